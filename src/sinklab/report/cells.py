"""Cells of a report (runs that differ only in the seed): values over seeds, table, training curves and headline."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sinklab.experiments.documents import CellSummary
from sinklab.measuring.statistics.highest import later_sink
from sinklab.report.data import ReportData, ReportedRun, model_label, rates_by_eps
from sinklab.survey.suites import (
    CheckpointsDocument,
    ComparisonDocument,
    DomainsDocument,
    FamilyMember,
    MeasuredCheckpoint,
)
from sinklab.tables import INFINITE, SINK_1, Table, TableCell, TableColumn, Value, counted
from sinklab.train.directory.history import Evaluation, seconds_spent

if TYPE_CHECKING:
    from sinklab.measuring.measurement import Measurement

SHOWN = 0.05
"""Minimum sink rate, percent, at which a headline on several models names a sink; lower rates round to 0.0."""


@dataclass(frozen=True)
class Spread:
    """Values of a quantity, one per seed of a cell, with their mean and sample standard deviation."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Spread | None":
        """Collect the values that are not None; return None if there are none."""
        known = tuple(float(value) for value in values if value is not None)
        return cls(known) if known else None

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float | None:
        """The sample standard deviation over seeds; None for a single seed or an infinite value."""
        return statistics.stdev(self.values) if len(self.values) > 1 and math.isfinite(self.mean) else None

    def text(self, decimals: int) -> str:
        """Format the mean and, for several seeds, the deviation: `8.6`, `8.6 ± 0.4`; `∞` if a value is infinite."""
        if not math.isfinite(self.mean):
            return INFINITE
        mean = f"{self.mean:.{decimals}f}"
        return mean if self.deviation is None else f"{mean} ± {self.deviation:.{decimals}f}"


@dataclass(frozen=True)
class CellRow:
    """The runs of one cell or, if no run is on disk, the values of the cell in `summary.json`.

    Attributes:
        seeds: number of runs; number of finished runs if the values are from the summary.
        eps: thresholds ε of the sink rates; several if runs of the cell were measured at different ε, and empty if
            unknown.
        progress: steps of unfinished runs, such as ` (step 500 of 2000)`; empty if all are finished.
        latest: last evaluation of every run, updated with its measurement (`ReportedRun.latest`), or one evaluation
            with the values of the summary.
        seconds: durations, in seconds, of training or of measuring an existing model; None if unknown.
    """

    cell: str
    seeds: int
    eps: Sequence[float]
    progress: str
    latest: Sequence[Evaluation]
    measured: "Sequence[Measurement]"
    seconds: Spread | None

    @property
    def sink_first(self) -> Spread | None:
        """Sink rates of the first token over the runs, percent; None if unknown."""
        return Spread.of(next(iter(one.sink_rate or ()), None) for one in self.latest)

    @property
    def sink_visible(self) -> Spread | None:
        """`sink_first` with importance averaged only over queries that can see the key; None if equal or unknown."""
        return Spread.of(next(iter(one.sink_rate_visible or ()), None) for one in self.latest)

    @property
    def sink_bias(self) -> Spread | None:
        """Sink rates of a bias, sink logit, sink token or registers over the runs, percent; None if there are none."""
        return Spread.of(one.sink_rate_bias for one in self.latest)

    @property
    def later_sink(self) -> tuple[int, float] | None:
        """Position (1-based) and mean rate over runs, in percent, of the highest sink at positions 1 to T / 2.

        None if the highest sink is at the first token, is below 1 % or is unknown.
        """
        rates = [one.sink_rate for one in self.latest if one.sink_rate]  # averaged at positions that all runs have
        return later_sink([statistics.fmean(rate or 0.0 for rate in at) for at in zip(*rates, strict=False)])


def cell_rows(data: ReportData) -> list[CellRow]:
    """Collect the row of every cell, in the order of `data.cells`."""
    return [_cell_row(data, cell) for cell in data.cells]


