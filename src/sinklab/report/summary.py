"""From runs to the numbers of a report: cells with their spread over seeds, curves, and the headline in words."""

import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, TypeVar

from sinklab.experiments.documents import CellSummary
from sinklab.measuring.statistics.highest import sink_elsewhere
from sinklab.report.data import ReportData, ReportedRun
from sinklab.report.experiments.sweeps import Sweep
from sinklab.survey.suites import CheckpointsDocument, ComparisonDocument, DomainsDocument
from sinklab.tables import INFINITE, counted
from sinklab.train.directory.history import Evaluation, seconds_spent

K = TypeVar("K", bound=Hashable)

SHOWN = 0.05
"""Percent from which a rate is not written as 0.0."""


@dataclass(frozen=True)
class Spread:
    """A quantity over the seeds of a cell: mean, and sample standard deviation where there are several seeds."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float | None:
        """The sample standard deviation over seeds, None for a single one and where one is infinite."""
        return statistics.stdev(self.values) if len(self.values) > 1 and math.isfinite(self.mean) else None

    def text(self, decimals: int) -> str:
        """`8.6` or, with several seeds, `8.6 ± 0.4`; `∞` where one of them is infinite."""
        if not math.isfinite(self.mean):
            return INFINITE
        mean = f"{self.mean:.{decimals}f}"
        return mean if self.deviation is None else f"{mean} ± {self.deviation:.{decimals}f}"


@dataclass(frozen=True)
class CellRow:
    """One line of the table of cells. Rates are percent, loss is nats per token; None where not recorded.

    The ratio to uniform attention is that of the first token's importance. `sink_elsewhere` is position (1-based) and
    mean rate of the highest sink where that is not the first token (highest.py).
    """

    cell: str
    seeds: int
    progress: str
    sink_first: Spread | None
    sink_visible: Spread | None
    sink_elsewhere: tuple[int, float] | None
    sink_bias: Spread | None
    uniform_ratio: Spread | None
    loss: Spread | None
    bits_per_byte: Spread | None
    norm_ratio: Spread | None
    row_sum: Spread | None
    seconds: Spread | None


def cell_rows(data: ReportData) -> list[CellRow]:
    """One row per cell: from its runs, and from `summary.json` for a cell whose runs are not on disk."""
    return [_cell_row(data, cell) for cell in data.cells]


def _cell_row(data: ReportData, cell: str) -> CellRow:
    runs, summary = data.runs_of(cell), data.summary_cells.get(cell, CellSummary())
    numbers = [run.latest for run in runs] or [_of_summary(summary)]
    unfinished = [how for run in runs if (how := progress(run) if run.in_progress else run.measured_early)]
    return CellRow(
        cell=cell,
        seeds=len(runs) or summary.seeds,
        progress=f" ({', '.join(unfinished)})" if unfinished else "",
        sink_first=_spread([_first(one.sink_rate) for one in numbers]),
        sink_visible=_spread([_first(one.sink_rate_visible) for one in numbers]),
        sink_elsewhere=sink_elsewhere(_mean_rates([one.sink_rate for one in numbers if one.sink_rate])),
        sink_bias=_spread([one.sink_rate_bias for one in numbers]),
        uniform_ratio=_spread([run.measurement.uniform_ratio[0] for run in runs if run.measurement]),
        loss=_spread([one.valid_loss for one in numbers]),
        bits_per_byte=_spread([run.measurement.bits_per_byte for run in runs if run.measurement]),
        norm_ratio=_spread([one.largest_norm_ratio for one in numbers]),
        row_sum=_spread([_row_sum(run) for run in runs]),
        seconds=_spread([_seconds(run) for run in runs] or [summary.seconds]),
    )


def _of_summary(cell: CellSummary) -> Evaluation:
    return Evaluation(
        step=0,
        sink_rate=cell.sink_rate,
        sink_rate_bias=cell.sink_rate_bias,
        valid_loss=cell.valid_loss,
        hidden_norm_ratio=[] if cell.hidden_norm_ratio_max is None else [cell.hidden_norm_ratio_max],
    )


def progress(run: ReportedRun) -> str:
    """How far an unfinished run has come."""
    return f"step {run.steps_done or 0} of {run.planned_steps}"


def _row_sum(run: ReportedRun) -> float | None:
    """Mean over layers and heads of what raw scores sum to; None where they sum to one."""
    row_sums = run.measurement.row_sums if run.measurement else None
    return None if row_sums is None else float(row_sums.mean())


def _seconds(run: ReportedRun) -> float | None:
    """Seconds spent training, or on a mere measurement. Updates of unknown speed had that of the next evaluation."""
    if run.trained:
        return seconds_spent([one for one in run.history if one.tokens is not None and one.tokens_per_second]) or None
    return run.measurement.seconds if run.measurement else None


def _spread(values: Sequence[float | None]) -> Spread | None:
    known = tuple(float(value) for value in values if value is not None)
    return Spread(known) if known else None


def _first(values: Sequence[float | None] | None) -> float | None:
    return values[0] if values else None


def _mean_rates(rates: Sequence[Sequence[float | None]]) -> list[float]:
    """By position, over runs; as long as the shortest."""
    return [statistics.fmean(rate or 0.0 for rate in at_position) for at_position in zip(*rates, strict=False)]


class OverSeeds(TypedDict):
    """One quantity over the seeds of a cell."""

    mean: float
    low: float
    high: float
    runs: int


class CurvePoint(OverSeeds):
    """A quantity of a cell at a training step; `where` says of which tokens or data."""

    cell: str
    where: str
    step: int


def curve(runs: Sequence[ReportedRun], value: Callable[[Evaluation], float | None], where: str) -> list[CurvePoint]:
    """One row per (cell, step), over the seeds that have reached that step."""
    found = by_key(
        ((run.cell, one.step), number) for run in runs for one in run.history if (number := value(one)) is not None
    )
    return [
        {"cell": cell, "where": where, "step": step, **over_seeds(numbers)} for (cell, step), numbers in found.items()
    ]


class LayerPoint(OverSeeds):
    """A quantity of a cell in a layer, or after a block (0 is the embedding)."""

    cell: str
    layer: int


def norm_ratios(runs: Sequence[ReportedRun]) -> tuple[list[LayerPoint], bool]:
    """Norm of the first token over the others' by block, at last; and whether some are infinite, which are left out."""
    found = by_key(
        ((run.cell, layer), ratio)
        for run in runs
        for layer, ratio in enumerate(run.latest.hidden_norm_ratio)
        if math.isfinite(ratio)
    )
    infinite = any(run.latest.largest_norm_ratio == math.inf for run in runs)
    return [{"cell": cell, "layer": layer, **over_seeds(numbers)} for (cell, layer), numbers in found.items()], infinite


