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
        named = (getattr(self, key, None) for key in ("cell", "than", "to"))
        return (*filter(None, named), *getattr(self, "over", ()))

    @property
    def quantities(self) -> tuple[str, ...]:
        """Names of the check's quantities, the main quantity first; empty for `diverges` and `trains`."""
        return ()


class QuantityClaim(_Check):
    """Base class of checks that compare a quantity between cells or with a bound.

    Attributes:
        value: name of the quantity (`quantities.py`). It is averaged over the last three evaluations of a run, unless
            it has a single value per run, such as a step.
        at_step: average over the last three evaluations up to this step instead (`RunNumbers.value`).
    """

    value: QuantityName
    at_step: int | None = Field(default=None, ge=1)

    @property
    def quantities(self) -> tuple[str, ...]:
        """Names of the check's quantities, the main quantity first."""
        return (self.value,)


class _Bounds(QuantityClaim):
    at_least: float | None = None
    at_most: float | None = None

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.at_least is not None and self.at_most is not None and self.at_least > self.at_most:
            raise ValueError(f"at_least {self.at_least:g} is above at_most {self.at_most:g}")
        return self


def _require_rate(name: str) -> str:
    if not quantity(name).is_sink_rate:
        raise ValueError(f"absent requires a sink rate in percent, such as sink_1, but value is {name}")
    return name


class Within(_Bounds):
    """At every seed of a cell, the quantity is at least `at_least` and at most `at_most`; either may be left out.

    Attributes:
        before: read the quantity at the last evaluation up to this step, without averaging, in place of `at_step`.
        after: in addition to `before`: at the last evaluation up to this step, the quantity must not be in the bounds.
    """

    kind: Literal["within"] = Field(default="within", alias="is")
    cell: str
    before: int | None = Field(default=None, ge=1)
    after: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _has_a_bound(self) -> Self:
        if self.at_least is None and self.at_most is None:
            raise ValueError("set at_least, at_most, or both")
        if self.before is None and self.after is not None:
            raise ValueError("after requires before, the step by which the quantity is in the bounds")
        if self.before is not None and self.at_step is not None:
            raise ValueError("set at_step or before, not both")
        return self


class SinkAbsent(QuantityClaim):
    """A cell has no sink: at every seed, the sink rate `value` is below 1 % at each of the last three evaluations."""

    kind: Literal["absent"] = Field(default="absent", alias="is")
    cell: str
    value: Annotated[QuantityName, AfterValidator(_require_rate)] = "sink_1"


class Differs(_Bounds):
    """The quantity is larger (greater) or smaller (less) at all seeds of one cell than at all seeds of another cell.

    This is the rule for five seeds per cell; `kinds.separated` is the rule for any number. The verdict is "direction
    only" if the comparison holds, but a condition set by `by`, `times`, `at_least`, `at_most` or `absent` does not.

    With `than_value` in place of `than`, two quantities of the same run are compared, seed by seed: a step with a later
    one, or the sink rate of a position with the highest rate of the others.

    Attributes:
        cell: the cell with the larger value (greater) or the smaller value (less).
        than: the other cell.
        than_value: the other quantity.
        by: the difference between the cells must exceed this number, in the quantity's unit.
        times: the ratio of the larger to the smaller value must exceed this number.
        at_least, at_most: bounds on the quantity that every seed of `cell` must satisfy.
        absent: `cell` must have no sink, by the rule of `SinkAbsent`.
    """

    kind: Literal["greater", "less"] = Field(alias="is")
    cell: str
    than: str | None = None
    than_value: QuantityName | None = None
    by: float | None = Field(default=None, gt=0)
    times: float | None = Field(default=None, gt=1)
    absent: bool = False

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if (self.than is None) == (self.than_value is None):
            raise ValueError("set either than, a cell, or than_value, another quantity of the same cell")
        if self.than_value and (self.by is not None or self.times is not None or self.absent):
            raise ValueError("by, times and absent apply to comparisons of cells: remove them, or set than")
        if self.by is not None and self.times is not None:
            raise ValueError("set either by or times, not both")
        if self.absent:
            _require_rate(self.value)
        return self

    @property
    def quantities(self) -> tuple[str, ...]:
        """Names of the check's quantities, the main quantity first."""
        return (self.value, self.than_value) if self.than_value else (self.value,)


def _on_the_list(name: str) -> str:
    if name not in families():
        raise ValueError(f"unknown family {name!r}; choose from: {', '.join(families())}")
    return name


FamilyName = Annotated[str, AfterValidator(_on_the_list)]


