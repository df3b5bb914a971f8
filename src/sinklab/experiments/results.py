"""What the runs of a cell came to, as it is judged and added up."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from sinklab.assessing.assessment import ASSESSMENT, load_assessment
from sinklab.errors import SinklabError
from sinklab.experiments.documents import CellRun, read_record
from sinklab.experiments.quantities import Reading, RunNumbers
from sinklab.schema import finite_or_none
from sinklab.train.directory.history import Evaluation, read_history, seconds_spent
from sinklab.train.recipe import load_recipe


@dataclass(frozen=True)
class CellResults:
    """The runs of one cell.

    Attributes:
        change: dotted keys of the recipe and their values, where they are not the base's.
        runs: each of its seeds, as the summary shows it, finished or not.
        numbers: of the finished ones.
        failed: how many did not train: their loss stopped being finite.
    """

    change: Mapping[str, object]
    runs: Sequence[CellRun]
    numbers: Sequence[RunNumbers]
    failed: int = 0

    def of_seeds(self, seeds: Collection[int] | None) -> "CellResults":
        """The same of these seeds alone; of all unless given."""
        if seeds is None:
            return self
        runs = [run for run in self.runs if run.seed in seeds]
        numbers = [run for run in self.numbers if run.seed in seeds]
        return replace(self, runs=runs, numbers=numbers, failed=sum(run.status == "failed" for run in runs))


def read_numbers(directory: Path) -> RunNumbers:
    """What a finished run says: metrics.jsonl (or metrics.jsonl.gz), recipe.yaml, record.json and assessment.json.

    Raises:
        InputError: one of them cannot be read, or is damaged.
        SinklabError: the run has not finished.
    """
    record, history = read_record(directory), read_history(directory / "metrics.jsonl")
    done = record.status == "done" if record else (directory / "measurement.json").exists()
    if not done or not history:
        raise SinklabError(f"the run in {directory} has not finished: run the same command again to continue it")
    recipe = load_recipe(str(directory / "recipe.yaml"))
    seconds = record.seconds if record else round(seconds_spent(history), 1)
    return RunNumbers(
        seed=recipe.seed,
        readings=[_reading(one) for one in history],
        kurtosis=record.kurtosis if record else None,
        seconds=seconds,
        tokens_per_second=record.tokens_per_second if record else None,
        peak_memory_mb=record.peak_memory_mb if record else None,
        measured=_assessed(directory),
    )


def named_values(numbers: RunNumbers, names: Iterable[str]) -> tuple[dict[str, float], list[str]]:
    """The numbers of a run by name, those it has; and the names of the steps that it never reached."""
    found = {name: value for name in names if (value := numbers.value(name)) is not None}
    never = [name for name, value in found.items() if value == math.inf]
    return {name: value for name, value in found.items() if name not in never}, never


def _assessed(directory: Path) -> dict[str, float]:
    """What is known of a run that was assessed on the text that it was validated on, as every run of a sweep is."""
    if not (directory / ASSESSMENT).is_file():
        return {}
    assessment = load_assessment(directory / ASSESSMENT)
    return assessment.numbers() if assessment.on_held_out else {}


def _reading(one: Evaluation) -> Reading:
    by_eps = {
        "sink_1": one.sink_rate_eps,
        "sink_1_visible": one.sink_rate_visible_eps,
        "sink_bias": one.sink_rate_bias_eps,
    }
    return Reading(
        step=one.step,
        tokens=one.tokens,
        sink_rate=one.sink_rate,
        sink_rate_visible=one.sink_rate_visible,
        sink_bias=one.sink_rate_bias,
        valid_loss=one.valid_loss,
        train_loss=one.train_loss,
        norm_ratio=finite_or_none(one.largest_norm_ratio),
        sink_layers=one.rate_layers,
        importance_first=_mean_percent(one.importance_first_heads),
        window_start=one.sink_rate_window_start,
        norm_ratio_before_norm=_largest(one.norm_ratio_before_norm),
        norm_ratio_sink_token=_largest(one.norm_ratio_sink_token),
        beside={name: rates for name, rates in by_eps.items() if rates},
    )


def _mean_percent(by_layer: Sequence[Sequence[float | None]] | None) -> float | None:
    known = [one for heads in by_layer or () for one in heads if one is not None]
    return 100 * fmean(known) if known else None


def _largest(ratios: Sequence[float] | None) -> float | None:
    """Of all blocks; None where there are none, or one is infinite."""
    return finite_or_none(max(ratios or (), default=None))
