"""Whether cells that are compared at one size come in the same order at another: pairs decided alike.

DataDecide (2504.11393) asks of a small model which of two data recipes is better at the larger size, and
reports the share of pairs that it decides as the larger one does (decision accuracy). Here the recipes are
interventions. A pair whose order at the larger size may be chance tells little about the smaller, so the share is given
a second time over the pairs that are certain there: those in which all seeds, paired, lie on one side.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

BySeed = Mapping[int, float]


@dataclass(frozen=True)
class Stability:
    """How a number's order at a small size agrees with that at a large one.

    Attributes:
        pairs: of the cells that have the number at both sizes; pairs that are equal at one of them are left out.
        alike: of these, decided alike by the means.
        certain: pairs that have two seeds or more at the large size, all on one side there.
        certain_alike: of these, decided alike by the means.
    """

    pairs: int
    alike: int
    certain: int
    certain_alike: int

    @property
    def accuracy(self) -> float | None:
        """Share of the pairs decided alike (0..1); a half is chance. None without pairs."""
        return self.alike / self.pairs if self.pairs else None

    @property
    def certain_accuracy(self) -> float | None:
        """The same of the certain pairs."""
        return self.certain_alike / self.certain if self.certain else None


def stability(small: Mapping[str, BySeed], large: Mapping[str, BySeed]) -> Stability:
    """The agreement of two sizes.

    Args:
        small, large: the number of each cell by seed, under the same names at both sizes.
    """
    cells = [cell for cell in small if small[cell] and large.get(cell)]
    pairs = alike = certain = certain_alike = 0
    for one, other in combinations(cells, 2):
        before, after = (_order(fmean(of[one].values()), fmean(of[other].values())) for of in (small, large))
        if not before or not after:
            continue
        pairs += 1
        alike += before == after
        if _certain(large[one], large[other]):
            certain += 1
            certain_alike += before == after
    return Stability(pairs, alike, certain, certain_alike)


def ranked(values: Mapping[str, BySeed]) -> Sequence[str]:
    """The cells by their means, smallest first."""
    known = [cell for cell in values if values[cell]]
    return sorted(known, key=lambda cell: fmean(values[cell].values()))


def _order(one: float, other: float) -> int:
    return (one > other) - (one < other)


def _certain(one: BySeed, other: BySeed) -> bool:
    signs = [_order(one[seed], other[seed]) for seed in one.keys() & other.keys()]
    return len(signs) > 1 and abs(sum(signs)) == len(signs)
