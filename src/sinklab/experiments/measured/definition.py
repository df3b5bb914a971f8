"""What an experiment about existing models may say: cells that are ways to measure a model, and claims about them.

kind: measured
cells:
  natural: {}                                             # text, 100 sequences of 64 tokens, eps 0.3
  repeat: {inputs: repeat}
  short: {length: 16, eps: 0.2}                           # the same sequences cut shorter, from the same pass
  swapped_5: {inputs: repeat, swap_position: [1, 5]}
  chat: {model: chat}                                     # of the second --model
claims:
  - {id: none_on_repeated, text: "..", check: {is: within, value: sink_1, cell: repeat, at_most: 1.0}}

The model comes with the call. What stands in the place of seeds are draws: other sequences of the same kind. So its
verdicts speak of this model alone.
"""

from datetime import date
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from sinklab.experiments.claims import Alike, Analysis, Check, Claim, Monotone, Reach, Statement, Within
from sinklab.experiments.quantities import QuantityName
from sinklab.measuring.options import Inputs
from sinklab.schema import Part
from sinklab.survey.open_models import families

Each = Literal["domain", "model"]
"""What every cell is measured for: each file of the folder --text, or each --model."""


class CellTask(Part):
    """A downstream task that the model is asked as well.

    Attributes:
        name: of lm-eval; it has acc or acc_norm.
        items: how many are drawn for each draw; null for all.
    """

    name: str
    items: int | None = Field(default=None, ge=1)


class MeasuredCell(Part):
    """One way to measure a model. Cells that differ in eps and length only share their sequences and the pass.

    Attributes:
        model: which of those given; the chat model is the second, and may be left out.
        inputs: what the sequences are made of.
        sequences, length: N and T.
        eps: threshold of the sink rate.
        loss: whether the loss is computed, a third of the work.
        details: also angles and what else `--details` has.
        swap_position, replace_position: learned positions that are changed (`Study`).
        task: what the model is asked beside it.
    """

    model: Literal["base", "chat"] = "base"
    inputs: Inputs = "natural"
    sequences: int = Field(default=100, ge=1)
    length: int = Field(default=64, ge=2)
    eps: float = Field(default=0.3, gt=0, lt=1)
    loss: bool = False
    details: bool = False
    swap_position: tuple[int, int] | None = None
    replace_position: tuple[int, int] | None = None
    task: CellTask | None = None

    @property
    def pass_key(self) -> str:
        """The same for cells that one pass over the same sequences measures."""
        return self.model_dump_json(exclude={"eps", "length"})


class AlikeOverDomains(Reach):
    """A cell is in every domain within a margin of what it is in the first."""

    kind: Literal["alike_over_domains"] = Field(default="alike_over_domains", alias="is")
    cell: str
    margin: float = Field(gt=0)

    @property
    def cells(self) -> tuple[str, ...]:
        return (self.cell,)

    def over(self, cells: tuple[str, ...]) -> Alike:
        """The comparison of these cells, one of each domain."""
        return Alike.model_validate({"is": "alike", "of": cells, "value": self.value, "margin": self.margin})


