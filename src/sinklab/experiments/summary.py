"""From the runs of a sweep to summary.json: every cell over its seeds, and a verdict on every claim."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import fmean, median

from sinklab.experiments.committed import five_seeds
from sinklab.experiments.definition import WHAT_SCALES_ARE, Experiment, Scale
from sinklab.experiments.documents import (
    CellSummary,
    ExperimentSummary,
    JudgedClaim,
    Summary,
    estimated,
    verdict_counts,
)
from sinklab.experiments.results import CellResults
from sinklab.experiments.verdicts.counts import FEWEST
from sinklab.experiments.verdicts.judging import judge


def summarise(
    asked: Sequence[tuple[Experiment, Scale]],
    results: Mapping[str, CellResults],
    own_seeds: Mapping[str, Collection[int]] | None = None,
    altered: bool = False,
) -> Summary:
    """The experiments of a sweep, their cells, and a verdict on each of their claims.

    Args:
        asked: in the order in which they are shown.
        results: by cell. A name is one recipe, whichever experiment it is in; those of no experiment are left out.
        own_seeds: of an experiment, by its id, the seeds that its table and verdicts use; all unless given.
        altered: the recipes were changed (--steps, --text), so that the results that come with sinklab are of others.
    """
    seeds = own_seeds or {}
    scales = {scale for _, scale in asked}
    alone = asked[0][0] if len(asked) == 1 else None
    claims = [claim for one, scale in asked for claim in judge(one, scale, results, seeds.get(one.id))]
    claims = _with_references(claims if altered else [_with_five_seeds(claim) for claim in claims])
    return Summary(
        id=alone.id if alone else "",
        title=alone.title if alone else "",
        scale=next(iter(scales)) if len(scales) == 1 else "",
        experiments={one.id: _described(one, scale, seeds.get(one.id, ())) for one, scale in asked},
        cells=_cells(asked, results),
        claims=claims,
        counts=verdict_counts(claims),
    )


def _with_references(claims: Sequence[JudgedClaim]) -> list[JudgedClaim]:
    """Claims that refer to another one have its verdict, where that is among them."""
    known = {f"{claim.experiment}.{claim.id}": claim for claim in claims if not claim.same_as}
    copied = {"verdict", "evidence", "seeds", "at_eps", "analysis", "stated", "finds", "elsewhere", "replicate"}
    return [
        claim.model_copy(update={name: getattr(other, name) for name in copied})
        if (other := known.get(claim.same_as)) is not None
        else claim
        for claim in claims
    ]


def _with_five_seeds(claim: JudgedClaim) -> JudgedClaim:
    """A claim without a verdict, with what five seeds gave in the results that come with sinklab."""
    if claim.verdict != "no verdict" or claim.seeds >= FEWEST:
        return claim
    return claim.model_copy(update={"elsewhere": five_seeds(claim)})


def _described(experiment: Experiment, scale: Scale, seeds: Collection[int]) -> ExperimentSummary:
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
        adapted=[
            *([f"{scale} is {WHAT_SCALES_ARE[scale]}"] if scale in WHAT_SCALES_ARE else []),
            *(one.why for one in experiment.adapted.get(scale, ())),
        ],
        seeds=sorted(seeds),
    )


def _cells(asked: Sequence[tuple[Experiment, Scale]], results: Mapping[str, CellResults]) -> dict[str, CellSummary]:
    """The cells of all experiments, each with all quantities that any of them shows."""
    names = list(dict.fromkeys(name for experiment, _ in asked for name in experiment.columns))
    found = dict.fromkeys(cell for experiment, scale in asked for cell in experiment.cells_at(scale))
    return {cell: cell_summary(results[cell], names) for cell in found if cell in results}


def cell_summary(of: CellResults, names: Sequence[str]) -> CellSummary:
    """Medians over the finished seeds, and every seed of some quantities.

    Args:
        names: of the quantities.
    """
    last = [run.last for run in of.numbers]
    return CellSummary(
        sink_rate=[_median(rates) for rates in zip(*(one.sink_rate for one in last), strict=False)],
        sink_rate_bias=_median(one.sink_bias for one in last),
        valid_loss=_median(one.valid_loss for one in last),
        hidden_norm_ratio_max=_median(one.norm_ratio for one in last),
        seeds=len(of.numbers),
        seconds=fmean(known) if (known := [run.seconds for run in of.numbers if run.seconds is not None]) else None,
        change=dict(of.change),
        values={name: one for name in names if (one := estimated(of.runs, name))},
        runs=list(of.runs),
    )


def _median(values: Iterable[float | None]) -> float | None:
    """Of what is known, None where nothing is."""
    known = [value for value in values if value is not None]
    return median(known) if known else None
