"""Decide checks on the runs of their cells, one function per class of check; `wording.py` describes the outcomes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from sinklab.experiments import claims
from sinklab.experiments.documents import ReplicateKind
from sinklab.experiments.quantities import AT_EPS, AVERAGED, RunNumbers, quantity
from sinklab.experiments.results import CellResults
from sinklab.experiments.verdicts.counts import seed_by_seed, separated
from sinklab.tables import NO_SINK, highest_rate

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
        values: values by cell and seed; for `appears` and `precedes`, by step or quantity and seed.
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


@dataclass(frozen=True)
class Runs:
    """Runs on which a check is evaluated.

    Attributes:
        results: results of the runs by cell.
        eps: threshold of the sink rates in `AT_EPS`, one of `OTHER_EPS_TEXTS`; default: the recipe's threshold.
        noun: unit of replication in the evidence: seed, draw or model.
    """

    results: Mapping[str, CellResults]
    eps: str | None = None
    noun: ReplicateKind = "seed"

    def of(self, cell: str) -> Sequence[RunNumbers]:
        """Return the finished runs of a cell, sorted by seed; empty for an unknown cell."""
        found = self.results[cell].numbers if cell in self.results else ()
        return sorted(found, key=lambda run: run.seed)

    def failed(self, cell: str) -> int:
        """Return the number of runs of a cell that diverged; 0 for an unknown cell."""
        return self.results[cell].failed if cell in self.results else 0

    def by_seed(self, cell: str, name: str, at_step: int | None = None) -> dict[int, float]:
        """Return the value of a quantity by seed (`RunNumbers.value`); seeds without a value are omitted."""
        eps = self.eps if name in AT_EPS else None
        found = {run.seed: run.value(name, at_step, eps) for run in self.of(cell)}
        return {seed: value for seed, value in found.items() if value is not None}

    def last(self, cell: str, name: str, at_step: int | None = None, count: int = AVERAGED) -> dict[int, list[float]]:
        """Return the values at the last `count` evaluations up to `at_step`, by seed; seeds without any are omitted."""
        eps = self.eps if name in AT_EPS else None
        found = {run.seed: run.evaluations(name, at_step, eps, count) for run in self.of(cell)}
        return {seed: values for seed, values in found.items() if values}

    def values(self, cells: Sequence[str], name: str, at_step: int | None = None) -> Values:
        """Return the value of a quantity by cell and seed; raise UnmeasuredError if no seed of a cell has a value."""
        found = {cell: self.by_seed(cell, name, at_step) for cell in cells}
        if absent := [cell for cell, values in found.items() if not values]:
            raise UnmeasuredError(name, at_step, absent)
        return found


def decide(check: claims.SingleCheck, runs: Runs) -> Finding:
    """Decide a check on the runs of its cells; raise UnmeasuredError if a cell has no values."""
    match check:
        case claims.Within():
            values = runs.values(check.cells, check.value, check.at_step)
            held = [_keeps(value, check) for value in values[check.cell].values()]
            return Finding(seed_by_seed(held), len(held), values, [held])
        case claims.SinkAbsent():
            values = runs.values(check.cells, check.value, check.at_step)
            held, repeated = _no_sink(check, runs)
            return Finding(seed_by_seed(held), len(held), values, [held], repeated=repeated)
        case claims.Differs():
            return _differs(check, runs)
        case claims.Equal():
            return _equal(check, runs)
        case claims.Monotone():
            return _monotone(check, runs)
        case claims.PeakAt():
            return _peak_at(check, runs)
        case claims.Appears():
            return _appears(check, runs)
        case claims.Precedes():
            first, then = (runs.values(check.cells, name)[check.cell] for name in (check.first, check.then))
            shared = sorted(set(first) & set(then))
            held = [first[seed] < then[seed] for seed in shared]
            pairs = {name: {seed: found[seed] for seed in shared} for name, found in
                     ((check.first, first), (check.then, then))}  # fmt: skip
            return Finding(seed_by_seed(held), len(held), pairs, [held])
        case claims.Diverges():
            diverges = check.kind == "diverges"
            held = [diverges] * runs.failed(check.cell) + [not diverges] * len(runs.of(check.cell))
            return Finding(seed_by_seed(held), len(held), {}, [held])


def _keeps(value: float, check: claims.Within | claims.Differs) -> bool:
    above = check.at_least is None or value >= check.at_least
    return above and (check.at_most is None or value <= check.at_most)


def _no_sink(check: claims.SinkAbsent | claims.Differs, runs: Runs) -> tuple[list[bool], bool]:
    """Return whether the sink rate is below 1 % at each of the last evaluations, by seed, and if these are several."""
    last = runs.last(check.cell, check.value, check.at_step).values()
    return [max(values) < NO_SINK for values in last], any(len(values) > 1 for values in last)


def moved(check: claims.Differs, low: Sequence[float]) -> list[float]:
    """Return the values that the larger ones must exceed: `by` above the smaller values, or `times` them."""
    return [value + (check.by or 0.0) if check.times is None else value * check.times for value in low]


def _differs(check: claims.Differs, runs: Runs) -> Finding:
    values = runs.values(check.cells, check.value, check.at_step)
    a, b = list(values[check.cell].values()), list(values[check.than].values())
    high, low = (a, b) if check.kind == "greater" else (b, a)
    holds = True if separated(high, low) else False if separated(low, high) else None
    size, repeated, statements = [True], False, []
    if check.by is not None or check.times is not None:
        size.append(separated(high, moved(check, low)))
    if check.at_least is not None or check.at_most is not None:
        statements.append([_keeps(value, check) for value in a])
    if check.absent:
        held, repeated = _no_sink(check, runs)
        statements.append(held)
    size += [seed_by_seed(held) is True for held in statements]
    return Finding(holds, min(len(a), len(b)), values, statements, all(size), repeated=repeated)


def _paired(check: claims.Equal | claims.Monotone, runs: Runs) -> tuple[Values, list[int]]:
    """Return the values by cell and seed, and the seeds that have values in all cells."""
    values = runs.values(check.cells, check.value, check.at_step)
    shared = sorted(set.intersection(*map(set, values.values())))
    if not shared:
        raise UnmeasuredError(check.value, check.at_step, (), values)
    return values, shared


def apart(check: claims.Equal, values: Values) -> dict[str, list[float]]:
    """Return the differences from the cell to compare with at the seeds that all cells have, by other cell."""
    shared = sorted(set.intersection(*map(set, values.values())))
    others = [cell for cell in values if cell != check.reference] or [check.reference]
    return {cell: [values[cell][seed] - values[check.reference][seed] for seed in shared] for cell in others}


def _equal(check: claims.Equal, runs: Runs) -> Finding:
    """Decide equivalence: at every seed, every other cell must differ from the first by at most the margin."""
    values, shared = _paired(check, runs)
    differences = apart(check, values).values()
    held = [all(abs(d[at]) <= check.margin for d in differences) for at in range(len(shared))]
    beyond = any(
        seed_by_seed([sign * one > check.margin for one in d]) is True for d in differences for sign in (1, -1)
    )
    return Finding(False if beyond else True if seed_by_seed(held) else None, len(shared), values, [held])


def _monotone(check: claims.Monotone, runs: Runs) -> Finding:
    sign = 1 if check.kind == "rising" else -1
    values, shared = _paired(check, runs)
    middle = (len(check.over) - 1) / 2

    def slope(seed: int) -> float:
        """Return the least-squares slope of the values over the ranks of the cells, up to a positive factor."""
        found = enumerate(values[cell][seed] for cell in check.over)
        return sum((rank - middle) * value for rank, value in found if rank != middle)

    held = [sign * slope(seed) > 0 for seed in shared]
    opposite = [
        (one, other)
        for one, other in pairwise(check.over)
        if separated(*(list(values[cell].values()) for cell in ((one, other) if sign > 0 else (other, one))))
    ]
    holds = seed_by_seed(held)
    opposite = opposite if holds else []
    return Finding(None if opposite else holds, len(shared), values, [held], opposite=opposite)


def _peak_at(check: claims.PeakAt, runs: Runs) -> Finding:
    name = f"sink_{check.position}"
    values = runs.values(check.cells, name)
    rates, ahead = values[check.cell], []
    for run in runs.of(check.cell):
        if run.seed in rates:
            positions = range(1, len(run.last.sink_rate) + 1)
            others = highest_rate([None if k == check.position else run.value(f"sink_{k}") for k in positions])
            ahead.append(rates[run.seed] > (others[1] if others else 0.0))
    large = [rate >= check.at_least for rate in rates.values()]
    return Finding(seed_by_seed(ahead), len(ahead), values, [ahead, large], seed_by_seed(large) is True)


def _appears(check: claims.Appears, runs: Runs) -> Finding:
    rates: dict[int, dict[int, float]] = {}
    for step in [check.before] if check.after is None else [check.after, check.before]:
        last = runs.last(check.cell, "sink_1", step, count=1)
        if not last:
            raise UnmeasuredError("sink_1", step, check.cells)
        rates[step] = {seed: one[0] for seed, one in last.items()}
    shared = sorted(set.intersection(*map(set, rates.values())))
    held = [
        rates[check.before][seed] >= check.rate and (check.after is None or rates[check.after][seed] < check.rate)
        for seed in shared
    ]
    values = {str(step): {seed: found[seed] for seed in shared} for step, found in rates.items()}
    return Finding(seed_by_seed(held), len(held), values, [held])
