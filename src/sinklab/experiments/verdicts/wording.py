"""Format numbers for the evidence of a claim. `noun` is the unit of replication: seed, draw or model."""

import math
from collections.abc import Iterable, Sequence

from sinklab.experiments.documents import ReplicateKind
from sinklab.experiments.verdicts.counts import middle_and_ends
from sinklab.measuring.registry import Metric


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


def difference(values: Sequence[float], of: Metric, noun: ReplicateKind, what: str = "") -> str:
    """Return a sentence with the median of differences and, for several, their range (`middle_and_ends`).

    Example: `The median difference at the same seed is -26.7 points [-39.7, -15.7].`

    Args:
        values: differences, one per seed; values that are not finite, because a step was never reached, are left out.
        what: subject of the sentence; default: that of the example.
    """
    known = [value for value in values if math.isfinite(value)]
    what = what or f"The median difference at the same {noun}"
    if not known:
        return f"{what} is undefined, because no {noun} has finite values of both cells."
    shown = [number(value, of) for value in middle_and_ends(known)]
    middle, low, high = (text if text.startswith("-") or not float(text) else f"+{text}" for text in shown)
    text = f"{what} is {middle}{step_unit(of)}"
    return f"{text}." if len(known) == 1 else f"{text} [{low}, {high}]."


def bounds(at_least: float | None, at_most: float | None, of: Metric) -> str:
    """Format one or two bounds on a quantity: `at least 10 %`, `at least 10 and at most 20 %`."""
    said = [f"at least {at_least:g}"] if at_least is not None else []
    said += [f"at most {at_most:g}"] if at_most is not None else []
    return f"{' and '.join(said)}{unit(of)}"
