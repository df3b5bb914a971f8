"""Effects that five seeds detect with 80 % power, and earlier verdicts by five seeds or more (docs/verdicts.md).

The effects are computed from the spread over the seeds of pilot runs (pilots.json), and are shown with claims about
trained cells. The earlier verdicts are those of committed results (committed.json), and are shown with claims that have
no verdict because of fewer seeds.
"""

from functools import cache
from importlib import resources
from math import sqrt
from typing import Any

from pydantic import Field

from sinklab.experiments.claims import All, Check, Differs, Equal, Monotone, Within
from sinklab.experiments.quantities import quantity
from sinklab.experiments.verdicts.wording import step_unit
from sinklab.files import parse_json
from sinklab.schema import ReadDocument, VersionedDocument

PILOTS, COMMITTED = "pilots.json", "committed.json"

TWO_CELLS = 3.1
"""Difference between two cells that five seeds of each detect with 80 % power, in standard deviations."""

ONE_CELL = 1.7
"""Distance from a bound, or from a cell that is 0 at all seeds, that five seeds detect with 80 % power, in standard
deviations."""

MARGIN = 2.0
"""Minimum margin within which five seeds confirm equality with 80 % power, in standard deviations of the difference."""


class PilotSpread(ReadDocument):
    """Spread of a quantity over the seeds of pilot runs, in the quantity's unit.

    Attributes:
        sd: standard deviation over the seeds of a cell, pooled over the cells.
        sd_of_difference: standard deviation over the seeds of the difference between two cells at the same seed, pooled
            over the pairs of cells; None if no two cells have at least two seeds in common.
        cells: training seeds of the pilot runs by cell.
    """

    sd: float = Field(ge=0)
    sd_of_difference: float | None = Field(default=None, ge=0)
    cells: dict[str, list[int]] = Field(default_factory=dict)


class Pilots(VersionedDocument):
    """pilots.json: spreads by scale and quantity, over seeds that no verdict uses (`benchmarks/pilots.py`)."""

    scales: dict[str, dict[str, PilotSpread]] = Field(default_factory=dict)


@cache
def shipped_pilots() -> Pilots:
    """Load the shipped pilots.json."""
    return Pilots.model_validate(_shipped(PILOTS))


def detectable(check: Check, scale: str) -> str:
    """Return a sentence with the smallest effect that five seeds detect with 80 % power, for the kind of a check.

    For `all`, the sentences of its checks are joined. The sentence is empty for checks other than `within`, `greater`,
    `less`, `equal`, `rising` and `falling`, for comparisons within a run, and if the scale has no pilot runs of the
    quantity.
    """
    if isinstance(check, All):
        return " ".join(dict.fromkeys(text for part in check.of if (text := detectable(part, scale))))
    if not isinstance(check, Within | Differs | Equal | Monotone):
        return ""
    if (isinstance(check, Differs) and check.than_value) or (isinstance(check, Within) and check.before):
        return ""
    found = shipped_pilots().scales.get(scale, {}).get(check.value)
    if found is None:
        return ""
    of = quantity(check.value)

    def size(times: float, sd: float) -> str:
        return f"{times * sd:.{max(of.decimals, 1)}f}{step_unit(of)}"

    if isinstance(check, Within):
        return f"Five seeds detect a value {size(ONE_CELL, found.sd)} beyond the bound with 80 % power."
    if isinstance(check, Equal):
        sd = found.sd * sqrt(2) if found.sd_of_difference is None else found.sd_of_difference
        return f"Five seeds confirm equality within a margin of {size(MARGIN, sd)} with 80 % power."
    sentence = f"Five seeds detect a difference of {size(TWO_CELLS, found.sd)} between two cells with 80 % power"
    at_zero = isinstance(check, Differs) and of.unit == "%"
    zero = f", and a difference of {size(ONE_CELL, found.sd)} if one cell is 0 for all seeds" if at_zero else ""
    return f"{sentence}{zero}."


class CommittedVerdict(ReadDocument):
    """Verdict on a claim by five seeds or more, with the number of seeds and the evidence in sentences."""

    verdict: str
    seeds: int
    evidence: str


class Committed(VersionedDocument):
    """committed.json: verdicts by scale and EXPERIMENT.CLAIM, from packed results (`benchmarks/committed.py`)."""

    scales: dict[str, dict[str, CommittedVerdict]] = Field(default_factory=dict)


@cache
def shipped_verdicts() -> Committed:
    """Load the shipped committed.json."""
    return Committed.model_validate(_shipped(COMMITTED))


def verdict_of_five(scale: str, claim: str) -> str:
    """Return an earlier verdict on a claim (EXPERIMENT.CLAIM) at a scale, with evidence; empty without one."""
    found = shipped_verdicts().scales.get(scale, {}).get(claim)
    if found is None:
        return ""
    return f"An earlier sweep with {found.seeds} seeds had the verdict {found.verdict}. {found.evidence}"


def _shipped(name: str) -> Any:
    return parse_json((resources.files("sinklab") / "experiments" / name).read_text("utf-8"))
