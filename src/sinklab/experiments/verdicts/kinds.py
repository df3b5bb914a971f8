"""Decide checks on the runs of their cells by counts of seeds and of pairs of seeds (docs/verdicts.md).

`wording.py` describes the outcomes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from scipy.special import betaincinv

from sinklab.experiments import claims
from sinklab.experiments.documents import CellSummary
from sinklab.experiments.quantities import AT_EPS, AVERAGED, quantity
from sinklab.tables import NO_SINK

FEWEST = 5
"""Minimum number of replicates (seeds, draws or models) of a verdict."""

ONE_MAY_DEVIATE = 9
"""Minimum number of replicates at which one may deviate, and at which ranges leave out the two extreme values."""

SEPARATED = 0.004
"""Maximum one-sided p-value (exact rank sum test) at which two cells differ; 5 seeds above 5 others: p = 1/252."""


def seed_by_seed(held: Sequence[bool]) -> bool | None:
    """Return True if a claim holds at every seed, False if it holds at none, else None.

    With nine seeds or more, one seed may deviate in either case. The caller checks the minimum number of seeds: without
    seeds, the result is True.
    """
    differ, kept = int(len(held) >= ONE_MAY_DEVIATE), sum(held)
    return True if kept >= len(held) - differ else False if kept <= differ else None


def pairs_against(above: Sequence[float], below: Sequence[float]) -> int:
    """Count the pairs (a, b) of a value of `above` and a value of `below` with a <= b."""
    return sum(a <= b for a in above for b in below)


def separated(above: Sequence[float], below: Sequence[float]) -> bool:
    """Return True if `above` exceeds `below` in the exact one-sided rank sum test, with p <= SEPARATED.

    A pair of equal values counts as opposing (`pairs_against`).
    """
    return rank_sum_p(len(above), len(below), pairs_against(above, below)) <= SEPARATED


def rank_sum_p(n: int, m: int, against: int) -> float:
    """Compute the exact one-sided p-value of the rank sum test, P(U <= against) (Mann and Whitney, 1947).

    U is the number of opposing pairs, in which one of the n values is smaller than one of the m values. Under the null
    hypothesis, all orderings of the n + m distinct values are equally likely.

    Args:
        n, m: number of values in the two samples; the alternative hypothesis is that the first sample has the larger
            values.
        against: number of opposing pairs, 0 to n m.
    """
    counts = [1] + against * [0]  # orderings by number of opposing pairs
    for size in range(1, n + 1):  # factors (1 - q^(m + size)) / (1 - q^size) of the Gaussian binomial coefficient
        for u in range(against, m + size - 1, -1):
            counts[u] -= counts[u - m - size]
        for u in range(size, against + 1):
            counts[u] += counts[u - size]
    return sum(counts) / math.comb(n + m, n)


def share_interval(kept: int, seeds: int) -> tuple[float, float]:
    """Return the ends of the exact 95 % confidence interval of a share (0..1) (Clopper and Pearson, 1934).

    The share is observed as k = `kept` of n = `seeds`. B(p; a, b) is the p-quantile of a beta distribution: the lower
    end is B(0.025; k, n - k + 1), or 0 if k = 0; the upper end is B(0.975; k + 1, n - k), or 1 if k = n.
    """
    low = 0.0 if kept == 0 else float(betaincinv(kept, seeds - kept + 1, 0.025))
    high = 1.0 if kept == seeds else float(betaincinv(kept + 1, seeds - kept, 0.975))
    return low, high


def middle_and_ends(values: Sequence[float]) -> tuple[float, float, float]:
    """Return median, minimum and maximum of the values, one per seed.

    With nine values or more, the second smallest and the second largest value replace minimum and maximum.
    """
    drop = int(len(values) >= ONE_MAY_DEVIATE)
    rising = sorted(values)
    return median(values), rising[drop], rising[len(rising) - 1 - drop]


Values = Mapping[str, Mapping[int, float]]
"""Values of a check's quantity by cell and seed."""


class UnmeasuredError(Exception):
    """A cell has no value of a quantity, or no replicate has values in all cells.

    Attributes:
        name: name of the quantity.
        at_step: step of the check; None for the end of the run.
        cells: cells without a value; empty if every cell has values, but no replicate has values in all of them.
        values: the values that there are, in the second case.
    """

    def __init__(self, name: str, at_step: int | None, cells: Sequence[str], values: Values | None = None) -> None:
        super().__init__(f"{quantity(name).label} was not measured")
        self.name, self.at_step, self.cells, self.values = name, at_step, cells, values or {}