def _cell_row(data: ReportData, cell: str) -> CellRow:
    runs, summary = data.runs_of(cell), data.summary_cells.get(cell, CellSummary())
    unfinished = [run.unfinished for run in runs if run.unfinished]
    stored = Evaluation(
        step=0,
        sink_rate=summary.sink_rate,
        sink_rate_bias=summary.sink_rate_bias,
        valid_loss=summary.valid_loss,
        hidden_norm_ratio=[] if summary.hidden_norm_ratio_max is None else [summary.hidden_norm_ratio_max],
    )
    eps = [run.eps for run in runs] or [summary.change.get(key) for key in ("eps", "metric.eps")]
    return CellRow(
        cell=cell,
        seeds=len(runs) or summary.seeds,
        eps=sorted({one for one in eps if isinstance(one, float)}),
        progress=f" ({', '.join(unfinished)})" if unfinished else "",
        latest=[run.latest for run in runs] or [stored],
        measured=[run.measurement for run in runs if run.measurement],
        seconds=Spread.of([_seconds(run) for run in runs] or [summary.seconds]),
    )


def _seconds(run: ReportedRun) -> float | None:
    """Return the duration of a run's training, or of the measurement of a model, in seconds; None if unknown.

    Evaluations without a recorded speed are skipped; their tokens are counted at the speed of the next evaluation.
    """
    if run.trained:
        return seconds_spent([one for one in run.history if one.tokens is not None and one.tokens_per_second]) or None
    return run.measurement.seconds if run.measurement else None


def cells_table(data: ReportData) -> Table:
    """Make the table of results with a row per cell, in the order of `data.cells`; empty columns are omitted."""
    rows, entries = cell_rows(data), data.entries
    trained = not data.runs or any(run.trained for run in data.runs)
    rate, loss = (".1f", ".3f") if trained else (".2f", ".4f")
    by_domain = any(isinstance(suite.document, DomainsDocument) for suite in data.suites)
    differing = len({eps for row in rows for eps in row.eps}) > 1
    thresholds = dict.fromkeys(eps for _, one in data.measured for eps in list(one.sink_rates or {})[1:])
    titles = {DomainsDocument: "Domain", ComparisonDocument: "Model", CheckpointsDocument: "Checkpoint"}
    title = titles.get(type(data.only_suite), "Cell" if trained else "Model")
    unit = {"Domain": "one file each", "Checkpoint": "step or tokens"}.get(title, "")
    steps = [entry.unit for entry in entries.values() if isinstance(entry, MeasuredCheckpoint)]

    def spread(title: str, unit: str, form: str, found: Spread | None) -> tuple[TableColumn, Value]:
        deviation = found and found.deviation
        value = found and TableCell(found.mean, "" if deviation is None else f"± {deviation:{form}}")
        return TableColumn(title, unit, form), value

    def columns_of(row: CellRow) -> list[tuple[TableColumn, Value]]:
        entry, latest, measured = entries.get(row.cell), row.latest, row.measured
        member = entry if isinstance(entry, FamilyMember) else None
        saved = entry if isinstance(entry, MeasuredCheckpoint) else None
        published = member.published if member else None
        difference = None if member is None or published is None else member.sink_1 - published
        name = TableCell(row.cell, saved.checkpoint if saved and saved.checkpoint != row.cell else "")
        elsewhere = f"{row.later_sink[1]:.1f} at {row.later_sink[0]}" if row.later_sink else None
        importance = Spread.of(one.uniform_ratio[0] for one in measured)
        sequences = ", ".join(sorted({str(one.sequences) for one in measured})) if by_domain else ""
        at_thresholds = {
            eps: Spread.of(rates_by_eps(one).get(eps, [None])[0] for one in measured) for eps in thresholds
        }
        validation = Spread.of(one.valid_loss for one in latest)
        sums = Spread.of(None if one.row_sums is None else float(one.row_sums.mean()) for one in measured)
        return [
            (TableColumn(title, unit, text=True), name),
            (TableColumn("Runs", "seeds"), TableCell(row.seeds, row.progress.strip())),
            (TableColumn("Tokens" if steps[:1] == ["tokens"] else "Step", form=",d"), saved and saved.step),
            (TableColumn("ε", "of the sink rates"), ", ".join(f"{eps:g}" for eps in row.eps) if differing else None),
            spread(SINK_1, "% of heads", rate, row.sink_first),
            *(spread(f"at ε = {eps}", "% of heads", rate, rates) for eps, rates in at_thresholds.items()),
            spread(f"{SINK_1} visible", "% of heads", rate, row.sink_visible),
            (TableColumn("Sink elsewhere", "% at position"), elsewhere),
            spread("Importance", "of the first token, times uniform", rate, importance),
            (TableColumn("Sequences", "measured"), sequences or None),
            (TableColumn("Published", f"{SINK_1}, % of heads", ",.2f"), published),
            (TableColumn("Difference", "measured − published", "+.2f"), difference),
            (TableColumn("Parameters", "millions", ",.1f"), member and member.parameters * 1e-6),
            spread("Sink on the bias", "% of heads", rate, row.sink_bias),
            spread("Valid. loss" if trained else "Loss", "nats / token", loss, validation),
            spread("Bits per byte", "of the text", loss, Spread.of(one.bits_per_byte for one in measured)),
            spread("Norm ratio", "maximum over blocks", rate, Spread.of(one.largest_norm_ratio for one in latest)),
            spread("Row sum", "of raw scores", ".2f", sums),
            spread("Time", "seconds", ".0f", row.seconds),
        ]

    found = [columns_of(row) for row in rows]
    notes = [
        "Sink rates are the percentage of (sequence, layer, head) triples whose importance exceeds ε."
        + (" Values are mean ± sample standard deviation over seeds." if any(row.seeds > 1 for row in rows) else "")
        + " An en dash marks values that were not recorded or do not apply."
    ]
    if any(row.sink_visible for row in rows):
        notes.append(
            f"{SINK_1} averages the attention to a key over all queries at its position or later, {SINK_1} visible "
            "only over the queries that can see the key."
        )
    if proxied := list(dict.fromkeys(run.cell for run, measured in data.measured if measured.proxy)):
        notes.append(
            f"The attention scores of {', '.join(proxied)} do not sum to one; importance is computed from the proxy "
            "scores |sim| / Σ |sim|."
        )
    columns = [column for pairs in found[:1] for column, _ in pairs]
    values = [[value for _, value in pairs] for pairs in found]
    return Table(f"{title}s", columns, values, notes, "cells").without_empty_columns()


