"""Evaluate checks on the runs of their cells: one function per kind of check, one for `equal` and `alike`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from sinklab.experiments.claims import (
    Alike,
    Appears,
    Differs,
    Diverges,
    Equal,
    Monotone,
    Precedes,
    SingleCheck,
    SinkAbsent,
    StandsAt,
    Within,
)
from sinklab.experiments.documents import ReplicateKind
from sinklab.experiments.quantities import AT_EPS, NO_SINK, RunNumbers, quantity
from sinklab.experiments.results import CellResults
from sinklab.experiments.verdicts.counts import pairs_against, seed_by_seed, separated
from sinklab.experiments.verdicts.wording import (
    bounds,
    by_seed,
    counted,
    difference,
    number,
    step_unit,
    unit,
)

Values = Mapping[str, Mapping[int, float]]
"""Values of a check's quantity by cell and seed."""


@dataclass(frozen=True)
class Finding:
    """Outcome of a check; the minimum number of seeds is not applied yet.

    Attributes:
        holds: True if the check is reproduced, False if contradicted, None if neither.
        said: evidence as text.
        seeds: number of replicates; the smaller number of two unpaired cells, the shared ones of paired cells.
        size: False if a size, bound or absence stated with the comparison does not hold, or the paper's number is
            outside the prediction interval.
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
        eps: threshold of the sink rates in `AT_EPS`, one of `BESIDE`; default: the recipe's.
        noun: replicate unit in the evidence: seed, draw, or model.
    """

    results: Mapping[str, CellResults]
    eps: str | None = None
    noun: ReplicateKind = "seed"

    def of(self, cell: str) -> Sequence[RunNumbers]:
        """Return the finished runs of a cell, sorted by seed; empty for an unknown cell."""
        found = self.results[cell].numbers if cell in self.results else ()
        return sorted(found, key=lambda run: run.seed)

    def by_seed(self, cell: str, name: str, at_step: int | None = None) -> dict[int, float]:
        """Return the value of a quantity by seed (`RunNumbers.value`); seeds without a value are omitted."""
        found = {run.seed: run.value(name, at_step, self._eps(name)) for run in self.of(cell)}
        return {seed: value for seed, value in found.items() if value is not None}

    def last(self, cell: str, name: str, at_step: int | None = None, count: int = 3) -> dict[int, list[float]]:
        """Return the values of the last `count` evaluations up to `at_step` by seed; seeds without any are omitted."""
        found = {run.seed: run.evaluations(name, at_step, self._eps(name), count) for run in self.of(cell)}
        return {seed: values for seed, values in found.items() if values}

    def counted(self, held: Sequence[bool]) -> str:
        """Return the count of True as text, such as `5 of 5 seeds (95 % CI: 48 to 100 % of all seeds)`."""
        return counted(held, self.noun)

    def _eps(self, name: str) -> str | None:
        return self.eps if name in AT_EPS else None


def put_to(check: SingleCheck, runs: Runs) -> Finding:
    """Evaluate a check on the runs of its cells; if a cell has no value, `holds` is None and `seeds` is 0."""
    match check:
        case StandsAt():
            return _stands_at(check, runs)
        case Appears():
            return _appears(check, runs)
        case Precedes():
            return _precedes(check, runs)
        case Diverges():
            return _diverges(check, runs)
        case _:
            values = {cell: runs.by_seed(cell, check.value, check.at_step) for cell in check.cells}
    if absent := [cell for cell, found in values.items() if not found]:
        return _missing(check.value, check.at_step, absent)
    match check:
        case Within():
            return _within(check, values, runs)
        case SinkAbsent():
            return _absent(check, values, runs)
        case Differs():
            return _differs(check, values, runs)
        case Equal():
            return _equivalence(check, [check.cell], check.to, values, runs)
        case Alike():
            return _equivalence(check, check.of[1:], check.of[0], values, runs)
        case Monotone():
            return _monotone(check, values, runs)


