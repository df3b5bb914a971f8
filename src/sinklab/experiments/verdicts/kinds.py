"""Evaluate checks on the runs of their cells, with one function per class of check; `Equal` and `Alike` share one."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import singledispatch
from itertools import pairwise
from typing import TypeVar

from sinklab.experiments.claims import (
    Alike,
    Appears,
    Differs,
    Diverges,
    Equal,
    HighestAt,
    Monotone,
    Precedes,
    SingleCheck,
    SinkAbsent,
    Within,
)
from sinklab.experiments.documents import ReplicateKind
from sinklab.experiments.quantities import AT_EPS, AVERAGED, RunNumbers, quantity
from sinklab.experiments.results import CellResults
from sinklab.experiments.verdicts.counts import FEWEST, pairs_against, seed_by_seed, separated, share_interval
from sinklab.experiments.verdicts.wording import bounds, difference, each_seed, number, step_unit, unit
from sinklab.measuring.statistics.highest import NO_SINK, highest_rate
from sinklab.tables import plural

T = TypeVar("T")

Values = Mapping[str, Mapping[int, float]]
"""Values of a check's quantity by cell and seed."""


class _UnmeasuredError(Exception):
    """A cell has no value of a quantity, or no replicate has values in all cells. The message is used as evidence."""


@dataclass(frozen=True)
class Finding:
    """Outcome of a check before the minimum number of seeds is applied.

    Attributes:
        holds: True if the check holds, apart from the requirements of `size`; False if it is contradicted; else None.
        said: evidence, in sentences.
        seeds: number of replicates with values. For two unpaired cells, the smaller of their numbers; for paired cells,
            the number of replicates with values in all cells.
        size: False if the check also requires a size, bound, absence or rate that does not hold, or if a number of the
            paper is outside the prediction interval of a new seed; else True.
    """

    holds: bool | None
    said: str
    seeds: int
    size: bool = True


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
        found = {run.seed: run.value(name, at_step, self._eps(name)) for run in self.of(cell)}
        return {seed: value for seed, value in found.items() if value is not None}

    def last(self, cell: str, name: str, at_step: int | None = None, count: int = AVERAGED) -> dict[int, list[float]]:
        """Return the values at the last `count` evaluations up to `at_step`, by seed; seeds without any are omitted."""
        found = {run.seed: run.evaluations(name, at_step, self._eps(name), count) for run in self.of(cell)}
        return {seed: values for seed, values in found.items() if values}

    def values(self, cells: Sequence[str], name: str, at_step: int | None = None) -> Values:
        """Return the value of a quantity by cell and seed; raise _UnmeasuredError if no seed of a cell has a value."""
        return _measured({cell: self.by_seed(cell, name, at_step) for cell in cells}, name, at_step)

    def counted(self, held: Sequence[bool]) -> str:
        """Format the number of seeds at which a statement holds: `5 of 5 seeds (95 % CI: 48 to 100 % of all seeds)`.

        With fewer than FEWEST seeds, the interval is left out: `3 of 3 seeds`.
        """
        kept, n = sum(held), len(held)
        if n < FEWEST:
            return f"{kept} of {plural(n, self.noun)}"
        low, high = share_interval(kept, n)
        return f"{kept} of {n} {self.noun}s (95 % CI: {100 * low:.0f} to {100 * high:.0f} % of all {self.noun}s)"

    def values_text(self, values: Mapping[str, Iterable[float]], name: str) -> str:
        """Return a sentence with the values of all seeds by cell: `Sink_1 by seed: softmax 12.1, 15.3, 9.8 %.`"""
        of = quantity(name)
        return f"{of.label} by {self.noun}: {'; '.join(each_seed(cell, one, of) for cell, one in values.items())}."

    def _eps(self, name: str) -> str | None:
        return self.eps if name in AT_EPS else None


def _measured(found: Mapping[str, T], name: str, at_step: int | None) -> Mapping[str, T]:
    """Return the values by cell; raise _UnmeasuredError if a cell has none."""
    if absent := [cell for cell, values in found.items() if not values]:
        when = f" at step {at_step:,}" if at_step else ""
        raise _UnmeasuredError(f"{quantity(name).label}{when} was not measured in {' and '.join(absent)}.")
    return found


def evaluate(check: SingleCheck, runs: Runs) -> Finding:
    """Evaluate a check on the runs of its cells; if a cell has no values, `holds` is None and `seeds` is 0."""
    try:
        return _found(check, runs)
    except _UnmeasuredError as error:
        return Finding(None, str(error), 0)


@singledispatch
def _found(check: SingleCheck, runs: Runs) -> Finding:
    raise TypeError(f"no rule for checks of type {type(check).__name__}")


