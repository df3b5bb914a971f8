"""Sentences about claims: the evidence, and earlier verdicts.

`noun` is the unit of replication: seed, draw or model.

The earlier verdicts are those of committed results (committed.json), and are shown with claims that have no verdict
because of fewer seeds.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from pydantic import Field

from sinklab.experiments import claims
from sinklab.experiments.documents import ReplicateKind
from sinklab.experiments.quantities import quantity
from sinklab.experiments.verdicts.kinds import (
    FEWEST,
    Finding,
    UnmeasuredError,
    apart,
    middle_and_ends,
    moved,
    pairs_against,
    share_interval,
)
from sinklab.files import parse_json
from sinklab.measuring.registry import OTHERS, Metric
from sinklab.schema import ReadDocument, VersionedDocument
from sinklab.tables import NO_SINK, plural


def number(value: float, of: Metric) -> str:
    """Format a value of a quantity without its unit; a step that was never reached (infinity) becomes `never`.

    Percentages whose magnitude is at least 0.005 and below 1 have one more decimal than the quantity.
    """
    if math.isinf(value):
        return "never"
    decimals = of.decimals + (of.unit == "%" and 0.005 <= abs(value) < 1)
    return f"{value:z.{decimals}f}"


def unit(of: Metric) -> str:
    """Return the unit to append to a value of a quantity, such as ` %`; empty for ratios and unitless numbers."""
    return {"x": "", "": ""}.get(of.unit, f" {of.unit}")


def step_unit(of: Metric) -> str:
    """Return the unit to append to a difference of two values: ` points` for percentages, else that of `unit`."""
    return {"%": " points"}.get(of.unit, unit(of))


def each_seed(cell: str, values: Iterable[float], of: Metric) -> str:
    """Format the values of a cell, one per seed: `softmax 12.1, 15.3, 9.8 %`."""
    return f"{cell} {', '.join(number(value, of) for value in values)}{unit(of)}"


def values_text(values: Mapping[str, Mapping[int, float]], name: str, noun: ReplicateKind) -> str:
    """Return a sentence with the values of all seeds by cell: `Sink_1 by seed: softmax 12.1, 15.3, 9.8 %.`"""
    of = quantity(name)
    return f"{of.label} by {noun}: {'; '.join(each_seed(cell, one.values(), of) for cell, one in values.items())}."


def counted(held: Sequence[bool], noun: ReplicateKind) -> str:
    """Format the number of seeds at which a statement holds: `5 of 5 seeds (95 % CI: 48 to 100 % of all seeds)`.

    With fewer than FEWEST seeds, the interval is left out: `3 of 3 seeds`.
    """
    kept, n = sum(held), len(held)
    if n < FEWEST:
        return f"{kept} of {plural(n, noun)}"
    low, high = share_interval(kept, n)
    return f"{kept} of {n} {noun}s (95 % CI: {100 * low:.0f} to {100 * high:.0f} % of all {noun}s)"


def difference(values: Sequence[float], of: Metric, noun: ReplicateKind, what: str = "") -> str:
    """Return a sentence with the median of differences and, for several, their range (`middle_and_ends`).

    Example: `The median difference at the same seed is -26.7 points [-39.7, -15.7].`

    Args:
        values: differences, one per seed; values that are not finite, because a step was never reached, are left out,
            and the sentence has their number.
        what: subject of the sentence; default: that of the example.
    """
    known = [value for value in values if math.isfinite(value)]
    what = what or f"The median difference at the same {noun}"
    if not known:
        return f"{what} is undefined, because no {noun} has finite values of both cells."
    shown = [number(value, of) for value in middle_and_ends(known)]
    middle, low, high = (text if text.startswith("-") or not float(text) else f"+{text}" for text in shown)
    ends = f" [{low}, {high}]" if len(known) > 1 else ""
    never = len(values) - len(known)
    without = f", without {never} {noun}{'s' * (never > 1)} at which a cell never reaches the step" if never else ""
    return f"{what} is {middle}{step_unit(of)}{ends}{without}."


def bounds(check: claims.Within | claims.Differs, of: Metric) -> str:
    """Format one or two bounds on a quantity: `at least 10 %`, `at least 10 and at most 20 %`."""
    parts = [f"at least {check.at_least:g}"] if check.at_least is not None else []
    parts += [f"at most {check.at_most:g}"] if check.at_most is not None else []
    return f"{' and '.join(parts)}{unit(of)}"


def unmeasured(error: UnmeasuredError, noun: ReplicateKind) -> str:
    """Return a sentence on the values that are missing."""
    if not error.cells:
        return f"{values_text(error.values, error.name, noun)} No {noun} has values of all cells."
    when = f" at step {error.at_step:,}" if error.at_step else ""
    return f"{quantity(error.name).label}{when} was not measured in {' and '.join(error.cells)}."


def evidence(check: claims.SingleCheck, finding: Finding, noun: ReplicateKind) -> str:
    """Return the sentences on the outcome of a check."""
    values = finding.values
    count = counted(finding.held[0], noun) if finding.held else ""
    match check:
        case claims.Within(before=int()):
            of = quantity(check.value)
            shown = " ".join(
                f"At the last evaluation up to step {int(step):,}, {values_text({check.cell: rates}, of.name, noun)}"
                for step, rates in values.items()
            )
            when = "between these steps" if check.after is not None else "by this step"
            if of.name == "sink_1" and check.at_most is None:
                return f"{shown} The rate reaches {check.at_least:g} % {when} at {count}."
            return f"{shown} The value becomes {bounds(check, of)} {when} at {count}."
        case claims.Within():
            limits = bounds(check, quantity(check.value))
            return f"{values_text(values, check.value, noun)} The value is {limits} at {count}."
        case claims.SinkAbsent():
            return f"{values_text(values, check.value, noun)} {_below(check, finding, noun)}"
        case claims.Differs(than_value=str()):
            return _differs_within_runs(check, finding, noun)
        case claims.Differs():
            return _differs(check, finding, noun)
        case claims.Equal():
            return _equal(check, finding, noun)
        case claims.Monotone():
            sign = "positive" if check.kind == "rising" else "negative"
            text = f"The slope over the cells in this order is {sign} at {count}."
            text = f"{values_text(values, check.value, noun)} {text}"
            if not finding.opposite:
                return text
            steps = " and ".join(f"{one} to {other}" for one, other in finding.opposite)
            return f"{text} From {steps}, the values change in the opposite direction without overlap of the {noun}s."
        case claims.Diverges():
            ended = "diverged" if check.kind == "diverges" else "did not diverge"
            return f"Training of {check.cell} {ended} at {count}."


def _below(check: claims.SinkAbsent | claims.Differs, finding: Finding, noun: ReplicateKind) -> str:
    each = " at each of the last three evaluations" if finding.repeated else ""
    return f"The rate of {check.cell} is below {NO_SINK:g} %{each} at {counted(finding.held[-1], noun)}."


def _differs(check: claims.Differs, finding: Finding, noun: ReplicateKind) -> str:
    of, (cell, than) = quantity(check.value), (finding.values[name] for name in check.cells)
    greater = check.kind == "greater"
    a, b = list(cell.values()), list(than.values())
    high, low = (a, b) if greater else (b, a)

    def opposing(below: Sequence[float], more: str = "") -> str:
        opposed = f"{check.cell} is not {'above' if greater else 'below'} {check.than}{more}"
        return f"In {pairs_against(high, below)} of {len(a) * len(b)} pairs of {noun}s, {opposed}."

    sentences = [
        values_text(finding.values, check.value, noun),
        opposing(low),
        difference([cell[seed] - than[seed] for seed in cell if seed in than], of, noun),
    ]
    if check.by is not None or check.times is not None:
        size = f"{check.by:g}{step_unit(of)}" if check.by else f"a factor of {check.times:g}"
        sentences.append(opposing(moved(check, low), f" by more than {size}"))
    if check.at_least is not None or check.at_most is not None:
        count = counted(finding.held[0], noun)
        sentences.append(f"The value of {check.cell} is {bounds(check, of)} at {count}.")
    if check.absent:
        sentences.append(_below(check, finding, noun))
    return " ".join(sentences)


def _differs_within_runs(check: claims.Differs, finding: Finding, noun: ReplicateKind) -> str:
    of, position = quantity(check.value), check.value.removeprefix("sink_")
    low, high = finding.values
    count, size = (counted(held, noun) for held in finding.held)
    bounded = "" if check.at_least is None and check.at_most is None else f"{bounds(check, of)} at {size}"
    if check.kind == "greater" and low == f"{OTHERS}{position}":
        shown = values_text({check.cell: finding.values[high]}, high, noun)
        highest = f"The rate at position {position} is the highest of positions 1 to T / 2 at {count}"
        return f"{shown} {highest}{f', and {bounded}' if bounded else ''}."
    both = zip(*(finding.values[name].values() for name in (low, high)), strict=True)
    pairs = ", ".join(f"{number(a, quantity(low))} and {number(b, quantity(high))}" for a, b in both)
    return (
        f"Pairs of {low} and {high} of {check.cell} by {noun}: {pairs}{unit(quantity(high))}. {low} is smaller than "
        f"{high} at {count}.{f' {check.value} is {bounded}.' if bounded else ''}"
    )


def _equal(check: claims.Equal, finding: Finding, noun: ReplicateKind) -> str:
    of, each = quantity(check.value), values_text(finding.values, check.value, noun)
    differences = apart(check, finding.values)
    farthest = max(differences, key=lambda cell: max(abs(d) for d in differences[cell]))
    margin = f"at most {check.margin:g}{step_unit(of)} in magnitude at {counted(finding.held[0], noun)}"
    if len(differences) == 1:
        return f"{each} {difference(differences[farthest], of, noun)} The difference is {margin}."
    what = f"The cell with the largest difference from {check.reference} is {farthest}; its median difference"
    return f"{each} {difference(differences[farthest], of, noun, what)} All differences are {margin}."


COMMITTED = "committed.json"


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