def curve(runs: Sequence[ReportedRun], value: Callable[[Evaluation], float | None], where: str) -> list[dict[str, Any]]:
    """Average a value of the evaluations by cell and step, over the seeds that have a value at the step.

    Returns:
        Rows with the fields `cell`, `where` (as passed, such as `first token`) and `step`, and those of `averaged`.
    """
    evaluations = ((run.cell, where, one.step, value(one)) for run in runs for one in run.history)
    return averaged(("cell", "where", "step"), (row for row in evaluations if row[-1] is not None))


def averaged(fields: Sequence[str], values: Iterable[Sequence[Any]]) -> list[dict[str, Any]]:
    """Group numbers by key and average them, for example over the runs of a cell.

    Args:
        fields: field names of the key.
        values: tuples of the key's values, one per field, followed by the number.

    Returns:
        A row per key, in order of appearance: the fields of the key, and the mean (`value`), minimum (`low`), maximum
        (`high`) and count (`runs`) of its numbers.
    """
    found: dict[tuple[Any, ...], list[float]] = {}
    for *key, number in values:
        found.setdefault(tuple(key), []).append(number)
    return [
        dict(zip(fields, key, strict=True))
        | {"value": statistics.fmean(numbers), "low": min(numbers), "high": max(numbers), "runs": len(numbers)}
        for key, numbers in found.items()
    ]