def _keeps(value: float, at_least: float | None, at_most: float | None) -> bool:
    return (at_least is None or value >= at_least) and (at_most is None or value <= at_most)


@_found.register
def _within(check: Within, runs: Runs) -> Finding:
    found = runs.values(check.cells, check.value, check.at_step)[check.cell].values()
    held = [_keeps(value, check.at_least, check.at_most) for value in found]
    limits = bounds(check.at_least, check.at_most, quantity(check.value))
    said = f"{runs.values_text({check.cell: found}, check.value)} The value is {limits} at {runs.counted(held)}."
    return Finding(seed_by_seed(held), said, len(held))


@_found.register
def _absent(check: SinkAbsent, runs: Runs) -> Finding:
    found = runs.values(check.cells, check.value, check.at_step)[check.cell].values()
    held, said = _no_sink(check, runs)
    return Finding(seed_by_seed(held), f"{runs.values_text({check.cell: found}, check.value)} {said}", len(held))


def _no_sink(check: SinkAbsent | Differs, runs: Runs) -> tuple[list[bool], str]:
    """Return whether the sink rate is below 1 % at each of the last evaluations, by seed, and the evidence."""
    last = runs.last(check.cell, check.value, check.at_step)
    held = [max(values) < NO_SINK for values in last.values()]
    each = " at each of the last three evaluations" if any(len(values) > 1 for values in last.values()) else ""
    return held, f"The rate of {check.cell} is below {NO_SINK:g} %{each} at {runs.counted(held)}."


@_found.register
def _differs(check: Differs, runs: Runs) -> Finding:
    values = runs.values(check.cells, check.value, check.at_step)
    of, cell, than = quantity(check.value), values[check.cell], values[check.than]
    greater = check.kind == "greater"
    a, b = list(cell.values()), list(than.values())
    high, low = (a, b) if greater else (b, a)
    holds = True if separated(high, low) else False if separated(low, high) else None

    def opposing(below: Sequence[float], more: str = "") -> str:
        opposed = f"{check.cell} is not {'above' if greater else 'below'} {check.than}{more}"
        return f"In {pairs_against(high, below)} of {len(a) * len(b)} pairs of {runs.noun}s, {opposed}."

    said = [
        runs.values_text({check.cell: a, check.than: b}, check.value),
        opposing(low),
        difference([cell[seed] - than[seed] for seed in cell if seed in than], of, runs.noun),
    ]
    sizes: list[bool] = []
    if check.by is not None or check.times is not None:
        moved = [value + (check.by or 0.0) if check.times is None else value * check.times for value in low]
        sizes.append(separated(high, moved))
        size = f"{check.by:g}{step_unit(of)}" if check.by else f"a factor of {check.times:g}"
        said.append(opposing(moved, f" by more than {size}"))
    if check.at_least is not None or check.at_most is not None:
        held = [_keeps(value, check.at_least, check.at_most) for value in a]
        sizes.append(seed_by_seed(held) is True)
        limits = bounds(check.at_least, check.at_most, of)
        said.append(f"The value of {check.cell} is {limits} at {runs.counted(held)}.")
    if check.absent:
        held, below = _no_sink(check, runs)
        sizes.append(seed_by_seed(held) is True)
        said.append(below)
    return Finding(holds, " ".join(said), min(len(a), len(b)), all(sizes))


def _paired(check: Equal | Alike | Monotone, runs: Runs) -> tuple[Values, list[int], str]:
    """Return the values by cell and seed, the seeds that have values in all cells, and the values as text.

    _UnmeasuredError is raised if a cell has no value, or no seed has values in all cells.
    """
    values = runs.values(check.cells, check.value, check.at_step)
    each = runs.values_text({cell: by_cell.values() for cell, by_cell in values.items()}, check.value)
    shared = sorted(set.intersection(*map(set, values.values())))
    if not shared:
        raise _UnmeasuredError(f"{each} No {runs.noun} has values of all cells.")
    return values, shared, each


@_found.register
def _equivalence(check: Equal | Alike, runs: Runs) -> Finding:
    """Evaluate equivalence: at every seed, every other cell must differ from the first by at most the margin."""
    others, first = ([check.cell], check.to) if isinstance(check, Equal) else (check.of[1:], check.of[0])
    values, shared, each = _paired(check, runs)
    of = quantity(check.value)
    apart = {cell: [values[cell][seed] - values[first][seed] for seed in shared] for cell in others}
    held = [all(abs(d[at]) <= check.margin for d in apart.values()) for at in range(len(shared))]
    beyond = any(
        seed_by_seed([sign * one > check.margin for one in d]) is True for d in apart.values() for sign in (1, -1)
    )
    farthest = max(apart, key=lambda cell: max(abs(d) for d in apart[cell]))
    margin = f"at most {check.margin:g}{step_unit(of)} in magnitude at {runs.counted(held)}"
    if len(apart) == 1:
        said = f"{each} {difference(apart[farthest], of, runs.noun)} The difference is {margin}."
    else:
        what = f"The cell with the largest difference from {first} is {farthest}; its median difference"
        said = f"{each} {difference(apart[farthest], of, runs.noun, what)} All differences are {margin}."
    holds = False if beyond else True if seed_by_seed(held) is True else None
    return Finding(holds, said, len(shared))


