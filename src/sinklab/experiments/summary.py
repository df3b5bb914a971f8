"""Build summary.json: median and range of each cell over its replicates, and the verdict on each claim.

The numbers of a run are read from run directories or from measurements of existing models.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from sinklab.assessing.assess_model import ASSESSMENT, load_assessment
from sinklab.errors import SinklabError
from sinklab.experiments.definition import SCALE_NOTES, Experiment, MeasuredCell, Scale
from sinklab.experiments.documents import (
    CellSummary,
    ExperimentSummary,
    Summary,
    estimated,
    median_of_known,
    read_record,
    verdict_counts,
)
from sinklab.experiments.quantities import RunNumbers
from sinklab.experiments.verdicts.judging import ToJudge, judge
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.registry import NAMED
from sinklab.schema import finite_or_none
from sinklab.train.recipe import load_recipe
from sinklab.train.run import Evaluation, read_history
from sinklab.tuning.tuned_directory import SFT, load_tuning, tuned_beside


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
    claims = [claim for one in experiments for claim in judge(one, results, altered)]
    counted = {f"{claim.experiment}.{claim.id}": claim for claim in claims if not claim.same_as}
    copied = {
        "verdict", "evidence", "seeds", "at_eps", "by_importance", "analysis", "stated", "elsewhere",
        "replicate", "rule",
    }  # fmt: skip
    for at, claim in enumerate(claims):  # a reference has the verdict and evidence of the claim to which it refers
        if other := counted.get(claim.same_as):
            claims[at] = claim.model_copy(update={name: getattr(other, name) for name in copied})
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


NO_METRICS = "its metrics.jsonl is missing or empty (restore it, or remove the directory to train the run again)"


class NoMetricsError(SinklabError):
    """Raised if a finished run has no metrics."""


def read_numbers(directory: Path) -> RunNumbers:
    """Read the quantities of a finished run.

    The sources are metrics.jsonl, recipe.yaml and, if they exist, record.json, assessment.json (if its text was the
    run's validation text) and the sft.json of the run's fine-tuning (`tuned_beside`). A run without record.json counts
    as finished if it has a measurement.json.

    Raises:
        InputError: if one of these files cannot be read or is damaged.
        NoMetricsError: if the run has finished, but metrics.jsonl is missing or has no evaluation.
        SinklabError: if the run has not finished, or has diverged.
    """
    record, history = read_record(directory), read_history(directory / "metrics.jsonl")
    done = record.status == "done" if record else (directory / "measurement.json").exists()
    if not done:
        raise SinklabError(
            f"the run in {directory} has no numbers: it has not finished (run the same command again to resume it) "
            "or has diverged"
        )
    if not history:
        raise NoMetricsError(f"the run in {directory} has no numbers: {NO_METRICS}")
    recipe = load_recipe(str(directory / "recipe.yaml"))
    assessed, tuned = directory / ASSESSMENT, tuned_beside(directory) / SFT
    measured = load_tuning(tuned).numbers() if tuned.is_file() else {}
    if record and record.kurtosis is not None:
        measured["kurtosis"] = record.kurtosis
    if assessed.is_file() and (assessment := load_assessment(assessed)).on_held_out:
        measured = assessment.numbers() | measured
    return RunNumbers(recipe.seed, history, measured=measured)


def named_values(numbers: RunNumbers, names: Iterable[str]) -> tuple[dict[str, float], list[str]]:
    """Return a run's finite values of these quantities by name, and the names of the steps that were never reached."""
    found = {name: value for name in names if (value := numbers.value(name)) is not None}
    never = [name for name, value in found.items() if value == math.inf]
    return {name: value for name, value in found.items() if name not in never}, never


def measured_numbers(cell: MeasuredCell, measured: Measurement, draw: int) -> RunNumbers:
    """Return the quantities of a replicate of a measured cell; only sink rates if the cell's sequences are shorter.

    Args:
        draw: index of the replicate (draw of sequences, or model), stored as `seed`.
    """
    whole, eps = cell.length == measured.length, f"{cell.eps:g}"
    rates, visible = measured.sink_rate, measured.sink_rate_visible
    if measured.sink_rates:
        rates = measured.sink_rates[eps]
    if measured.sink_rates_visible:
        visible = measured.sink_rates_visible[eps]
    if cell.length < measured.length:
        rates = (measured.sink_rate_by_length or {})[str(cell.length)][eps]
    reading = Evaluation(
        step=0,
        sink_rate=[*rates],
        sink_rate_visible=[*visible] if whole and visible is not None else None,
        sink_rate_bias=measured.sink_rate_bias if whole and cell.eps == measured.eps else None,
        valid_loss=measured.loss if whole else None,
        hidden_norm_ratio=(measured.hidden_norm_ratio or []) if whole else [],
        key_norm_ratio=measured.key_norm_ratio if whole else None,
        value_norm_ratio=measured.value_norm_ratio if whole else None,
    )
    others = {one.name: one.of_model(measured, cell.eps) for one in NAMED if one.of_model and whole}
    return RunNumbers(
        draw,
        [reading],
        sequences=measured.sequences,
        measured={name: value for name, value in others.items() if value is not None},
    )