def growth_of_sink(data: ReportData, cell: str) -> list[float]:
    """By step, mean over seeds: the sink rate of the first token or of the bias, whichever is larger."""
    rows = curve(
        data.runs_of(cell),
        lambda one: max(one.sink_rate[0] or 0.0, one.sink_rate_bias or 0.0) if one.sink_rate else None,
        "anywhere",
    )
    return [row["mean"] for row in sorted(rows, key=lambda row: row["step"])]


def by_key(pairs: Iterable[tuple[K, float]]) -> dict[K, list[float]]:
    """The numbers of each key together, keys in the order of their first."""
    found: dict[K, list[float]] = {}
    for key, number in pairs:
        found.setdefault(key, []).append(number)
    return found


def over_seeds(numbers: Sequence[float]) -> OverSeeds:
    """Mean, lowest and highest of the seeds, and how many there are."""
    return {"mean": statistics.fmean(numbers), "low": min(numbers), "high": max(numbers), "runs": len(numbers)}


def headline(data: ReportData) -> list[str]:
    """The runs and their main result, in at most three sentences."""
    rows = cell_rows(data)
    trained = [run for run in data.runs if run.trained]
    sentences = [_what_a_sweep_did(sweep) for sweep in data.sweeps if len(sweep.experiments) > 1]
    sentences += [_what_was_done(data, rows, trained)] if rows else []
    with_sink = [row for row in rows if row.sink_first is not None]
    if with_sink:
        sentences.append(_what_came_out(with_sink))
    unfinished = sum(run.in_progress for run in trained)
    if unfinished:
        sentences.append(f"{counted(unfinished, 'run')} still in progress: the numbers below are not final.")
    return sentences


