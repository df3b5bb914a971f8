"""Schemas of claims in experiment files, and of the checks that decide them by the rule in docs/verdicts.md. Example:

claims:
  - id: bias_takes_the_sink
    text: "With K biases, the first token is no longer a sink"
    stated: 2026-11-23
    check: {is: less, value: sink_1, cell: k_biases, than: softmax, absent: true}
  - id: sigmoid_has_none
    text: "Sigmoid attention has no sink"
    same_as: table_6.sigmoid_has_none
"""

from dataclasses import dataclass
from datetime import date
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from sinklab.experiments.documents import Analysis
from sinklab.experiments.quantities import QuantityName, quantity
from sinklab.schema import Part
from sinklab.survey.open_models import families

Scale = Literal["tiny", "mini", "laptop", "lab", "small", "60m", "1b", "backcopy", "trigger_average"]


class _Check(Part):
    @property
    def cells(self) -> tuple[str, ...]:
        """Names of the cells that the check uses."""
        match self:
            case All():
                return tuple(dict.fromkeys(cell for check in self.of for cell in check.cells))
            case Alike():
                return self.of
            case Monotone():
                return self.over
            case Differs():
                return (self.cell, self.than)
            case Equal():
                return (self.cell, self.to)
            case _:
                return (self.cell,) if isinstance(self, _OneCell) else ()


class QuantityClaim(_Check):
    """Base class of checks that compare a quantity between cells or with a bound.

    Attributes:
        value: name of the quantity (`quantities.py`). It is averaged over the last three evaluations of a run, unless
            it has a single value per run, such as a step.
        at_step: average over the last three evaluations up to this step instead (`RunNumbers.value`).
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


class _OneCell(_Check):
    cell: str


def _require_rate(name: str) -> str:
    if not quantity(name).is_sink_rate:
        raise ValueError(f"absent requires a sink rate in percent, such as sink_1, but value is {name}")
    return name


class Within(_OneCell, _Bounds):
    """At every seed of a cell, the quantity is at least `at_least` and at most `at_most`; either may be left out."""

    kind: Literal["within"] = Field(default="within", alias="is")

    @model_validator(mode="after")
    def _has_a_bound(self) -> Self:
        if self.at_least is None and self.at_most is None:
            raise ValueError("set at_least, at_most, or both")
        return self


class SinkAbsent(_OneCell, QuantityClaim):
    """A cell has no sink: at every seed, the sink rate `value` is below 1 % at each of the last three evaluations."""

    kind: Literal["absent"] = Field(default="absent", alias="is")
    value: Annotated[QuantityName, AfterValidator(_require_rate)] = "sink_1"


class Differs(_Bounds):
    """The quantity is larger (greater) or smaller (less) at all seeds of one cell than at all seeds of another cell.

    This is the rule for five seeds per cell; `counts.separated` is the rule for any number. The verdict is "direction
    only" if the comparison holds, but a condition set by `by`, `times`, `at_least`, `at_most` or `absent` does not.

    Attributes:
        cell: the cell with the larger value (greater) or the smaller value (less).
        than: the other cell.
        by: the difference between the cells must exceed this number, in the quantity's unit.
        times: the ratio of the larger to the smaller value must exceed this number.
        at_least, at_most: bounds on the quantity that every seed of `cell` must satisfy.
        absent: `cell` must have no sink, by the rule of `SinkAbsent`.
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
            raise ValueError("set either by or times, not both")
        if self.absent:
            _require_rate(self.value)
        return self


class Equal(QuantityClaim):
    """At every seed, the quantity differs between two cells by at most `margin`, in the quantity's unit."""

    kind: Literal["equal"] = Field(default="equal", alias="is")
    cell: str
    to: str
    margin: float = Field(gt=0)


class Alike(QuantityClaim):
    """At every seed, the quantity differs between the first cell of `of` and each other cell by at most `margin`."""

    kind: Literal["alike"] = Field(default="alike", alias="is")
    of: tuple[str, ...] = Field(min_length=2)
    margin: float = Field(gt=0)


class Monotone(QuantityClaim):
    """The quantity increases (rising) or decreases (falling) over the cells in the given order.

    At every seed, the least-squares slope over the ranks of the cells is positive (rising) or negative (falling). In
    addition, no two neighbouring cells are separated in the opposite direction (`counts.separated`).
    """

    kind: Literal["rising", "falling"] = Field(alias="is")
    over: tuple[str, ...] = Field(min_length=3)


class HighestAt(_OneCell):
    """At every seed of a cell, `position` (1-based) has the highest sink rate, which is at least `at_least` percent.

    The rate is compared with those of the other positions among 1 .. T / 2 (`highest_rate`); a tie opposes the claim.
    If only the second condition fails, the verdict is "direction only".
    """

    kind: Literal["stands_at"] = Field(default="stands_at", alias="is")
    position: int = Field(ge=1)
    at_least: float = Field(default=1.0, gt=0, lt=100)


class Appears(_OneCell):
    """At every seed, Sink_1 of a cell is at least `rate` percent at the last evaluation up to step `before`.

    If `after` is set, Sink_1 must also be below `rate` at the last evaluation up to step `after`.
    """

    kind: Literal["appears"] = Field(default="appears", alias="is")
    rate: float = Field(default=10.0, gt=0, lt=100)
    after: int | None = Field(default=None, ge=0)
    before: int = Field(ge=1)


class Precedes(_OneCell):
    """At every seed of a cell, the quantity `first` is smaller than `then`, such as `norm_step` < `emergence_step`."""

    kind: Literal["precedes"] = Field(default="precedes", alias="is")
    first: QuantityName
    then: QuantityName


