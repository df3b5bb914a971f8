"""Claims as data: typed comparisons of cells, judged by the rule of docs/verdicts.md. Never code.

claims:
  - id: bias_takes_the_sink
    text: "With K biases the first token is no sink any more"
    stated: 2026-11-23
    check: {is: less, value: sink_1, cell: k_biases, than: softmax, absent: true}
  - id: sigmoid_has_none
    text: "Nor has sigmoid attention, as in table 6"
    same_as: table_6.sigmoid_has_none
"""

from dataclasses import dataclass
from datetime import date
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from sinklab.experiments.quantities import QuantityName, quantity
from sinklab.schema import Part
from sinklab.survey.open_models import families

Scale = Literal["tiny", "mini", "small", "60m", "1b"]

Analysis = Literal["confirmatory", "exploratory"]
"""Confirmatory: the paper's claim, asked of runs trained after it was stated. Exploratory: everything else."""


class QuantityClaim(Part):
    """Base class of the checks of a quantity.

    Attributes:
        value: name of the quantity (`quantities.py`); the number is the mean of a run's last three evaluations.
        at_step: use the last evaluation up to this step and the two before it; default: the end of the run.
    """

    value: QuantityName
    at_step: int | None = Field(default=None, ge=1)


class _Bounds(QuantityClaim):
    at_least: float | None = None
    at_most: float | None = None

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.at_least is not None and self.at_most is not None and self.at_least > self.at_most:
            raise ValueError(f"at_least {self.at_least:g} is above at_most {self.at_most:g}")
        return self


class _OneCell(Part):
    cell: str

    @property
    def cells(self) -> tuple[str, ...]:
        return (self.cell,)


def _require_rate(name: str, what: str) -> None:
    if quantity(name).unit != "%":
        raise ValueError(f"{what} requires a sink rate, and {name} is not one")


class Within(_OneCell, _Bounds):
    """One cell lies within a lower or upper bound, or both, in the quantity's unit."""

    kind: Literal["within"] = Field(default="within", alias="is")

    @model_validator(mode="after")
    def _has_a_bound(self) -> Self:
        if self.at_least is None and self.at_most is None:
            raise ValueError("set at_least, at_most, or both")
        return self


class SinkAbsent(_OneCell, QuantityClaim):
    """A cell has no sink: the rate is below 1 % at each of the last three evaluations."""

    kind: Literal["absent"] = Field(default="absent", alias="is")
    value: QuantityName = "sink_1"

    @model_validator(mode="after")
    def _of_a_rate(self) -> Self:
        _require_rate(self.value, "absent")
        return self


class Differs(_Bounds):
    """All seeds of one cell are above (greater) or below (less) all seeds of another.

    Attributes:
        by: minimum difference, in the quantity's unit.
        times: minimum ratio of the larger value to the smaller.
        at_least, at_most: bounds that every seed of the cell must also satisfy.
        absent: whether the cell must also have no sink (below 1 % at each of the last three evaluations).
    """

    kind: Literal["greater", "less"] = Field(alias="is")
    cell: str
    than: str
    by: float | None = Field(default=None, gt=0)
    times: float | None = Field(default=None, gt=1)
    absent: bool = False

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if self.by is not None and self.times is not None:
            raise ValueError("set by or times, not both")
        if self.absent:
            _require_rate(self.value, "absent")
        return self

    @property
    def cells(self) -> tuple[str, ...]:
        return (self.cell, self.than)


class Equal(QuantityClaim):
    """One cell equals another within a margin in the quantity's unit, seed by seed."""

    kind: Literal["equal"] = Field(default="equal", alias="is")
    cell: str
    to: str
    margin: float = Field(gt=0)

    @property
    def cells(self) -> tuple[str, ...]:
        return (self.cell, self.to)


class Alike(QuantityClaim):
    """Every cell equals the first within a margin, seed by seed."""

    kind: Literal["alike"] = Field(default="alike", alias="is")
    of: tuple[str, ...] = Field(min_length=2)
    margin: float = Field(gt=0)

    @property
    def cells(self) -> tuple[str, ...]:
        return self.of


class Monotone(QuantityClaim):
    """The quantity increases or decreases over the cells in the given order."""

    kind: Literal["rising", "falling"] = Field(alias="is")
    over: tuple[str, ...] = Field(min_length=3)

    @property
    def cells(self) -> tuple[str, ...]:
        return self.over


class StandsAt(_OneCell):
    """The sink of a cell is at one position, counted from 1, with at least this rate in percent."""

    kind: Literal["stands_at"] = Field(default="stands_at", alias="is")
    position: int = Field(ge=1)
    at_least: float = Field(default=1.0, gt=0, lt=100)


class Appears(_OneCell):
    """Sink_1 of a cell is below a rate (percent) up to one step, if given, and has reached it by another."""

    kind: Literal["appears"] = Field(default="appears", alias="is")
    rate: float = Field(default=10.0, gt=0, lt=100)
    after: int | None = Field(default=None, ge=0)
    before: int = Field(ge=1)


class Precedes(_OneCell):
    """In every run of a cell, one step is earlier than another, such as `norm_step` than `emergence_step`."""

    kind: Literal["precedes"] = Field(default="precedes", alias="is")
    first: QuantityName
    then: QuantityName


class Diverges(_OneCell):
    """The loss of a cell becomes non-finite (diverges), or never does (trains)."""

    kind: Literal["diverges", "trains"] = Field(alias="is")


SingleCheck = Annotated[
    Within | SinkAbsent | Differs | Equal | Alike | Monotone | StandsAt | Appears | Precedes | Diverges,
    Field(discriminator="kind"),
]