def _what_a_sweep_did(sweep: Sweep) -> str:
    runs = sweep.runs
    done, failed = (sum(run.status == status for run in runs) for status in ("done", "failed"))
    ended = f" ({failed} of them failed)" if failed else ""
    left = len(runs) - done - failed
    waiting = f"; {counted(left, 'run')} still to be finished" if left else ""
    cells = counted(len(sweep.summary.cells), "cell")
    scale = f" at scale {sweep.summary.scale}" if sweep.summary.scale else ""
    return (
        f"{counted(len(sweep.experiments), 'experiment').capitalize()}{scale}: {cells}, "
        f"{counted(done + failed, 'run')}{ended}{waiting}."
    )


def _what_was_done(data: ReportData, rows: list[CellRow], trained: list[ReportedRun]) -> str:
    if not data.runs:
        return f"The summary of {counted(len(rows), 'cell')}; the runs themselves are not on disk here."
    eps = ", ".join(sorted({f"{run.eps:g}" for run in data.runs}))
    measured = f"attention sinks measured at ε = {eps}"
    lengths = sorted({one.length for _, one in data.measured})
    if lengths:
        measured += f" on sequences of {' and '.join(map(str, lengths))} tokens"
    if not trained:
        return f"{_subject(data)}, {measured}."
    steps = sorted({run.planned_steps for run in trained if run.planned_steps})
    length = f" for {' to '.join(f'{step:,}' for step in dict.fromkeys((steps[0], steps[-1])))} steps" if steps else ""
    cells = len({run.cell for run in trained})
    seeds = f" ({len(trained)} runs over seeds)" if len(trained) > cells else ""
    return f"{counted(cells, 'model').capitalize()} trained{length}{seeds}, {measured}."


def _subject(data: ReportData) -> str:
    names = {run.measurement.model for run in data.runs if run.measurement and run.measurement.model}
    models = counted(len(data.runs), "model").capitalize()
    match data.only_suite:
        case DomainsDocument() as document:
            return f"{Path(document.model).name} on {counted(len(data.runs), 'domain')}"
        case ComparisonDocument():
            return f"{models} on the same text"
        case CheckpointsDocument() as document:
            return f"{Path(document.model).name} at {counted(len(data.runs), 'checkpoint')}"
    if names and len(names) < len(data.runs):
        return f"{counted(len(data.runs), 'measurement').capitalize()} of {counted(len(names), 'model')}"
    return models


def _what_came_out(rows: list[CellRow]) -> str:
    sinks = [(row.sink_first, row.cell) for row in rows if row.sink_first is not None]
    biases = [(row.sink_bias, row.cell) for row in rows if row.sink_bias is not None]
    rate, strongest = max(sinks, key=lambda one: one[0].mean)
    if len(sinks) == 1:
        return f"The first token is a sink for {rate.text(1)} % of its heads."
    if rate.mean < SHOWN:
        text = "None has a sink on the first token"
    else:
        text = f"The sink on the first token is strongest in “{strongest}” ({rate.text(1)} % of heads)"
    rate, top = max(biases, key=lambda one: one[0].mean, default=(Spread((0.0,)), ""))
    if rate.mean >= SHOWN:
        text += f"; the largest sink on a bias is in “{top}” ({rate.text(1)} % of heads)"
    return text + "."
