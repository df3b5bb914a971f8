"""Counts of seeds and pairs of seeds that decide claims, with confidence intervals (docs/verdicts.md)."""

import math
from collections.abc import Sequence
from functools import cache
from statistics import median

from scipy.special import betaincinv

FEWEST = 5
"""Minimum number of seeds of a verdict."""

MANY = 9
"""Minimum number of seeds at which one seed may deviate."""

SEPARATED = 0.004
"""Maximum one-sided p-value (exact rank sum test) at which two cells differ; 5 above 5 seeds have p = 1/252."""


def seed_by_seed(held: Sequence[bool]) -> bool | None:
    """Return True if a claim holds at every seed, False if at none, else None.

    With nine seeds or more, one seed may deviate. The minimum number of seeds is not checked here.
    """
    differ, kept = int(len(held) >= MANY), sum(held)
    return True if kept >= len(held) - differ else False if kept <= differ else None


def pairs_against(above: Sequence[float], below: Sequence[float]) -> int:
    """Count the pairs of seeds in which the value of `above` is not above that of `below`; ties count."""
    return sum(a <= b for a in above for b in below)


def separated(above: Sequence[float], below: Sequence[float]) -> bool:
    """Return True if the values of `above` exceed those of `below` by the exact one-sided rank sum test."""
    return rank_sum_p(len(above), len(below), pairs_against(above, below)) <= SEPARATED


def rank_sum_p(n: int, m: int, against: int) -> float:
    """Compute the exact p-value of the rank sum test (Mann and Whitney, 1947), p = P(U <= u), u = `against`.

    This is the share of the orderings of n and m distinct numbers with at most `against` (0 to n m) opposing pairs.
    """
    return sum(_orders(n, m, u) for u in range(against + 1)) / math.comb(n + m, n)


@cache
def _orders(n: int, m: int, against: int) -> int:
    """Count the orderings of n and m numbers with exactly `against` opposing pairs, by recursion on the largest."""
    if against < 0:
        return 0
    if n == 0 or m == 0:
        return int(against == 0)
    return _orders(n - 1, m, against) + _orders(n, m - 1, against - n)


def share_interval(kept: int, seeds: int) -> tuple[float, float]:
    """Compute the exact 95 % confidence interval of the share of seeds that agree (Clopper and Pearson, 1934).

    The ends are quantiles of beta distributions: B(0.025; k, n - k + 1) and B(0.975; k + 1, n - k).
    """
    low = 0.0 if kept == 0 else float(betaincinv(kept, seeds - kept + 1, 0.025))
    high = 1.0 if kept == seeds else float(betaincinv(kept + 1, seeds - kept, 0.975))
    return low, high


def middle_and_ends(values: Sequence[float]) -> tuple[float, float, float]:
    """Return median, minimum and maximum over seeds; from nine seeds on, second lowest and second highest value."""
    drop = int(len(values) >= MANY)
    rising = sorted(values)
    return median(values), rising[drop], rising[len(rising) - 1 - drop]
