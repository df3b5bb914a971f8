"""Claims as data: typed comparisons of cells, judged by the rule of docs/verdicts.md. Never code.

claims:
  - id: bias_takes_the_sink
    text: "With K biases the first token is no sink any more"
    check: {is: less, value: sink_1, cell: k_biases, than: softmax, at_most: 1.0}
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from sinklab.experiments.quantities import QuantityName
from sinklab.schema import Part


class Reach(Part):
    """What every claim about numbers says.

    Attributes:
        value: which number (`quantities`).
        at_step: at the last evaluation up to this step; the end of the run unless given.
    """

    value: QuantityName
    at_step: int | None = Field(default=None, ge=1)


class _Bounds(Reach):
    at_least: float | None = None
    at_most: float | None = None

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.at_least is not None and self.at_most is not None and self.at_least > self.at_most:
            raise ValueError(f"at_least {self.at_least:g} is above at_most {self.at_most:g}")
        return self


class Within(_Bounds):
    """The number of one cell keeps one bound or two, in the quantity's unit."""

    kind: Literal["within"] = Field(default="within", alias="is")
    cell: str

    @model_validator(mode="after")
    def _has_a_bound(self) -> Self:
        if self.at_least is None and self.at_most is None:
            raise ValueError("give at_least, at_most, or both")
        return self

    @property
    def cells(self) -> tuple[str, ...]:
        return (self.cell,)


class Differs(_Bounds):
    """One cell is above (greater) or below (less) another, paired by seed.

    Attributes:
        by: at least so far apart, in the quantity's unit.
        times: at least so many times as large (greater) or as small (less).
        at_least, at_most: bounds that the cell keeps as well.
    """

    kind: Literal["greater", "less"] = Field(alias="is")
    cell: str
    than: str
    by: float | None = Field(default=None, gt=0)
    times: float | None = Field(default=None, gt=1)

    @property
    def cells(self) -> tuple[str, ...]:
        return (self.cell, self.than)


class Equal(Reach):
    """One cell is another up to a margin in the quantity's unit: an equivalence test."""

    kind: Literal["equal"] = Field(default="equal", alias="is")
    cell: str
    to: str
    margin: float = Field(gt=0)

    @property
    def cells(self) -> tuple[str, ...]:
        return (self.cell, self.to)


class Alike(Reach):
    """Any two of these cells are equal up to a margin: the largest of the differences is tested."""

    kind: Literal["alike"] = Field(default="alike", alias="is")
    of: tuple[str, ...] = Field(min_length=2)
    margin: float = Field(gt=0)

    @property
    def cells(self) -> tuple[str, ...]:
        return self.of


class Monotone(Reach):
    """The number rises or falls over cells in this order."""

    kind: Literal["rising", "falling"] = Field(alias="is")
    over: tuple[str, ...] = Field(min_length=3)

    @property
    def cells(self) -> tuple[str, ...]:
        return self.over


class SameOrder(Reach):
    """Cells come in the order of others that stand for them at another size (2504.11393: pairs decided alike).

    Attributes:
        of: cells at the small size.
        there: the same at the large one, in the same places.
    """

    kind: Literal["same_order"] = Field(default="same_order", alias="is")
    of: tuple[str, ...] = Field(min_length=3)
    there: tuple[str, ...] = Field(min_length=3)

    @model_validator(mode="after")
    def _answer_to_each_other(self) -> Self:
        if len(self.of) != len(self.there):
            raise ValueError(f"{len(self.of)} cells in `of` and {len(self.there)} in `there`: give one for each")
        return self

    @property
    def cells(self) -> tuple[str, ...]:
        return (*self.of, *self.there)


class StandsAt(Part):
    """The sink of a cell stands at one position, counted from 1, and takes at least so many percent there."""

    kind: Literal["stands_at"] = Field(default="stands_at", alias="is")
    cell: str
    position: int = Field(ge=1)
    at_least: float = Field(default=1.0, gt=0, lt=100)

    @property
    def cells(self) -> tuple[str, ...]:
        return (self.cell,)


class Appears(Part):
    """Sink_1 of a cell reaches a rate (percent) after one step, if given, and before another."""

    kind: Literal["appears"] = Field(default="appears", alias="is")
    cell: str
    rate: float = Field(default=10.0, gt=0, lt=100)
    after: int | None = Field(default=None, ge=0)
    before: int = Field(ge=1)

    @property
    def cells(self) -> tuple[str, ...]:
        return (self.cell,)


class Precedes(Part):
    """Within the runs of a cell one step comes before another, such as `norm_step` before `emergence_step`."""

    kind: Literal["precedes"] = Field(default="precedes", alias="is")
    cell: str
    first: QuantityName
    then: QuantityName

    @property
    def cells(self) -> tuple[str, ...]:
        return (self.cell,)


class Diverges(Part):
    """A cell does not train: its loss stops being finite."""

    kind: Literal["diverges", "trains"] = Field(alias="is")
    cell: str

    @property
    def cells(self) -> tuple[str, ...]:
        return (self.cell,)


Check = Annotated[
    Within | Differs | Equal | Alike | Monotone | SameOrder | StandsAt | Appears | Precedes | Diverges,
    Field(discriminator="kind"),
]


class Claim(Part):
    """A sentence and the comparison that decides it.

    Attributes:
        id: names it within its experiment.
        scales: it is made at these scales only; at all unless given.
        why: the reason where a bound or margin is not the paper's own.
    """

    id: str = Field(pattern=r"^\w+$")
    text: str
    check: Check
    scales: tuple[str, ...] | None = None
    why: str | None = None