class _OverSizes(Reach):
    """Compares the models of each family, from small to large.

    Attributes:
        families: in these only; in all unless given.
        but: not in these.
    """

    cell: str
    families: tuple[str, ...] = ()
    but: tuple[str, ...] = ()

    @field_validator("families", "but")
    @classmethod
    def _are_on_the_list(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if unknown := [name for name in names if name not in families()]:
            raise ValueError(f"no family {unknown[0]!r}; there are: {', '.join(families())}")
        return names

    @property
    def cells(self) -> tuple[str, ...]:
        return (self.cell,)

    def is_about(self, family: str) -> bool:
        """Whether the models of this family are compared."""
        return (not self.families or family in self.families) and family not in self.but


class GrowsWithSize(_OverSizes):
    """A cell rises over the models of a family, from small to large."""

    kind: Literal["grows_with_size"] = Field(default="grows_with_size", alias="is")

    def over(self, cells: tuple[str, ...]) -> Monotone:
        """The comparison of these cells, one of each model."""
        return Monotone.model_validate({"is": "rising", "over": cells, "value": self.value})


class AlikeOverSizes(_OverSizes):
    """A cell is in every model of a family within a margin of what it is in the smallest."""

    kind: Literal["alike_over_sizes"] = Field(default="alike_over_sizes", alias="is")
    margin: float = Field(gt=0)

    def over(self, cells: tuple[str, ...]) -> Alike:
        """The comparison of these cells, one of each model."""
        return Alike.model_validate({"is": "alike", "of": cells, "value": self.value, "margin": self.margin})


MeasuredCheck = Annotated[Check | AlikeOverDomains | GrowsWithSize | AlikeOverSizes, Field(discriminator="kind")]


class MeasuredClaim(Statement):
    """A sentence and the comparison that decides it.

    Attributes:
        positions: of which models it is claimed: those that add positions to their embedding, or the others.
        proposition: it is claimed of the models of which this proposition of the paper speaks.
    """

    check: MeasuredCheck
    positions: Literal["added", "other"] | None = None
    proposition: int | None = Field(default=None, ge=1, le=4)

    def with_check(self, check: Check, family: str = "") -> Claim:
        """The claim about cells that were measured, of one family or model where there are several."""
        name, text = (f"{self.id}_{family}", f"{self.text} ({family})") if family else (self.id, self.text)
        said = self.model_dump(include={"evidence", "stated", "changed", "why"})
        return Claim(id=name, text=text, check=check, **said)


class PaperModels(Part):
    """Which table of the paper stands beside the cells.

    Attributes:
        table: of `published.yaml`.
        model: whose numbers its rows are, by cell. Unless given, a row is a model, and has Sink_1 by cell.
    """

    table: str
    model: str | None = None


class MeasuredExperiment(Part):
    """Ways to measure a model that is given, and claims about what comes out.

    Attributes:
        id: names its results.
        title: what it shows, in a few words.
        question: what it asks, a sentence.
        source: where the paper has it.
        cells: by name.
        each: every cell is measured for each of these; it is then named DOMAIN/CELL or MODEL/CELL.
        columns: numbers that its table shows.
        against: two of them, of which a figure shows the second against the first, a point for each cell.
        published: the paper's numbers, of models that it measured.
        evidence, stated: of its claims, unless one says otherwise.
        rank: of the list of experiments, the smaller first.
    """

    kind: Literal["measured"]
    id: str = Field(pattern=r"^[\w.-]+$")
    title: str
    question: str = ""
    source: str = ""
    cells: dict[str, MeasuredCell] = Field(min_length=1)
    each: Each | None = None
    columns: tuple[QuantityName, ...] = ("sink_1",)
    against: tuple[QuantityName, QuantityName] | None = None
    published: PaperModels | None = None
    evidence: Analysis = "exploratory"
    stated: date | None = None
    claims: tuple[MeasuredClaim, ...] = ()
    rank: int = 1000

    @model_validator(mode="after")
    def _names_are_those_of_cells(self) -> Self:
        for claim in self.claims:
            if missing := [cell for cell in claim.check.cells if cell not in self.cells]:
                raise ValueError(f"claim {claim.id} is about cell {missing[0]!r}, which is not there")
            wanted = {AlikeOverDomains: "domain", GrowsWithSize: "model", AlikeOverSizes: "model"}.get(
                type(claim.check)
            )
            of_each = self.each == "model" and isinstance(claim.check, Within)
            if self.each != wanted and not of_each:
                raise ValueError(
                    f"claim {claim.id} compares {f'{wanted}s' if wanted else 'cells'}: the experiment is "
                    f"{'measured once' if self.each is None else f'for each {self.each}'}"
                )
        for name, cell in self.cells.items():
            if self.each == "domain" and cell.inputs != "natural":
                raise ValueError(f"cell {name!r} is not of text, and the experiment is for each domain of a text")
            if self.each == "model" and cell.model != "base":
                raise ValueError(f"cell {name!r} is of one model, and the experiment is for each")
        return self

    @property
    def tasks(self) -> list[str]:
        """The downstream tasks of its cells."""
        return list(dict.fromkeys(cell.task.name for cell in self.cells.values() if cell.task))

    @property
    def needs_text(self) -> bool:
        """Whether a cell reads text."""
        return any(cell.inputs == "natural" for cell in self.cells.values())

    @property
    def most_models(self) -> int | None:
        """How many --model it takes; None for any number."""
        if self.each == "model":
            return None
        return 1 + any(cell.model == "chat" for cell in self.cells.values())