@dataclass(frozen=True)
class Finding:
    """Outcome of a check before the minimum number of seeds is applied.

    Attributes:
        holds: True if the check holds, apart from the requirements of `size`; False if it is contradicted; else None.
        seeds: number of replicates with values. For two unpaired cells, the smaller of their numbers; for paired cells,
            the number of replicates with values in all cells.
        values: values by cell and seed; for `before`, by step and seed; for `than_value`, by quantity and seed.
        held: for each statement of the evidence, whether it is true, by seed.
        size: False if the check also requires a size, bound, absence or rate that does not hold; else True.
        opposite: for a slope, pairs of neighbouring cells that are separated in the opposite direction.
        repeated: for the absence of a sink, whether several evaluations were read.
    """

    holds: bool | None
    seeds: int
    values: Values
    held: Sequence[Sequence[bool]] = ()
    size: bool = True
    opposite: Sequence[tuple[str, str]] = ()
    repeated: bool = False


def by_seed(cell: CellSummary, name: str, at_step: int | None = None, eps: str | None = None) -> dict[int, float]:
    """Return the value of a quantity by seed (`RunNumbers.value`); seeds without a value are omitted.

    Args:
        eps: threshold of the sink rates in `AT_EPS`, one of `OTHER_EPS_TEXTS`; default: the recipe's threshold.
    """
    values = {run.seed: run.value(name, at_step, eps if name in AT_EPS else None) for run in cell.numbers}
    return {seed: value for seed, value in values.items() if value is not None}


def decide(check: claims.SingleCheck, cells: Mapping[str, CellSummary], eps: str | None = None) -> Finding:
    """Decide a check on the runs of its cells; raise UnmeasuredError if a cell has no values.

    Args:
        eps: see `by_seed`.
    """
    if isinstance(check, claims.Diverges):
        done, failed = len(cells[check.cell].numbers), cells[check.cell].count("failed")
        diverges = check.kind == "diverges"
        held = [diverges] * failed + [not diverges] * done
        return Finding(seed_by_seed(held), len(held), {}, [held])

    def values(name: str) -> Values:
        values = {cell: by_seed(cells[cell], name, check.at_step, eps) for cell in check.cells}
        if absent := [cell for cell in check.cells if not values[cell]]:
            raise UnmeasuredError(name, check.at_step, absent)
        return values

    def last(step: int | None, count: int = AVERAGED) -> dict[int, list[float]]:
        """Return the values of the check's cell at the last evaluations up to a step, by seed."""
        threshold = eps if check.value in AT_EPS else None
        read = {run.seed: run.evaluations(check.value, step, threshold, count) for run in cells[check.cells[0]].numbers}
        return {seed: several for seed, several in read.items() if several}

    match check:
        case claims.Within(before=int()):
            return _changes(check, last)
        case claims.Within():
            by_cell = values(check.value)
            held = [_keeps(value, check) for value in by_cell[check.cell].values()]
            return Finding(seed_by_seed(held), len(held), by_cell, [held])
        case claims.SinkAbsent():
            by_cell, rates = values(check.value), last(check.at_step).values()
            held = [max(several) < NO_SINK for several in rates]
            repeated = any(len(several) > 1 for several in rates)
            return Finding(seed_by_seed(held), len(held), by_cell, [held], repeated=repeated)
        case claims.Differs(than_value=str(other)):
            names = (other, check.value) if check.kind == "greater" else (check.value, other)
            return _differs_within_runs(check, {name: values(name)[check.cell] for name in names})
        case claims.Differs():
            return _differs(check, values(check.value), [*last(check.at_step).values()] if check.absent else [])
    by_cell = values(check.value)
    shared = sorted(set.intersection(*map(set, by_cell.values())))
    if not shared:
        raise UnmeasuredError(check.value, check.at_step, (), by_cell)
    return _equal(check, by_cell, shared) if isinstance(check, claims.Equal) else _monotone(check, by_cell, shared)


def _keeps(value: float, check: claims.Within | claims.Differs) -> bool:
    above = check.at_least is None or value >= check.at_least
    return above and (check.at_most is None or value <= check.at_most)


