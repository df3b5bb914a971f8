"""Build summary.json: median and range of each cell over its replicates, and the verdict on each claim."""

from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import Any

from sinklab.experiments.definition import SCALE_NOTES, Experiment, Scale
from sinklab.experiments.documents import (
    CellSummary,
    ExperimentSummary,
    JudgedClaim,
    Summary,
    estimated,
    median_of_known,
    verdict_counts,
)
from sinklab.experiments.verdicts.judging import ToJudge, judge
from sinklab.schema import finite_or_none


def at_scale(experiment: Experiment, scale: Scale, seeds: Collection[int] | None = None) -> ToJudge:
    """Return a trained experiment at a scale of its `base`, its entry in summary.json, and the claims to judge.

    Args:
        seeds: training seeds in tables and verdicts; default: all.
    """
    cells = list(experiment.cells_at(scale))
    published = {cell: experiment.published.numbers_of(cell) for cell in cells} if experiment.published else {}
    shipped = [SCALE_NOTES[scale]] if scale in SCALE_NOTES and experiment.base[scale] == scale else []
    adapted = [*shipped, *(one.why for one in experiment.adapted.get(scale, ()))]
    entry = summary_entry(experiment, scale, cells, published, adapted=adapted, seeds=sorted(seeds or ()))
    return experiment, entry, experiment.claims_at(scale)


def summary_entry(
    experiment: Experiment, scale: str, cells: list[str], published: Mapping[str, dict[str, float]], **others: Any
) -> ExperimentSummary:
    """Return the entry of an experiment in summary.json.

    Args:
        scale: scale of the trained models, or names of the existing models.
        others: further fields of `ExperimentSummary`.
    """
    return ExperimentSummary(
        title=experiment.title,
        question=experiment.question,
        source=experiment.source,
        scale=scale,
        cells=cells,
        baseline=experiment.compared_with,
        columns=list(experiment.columns),
        published={cell: numbers for cell, numbers in published.items() if numbers},
        replicate=experiment.replicate,
        axes=experiment.axes,
        **others,
    )


def summarise(experiments: Sequence[ToJudge], results: Mapping[str, CellSummary], altered: bool = False) -> Summary:
    """Return the content of summary.json: results of the cells, and verdicts on the claims.

    Args:
        experiments: experiments at a scale or on existing models, in the order of display.
        results: results by cell name; cells of the same name have the same recipe in every experiment. Cells of none
            of the experiments are omitted.
        altered: whether --steps or --text override the recipes (`judge`).
    """
    entries = {experiment.id: entry for experiment, entry, _ in experiments}
    scales = {entry.scale for entry in entries.values()}
    alone = experiments[0][0] if len(experiments) == 1 else None
    claims = _with_references([claim for one in experiments for claim in judge(one, results, altered)])
    columns = list(dict.fromkeys(name for entry in entries.values() for name in entry.columns))
    cells = dict.fromkeys(cell for entry in entries.values() for cell in entry.cells)
    return Summary(
        id=alone.id if alone else "",
        title=alone.title if alone else "",
        scale=next(iter(scales)) if len(scales) == 1 else "",
        experiments=entries,
        cells={cell: _cell_summary(results[cell], columns) for cell in cells if cell in results},
        claims=claims,
        counts=verdict_counts(claims),
    )


def _with_references(claims: Sequence[JudgedClaim]) -> list[JudgedClaim]:
    """Return the claims; references (`same_as`) to one of them get the verdict and evidence of this claim."""
    known = {f"{claim.experiment}.{claim.id}": claim for claim in claims if not claim.same_as}
    copied = {
        "verdict", "evidence", "seeds", "at_eps", "by_importance", "analysis", "stated", "finds", "elsewhere",
        "replicate", "rule",
    }  # fmt: skip
    return [
        claim.model_copy(update={name: getattr(other, name) for name in copied})
        if (other := known.get(claim.same_as)) is not None
        else claim
        for claim in claims
    ]


def _cell_summary(cell: CellSummary, names: Sequence[str]) -> CellSummary:
    """Return the cell with medians over its finished runs, and estimates of the quantities `names`."""
    last = [run.last for run in cell.numbers]
    seconds = [run.seconds for run in cell.runs if run.status == "done" and run.seconds is not None]
    return CellSummary(
        sink_rate=[median_of_known(rates) for rates in zip(*(one.sink_rate for one in last), strict=False)],
        sink_rate_bias=median_of_known(one.sink_rate_bias for one in last),
        valid_loss=median_of_known(one.valid_loss for one in last),
        hidden_norm_ratio_max=median_of_known(finite_or_none(one.largest_norm_ratio) for one in last),
        seeds=len(last),
        seconds=fmean(seconds) if seconds else None,
        change=cell.change,
        values={name: one for name in names if (one := estimated(cell.runs, name))},
        runs=cell.runs,
    )