def _missing(name: str, at_step: int | None, cells: Sequence[str]) -> Finding:
    when = f" at step {at_step:,}" if at_step else ""
    return Finding(None, f"{quantity(name).label}{when} was not measured in {' and '.join(cells)}.", 0)


def _keeps(value: float, at_least: float | None, at_most: float | None) -> bool:
    return (at_least is None or value >= at_least) and (at_most is None or value <= at_most)


def _within(check: Within, values: Values, runs: Runs) -> Finding:
    found, of = values[check.cell].values(), quantity(check.value)
    held = [_keeps(value, check.at_least, check.at_most) for value in found]
    limits = bounds(check.at_least, check.at_most, of)
    shown = by_seed({check.cell: found}, of, runs.noun)
    return Finding(seed_by_seed(held), f"{shown} The value is {limits} at {runs.counted(held)}.", len(held))


def _absent(check: SinkAbsent, values: Values, runs: Runs) -> Finding:
    held, said = _no_sink(check, runs)
    shown = by_seed({check.cell: values[check.cell].values()}, quantity(check.value), runs.noun)
    return Finding(seed_by_seed(held), f"{shown} {said}", len(held))


def _no_sink(check: SinkAbsent | Differs, runs: Runs) -> tuple[list[bool], str]:
    """Return for each seed True if its sink rate is below 1 % at each of its last evaluations, and the evidence."""
    last = runs.last(check.cell, check.value, check.at_step)
    held = [max(values) < NO_SINK for values in last.values()]
    each = " at each of the last three evaluations" if any(len(values) > 1 for values in last.values()) else ""
    return held, f"The rate of {check.cell} is below {NO_SINK:g} %{each} at {runs.counted(held)}."


