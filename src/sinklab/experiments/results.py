"""Numbers of a run, read from run directories or from measurements of existing models."""

import math
from collections.abc import Iterable
from pathlib import Path

from sinklab.assessing.assessment import ASSESSMENT, load_assessment
from sinklab.errors import SinklabError
from sinklab.experiments.definition import MeasuredCell
from sinklab.experiments.documents import read_record
from sinklab.experiments.quantities import RunNumbers
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.registry import NAMED
from sinklab.train.directory.history import Evaluation, read_history
from sinklab.train.recipe import load_recipe
from sinklab.tuning.tuned_directory import SFT, load_tuning, tuned_beside

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