def headline(data: ReportData) -> list[str]:
    """Return the sentences of the headline: one per sweep whose runs are not listed, then up to three about the runs.

    The runs of packed sweeps and of sweeps of several experiments are not listed. The sentences about the runs state
    the setting, the main result, and the number of unfinished runs.
    """
    rows = cell_rows(data)
    trained = [run for run in data.runs if run.trained]
    sentences = []
    for summary in (one.summary for one in data.sweeps if one.packed or len(one.summary.experiments) > 1):
        done, failed = (sum(run.status == status for run in summary.runs) for status in ("done", "failed"))
        scale = f" at scale {summary.scale}" if summary.scale else ""
        ended = counted(done + failed, "run") + (f" ({failed} of them failed)" if failed else "")
        left = len(summary.runs) - done - failed
        sentences.append(
            f"{counted(len(summary.experiments), 'experiment').capitalize()}{scale}: "
            f"{counted(len(summary.cells), 'cell')}, {ended}"
            + (f"; {counted(left, 'run')} unfinished." if left else ".")
        )
    if rows:
        stored = f"The summary contains {counted(len(rows), 'cell')}; their runs are not on disk."
        sentences.append(_setting(data, trained) if data.runs else stored)
    sinks = [(row.sink_first, row.cell) for row in rows if row.sink_first is not None]
    biases = [(row.sink_bias, row.cell) for row in rows if row.sink_bias is not None and row.sink_first is not None]
    if sinks:
        sentences.append(_main_result(sinks, biases))
    if unfinished := sum(run.in_progress for run in trained):
        verb = "is" if unfinished == 1 else "are"
        sentences.append(
            f"{counted(unfinished, 'run').capitalize()} {verb} unfinished: the numbers below are not final."
        )
    return sentences


def _setting(data: ReportData, trained: list[ReportedRun]) -> str:
    """Return a sentence with the number of models trained or measured, ε, sequence lengths, and training steps."""
    measured = f"attention sinks were measured at ε = {data.eps}"
    lengths = sorted({one.length for _, one in data.measured})
    if lengths:
        measured += f" on sequences of {' and '.join(map(str, lengths))} tokens"
    if trained:
        steps = sorted({run.planned_steps for run in trained if run.planned_steps})
        ends = dict.fromkeys((steps[0], steps[-1])) if steps else ()
        length = f" for {' to '.join(f'{step:,}' for step in ends)} steps" if steps else ""
        cells = len({run.cell for run in trained})
        seeds = f" ({len(trained)} runs)" if len(trained) > cells else ""
        verb = "was" if cells == 1 else "were"
        return f"{counted(cells, 'model').capitalize()} {verb} trained{length}{seeds}; {measured}."
    names = {run.measurement.model for run in data.runs if run.measurement and run.measurement.model}
    subject = counted(len(data.runs), "model").capitalize()
    match data.only_suite:
        case DomainsDocument() as document:
            subject = f"{model_label(document.model)} on {counted(len(data.runs), 'domain')}"
        case ComparisonDocument():
            subject += " side by side"
        case CheckpointsDocument() as document:
            subject = f"{model_label(document.model)} at {counted(len(data.runs), 'checkpoint')}"
        case _ if names and len(names) < len(data.runs):
            subject = f"{counted(len(data.runs), 'measurement').capitalize()} of {counted(len(names), 'model')}"
    return f"{subject}: {measured}."


def _main_result(sinks: list[tuple[Spread, str]], biases: list[tuple[Spread, str]]) -> str:
    rate, strongest = max(sinks, key=lambda one: one[0].mean)
    top = max(biases, key=lambda one: one[0].mean, default=None)
    if len(sinks) == 1:
        return f"The first token is a sink in {rate.text(1)} % of the heads."
    text = f"The sink on the first token is strongest in “{strongest}” ({rate.text(1)} % of heads)"
    if rate.mean < SHOWN:
        text = "No model has a sink on the first token"
    if top and top[0].mean >= SHOWN:
        text += f"; the strongest sink on a bias is in “{top[1]}” ({top[0].text(1)} % of heads)"
    return text + "."
