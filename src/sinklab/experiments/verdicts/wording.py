"""Numbers of the evidence as people read them."""

import math
from collections.abc import Sequence

from sinklab.experiments.quantities import Quantity
from sinklab.experiments.verdicts.estimates import LEVEL, MeanOverSeeds
from sinklab.experiments.verdicts.observations import Observations


def number(value: float, of: Quantity) -> str:
    """A number without its unit; small rates with a decimal more."""
    decimals = of.decimals + (of.measure == "rate" and 0.005 <= abs(value) < 1)
    return f"{value:z.{decimals}f}"


def unit(of: Quantity) -> str:
    """What stands behind a number."""
    return {"x": "", "": ""}.get(of.unit, f" {of.unit}")


def step_unit(of: Quantity) -> str:
    """What stands behind a difference."""
    return {"%": " points"}.get(of.unit, unit(of))


def each_seed(seen: Observations, cell: str) -> str:
    """A cell with the number of every seed: `softmax 12.1, 15.3, 9.8 %`."""
    of = seen.quantity
    shown = [
        ("> " if of.unit == "steps" and one.end else "") + number(one.value, of)
        for _, one in sorted(seen.by_cell[cell].items())
    ]
    return f"{cell} {', '.join(shown)}{unit(of)}"


def mean_with_interval(seen: Observations, cell: str) -> str:
    """`mean 12.2 % [8.9, 16.4]`, the interval at 95 %."""
    mean, of = seen.mean_of(cell), seen.quantity
    text = f"mean {number(seen.turned_back(mean.mean, cell), of)}{unit(of)}"
    if mean.spread is None:
        return text
    low, high = (number(seen.turned_back(y, cell), of) for y in mean.interval())
    return f"{text} [{low}, {high}]"


def difference(seen: Observations, mean: MeanOverSeeds, than: str, seeds: Sequence[int], level: float = LEVEL) -> str:
    """`difference -12.3 points [-15.0, -9.1]`: around the mean of the cell that is compared with."""
    of, around = seen.quantity, seen.mean_y(than, seeds)
    here = seen.turned_back(around, than)

    def read(d: float) -> str:
        return _signed(number(seen.turned_back(around + d, than) - here, of))

    text = f"difference {read(mean.mean)}{step_unit(of)}"
    if mean.spread is None:
        return text
    low, high = (read(d) for d in mean.interval(level))
    return f"{text} [{low}, {high}]"


def trend_per_cell(mean: MeanOverSeeds, of: Quantity) -> str:
    """`trend per cell x 1.21 [1.05, 1.40]`, of the odds for a rate; `+ 0.02 [..]` for what is compared as it is."""
    if of.measure == "plain":
        text = f"trend per cell {mean.mean:+.3g}"
        return text if mean.spread is None else f"{text} [{', '.join(f'{y:+.3g}' for y in mean.interval())}]"
    return factor(mean, f"trend per cell{', odds' if of.measure == 'rate' else ''}")


def factor(mean: MeanOverSeeds, of: str) -> str:
    """`ratio x 1.21 [1.05, 1.40]`: a difference of logarithms or logits."""
    text = f"{of} x {_power(mean.mean)}"
    return text if mean.spread is None else f"{text} [{', '.join(_power(y) for y in mean.interval())}]"


def p_value(p: float, comparisons: int = 1) -> str:
    """`p 0.013`, and among how many comparisons it was adjusted."""
    text = "p < 0.001" if p < 0.001 else f"p {p:.3f}"
    return f"{text} adjusted for {comparisons} comparisons" if comparisons > 1 else text


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


def _power(y: float) -> str:
    power = math.exp(min(max(y, -50.0), 50.0))
    return f"{power:,.0f}" if 100 <= power < 1e6 else f"{power:.4g}"
