"""From the runs of a sweep to summary.json: every cell over its seeds, and a verdict on every claim."""

import statistics
from collections.abc import Iterable, Mapping, Sequence

from sinklab.experiments.definition import Experiment, Scale
from sinklab.experiments.documents import CellEstimate, CellSummary, ExperimentSummary, Summary
from sinklab.experiments.results import CellResults
from sinklab.experiments.verdicts.evidence import Evidence
from sinklab.experiments.verdicts.judging import evidence_of, judge


def summarise(asked: Sequence[tuple[Experiment, Scale]], results: Mapping[str, CellResults]) -> Summary:
    """The experiments of a sweep, their cells, and a verdict on each of their claims.

    Args:
        asked: in the order in which they are shown.
        results: by cell. A name is one recipe, whichever experiment it is in; those of no experiment are left out.
    """
    cells = _cells(asked, results)
    scales = {scale for _, scale in asked}
    alone = asked[0][0] if len(asked) == 1 else None
    return Summary(
        id=alone.id if alone else "",
        title=alone.title if alone else "",
        scale=next(iter(scales)) if len(scales) == 1 else "",
        experiments={experiment.id: _described(experiment, scale) for experiment, scale in asked},
        cells=cells,
        claims=[claim for experiment, scale in asked for claim in judge(experiment, scale, results)],
    )


def _described(experiment: Experiment, scale: Scale) -> ExperimentSummary:
    cells = list(experiment.cells_at(scale))
    published = {cell: experiment.published.numbers_of(cell) for cell in cells} if experiment.published else {}
    return ExperimentSummary(
        title=experiment.title,
        question=experiment.question,
        source=experiment.source,
        scale=scale,
        cells=cells,
        baseline=experiment.compared_with,
        columns=list(experiment.columns),
        published={cell: numbers for cell, numbers in published.items() if numbers},
        adapted=[one.why for one in experiment.adapted.get(scale, ())],
    )


def _cells(asked: Sequence[tuple[Experiment, Scale]], results: Mapping[str, CellResults]) -> dict[str, CellSummary]:
    """The cells of all experiments, each with all quantities that any of them shows.

    Their intervals rest on the spread within all cells of the experiment that they are first in.
    """
    names = list(dict.fromkeys(name for experiment, _ in asked for name in experiment.columns))
    cells: dict[str, CellSummary] = {}
    for experiment, scale in asked:
        evidence = evidence_of(experiment, scale, results)
        for cell, of in evidence.results.items():
            if cell not in cells:
                cells[cell] = cell_summary(cell, of, names, evidence)
    return cells


def cell_summary(cell: str, of: CellResults, names: Sequence[str], evidence: Evidence) -> CellSummary:
    """Plain means over the finished seeds, and estimates with intervals.

    Args:
        names: of the quantities.
    """
    last = [run.last for run in of.numbers]
    estimates = {name: _estimate(cell, name, evidence) for name in names if cell in evidence.of(name).by_cell}
    return CellSummary(
        sink_rate=[_mean(rates) for rates in zip(*(one.sink_rate for one in last), strict=False)],
        sink_rate_bias=_mean(one.sink_bias for one in last),
        valid_loss=_mean(one.valid_loss for one in last),
        hidden_norm_ratio_max=_mean(one.norm_ratio for one in last),
        seeds=len(of.numbers),
        seconds=_mean(run.seconds for run in of.numbers),
        change=dict(of.change),
        values=estimates,
        runs=list(of.runs),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    """The mean of what is known, None where nothing is."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _estimate(cell: str, name: str, evidence: Evidence) -> CellEstimate:
    seen = evidence.of(name)
    mean, never_reached = seen.mean_of(cell), seen.never_reached(cell)
    if mean.spread is None or never_reached:
        return CellEstimate(mean=seen.turned_back(mean.mean, cell), never_reached=never_reached)
    low, high = (seen.turned_back(y, cell) for y in mean.interval())
    return CellEstimate(mean=seen.turned_back(mean.mean, cell), low=low, high=high)