def moved(check: claims.Differs, low: Sequence[float]) -> list[float]:
    """Return the values that the larger ones must exceed: `by` above the smaller values, or `times` them."""
    return [value + (check.by or 0.0) if check.times is None else value * check.times for value in low]


def _differs(check: claims.Differs, values: Values, last_rates: Sequence[Sequence[float]]) -> Finding:
    a, b = (list(values[cell].values()) for cell in check.cells)
    high, low = (a, b) if check.kind == "greater" else (b, a)
    holds = True if separated(high, low) else False if separated(low, high) else None
    size, statements = [True], []
    if check.by is not None or check.times is not None:
        size.append(separated(high, moved(check, low)))
    if check.at_least is not None or check.at_most is not None:
        statements.append([_keeps(value, check) for value in a])
    if check.absent:
        statements.append([max(rates) < NO_SINK for rates in last_rates])
    size += [seed_by_seed(held) is True for held in statements]
    repeated = check.absent and any(len(rates) > 1 for rates in last_rates)
    return Finding(holds, min(len(a), len(b)), values, statements, all(size), repeated=repeated)


def _differs_within_runs(check: claims.Differs, values: Values) -> Finding:
    """Compare two quantities of the same runs, the claimed smaller one first in `values`."""
    low, high = values.values()
    shared = sorted(set(low) & set(high))
    smaller = [low[seed] < high[seed] for seed in shared]
    bounded = [_keeps(values[check.value][seed], check) for seed in shared]
    pairs = {name: {seed: by_seed[seed] for seed in shared} for name, by_seed in values.items()}
    size = seed_by_seed(bounded) is True
    return Finding(seed_by_seed(smaller), len(shared), pairs, [smaller, bounded], size)


def _changes(check: claims.Within, last: Callable[..., dict[int, list[float]]]) -> Finding:
    """Decide whether the quantity is in the bounds at the step `before`, and not yet at the step `after`."""
    assert check.before is not None
    values: dict[int, dict[int, float]] = {}
    for step in [check.before] if check.after is None else [check.after, check.before]:
        values[step] = {seed: several[0] for seed, several in last(step, count=1).items()}
        if not values[step]:
            raise UnmeasuredError(check.value, step, check.cells)
    shared = sorted(set.intersection(*map(set, values.values())))
    held = [
        _keeps(values[check.before][seed], check)
        and (check.after is None or not _keeps(values[check.after][seed], check))
        for seed in shared
    ]
    by_step = {str(step): {seed: by_seed[seed] for seed in shared} for step, by_seed in values.items()}
    return Finding(seed_by_seed(held), len(held), by_step, [held])


def apart(check: claims.Equal, values: Values) -> dict[str, list[float]]:
    """Return the differences from the cell to compare with at the seeds that all cells have, by other cell."""
    shared = sorted(set.intersection(*map(set, values.values())))
    others = [cell for cell in values if cell != check.reference] or [check.reference]
    return {cell: [values[cell][seed] - values[check.reference][seed] for seed in shared] for cell in others}


def _equal(check: claims.Equal, values: Values, shared: Sequence[int]) -> Finding:
    """Decide equivalence: at every seed, every other cell must differ from the first by at most the margin."""
    differences = apart(check, values).values()
    held = [all(abs(d[at]) <= check.margin for d in differences) for at in range(len(shared))]
    beyond = any(
        seed_by_seed([sign * one > check.margin for one in d]) is True for d in differences for sign in (1, -1)
    )
    return Finding(False if beyond else True if seed_by_seed(held) else None, len(shared), values, [held])


def _monotone(check: claims.Monotone, values: Values, shared: Sequence[int]) -> Finding:
    sign = 1 if check.kind == "rising" else -1
    middle = (len(check.over) - 1) / 2

    def slope(seed: int) -> float:
        """Return the least-squares slope of the values over the ranks of the cells, up to a positive factor."""
        ranked = enumerate(values[cell][seed] for cell in check.over)
        return sum((rank - middle) * value for rank, value in ranked if rank != middle)

    held = [sign * slope(seed) > 0 for seed in shared]
    opposite = [
        (one, other)
        for one, other in pairwise(check.over)
        if separated(*(list(values[cell].values()) for cell in ((one, other) if sign > 0 else (other, one))))
    ]
    holds = seed_by_seed(held)
    opposite = opposite if holds else []
    return Finding(None if opposite else holds, len(shared), values, [held], opposite=opposite)
