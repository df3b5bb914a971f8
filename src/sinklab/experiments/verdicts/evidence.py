"""What the kinds of claims are judged from, and what comes of one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sinklab.experiments.quantities import RunNumbers, quantity
from sinklab.experiments.results import CellResults
from sinklab.experiments.verdicts.estimates import MOST_SEEDS, MeanOverSeeds, seeds_that_decide
from sinklab.experiments.verdicts.observations import Observations, observe
from sinklab.experiments.verdicts.recorded import QuantitySpread


@dataclass(frozen=True)
class Finding:
    """What the runs say of a claim.

    Attributes:
        holds: established (True), refuted (False), or neither.
        said: the numbers that it rests on.
        size: whether the size that it states is established, too; True where it states none.
        note: why it is open, or what was left out.
        seeds_needed: how many would decide, where it is open and that can be said.
    """

    holds: bool | None
    said: str
    size: bool = True
    note: str = ""
    seeds_needed: int | None = None


@dataclass(frozen=True)
class Evidence:
    """The runs of an experiment's cells at a scale, number by number.

    Attributes:
        results: by cell.
        recorded: spreads of the scale by quantity, where they may be used.
    """

    results: Mapping[str, CellResults]
    recorded: Mapping[str, QuantitySpread] = field(default_factory=dict)
    _seen: dict[tuple[str, int | None], Observations] = field(default_factory=dict, repr=False)

    def of(self, name: str, at_step: int | None = None) -> Observations:
        """A quantity in all cells."""
        if (name, at_step) not in self._seen:
            self._seen[name, at_step] = observe(self.results, name, at_step, self.recorded.get(name))
        return self._seen[name, at_step]

    def runs(self, cell: str) -> Sequence[RunNumbers]:
        """The finished runs of a cell."""
        return self.results[cell].numbers if cell in self.results else ()


def missing(name: str, at_step: int | None, cells: Sequence[str]) -> Finding:
    """A claim about a number that the finished runs of some cells do not have."""
    when = f" at step {at_step:,}" if at_step else ""
    return Finding(None, f"{quantity(name).label}{when} was not measured in {' and '.join(cells)}")


def undecided(said: str, means: Sequence[MeanOverSeeds], decided: Callable[[int], bool]) -> Finding:
    """A claim that these runs do not decide.

    Args:
        means: that it rests on.
        decided: whether so many seeds would decide it, if mean and spread stayed where they are.
    """
    if any(mean.spread is None for mean in means):
        return Finding(None, said, note="nothing is known of the spread between seeds")
    needed = seeds_that_decide(min(mean.n for mean in means), decided)
    more = f"about {needed} seeds would decide" if needed else f"no number of seeds up to {MOST_SEEDS:,} would decide"
    return Finding(None, said, note=more, seeds_needed=needed)
