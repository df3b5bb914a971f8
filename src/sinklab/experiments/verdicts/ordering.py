"""Claims that cells come in the same order at two sizes: pairs decided alike.

DataDecide (2504.11393) asks of a small model which of two data recipes is better at the larger size, and reports the
share of pairs that it decides as the larger one does (decision accuracy). Here the recipes are interventions. A pair
whose order at the larger size may be chance tells nothing of the smaller, so that those count whose order is certain
there; and the small size's own order is an estimate, too, so that their share has an interval.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from sinklab.experiments.claims import SameOrder
from sinklab.experiments.verdicts.estimates import LEVEL, MeanOverSeeds
from sinklab.experiments.verdicts.evidence import Evidence, Finding, missing, undecided
from sinklab.experiments.verdicts.observations import Observations

ALIKE = 0.8
"""Share of the certain pairs from which on the order is the same."""

FEWEST = 5
"""Certain pairs without which nothing is said: of 21 pairs without any difference one is certain by chance."""

BESIDES_ANY = 3
"""Of these, so many are left when any one cell is taken away: where one stands apart, all its pairs are one finding."""

DRAWS = 4000


@dataclass(frozen=True)
class Pairs:
    """How the order of cells at a small size agrees with that at a large one.

    Attributes:
        all: pairs of cells that differ at both sizes.
        alike: of these, decided alike by the means.
        certain: pairs whose difference at the large size has a 95 % interval without 0.
        certain_alike: of these, decided alike by the means; a tie at the small size decides nothing.
        besides_any: certain pairs that are left at the least when one cell is taken away.
        share: 95 % interval of the share of certain pairs decided alike, by what is known of the means at the small
            size.
    """

    all: int
    alike: int
    certain: int
    certain_alike: int
    besides_any: int
    share: tuple[float, float]

    @property
    def open_because(self) -> str:
        """What keeps anything from being said; empty where nothing does."""
        if self.certain < FEWEST:
            return f"fewer than {FEWEST} are certain"
        return "nearly all of these are about one and the same cell" if self.besides_any < BESIDES_ANY else ""

    @property
    def same(self) -> bool | None:
        """Whether the order is the same; None where that is not known."""
        low, high = self.share
        if self.open_because or low < ALIKE <= high:
            return None
        return low >= ALIKE


@dataclass(frozen=True)
class _Pair:
    """Two cells by their places in the lists, with their difference at either size.

    Attributes:
        certain: whether the one at the large size is.
    """

    one: int
    other: int
    here: float
    beyond: float
    certain: bool

    @property
    def alike(self) -> bool:
        return self.here * self.beyond > 0


def pairs_alike(seen: Observations, of: Sequence[str], there: Sequence[str], seeds: int | None = None) -> Pairs:
    """Every two of some cells, paired by seed, beside the two that stand for them at the large size.

    Args:
        seeds: so many of every cell, if means and spread stayed where they are; those there are unless given.
    """
    small, large = seen.only(of), seen.only(there)
    pairs = []
    for one, other in combinations(range(len(of)), 2):
        here = small.contrast({of[one]: 1.0, of[other]: -1.0})
        beyond = large.contrast({there[one]: 1.0, there[other]: -1.0})
        if here and beyond:
            low, high = (beyond.with_seeds(seeds) if seeds else beyond).interval()
            pairs.append(_Pair(one, other, here.mean, beyond.mean, low > 0 or high < 0))
    differing, certain = [pair for pair in pairs if pair.here * pair.beyond], [pair for pair in pairs if pair.certain]
    return Pairs(
        all=len(differing),
        alike=sum(pair.alike for pair in differing),
        certain=len(certain),
        certain_alike=sum(pair.alike for pair in certain),
        besides_any=min(sum(cell not in (pair.one, pair.other) for pair in certain) for cell in range(len(of))),
        share=_share_alike(small, of, certain, seeds),
    )


def _share_alike(
    small: Observations, of: Sequence[str], certain: Sequence[_Pair], seeds: int | None
) -> tuple[float, float]:
    """Within which the share lies for 95 % of the means that the runs of the small size leave possible.

    Means of the seeds that all cells share, drawn around those found with what is left of a number when cell and seed
    are taken away: t distributed with its degrees of freedom.
    """
    shared = small.shared(of)
    if not (certain and shared and small.paired):
        return 0.0, 1.0
    now = MeanOverSeeds(0.0, len(shared), small.paired)
    of_mean = now.with_seeds(seeds) if seeds else now
    assert of_mean.spread
    draw, df = np.random.default_rng(0), of_mean.spread.df
    found_C = np.array([small.mean_y(cell, shared) for cell in of])
    error_D = of_mean.standard_error * np.sqrt(df / draw.chisquare(df, DRAWS))
    mean_DC = found_C + error_D[:, None] * draw.standard_normal((DRAWS, len(of)))
    here_DP = mean_DC[:, [pair.one for pair in certain]] - mean_DC[:, [pair.other for pair in certain]]
    alike_DP = here_DP * np.array([pair.beyond for pair in certain]) > 0
    low, high = np.quantile(alike_DP.mean(axis=1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def judge_same_order(check: SameOrder, evidence: Evidence) -> Finding:
    """Four fifths of the certain pairs are decided alike, or fewer; where that is not known neither is said."""
    seen = evidence.of(check.value, check.at_step)
    if absent := [cell for cell in check.cells if cell not in seen.by_cell]:
        return missing(check.value, check.at_step, absent)
    pairs = pairs_alike(seen, check.of, check.there)
    low, high = pairs.share
    said = (
        f"by the means {_ordered(seen, check.of)}; {_ordered(seen, check.there)}: {pairs.alike} of {pairs.all} pairs "
        f"decided alike, {pairs.certain_alike} of the {pairs.certain} that are certain there"
    )
    said += f" [{low:.0%}, {high:.0%}], claimed {ALIKE:.0%} of these" if pairs.certain else ""
    if pairs.same is not None:
        return Finding(pairs.same, said)
    means = [MeanOverSeeds(0.0, len(size.shared(cells)), size.paired) for size, cells in _sizes(seen, check)]
    found = undecided(said, means, lambda n: pairs_alike(seen, check.of, check.there, n).same is not None)
    return replace(found, note="; ".join(filter(None, (pairs.open_because, found.note))))


def _sizes(seen: Observations, check: SameOrder) -> list[tuple[Observations, Sequence[str]]]:
    return [(seen.only(cells), cells) for cells in (check.of, check.there)]


def _ordered(seen: Observations, cells: Sequence[str]) -> str:
    """The cells by their means over the seeds that they share."""
    seeds = seen.shared(cells)
    return " < ".join(sorted(cells, key=lambda cell: seen.mean_y(cell, seeds)))
