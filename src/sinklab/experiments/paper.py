"""Data of the paper: numbers (`published.yaml`), statements with the claims that encode them (`coverage.yaml`), and
twenty main statements (`glance.yaml`)."""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any, Self

from pydantic import Field, model_validator

from sinklab.experiments.quantities import QuantityName
from sinklab.files import parse_yaml
from sinklab.schema import Part


def _data(name: str) -> Any:
    return parse_yaml((resources.files("sinklab") / "experiments" / name).read_text(encoding="utf-8"))


@cache
def published_tables() -> Mapping[str, Mapping[str, dict[str, float]]]:
    """Return the paper's numbers from `published.yaml`, by table, row and quantity.

    The rows of table 1 are existing models. Instead of quantities, they have Sink_1 by cell: natural, random and repeat
    (kinds of input), or natural (base model) and chat (chat model). A row whose training failed in the paper is
    {"trains": 0.0}.
    """
    return {
        name: {row: {key: float(value) for key, value in found.items() if key != "without"}
               for row, found in table["rows"].items()}
        for name, table in _data("published.yaml").items()
    }  # fmt: skip


class Published(Part):
    """Reference of an experiment to a table of the paper.

    Attributes:
        table: name of a table in `published.yaml`.
        rows: row name by cell; default: the row with the cell's name.
        model: for measured cells, the model of all rows; default: each row is a model, with Sink_1 by cell.
    """

    table: str
    rows: dict[str, str] = Field(default_factory=dict)
    model: str | None = None

    @model_validator(mode="after")
    def _table_and_rows_exist(self) -> Self:
        if self.table not in published_tables():
            raise ValueError(f"unknown published table {self.table!r}; choose from: {', '.join(published_tables())}")
        known = published_tables()[self.table]
        for cell, row in self.rows.items():
            if row not in known:
                raise ValueError(
                    f"published {self.table} has no row {row!r} for cell {cell!r}; it has: {', '.join(known)}"
                )
        return self

    def numbers_of(self, cell: str) -> dict[str, float]:
        """Return the paper's numbers for a cell by quantity; empty if the table has no row for the cell.

        The result is {"trains": 0.0} if training failed in the paper.
        """
        return published_tables()[self.table].get(self.rows.get(cell, cell), {})


class Covered(Part):
    """A table, figure, takeaway, proposition or section of the paper.

    Attributes:
        says: paraphrase of the paper's statement.
        claims: claims that encode the statement, as EXPERIMENT.CLAIM.
        without: reason why no claim encodes the statement, or a part of it; empty if claims encode all of it.
    """

    says: str
    claims: tuple[str, ...] = ()
    without: str = ""


@cache
def paper_coverage() -> Mapping[str, Covered]:
    """Return the paper's parts by name, such as table_4, figure_7, takeaway_6.1, proposition_2 and section_7.3."""
    return {name: Covered.model_validate(part) for name, part in _data("coverage.yaml").items()}


class DrawnNumber(Part):
    """A quantity for which the report plots our value and the paper's value.

    Attributes:
        cell: name of our cell, in the experiment of the statement's first claim.
        value: name of the quantity, which is in percent.
        row: row of the paper's table, as TABLE.ROW of `published.yaml`.
    """

    cell: str
    value: QuantityName
    row: str

    @property
    def paper(self) -> float:
        """The paper's number, percent.

        Raises:
            KeyError: if `published.yaml` has no such number.
        """
        table, row = self.row.split(".", 1)
        return published_tables()[table][row][self.value]


class ScaledStatement(Part):
    """Claims, number and caveat of a statement at one scale; an empty caveat is that of the other scales."""

    claims: tuple[str, ...] = Field(min_length=1)
    number: DrawnNumber | None = None
    caveat: str = ""


class PaperStatement(Part):
    """One of the paper's twenty main statements.

    Attributes:
        says: short form of the statement.
        paper: the paper's numbers for the statement, as text; rates are percent of heads unless stated otherwise.
        claims: claims that encode the statement, as EXPERIMENT.CLAIM; some are made only at certain scales.
        number: quantity to plot; None for no plot.
        caveat: difference between our claims and the paper's statement, a sentence.
        laptop: the claims, number and caveat at the scale laptop; None if they are the same or there are none.
    """

    says: str
    paper: str
    claims: tuple[str, ...] = Field(min_length=1)
    number: DrawnNumber | None = None
    caveat: str
    laptop: ScaledStatement | None = None

    def at(self, scale: str) -> Self:
        """Return the statement with the claims, number and caveat of a scale."""
        own = self.laptop if scale == "laptop" else None
        if own is None:
            return self
        caveat = own.caveat or self.caveat
        return self.model_copy(update={"claims": own.claims, "number": own.number, "caveat": caveat})


@cache
def statements() -> Sequence[PaperStatement]:
    """Return the paper's twenty main statements from `glance.yaml`, in the order of the file."""
    return tuple(PaperStatement.model_validate(one) for one in _data("glance.yaml"))