def _differs(check: Differs, values: Values, runs: Runs) -> Finding:
    of, cell, than = quantity(check.value), values[check.cell], values[check.than]
    greater = check.kind == "greater"
    a, b = list(cell.values()), list(than.values())
    high, low = (a, b) if greater else (b, a)
    holds = True if separated(high, low) else False if separated(low, high) else None

    def opposing(below: Sequence[float], more: str = "") -> str:
        opposed = f"{check.cell} is not {'above' if greater else 'below'} {check.than}{more}"
        return f"In {pairs_against(high, below)} of {len(a) * len(b)} pairs of {runs.noun}s, {opposed}."

    said = [
        by_seed({check.cell: a, check.than: b}, of, runs.noun),
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
        said.append(
            f"The value of {check.cell} is {bounds(check.at_least, check.at_most, of)} at {runs.counted(held)}."
        )
    if check.absent:
        held, below = _no_sink(check, runs)
        sizes.append(seed_by_seed(held) is True)
        said.append(below)
    return Finding(holds, " ".join(said), min(len(a), len(b)), all(sizes))


def _paired(values: Values, runs: Runs, check: Equal | Alike | Monotone) -> tuple[list[int], str]:
    """Return the seeds with values in all cells, and the values of all cells as text."""
    found = {cell: by_cell.values() for cell, by_cell in values.items()}
    each = by_seed(found, quantity(check.value), runs.noun)
    shared = sorted(set.intersection(*(set(by_cell) for by_cell in values.values())))
    return shared, each if shared else f"{each} No {runs.noun} has values of all cells."


def _equivalence(check: Equal | Alike, others: Sequence[str], first: str, values: Values, runs: Runs) -> Finding:
    """Evaluate equivalence: the cells `others` must be within the margin of the cell `first` at every seed."""
    of = quantity(check.value)
    shared, each = _paired(values, runs, check)
    if not shared:
        return Finding(None, each, 0)
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


def _monotone(check: Monotone, values: Values, runs: Runs) -> Finding:
    sign = 1 if check.kind == "rising" else -1
    shared, each = _paired(values, runs, check)
    if not shared:
        return Finding(None, each, 0)
    held = [sign * _slope([values[cell][seed] for cell in check.over]) > 0 for seed in shared]
    against = [
        f"{one} to {other}"
        for one, other in pairwise(check.over)
        if separated(*(list(values[cell].values()) for cell in ((one, other) if sign > 0 else (other, one))))
    ]
    holds = seed_by_seed(held)
    slope = "positive" if sign > 0 else "negative"
    said = f"{each} The slope over the cells in this order is {slope} at {runs.counted(held)}."
    if holds and against:
        steps = " and ".join(against)
        said += f" From {steps}, the values change in the opposite direction without overlap of the {runs.noun}s."
        return Finding(None, said, len(shared))
    return Finding(holds, said, len(shared))


def _slope(values: Sequence[float]) -> float:
    """Return the least-squares slope of the values over their indices, up to a positive factor."""
    middle = (len(values) - 1) / 2
    return sum((rank - middle) * value for rank, value in enumerate(values) if rank != middle)


def _stands_at(check: StandsAt, runs: Runs) -> Finding:
    name = f"sink_{check.position}"
    of, rates = quantity(name), runs.by_seed(check.cell, name)
    if not rates:
        return _missing(name, None, [check.cell])
    ahead = []
    for run in runs.of(check.cell):
        if run.seed in rates:
            positions = (k for k in range(1, len(run.last.sink_rate) + 1) if k != check.position)
            others = [value for k in positions if (value := run.value(f"sink_{k}")) is not None]
            ahead.append(rates[run.seed] > max(others, default=0.0))
    large = [rate >= check.at_least for rate in rates.values()]
    said = (
        f"{by_seed({check.cell: rates.values()}, of, runs.noun)} The rate at position {check.position} is the highest "
        f"of all positions at {runs.counted(ahead)}, and at least {check.at_least:g} % at {runs.counted(large)}."
    )
    return Finding(seed_by_seed(ahead), said, len(ahead), seed_by_seed(large) is True)


def _appears(check: Appears, runs: Runs) -> Finding:
    steps = [check.before] if check.after is None else [check.after, check.before]
    found = [runs.last(check.cell, "sink_1", step, count=1) for step in steps]
    for step, one in zip(steps, found, strict=True):
        if not one:
            return _missing("sink_1", step, [check.cell])
    of, shared = quantity("sink_1"), sorted(set.intersection(*(set(one) for one in found)))
    rates = [[one[seed][0] for seed in shared] for one in found]
    held = [
        after >= check.rate and (check.after is None or before < check.rate)
        for before, after in zip(rates[0], rates[-1], strict=True)
    ]
    shown = " ".join(
        f"At the last evaluation up to step {step:,}, {by_seed({check.cell: values}, of, runs.noun)}"
        for step, values in zip(steps, rates, strict=True)
    )
    when = "between these steps" if check.after is not None else "by this step"
    said = f"{shown} The rate reaches {check.rate:g} % {when} at {runs.counted(held)}."
    return Finding(seed_by_seed(held), said, len(held))


def _precedes(check: Precedes, runs: Runs) -> Finding:
    first, then = (runs.by_seed(check.cell, name) for name in (check.first, check.then))
    for name, found in ((check.first, first), (check.then, then)):
        if not found:
            return _missing(name, None, [check.cell])
    shared = sorted(set(first) & set(then))
    held = [first[seed] < then[seed] for seed in shared]
    one, other = quantity(check.first), quantity(check.then)
    pairs = ", ".join(f"{number(first[seed], one)} and {number(then[seed], other)}" for seed in shared)
    said = (
        f"Pairs of {check.first} and {check.then} of {check.cell} by {runs.noun}: {pairs}{unit(other)}. "
        f"{check.first} is smaller than {check.then} at {runs.counted(held)}."
    )
    return Finding(seed_by_seed(held), said, len(held))


def _diverges(check: Diverges, runs: Runs) -> Finding:
    trained = len(runs.of(check.cell))
    failed = runs.results[check.cell].failed if check.cell in runs.results else 0
    diverged = [True] * failed + [False] * trained
    held = [one == (check.kind == "diverges") for one in diverged]
    ended = "diverged" if check.kind == "diverges" else "did not diverge"
    said = f"Training of {check.cell} {ended} at {runs.counted(held)}."
    return Finding(seed_by_seed(held), said, len(held))