class Diverges(_OneCell):
    """Training of a cell diverges (loss, gradient or weights not finite) at every seed, or at none (trains)."""

    kind: Literal["diverges", "trains"] = Field(alias="is")


_Single = Within | SinkAbsent | Differs | Equal | Alike | Monotone | HighestAt | Appears | Precedes | Diverges
SingleCheck = Annotated[_Single, Field(discriminator="kind")]


class All(_Check):
    """Conjunction of checks: reproduced if all checks are reproduced, contradicted if any is (`judging.ORDER`)."""

    kind: Literal["all"] = Field(default="all", alias="is")
    of: tuple[SingleCheck, ...] = Field(min_length=2)


class _OverSubjects(_OneCell, QuantityClaim):
    """Base class of checks of one cell across the domains of --text or the models of --model."""

    @model_validator(mode="after")
    def _without_step(self) -> Self:
        if self.at_step is not None:
            raise ValueError("at_step is a step of training, and existing models are not trained: leave it out")
        return self


class AlikeOverDomains(_OverSubjects):
    """At every draw, a quantity differs by at most `margin` between the first text domain and each other domain."""

    kind: Literal["alike_over_domains"] = Field(default="alike_over_domains", alias="is")
    margin: float = Field(gt=0)


def _on_the_list(name: str) -> str:
    if name not in families():
        raise ValueError(f"unknown family {name!r}; choose from: {', '.join(families())}")
    return name


FamilyName = Annotated[str, AfterValidator(_on_the_list)]


class _OverSizes(_OverSubjects):
    """Base class of checks that compare a quantity across the model sizes of each family.

    Attributes:
        families: model families of the paper's list (`survey/open_models.py`) to check; default: all.
        but: model families to exclude.
    """

    families: tuple[FamilyName, ...] = ()
    but: tuple[FamilyName, ...] = ()


class GrowsWithSize(_OverSizes):
    """The quantity of a cell increases with model size within each family, by the rule of `Monotone` (rising)."""

    kind: Literal["grows_with_size"] = Field(default="grows_with_size", alias="is")


class AlikeOverSizes(_OverSizes):
    """At every draw, a quantity differs by at most `margin` between a family's smallest model and each other model."""

    kind: Literal["alike_over_sizes"] = Field(default="alike_over_sizes", alias="is")
    margin: float = Field(gt=0)


OverSubjects = AlikeOverDomains | GrowsWithSize | AlikeOverSizes
"""Checks of one cell across domains or models; `over` converts them to checks of several cells."""


def over(check: OverSubjects, cells: tuple[str, ...]) -> Alike | Monotone:
    """Convert a check across domains or models to a check of the cells that have their results.

    Args:
        cells: names of the cells (DOMAIN/CELL or MODEL/CELL), one per domain or model; models by increasing size.
    """
    if isinstance(check, GrowsWithSize):
        return Monotone.model_validate({"is": "rising", "over": cells, "value": check.value})
    return Alike(of=cells, value=check.value, margin=check.margin)


Check = Annotated[_Single | All | OverSubjects, Field(discriminator="kind")]


def parts_of(check: Check) -> tuple[Check, ...]:
    """Return the checks combined by an `all` check; for any other check, a tuple of the check itself."""
    return check.of if isinstance(check, All) else (check,)


def quantities_of(check: Check) -> tuple[str, ...]:
    """Return the names of a check's quantities, the main quantity first; empty for `diverges` and `trains`."""
    match check:
        case All():
            return tuple(dict.fromkeys(name for part in check.of for name in quantities_of(part)))
        case HighestAt():
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
    """A statement, the check that decides it, and the date on which it was written.

    Attributes:
        id: identifier, unique within the experiment.
        text: statement of the claim.
        check: the check that decides the claim; required unless `same_as` is set.
        same_as: another claim, as EXPERIMENT.CLAIM, whose check is used (`load_experiment` copies the check). A claim
            with `same_as` is not counted in the numbers of verdicts.
        scales: scales at which the claim is made; default: all scales of the experiment.
        asks_massive: True or the name of a cell: judge the claim only if training at least doubles the norm ratio of
            the baseline or of this cell. False: always judge it. Default: the experiment's setting if the check uses
            a quantity in `quantities.NORMS`, else False.
        asks_sink: the same for a Sink_1 of at least 10 % of the baseline or of this cell. Default: the experiment's
            setting if the check uses a quantity of sinks, else False.
        positions: judge the claim only for models that add positional embeddings to the token embeddings ("added"), or
            only for models that do not ("other").
        proposition: judge the claim only for models to which the paper's proposition with this number applies.
        evidence: confirmatory or exploratory; default: the experiment's setting.
        stated: date on which the claim was written; default: the experiment's date.
        changed: date and description of a later change, and which results had been seen: `YYYY-MM-DD: ..`. Shown with
            the claim.
        why: reason for the check, such as for a bound that is not the paper's; a comment that is not shown.
    """

    id: str = Field(pattern=r"^\w+$")
    text: str
    check: Check | None = None
    same_as: str | None = Field(default=None, pattern=r"^[\w.-]+\.\w+$")
    scales: tuple[Scale, ...] | None = None
    asks_massive: bool | str | None = None
    asks_sink: bool | str | None = None
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
        """Names of the cells that the check uses; empty for an unresolved reference (`same_as`)."""
        return self.check.cells if self.check else ()

    def about(self, check: Check, subject: str = "") -> "Claim":
        """Return a copy of the claim with another check; `subject` (a family or model) is added to id and text."""
        named = {"id": f"{self.id}_{subject}", "text": f"{self.text} ({subject})"} if subject else {}
        return self.model_copy(update={"check": check, **named})


@dataclass(frozen=True)
class Undecidable:
    """A claim that cannot be judged on the given models and texts, with the reason in sentences."""

    claim: Claim
    why: str
