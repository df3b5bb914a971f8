"""Numbers and counts of the evidence as people read them."""

import math
from collections.abc import Iterable, Sequence

from sinklab.experiments.quantities import Quantity
from sinklab.experiments.verdicts.counts import FEWEST, middle_and_ends, share_interval


def number(value: float, of: Quantity) -> str:
    """A number without its unit; small rates have a decimal more, a step that was not reached is `never`."""
    if math.isinf(value):
        return "never"
    decimals = of.decimals + (of.unit == "%" and 0.005 <= abs(value) < 1)
    return f"{value:z.{decimals}f}"


def unit(of: Quantity) -> str:
    """The unit behind a number."""
    return {"x": "", "": ""}.get(of.unit, f" {of.unit}")


def step_unit(of: Quantity) -> str:
    """The unit behind a difference."""
    return {"%": " points"}.get(of.unit, unit(of))


def each_seed(cell: str, values: Iterable[float], of: Quantity) -> str:
    """A cell with the number of every seed: `softmax 12.1, 15.3, 9.8 %`."""
    return f"{cell} {', '.join(number(value, of) for value in values)}{unit(of)}"


def difference(values: Sequence[float], of: Quantity, what: str = "difference") -> str:
    """`difference -26.7 points [-39.7, -15.7]`: the median over seeds, the smallest and the largest."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return f"no {what} at any seed"
    middle, low, high = (_signed(number(value, of)) for value in middle_and_ends(known))
    text = f"{what} {middle}{step_unit(of)}"
    return text if len(known) == 1 else f"{text} [{low}, {high}]"


def counted(held: Sequence[bool]) -> str:
    """`5 of 5 seeds (48 to 100 % of all seeds)`; `3 of 3 seeds so far` where there are too few for a verdict."""
    kept, n = sum(held), len(held)
    if n < FEWEST:
        return f"{kept} of {seeds(n)} so far"
    low, high = share_interval(kept, n)
    return f"{kept} of {n} seeds ({100 * low:.0f} to {100 * high:.0f} % of all seeds)"


def overlapping(against: int, n: int, m: int) -> str:
    """`2 of 25 pairs of seeds against`."""
    return f"{against} of {n * m} pairs of seeds against{' so far' if min(n, m) < FEWEST else ''}"


def bounds(at_least: float | None, at_most: float | None, of: Quantity) -> str:
    """`at least 10 %`."""
    said = [f"at least {at_least:g}"] if at_least is not None else []
    said += [f"at most {at_most:g}"] if at_most is not None else []
    return f"{' and '.join(said)}{unit(of)}"


def seeds(count: int) -> str:
    """`1 seed`, `3 seeds`."""
    return "1 seed" if count == 1 else f"{count} seeds"


def _signed(text: str) -> str:
    return text if text.startswith("-") or not float(text) else f"+{text}"
