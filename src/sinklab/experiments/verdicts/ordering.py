"""Claims that cells come in the same order at two sizes: pairs decided alike.

DataDecide (2504.11393) asks of a small model which of two data recipes is better at the larger size, and reports the
share of pairs that it decides as the larger one does (decision accuracy). Here the recipes are interventions. A pair
whose order at the larger size may be chance tells nothing of the smaller, so that those count whose order is certain.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from sinklab.experiments.claims import SameOrder
from sinklab.experiments.verdicts.evidence import Evidence, Finding, missing
from sinklab.experiments.verdicts.observations import Observations

ALIKE = 0.8
"""Share of the certain pairs from which on the order is the same."""

FEWEST = 5
"""Certain pairs without which nothing is said: of 21 pairs without any difference one is certain by chance."""


@dataclass(frozen=True)
class Pairs:
    """How the order of cells at a small size agrees with that at a large one.

    Attributes:
        all: pairs of cells that differ at both sizes.
        alike: of these, decided alike by the means.
        certain: pairs whose difference at the large size has a 95 % interval without 0.
        certain_alike: of these, decided alike.
    """

    all: int
    alike: int
    certain: int
    certain_alike: int

    @property
    def same(self) -> bool | None:
        """Whether the order is the same; None with too few certain pairs."""
        return self.certain_alike >= ALIKE * self.certain if self.certain >= FEWEST else None


def pairs_alike(seen: Observations, of: Sequence[str], there: Sequence[str]) -> Pairs:
    """Every two of some cells, paired by seed, beside the two that stand for them at the large size."""
    found = []
    for one, other in combinations(zip(of, there, strict=True), 2):
        here, beyond = (seen.contrast({first: 1.0, second: -1.0}) for first, second in zip(one, other, strict=True))
        if here and beyond and here.mean and beyond.mean:
            low, high = beyond.interval()
            found.append(((here.mean > 0) == (beyond.mean > 0), low > 0 or high < 0))
    return Pairs(
        all=len(found),
        alike=sum(alike for alike, _ in found),
        certain=sum(certain for _, certain in found),
        certain_alike=sum(alike and certain for alike, certain in found),
    )


def judge_same_order(check: SameOrder, evidence: Evidence) -> Finding:
    """Four fifths of the certain pairs are decided alike, or not; with few of them neither is said."""
    seen = evidence.of(check.value, check.at_step)
    if absent := [cell for cell in check.cells if cell not in seen.by_cell]:
        return missing(check.value, check.at_step, absent)
    pairs = pairs_alike(seen, check.of, check.there)
    said = (
        f"by the means {_ordered(seen, check.of)}; {_ordered(seen, check.there)}: {pairs.alike} of {pairs.all} pairs "
    )
    said += f"decided alike, {pairs.certain_alike} of the {pairs.certain} that are certain there"
    said += f", claimed {ALIKE:.0%} of these"
    return Finding(pairs.same, said, note=f"fewer than {FEWEST} are certain" if pairs.same is None else "")


def _ordered(seen: Observations, cells: Sequence[str]) -> str:
    return " < ".join(sorted(cells, key=lambda cell: seen.mean_of(cell).mean))