@_found.register
def _monotone(check: Monotone, runs: Runs) -> Finding:
    sign = 1 if check.kind == "rising" else -1
    values, shared, each = _paired(check, runs)
    middle = (len(check.over) - 1) / 2

    def slope(seed: int) -> float:
        """Return the least-squares slope of the values over the ranks of the cells, up to a positive factor."""
        found = enumerate(values[cell][seed] for cell in check.over)
        return sum((rank - middle) * value for rank, value in found if rank != middle)

    held = [sign * slope(seed) > 0 for seed in shared]
    against = [
        f"{one} to {other}"
        for one, other in pairwise(check.over)
        if separated(*(list(values[cell].values()) for cell in ((one, other) if sign > 0 else (other, one))))
    ]
    holds = seed_by_seed(held)
    said = f"{each} The slope over the cells in this order is {'positive' if sign > 0 else 'negative'} at "
    said += f"{runs.counted(held)}."
    if holds and against:
        steps = " and ".join(against)
        said += f" From {steps}, the values change in the opposite direction without overlap of the {runs.noun}s."
        holds = None
    return Finding(holds, said, len(shared))


@_found.register
def _highest_at(check: HighestAt, runs: Runs) -> Finding:
    name = f"sink_{check.position}"
    rates = runs.values(check.cells, name)[check.cell]
    ahead = []
    for run in runs.of(check.cell):
        if run.seed in rates:
            positions = range(1, len(run.last.sink_rate) + 1)
            others = highest_rate([None if k == check.position else run.value(f"sink_{k}") for k in positions])
            ahead.append(rates[run.seed] > (others[1] if others else 0.0))
    large = [rate >= check.at_least for rate in rates.values()]
    said = (
        f"{runs.values_text({check.cell: rates.values()}, name)} The rate at position {check.position} is the highest "
        f"of positions 1 to T / 2 at {runs.counted(ahead)}, and at least {check.at_least:g} % at {runs.counted(large)}."
    )
    return Finding(seed_by_seed(ahead), said, len(ahead), seed_by_seed(large) is True)


@_found.register
def _appears(check: Appears, runs: Runs) -> Finding:
    steps = [check.before] if check.after is None else [check.after, check.before]
    found = [
        _measured({check.cell: runs.last(check.cell, "sink_1", step, count=1)}, "sink_1", step)[check.cell]
        for step in steps
    ]
    shared = sorted(set.intersection(*map(set, found)))
    rates = [[one[seed][0] for seed in shared] for one in found]
    held = [
        after >= check.rate and (check.after is None or before < check.rate)
        for before, after in zip(rates[0], rates[-1], strict=True)
    ]
    shown = " ".join(
        f"At the last evaluation up to step {step:,}, {runs.values_text({check.cell: values}, 'sink_1')}"
        for step, values in zip(steps, rates, strict=True)
    )
    when = "between these steps" if check.after is not None else "by this step"
    said = f"{shown} The rate reaches {check.rate:g} % {when} at {runs.counted(held)}."
    return Finding(seed_by_seed(held), said, len(held))


@_found.register
def _precedes(check: Precedes, runs: Runs) -> Finding:
    first, then = (runs.values(check.cells, name)[check.cell] for name in (check.first, check.then))
    shared = sorted(set(first) & set(then))
    held = [first[seed] < then[seed] for seed in shared]
    one, other = quantity(check.first), quantity(check.then)
    pairs = ", ".join(f"{number(first[seed], one)} and {number(then[seed], other)}" for seed in shared)
    said = (
        f"Pairs of {check.first} and {check.then} of {check.cell} by {runs.noun}: {pairs}{unit(other)}. "
        f"{check.first} is smaller than {check.then} at {runs.counted(held)}."
    )
    return Finding(seed_by_seed(held), said, len(held))


@_found.register
def _diverges(check: Diverges, runs: Runs) -> Finding:
    trained, failed = len(runs.of(check.cell)), runs.failed(check.cell)
    diverges = check.kind == "diverges"
    held = [diverges] * failed + [not diverges] * trained
    ended = "diverged" if diverges else "did not diverge"
    said = f"Training of {check.cell} {ended} at {runs.counted(held)}."
    return Finding(seed_by_seed(held), said, len(held))
