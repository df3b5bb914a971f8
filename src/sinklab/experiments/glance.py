"""The paper at a glance: twenty statements with what it prints and the claims that encode them (`glance.yaml`)."""

from collections.abc import Sequence
from functools import cache
from importlib import resources

from pydantic import Field

from sinklab.experiments.published import published_tables
from sinklab.experiments.quantities import QuantityName
from sinklab.files import parse_yaml
from sinklab.schema import Part


class DrawnNumber(Part):
    """The number that stands for a statement where ours are drawn beside the paper's.

    Attributes:
        cell: of the experiment of the statement's first claim.
        value: a quantity of it, in percent.
        row: the paper's, as TABLE.ROW of `published.yaml`.
    """

    cell: str
    value: QuantityName
    row: str

    @property
    def paper(self) -> float:
        """What the paper prints, percent.

        Raises:
            KeyError: it prints no such number.
        """
        table, row = self.row.split(".", 1)
        return published_tables()[table].rows[row].values[self.value]


class PaperStatement(Part):
    """One of the twenty.

    Attributes:
        says: the statement, a few words about the sink.
        paper: what the paper prints of it; rates are percent of heads.
        claims: that encode it, each as EXPERIMENT.CLAIM; a scale judges those that it asks.
        number: that is drawn; None where the paper prints none in percent.
        caveat: how what is asked here differs from what the paper says, a sentence.
    """

    says: str
    paper: str
    claims: tuple[str, ...] = Field(min_length=1)
    number: DrawnNumber | None = None
    caveat: str

    @property
    def experiment(self) -> str:
        """The experiment of the first claim."""
        return self.claims[0].partition(".")[0]


@cache
def statements() -> Sequence[PaperStatement]:
    """The twenty, in the order of the paper."""
    text = (resources.files("sinklab") / "experiments" / "glance.yaml").read_text(encoding="utf-8")
    return tuple(PaperStatement.model_validate(one) for one in parse_yaml(text))
