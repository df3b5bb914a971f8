"""Counts of seeds and pairs of seeds that decide claims, with confidence intervals (docs/verdicts.md)."""

import math
from collections.abc import Sequence
from statistics import median

from scipy.special import betaincinv

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
