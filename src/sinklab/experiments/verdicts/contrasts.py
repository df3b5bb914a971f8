"""The differences that claims rest on, seed by seed."""

from sinklab.experiments.claims import Differs, Precedes
from sinklab.experiments.verdicts.estimates import MeanOverSeeds, over_seeds, single_spread
from sinklab.experiments.verdicts.evidence import Evidence
from sinklab.experiments.verdicts.transforms import transformed


def differing(check: Differs, evidence: Evidence) -> MeanOverSeeds | None:
    """One cell less the other; None where no seed has both."""
    return evidence.of(check.value, check.at_step).contrast({check.cell: 1.0, check.than: -1.0})


def trend(over: tuple[str, ...]) -> dict[str, float]:
    """The weights whose sum over cells in order is the slope of their straight line."""
    middle = (len(over) - 1) / 2
    squares = sum((rank - middle) ** 2 for rank in range(len(over)))
    return {cell: (rank - middle) / squares for rank, cell in enumerate(over)}


def steps_between(check: Precedes, evidence: Evidence) -> MeanOverSeeds | None:
    """log(first) - log(then) within the runs of a cell, pooled spread; None where no run has both."""
    first, then = evidence.of(check.first), evidence.of(check.then)
    differences = {
        cell: [by_seed[seed].y - then.by_cell[cell][seed].y for seed in sorted(by_seed) if seed in then.by_cell[cell]]
        for cell, by_seed in first.by_cell.items()
        if cell in then.by_cell
    }
    return _of_runs(differences, check.cell)


def ahead_of_others(cell: str, position: int, evidence: Evidence) -> tuple[list[float], MeanOverSeeds | None]:
    """logit(rate at a position) - logit(largest rate elsewhere) at every seed of a cell, and their mean.

    The spread is pooled over all cells. The position is counted from 1. Empty and None where it was not measured.
    """
    differences: dict[str, list[float]] = {}
    for name in evidence.results:
        for run in evidence.runs(name):
            rates = [transformed(rate, "rate", run.triples) for rate in run.last.sink_rate if rate is not None]
            if position <= len(rates) == len(run.last.sink_rate) and len(rates) > 1:
                others = max(rates[: position - 1] + rates[position:])
                differences.setdefault(name, []).append(rates[position - 1] - others)
    return differences.get(cell, []), _of_runs(differences, cell)


def _of_runs(differences: dict[str, list[float]], cell: str) -> MeanOverSeeds | None:
    """The mean of a cell's differences; cells where they are all the same say nothing of the spread."""
    known = single_spread([values for values in differences.values() if max(values) > min(values)])
    return over_seeds(differences[cell], known) if differences.get(cell) else None
