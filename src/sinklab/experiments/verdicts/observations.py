"""One number of all runs of an experiment, on the scale on which it is compared."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from sinklab.experiments.quantities import Quantity, RunNumbers, quantity
from sinklab.experiments.results import CellResults
from sinklab.experiments.verdicts.estimates import MeanOverSeeds, SeedSpread, over_seeds, paired_spread, single_spread
from sinklab.experiments.verdicts.recorded import QuantitySpread, RecordedSpread
from sinklab.experiments.verdicts.transforms import transformed, turned_back

End = Literal["low", "high"]

NEAR = 0.5
"""Percent from 0 % or 100 % within which a rate lies at that end: there the logit magnifies single triples."""


@dataclass(frozen=True)
class Observed:
    """The number of one run.

    Attributes:
        value: in the quantity's unit.
        y: as it is compared.
        triples: that a rate is over, or sequences.
        end: at which the number lies, if at one: near 0 % or 100 %, or the last step where a step was never reached.
    """

    value: float
    y: float
    triples: int
    end: End | None = None


@dataclass(frozen=True)
class Observations:
    """A quantity over the cells of an experiment.

    Attributes:
        by_cell: the runs of each cell that have the number, by seed.
        recorded: its spread at this scale, for an experiment without replicates.
    """

    quantity: Quantity
    by_cell: Mapping[str, Mapping[int, Observed]]
    recorded: QuantitySpread

    @cached_property
    def single(self) -> SeedSpread | None:
        """Of one cell's number from seed to seed."""
        return single_spread([list(cell.values()) for cell in self._that_scatter()]) or _known(self.recorded.single)

    @cached_property
    def paired(self) -> SeedSpread | None:
        """Of what is left of a number when cell and seed are taken away."""
        return paired_spread(self._that_scatter()) or _known(self.recorded.paired)

    def _that_scatter(self) -> list[dict[int, float]]:
        cells = [by_seed for by_seed in self.by_cell.values() if not _at_one_end(by_seed.values())]
        return [{seed: one.y for seed, one in by_seed.items()} for by_seed in cells]

    def only(self, cells: Sequence[str]) -> "Observations":
        """Of some of the cells, whose spread is then that of these alone; without what was recorded."""
        return replace(self, by_cell={cell: self.by_cell[cell] for cell in cells}, recorded=QuantitySpread())

    def mean_of(self, cell: str) -> MeanOverSeeds:
        """The mean of a cell that has the number."""
        return over_seeds([one.y for one in self.by_cell[cell].values()], self.single)

    def contrast(self, weights: Mapping[str, float]) -> MeanOverSeeds | None:
        """The weighted sum over cells, seed by seed; None where no seed has all of them."""
        seeds = self.shared(list(weights))
        if not seeds:
            return None
        sums = [sum(weight * self.by_cell[cell][seed].y for cell, weight in weights.items()) for seed in seeds]
        return over_seeds(sums, self._spread_of(list(weights.values())))

    def _spread_of(self, weights: Sequence[float]) -> SeedSpread | None:
        """Of a weighted sum over cells: where the weights do not add up to 0, what all cells of a seed share stays."""
        if not self.paired:
            return None
        apart, together = math.fsum(weight * weight for weight in weights), math.fsum(weights) ** 2
        shared = max(0.0, self.single.sd**2 - self.paired.sd**2) if self.single else 0.0
        return replace(self.paired, sd=math.sqrt(apart * self.paired.sd**2 + together * shared))

    def shared(self, cells: Sequence[str]) -> list[int]:
        """The seeds that all of these cells have."""
        return sorted(set.intersection(*(set(self.by_cell.get(cell, ())) for cell in cells)))

    def values(self, cell: str) -> list[float]:
        """The numbers of a cell in the order of its seeds."""
        return [one.value for _, one in sorted(self.by_cell[cell].items())]

    def never_reached(self, cell: str) -> int:
        """Seeds of the cell that never reached the step that is asked for; 0 where it is not a step."""
        return sum(one.end is not None for one in self.by_cell[cell].values()) if self.quantity.unit == "steps" else 0

    def triples(self, cell: str) -> int:
        """That the rates of a cell are over."""
        return max(one.triples for one in self.by_cell[cell].values())

    def bounds(self, at_least: float | None, at_most: float | None, cell: str) -> tuple[float, float]:
        """Bounds in the quantity's unit as they are compared with the mean of a cell.

        A rate is at least 0 % and at most 100 % without a test.
        """
        is_rate = self.quantity.measure == "rate"
        low = -math.inf if at_least is None or (is_rate and at_least <= 0) else self.compared(at_least, cell)
        high = math.inf if at_most is None or (is_rate and at_most >= 100) else self.compared(at_most, cell)
        return low, high

    def compared(self, value: float, cell: str) -> float:
        """A number in the quantity's unit as it is compared with those of a cell."""
        if self.quantity.measure == "positive" and value <= 0:
            return -math.inf
        return transformed(value, self.quantity.measure, self.triples(cell))

    def turned_back(self, y: float, cell: str) -> float:
        """The number in the quantity's unit."""
        return turned_back(y, self.quantity.measure, self.triples(cell))

    def mean_y(self, cell: str, seeds: Sequence[int]) -> float:
        """The mean of a cell over these seeds, as it is compared."""
        return math.fsum(self.by_cell[cell][seed].y for seed in seeds) / len(seeds)


def observe(
    results: Mapping[str, CellResults], name: str, at_step: int | None = None, recorded: QuantitySpread | None = None
) -> Observations:
    """A quantity in all finished runs that have it; a run that ended before `at_step` has it not."""
    known = quantity(name)
    found = {
        cell: {run.seed: one for run in of.numbers if (one := _observed(run, known, at_step))}
        for cell, of in results.items()
    }
    return Observations(known, {cell: one for cell, one in found.items() if one}, recorded or QuantitySpread())


def _observed(run: RunNumbers, known: Quantity, at_step: int | None) -> Observed | None:
    if at_step is not None and run.last.step < at_step:
        return None
    value, end = run.value(known.name, at_step), None
    if value is None and run.is_of_a_known_number(known.name):
        value, end = float(max(run.last.step, 1)), "high"
    if value is None or (known.measure == "positive" and value <= 0):
        return None
    if known.measure == "rate":
        end = "low" if value <= NEAR else "high" if value >= 100 - NEAR else None
    trials = run.trials(known.name)
    return Observed(value, transformed(value, known.measure, trials), trials, end)


def _at_one_end(cell: Iterable[Observed]) -> bool:
    ends = {one.end for one in cell}
    return len(ends) == 1 and None not in ends


def _known(recorded: RecordedSpread | None) -> SeedSpread | None:
    return recorded.known if recorded else None