class All(Part):
    """Conjunction of checks: reproduced if all of them are, contradicted if any of them is."""

    kind: Literal["all"] = Field(default="all", alias="is")
    of: tuple[SingleCheck, ...] = Field(min_length=2)

    @property
    def cells(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell for check in self.of for cell in check.cells))


class AlikeOverDomains(_OneCell, QuantityClaim):
    """The value of a measured cell in every domain is within a margin of its value in the first domain."""

    kind: Literal["alike_over_domains"] = Field(default="alike_over_domains", alias="is")
    margin: float = Field(gt=0)

    def over(self, cells: tuple[str, ...]) -> Alike:
        """The comparison of the cell's measurements, one per domain."""
        return Alike(of=cells, value=self.value, margin=self.margin)


class _OverSizes(_OneCell, QuantityClaim):
    """Base class of checks that compare the models of each family, from small to large.

    Attributes:
        families: the families compared; default: all.
        but: families that are excluded.
    """

    families: tuple[str, ...] = ()
    but: tuple[str, ...] = ()

    @field_validator("families", "but")
    @classmethod
    def _are_on_the_list(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if unknown := [name for name in names if name not in families()]:
            raise ValueError(f"unknown family {unknown[0]!r}; choose from: {', '.join(families())}")
        return names

    def is_about(self, family: str) -> bool:
        """Whether the models of this family are compared."""
        return (not self.families or family in self.families) and family not in self.but


class GrowsWithSize(_OverSizes):
    """The value of a measured cell increases over the models of a family, from small to large."""

    kind: Literal["grows_with_size"] = Field(default="grows_with_size", alias="is")

    def over(self, cells: tuple[str, ...]) -> Monotone:
        """The comparison of the cell's measurements, one per model."""
        return Monotone.model_validate({"is": "rising", "over": cells, "value": self.value})


class AlikeOverSizes(_OverSizes):
    """The value of a measured cell in every model of a family is within a margin of its value in the smallest model."""

    kind: Literal["alike_over_sizes"] = Field(default="alike_over_sizes", alias="is")
    margin: float = Field(gt=0)

    def over(self, cells: tuple[str, ...]) -> Alike:
        """The comparison of the cell's measurements, one per model."""
        return Alike(of=cells, value=self.value, margin=self.margin)


OverSubjects = AlikeOverDomains | GrowsWithSize | AlikeOverSizes
"""Compares one cell over the domains or models that it is measured for, which are known once these are given."""

Check = Annotated[
    Within | SinkAbsent | Differs | Equal | Alike | Monotone | StandsAt | Appears | Precedes | Diverges | All
    | OverSubjects,
    Field(discriminator="kind"),
]  # fmt: skip


def parts_of(check: Check) -> tuple[Check, ...]:
    """The checks that `all` combines; for any other kind, the check itself."""
    return check.of if isinstance(check, All) else (check,)


def quantities_of(check: Check) -> tuple[str, ...]:
    """The quantities that a check uses, the main one first; empty for `diverges` and `trains`."""
    match check:
        case All():
            return tuple(dict.fromkeys(name for part in check.of for name in quantities_of(part)))
        case StandsAt():
            return (f"sink_{check.position}",)
        case Appears():
            return ("sink_1",)
        case Precedes():
            return (check.then, check.first)
        case Diverges():
            return ()
        case _:
            return (check.value,)


class Claim(Part):
    """A statement, the check that decides it, and the day on which it was stated.

    Attributes:
        id: unique within its experiment.
        check: the comparison. A file has either this or `same_as`; loading a reference fills in the check referred to.
        same_as: EXPERIMENT.CLAIM whose check is used; a claim with this reference is not counted.
        scales: the scales at which the claim is made; default: all.
        asks_massive: whether the claim is judged only if the trained baseline, or the cell named here, has at least
            twice its untrained norm ratio; default: the experiment's setting.
        positions: limits it to measured models that add positions to their embedding, or to the others.
        proposition: limits it to measured models to which this proposition of the paper applies.
        evidence: confirmatory or exploratory; default: the experiment's setting.
        stated: the date on which the claim was written; default: the experiment's date.
        changed: `YYYY-MM-DD: the change, and which results had been seen`; shown on the claim.
        why: the reason for a bound or margin that differs from the paper's.
    """

    id: str = Field(pattern=r"^\w+$")
    text: str
    check: Check | None = None
    same_as: str | None = Field(default=None, pattern=r"^[\w.-]+\.\w+$")
    scales: tuple[Scale, ...] | None = None
    asks_massive: bool | str | None = None
    positions: Literal["added", "other"] | None = None
    proposition: int | None = Field(default=None, ge=1, le=4)
    evidence: Analysis | None = None
    stated: date | None = None
    changed: str | None = Field(default=None, pattern=r"^\d{4}-\d\d-\d\d: .+")
    why: str | None = None

    @model_validator(mode="after")
    def _has_a_comparison(self) -> Self:
        if self.check is None and self.same_as is None:
            raise ValueError("set check, or same_as: EXPERIMENT.CLAIM")
        return self

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells that the check uses; empty for an unresolved reference (`same_as`)."""
        return self.check.cells if self.check else ()

    def about(self, check: Check, subject: str = "") -> "Claim":
        """A copy of the claim with another check; a named family or model is added to its id and text."""
        named = {"id": f"{self.id}_{subject}", "text": f"{self.text} ({subject})"} if subject else {}
        return self.model_copy(update={"check": check, **named})


@dataclass(frozen=True)
class Undecidable:
    """A claim that the given models and texts cannot decide.

    Attributes:
        why: the reason, a sentence.
    """

    claim: Claim
    why: str
