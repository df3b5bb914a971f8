"""The two counts that decide every claim, with their intervals (docs/verdicts.md). Depends only on counts of seeds."""

import math
from collections.abc import Callable, Sequence
from functools import cache
from statistics import median

FEWEST = 5
"""Fewest seeds of a verdict."""

MANY = 9
"""Fewest seeds of which one may differ."""

SEPARATED = 0.004
"""Largest one-sided p of the exact rank sum test at which two cells do not overlap: 5 and 5 seeds have 1/252."""


def seed_by_seed(held: Sequence[bool]) -> bool | None:
    """Whether a claim is reproduced (it holds at every seed), contradicted (at none), or neither.

    With nine seeds or more, one may differ. Whether there are enough seeds for a verdict is not checked here.
    """
    differ, kept = int(len(held) >= MANY), sum(held)
    return True if kept >= len(held) - differ else False if kept <= differ else None


def pairs_against(above: Sequence[float], below: Sequence[float]) -> int:
    """Number of seed pairs in which the first is not above the second; ties count."""
    return sum(a <= b for a in above for b in below)


def separated(above: Sequence[float], below: Sequence[float]) -> bool:
    """Whether the first values are above the second ones, by the exact one-sided rank sum test."""
    return rank_sum_p(len(above), len(below), pairs_against(above, below)) <= SEPARATED


def rank_sum_p(n: int, m: int, against: int) -> float:
    """P-value: share of the orderings of n and m distinct numbers with at most `against` (0 to n m) opposing pairs.

    Counted exactly (Mann and Whitney, 1947): U = `against`, p = P(U <= u).
    """
    return sum(_orders(n, m, u) for u in range(against + 1)) / math.comb(n + m, n)


@cache
def _orders(n: int, m: int, against: int) -> int:
    """Number of orderings of n and m numbers with exactly `against` opposing pairs, by recursion on the largest."""
    if against < 0:
        return 0
    if n == 0 or m == 0:
        return int(against == 0)
    return _orders(n - 1, m, against) + _orders(n, m - 1, against - n)


def share_interval(kept: int, seeds: int, level: float = 0.95) -> tuple[float, float]:
    """Exact confidence interval of the share of seeds for which a claim holds (Clopper and Pearson, 1934), 0 to 1."""
    tail = (1 - level) / 2

    def at_least(share: float) -> float:
        return _binomial(share, range(kept, seeds + 1), seeds)

    def at_most(share: float) -> float:
        return _binomial(share, range(kept + 1), seeds)

    low = 0.0 if kept == 0 else _where(lambda share: at_least(share) < tail)
    high = 1.0 if kept == seeds else _where(lambda share: at_most(share) > tail)
    return low, high


def _binomial(share: float, counts: range, seeds: int) -> float:
    return sum(math.comb(seeds, k) * share**k * (1 - share) ** (seeds - k) for k in counts)


def _where(below: Callable[[float], bool]) -> float:
    """Find by bisection the share up to which a predicate is true."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return (low + high) / 2


def middle_and_ends(values: Sequence[float]) -> tuple[float, float, float]:
    """The median over seeds, the smallest and the largest; with nine seeds or more, one at either end is excluded."""
    drop = int(len(values) >= MANY)
    rising = sorted(values)
    return median(values), rising[drop], rising[len(rising) - 1 - drop]
