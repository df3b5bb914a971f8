"""Means over seeds with what is known of their spread: intervals, tests, and how many seeds would decide.

All numbers are on the transformed scale (`transforms`).
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

LEVEL = 0.95
"""Of the intervals that are shown and that bounds are held against."""

EQUIVALENCE = 0.90
"""Of the interval that lies within the margin where two one-sided tests at 5 % say so."""

MOST_SEEDS = 1000
"""Beyond which nobody is told to train more."""

K = TypeVar("K")


@dataclass(frozen=True)
class SeedSpread:
    """A standard deviation and what it rests on.

    Attributes:
        sd: of one seed's number.
        df: degrees of freedom.
        recorded: earlier, for this scale; more seeds of this experiment do not add to it.
    """

    sd: float
    df: float
    recorded: bool = False


@dataclass(frozen=True)
class MeanOverSeeds:
    """A mean over n seeds and the spread of one.

    Attributes:
        mean, n: of the seeds.
        spread: of one seed's number; None where nothing is known of it.
    """

    mean: float
    n: int
    spread: SeedSpread | None

    @property
    def standard_error(self) -> float:
        """Of the mean; infinite where the spread is unknown."""
        return self.spread.sd / math.sqrt(self.n) if self.spread else math.inf

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """The t interval of the mean; everything where the spread is unknown."""
        half = self._half(level) * self.standard_error if self.spread else math.inf
        return self.mean - half, self.mean + half

    def prediction(self, level: float = LEVEL) -> tuple[float, float]:
        """The t interval within which one more seed lies: mean +- t s sqrt(1 + 1/n)."""
        half = self._half(level) * self.spread.sd * math.sqrt(1 + 1 / self.n) if self.spread else math.inf
        return self.mean - half, self.mean + half

    @property
    def p(self) -> float:
        """Of the two-sided t test of a mean of 0; 1 where the spread is unknown."""
        from scipy.special import stdtr

        if not self.spread:
            return 1.0
        return float(2 * stdtr(self.spread.df, -abs(self.mean) / self.standard_error))

    def one_sided_p(self) -> float:
        """Of the t test that the mean is not below 0; 1 where the spread is unknown."""
        from scipy.special import stdtr

        return float(stdtr(self.spread.df, self.mean / self.standard_error)) if self.spread else 1.0

    def moved_to(self, mean: float) -> "MeanOverSeeds":
        """Another mean with this spread."""
        return replace(self, mean=mean)

    def negated(self) -> "MeanOverSeeds":
        """The mean of the opposite."""
        return replace(self, mean=-self.mean)

    def with_seeds(self, n: int) -> "MeanOverSeeds":
        """The same mean and spread as they would be with n seeds of every cell."""
        if not self.spread or self.spread.recorded or self.n == 1:
            return replace(self, n=n)
        return replace(self, n=n, spread=replace(self.spread, df=self.spread.df * (n - 1) / (self.n - 1)))

    def _half(self, level: float) -> float:
        from scipy.special import stdtrit

        assert self.spread
        return float(stdtrit(self.spread.df, (1 + level) / 2))


def over_seeds(values: Sequence[float], known: SeedSpread | None) -> MeanOverSeeds:
    """The mean of a number of each seed, with the larger of the spread that is known and of their own.

    Own numbers that are all the same say nothing of the spread: they lie at an end of what they can be, or between the
    same two evaluations.

    Args:
        values: at least one.
        known: the pooled or recorded spread of such a number.
    """
    own = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    larger = own > (known.sd if known else 0.0) and not math.isclose(own, 0.0, abs_tol=1e-12)
    return MeanOverSeeds(
        math.fsum(values) / len(values), len(values), SeedSpread(own, len(values) - 1) if larger else known
    )


def single_spread(cells: Sequence[Sequence[float]]) -> SeedSpread | None:
    """The standard deviation within cells, pooled over them; None without two seeds of a cell that differ.

    Args:
        cells: the numbers of each cell.
    """
    squares = math.fsum((y - math.fsum(cell) / len(cell)) ** 2 for cell in cells for y in cell if cell)
    df = sum(len(cell) - 1 for cell in cells if cell)
    return _spread(squares, df)


def paired_spread(cells: Sequence[Mapping[int, float]]) -> SeedSpread | None:
    """The residual standard deviation of y_cs = mu_c + beta_s + e_cs by least squares, seeds missing or not.

    Args:
        cells: the numbers of each cell by seed.

    Returns:
        None without two cells that have two seeds in common, or where nothing scatters.
    """
    rows = [(c, seed, y) for c, cell in enumerate(cells) for seed, y in sorted(cell.items())]
    seeds = sorted({seed for _, seed, _ in rows})
    if not rows:
        return None
    design = np.zeros((len(rows), len(cells) + len(seeds)))
    for row, (cell, seed, _) in enumerate(rows):
        design[row, cell] = design[row, len(cells) + seeds.index(seed)] = 1.0
    y = np.array([value for _, _, value in rows])
    solution, _, rank, _ = np.linalg.lstsq(design, y, rcond=1e-10)
    return _spread(float(np.sum((y - design @ solution) ** 2)), len(rows) - int(rank))


def _spread(squares: float, df: int) -> SeedSpread | None:
    sd = math.sqrt(squares / df) if df > 0 else 0.0
    return SeedSpread(sd, df) if sd > 1e-12 else None


def holm(p_values: Mapping[K, float]) -> dict[K, float]:
    """Holm's adjusted p values of a family: the i-th smallest of m times m - i + 1, never below one before it."""
    adjusted: dict[K, float] = {}
    largest = 0.0
    for i, (key, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, p * (len(p_values) - i)))
        adjusted[key] = largest
    return adjusted


def within(mean: MeanOverSeeds, low: float, high: float, level: float = LEVEL) -> bool | None:
    """Whether a mean lies within bounds: its interval does (True), lies outside (False), or neither (None)."""
    lowest, highest = mean.interval(level)
    if low <= lowest and highest <= high and mean.spread:
        return True
    return False if highest < low or high < lowest else None


def equivalent(sides: Sequence[MeanOverSeeds], comparisons: int = 1) -> bool | None:
    """Whether what is to be below 0 is (True), by one-sided tests at 5 %, or one of it is above (False).

    Args:
        sides: how far each side lies beyond the margin.
        comparisons: that may refute the same claim: the level of the intervals is Bonferroni's for so many.
    """
    if all(side.one_sided_p() < 1 - LEVEL for side in sides):
        return True
    level = 1 - (1 - LEVEL) / comparisons
    return False if any(side.interval(level)[0] > 0 for side in sides) else None


def seeds_that_decide(now: int, decided: Callable[[int], bool]) -> int | None:
    """The smallest number of seeds above those there are with which a claim would be decided, None beyond 1,000.

    Args:
        decided: by so many seeds, if mean and spread stayed where they are; once True it stays so.
    """
    candidates = range(now + 1, MOST_SEEDS + 1)
    found = bisect_left(candidates, True, key=decided)
    return candidates[found] if found < len(candidates) else None