class OverCells(QuantityClaim):
    """A check of several cells, or of one cell over the domains or models of an experiment with `each`.

    Attributes:
        cell: the cell of every domain, or of every model of a family by increasing size, in place of several cells.
        families: model families of the paper's list (`survey/open_models.py`) to check; default: all.
        without_families: model families to exclude.
    """

    cell: str | None = None
    over: tuple[str, ...] = ()
    families: tuple[FamilyName, ...] = ()
    without_families: tuple[FamilyName, ...] = ()

    @property
    def over_subjects(self) -> bool:
        """True if the check compares the domains or models of one cell."""
        return self.cells == (self.cell,)

    @model_validator(mode="after")
    def _keys_fit_each_other(self) -> Self:
        if self.over_subjects and self.at_step is not None:
            raise ValueError("at_step is a step of training, and existing models are not trained: leave it out")
        if not self.over_subjects and (self.families or self.without_families):
            raise ValueError("families and without_families apply to comparisons of model sizes: leave them out")
        return self

    def across(self, cells: tuple[str, ...]) -> Self:
        """Return the check of the cells that have the results of the domains or models; models by increasing size."""
        return self.model_copy(update={"cell": None, "over": cells, "families": (), "without_families": ()})


class Equal(OverCells):
    """At every seed, the quantity differs between two cells, or between a first and all others, by at most `margin`.

    Attributes:
        cell, to: the two cells. Without `to`: the first domain and each other, or the smallest model of each family and
            each other of the family, in an experiment with `each`.
        over: the first cell and the others, in place of `cell` and `to`.
        margin: in the quantity's unit.
    """

    kind: Literal["equal"] = Field(default="equal", alias="is")
    to: str | None = None
    over: tuple[str, ...] = Field(default=(), alias="of")
    margin: float = Field(gt=0)

    @model_validator(mode="after")
    def _has_two_cells(self) -> Self:
        if bool(self.cell) == (len(self.over) > 1) or (self.over and self.to):
            raise ValueError("set cell and to, or two cells or more in of")
        return self

    @property
    def reference(self) -> str:
        """The cell from which the differences are counted."""
        return self.to or self.over[0]


class Monotone(OverCells):
    """The quantity increases (rising) or decreases (falling) over the cells in the given order, or over model sizes.

    At every seed, the least-squares slope over the ranks of the cells is positive (rising) or negative (falling). In
    addition, no two neighbouring cells are separated in the opposite direction (`kinds.separated`).
    """

    kind: Literal["rising", "falling"] = Field(alias="is")

    @model_validator(mode="after")
    def _has_three_cells(self) -> Self:
        if bool(self.cell) == (len(self.over) > 2):
            raise ValueError("set three cells or more in over, or the cell of models in an experiment with each: model")
        return self


class Diverges(_Check):
    """Training of a cell diverges (loss, gradient or weights not finite) at every seed, or at none (trains)."""

    kind: Literal["diverges", "trains"] = Field(alias="is")
    cell: str


SingleCheck = Within | SinkAbsent | Differs | Equal | Monotone | Diverges


class All(_Check):
    """Conjunction of checks: reproduced if all checks are reproduced, contradicted if any is (`judging.ORDER`)."""

    kind: Literal["all"] = Field(default="all", alias="is")
    of: tuple[Annotated[SingleCheck, Field(discriminator="kind")], ...] = Field(min_length=2)

    @model_validator(mode="after")
    def _names_cells(self) -> Self:
        if any(isinstance(check, OverCells) and check.over_subjects for check in self.of):
            raise ValueError(
                "a comparison of domains or models cannot be a part of all: write it as a claim of its own"
            )
        return self

    @property
    def cells(self) -> tuple[str, ...]:
        """Names of the cells of all checks."""
        return tuple(dict.fromkeys(cell for check in self.of for cell in check.cells))

    @property
    def quantities(self) -> tuple[str, ...]:
        """Names of the quantities of all checks."""
        return tuple(dict.fromkeys(name for check in self.of for name in check.quantities))


Check = Annotated[SingleCheck | All, Field(discriminator="kind")]


def parts_of(check: Check) -> tuple[SingleCheck, ...]:
    """Return the checks combined by an `all` check; for any other check, a tuple of the check itself."""
    return check.of if isinstance(check, All) else (check,)


class Claim(Part):
    """A statement, the check that decides it, and the date on which it was written.

    Attributes:
        id: identifier, unique within the experiment.
        text: statement of the claim.
        check: the check that decides the claim; required unless `same_as` is set.
        same_as: another claim, as EXPERIMENT.CLAIM, whose check is used (`load_experiment` copies the check). A claim
            with `same_as` is not counted in the numbers of verdicts.
        scales: scales at which the claim is made; default: all scales of the experiment.
        requires_massive: True or the name of a cell: judge the claim only if training at least doubles the norm ratio
            of the baseline or of this cell. False: always judge it. Default: the experiment's setting if the check uses
            a quantity in `quantities.NORMS`, else False.
        requires_sink: the same for a Sink_1 of at least 10 % of the baseline or of this cell. Default: the experiment's
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
    requires_massive: bool | str | None = None
    requires_sink: bool | str | None = None
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
