"""The cells of a report (runs that differ only in the seed): values over seeds, table, training curves, headline."""

import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sinklab.experiments.documents import CellSummary
from sinklab.measuring.statistics.highest import sink_elsewhere
from sinklab.report.data import ReportData, ReportedRun, rates_by_eps
from sinklab.survey.suites import CheckpointsDocument, ComparisonDocument, DomainsDocument, FamiliesDocument
from sinklab.tables import INFINITE, SINK_1, Table, TableCell, TableColumn, Value, counted, table_of
from sinklab.train.directory.history import Evaluation, seconds_spent

if TYPE_CHECKING:
    from sinklab.measuring.measurement import Measurement

K = TypeVar("K", bound=Hashable)

SHOWN = 0.05
"""Rates below this, in percent, are printed as 0.0, and are not called a sink in the headline."""
BARS = "▁▂▃▄▅▆▇█"


CellColumn = tuple[TableColumn, Callable[["CellRow"], Value]]
"""A column, and the function that computes its value for a cell."""


@dataclass(frozen=True)
class Spread:
    """Values of a quantity at the seeds of a cell, with their mean and sample standard deviation."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Spread | None":
        """Collect the values that are not None; None if there are none."""
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
        """Format the mean, with several seeds also the deviation: `8.6`, `8.6 ± 0.4`; `∞` if a value is infinite."""
        if not math.isfinite(self.mean):
            return INFINITE
        mean = f"{self.mean:.{decimals}f}"
        return mean if self.deviation is None else f"{mean} ± {self.deviation:.{decimals}f}"


@dataclass(frozen=True)
class CellRow:
    """The runs of one cell; without runs on disk, the values stored in `summary.json`.

    Attributes:
        seeds: number of runs; of finished runs, if it comes from the summary.
        eps: thresholds ε of the sink rates, one unless measurements at several share the cell; empty if unknown.
        progress: steps of unfinished runs, such as ` (step 500 of 2000)`; empty if all are finished.
        latest: last evaluation of every run, with the values of its measurement (`ReportedRun.latest`).
        measured: measurements of the runs that have one.
        seconds: duration of the training, or of the measurement if nothing was trained; None if unknown.
    """

    cell: str
    seeds: int
    eps: Sequence[float]
    progress: str
    latest: Sequence[Evaluation]
    measured: "Sequence[Measurement]"
    seconds: Spread | None

    def over_runs(self, value: Callable[[Evaluation], float | None]) -> Spread | None:
        """Return the values of a quantity at the last evaluation of every run; None if no run has the quantity."""
        return Spread.of(map(value, self.latest))

    def over_measurements(self, value: "Callable[[Measurement], float | None]") -> Spread | None:
        """Return the values of a quantity in the measurements of the runs; None if no measurement has the quantity."""
        return Spread.of(map(value, self.measured))

    @property
    def sink_first(self) -> Spread | None:
        """Sink rate of the first token, percent; None if unknown."""
        return self.over_runs(lambda one: next(iter(one.sink_rate or ()), None))

    @property
    def sink_visible(self) -> Spread | None:
        """Sink rate of the first token over the queries that can see it, percent; None if equal to `sink_first`."""
        return self.over_runs(lambda one: next(iter(one.sink_rate_visible or ()), None))

    @property
    def sink_bias(self) -> Spread | None:
        """Sink rate of a bias, sink logit or sink token, percent; None if the model has none."""
        return self.over_runs(lambda one: one.sink_rate_bias)

    @property
    def sink_elsewhere(self) -> tuple[int, float] | None:
        """1-based position and mean rate of the highest sink; None if that is the first token, below 1 % or unknown."""
        rates = [one.sink_rate for one in self.latest if one.sink_rate]  # averaged up to the length of the shortest
        return sink_elsewhere([statistics.fmean(rate or 0.0 for rate in at) for at in zip(*rates, strict=False)])


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

    Evaluations without a recorded speed are skipped: their tokens are counted at the speed of the next evaluation.
    """
    if run.trained:
        return seconds_spent([one for one in run.history if one.tokens is not None and one.tokens_per_second]) or None
    return run.measurement.seconds if run.measurement else None


def cells_table(data: ReportData, curves: bool = False) -> Table:
    """Make the table of results with a row per cell, in the order of `data.cells`; empty columns are omitted.

    Args:
        curves: whether to add a column of sparklines of the sink rate by step (`growth_of_sink`), for output without
            charts.
    """
    rows = cell_rows(data)
    trained = not data.runs or any(run.trained for run in data.runs)
    rate, loss = (".1f", ".3f") if trained else (".2f", ".4f")
    members, saved = data.suite_rows(FamiliesDocument), data.suite_rows(CheckpointsDocument)
    by_domain = any(isinstance(suite.document, DomainsDocument) for suite in data.suites)
    differing = len({eps for row in rows for eps in row.eps}) > 1
    thresholds = dict.fromkeys(eps for _, one in data.measured for eps in list(one.sink_rates or {})[1:])
    grown = dict(
        zip(data.cells, sparklines([growth_of_sink(data, row.cell) if curves else [] for row in rows]), strict=True)
    )
    match data.only_suite:
        case DomainsDocument():
            title, unit = "Domain", "one file each"
        case ComparisonDocument():
            title, unit = "Model", ""
        case CheckpointsDocument():
            title, unit = "Checkpoint", "step or tokens"
        case _:
            title, unit = ("Cell", "") if trained else ("Model", "")
    tokens = next((one.unit for one in saved.values()), "step") == "tokens"

    def name(row: CellRow) -> TableCell:
        checkpoint = saved[row.cell].checkpoint if row.cell in saved else row.cell
        return TableCell(row.cell, checkpoint if checkpoint != row.cell else "")

    def elsewhere(row: CellRow) -> str | None:
        return f"{row.sink_elsewhere[1]:.1f} at {row.sink_elsewhere[0]}" if row.sink_elsewhere else None

    def thresholds_of(row: CellRow) -> str | None:
        return ", ".join(f"{eps:g}" for eps in row.eps) if differing else None

    def published(row: CellRow) -> float | None:
        return members[row.cell].published if row.cell in members else None

    def difference(row: CellRow) -> float | None:
        printed = published(row)
        return None if printed is None else members[row.cell].sink_1 - printed

    def spread(title: str, unit: str, form: str, of: Callable[[CellRow], Spread | None]) -> CellColumn:
        def value(row: CellRow) -> Value:
            found = of(row)
            if found is None:
                return None
            return TableCell(found.mean, "" if found.deviation is None else f"± {found.deviation:{form}}")

        return TableColumn(title, unit, form), value

    def at_threshold(eps: str) -> Callable[[CellRow], Spread | None]:
        return lambda row: row.over_measurements(lambda one: rates_by_eps(one).get(eps, [None])[0])

    columns: list[CellColumn] = [
        (TableColumn(title, unit, text=True), name),
        (TableColumn("Runs", "seeds"), lambda row: TableCell(row.seeds, row.progress.strip())),
        (
            TableColumn("Tokens" if tokens else "Step", form=",d"),
            lambda row: saved[row.cell].step if row.cell in saved else None,
        ),
        (TableColumn("ε", "of the sink rates"), thresholds_of),
        spread(SINK_1, "% of heads", rate, lambda row: row.sink_first),
        *(spread(f"at ε = {eps}", "% of heads", rate, at_threshold(eps)) for eps in thresholds),
        spread(f"{SINK_1} visible", "% of heads", rate, lambda row: row.sink_visible),
        (TableColumn("Sink elsewhere", "% at position"), elsewhere),
        spread(
            "Importance",
            "of the first token, times uniform",
            rate,
            lambda row: row.over_measurements(lambda m: m.uniform_ratio[0]),
        ),
        (
            TableColumn("Sequences", "measured"),
            lambda row: ", ".join(sorted({str(m.sequences) for m in row.measured})) or None if by_domain else None,
        ),
        (TableColumn("Published", f"{SINK_1}, % of heads", ",.2f"), published),
        (TableColumn("Difference", "measured − published", "+.2f"), difference),
        (
            TableColumn("Parameters", "millions", ",.1f"),
            lambda row: members[row.cell].parameters * 1e-6 if row.cell in members else None,
        ),
        spread("Sink on the bias", "% of heads", rate, lambda row: row.sink_bias),
        spread(
            "Valid. loss" if trained else "Loss",
            "nats / token",
            loss,
            lambda row: row.over_runs(lambda one: one.valid_loss),
        ),
        spread("Bits per byte", "of the text", loss, lambda row: row.over_measurements(lambda m: m.bits_per_byte)),
        spread(
            "Norm ratio", "maximum over blocks", rate, lambda row: row.over_runs(lambda one: one.largest_norm_ratio)
        ),
        spread(
            "Row sum",
            "of raw scores",
            ".2f",
            lambda row: row.over_measurements(lambda m: None if m.row_sums is None else float(m.row_sums.mean())),
        ),
        spread("Time", "seconds", ".0f", lambda row: row.seconds),
        (TableColumn("Sink", "by step"), lambda row: grown[row.cell]),
    ]
    table = table_of(f"{title}s", rows, columns, key="cells")
    notes = [
        "Sink rates are the percentage of (sequence, layer, head) triples whose importance exceeds ε."
        + (" Values are mean ± sample standard deviation over seeds." if any(row.seeds > 1 for row in rows) else "")
        + " An en dash marks values that were not recorded or do not apply."
    ]
    if any(row.sink_visible for row in rows):
        notes.append(
            f"{SINK_1} averages attention over all queries from the key's position on, and {SINK_1} visible over the "
            "queries that can see the key."
        )
    if proxied := list(dict.fromkeys(run.cell for run, measured in data.measured if measured.proxy)):
        notes.append(
            f"In {', '.join(proxied)}, the attention scores do not sum to one: importance is computed from the proxy "
            "scores |sim| / Σ |sim|."
        )
    return replace(table.without_empty_columns(), notes=notes)


def sparklines(curves: Sequence[Sequence[float]]) -> list[str]:
    """Return each curve as a text of bars, on a shared scale from 0 to their maximum, or to 1 if that is smaller."""
    highest = max((value for values in curves for value in values), default=0.0)
    return [sparkline(values, max(highest, 1.0)) for values in curves]


def sparkline(values: Sequence[float], highest: float, width: int = 16) -> str:
    """Return values as a text of bars from 0 to `highest`, which is positive, sampled to at most `width` bars."""
    count = min(width, len(values))
    picked = [values[(index + 1) * len(values) // count - 1] for index in range(count)]
    return "".join(BARS[min(len(BARS) - 1, max(0, int(value / highest * len(BARS))))] for value in picked)


def curve(runs: Sequence[ReportedRun], value: Callable[[Evaluation], float | None], where: str) -> list[dict[str, Any]]:
    """Average a value of the evaluations by cell and step, over the seeds that reached the step.

    Args:
        value: function that returns the value of an evaluation, or None to omit it.
        where: name of the position or of the data, the same in all rows.

    Returns:
        Rows `cell, where, step` with the fields of `over_seeds`.
    """
    found = by_key(
        ((run.cell, one.step), number) for run in runs for one in run.history if (number := value(one)) is not None
    )
    return [
        {"cell": cell, "where": where, "step": step, **over_seeds(numbers)} for (cell, step), numbers in found.items()
    ]


def norm_ratios(runs: Sequence[ReportedRun]) -> tuple[list[dict[str, Any]], bool]:
    """Average the norm ratio of the first token at the last evaluation over seeds, by block.

    Returns:
        Rows `cell, layer` (0 is the embedding) with the fields of `over_seeds`, and whether infinite ratios were
        omitted.
    """
    found = by_key(
        ((run.cell, layer), ratio)
        for run in runs
        for layer, ratio in enumerate(run.latest.hidden_norm_ratio)
        if math.isfinite(ratio)
    )
    infinite = any(run.latest.largest_norm_ratio == math.inf for run in runs)
    return [{"cell": cell, "layer": layer, **over_seeds(numbers)} for (cell, layer), numbers in found.items()], infinite


def growth_of_sink(data: ReportData, cell: str) -> list[float]:
    """Return, for every step, the larger of the sink rates of first token and bias, then mean over seeds, percent."""
    rows = curve(
        data.runs_of(cell),
        lambda one: max(one.sink_rate[0] or 0.0, one.sink_rate_bias or 0.0) if one.sink_rate else None,
        "anywhere",
    )
    return [row["mean"] for row in sorted(rows, key=lambda row: row["step"])]


def by_key(pairs: Iterable[tuple[K, float]]) -> dict[K, list[float]]:
    """Group numbers by key, in the order in which the keys first appear."""
    found: dict[K, list[float]] = {}
    for key, number in pairs:
        found.setdefault(key, []).append(number)
    return found


def over_seeds(numbers: Sequence[float]) -> dict[str, float]:
    """Return mean, minimum (`low`), maximum (`high`) and number (`runs`) of the values at one or more seeds."""
    return {"mean": statistics.fmean(numbers), "low": min(numbers), "high": max(numbers), "runs": len(numbers)}


def headline(data: ReportData) -> list[str]:
    """Return a sentence per sweep of several experiments, and up to three about the runs and their main result."""
    rows = cell_rows(data)
    trained = [run for run in data.runs if run.trained]
    sentences = []
    for summary in (sweep.summary for sweep in data.sweeps if len(sweep.summary.experiments) > 1):
        done, failed = (sum(run.status == status for run in summary.runs) for status in ("done", "failed"))
        scale = f" at scale {summary.scale}" if summary.scale else ""
        ended = counted(done + failed, "run") + (f" ({failed} of them failed)" if failed else "")
        left = len(summary.runs) - done - failed
        sentences.append(
            f"{counted(len(summary.experiments), 'experiment').capitalize()}{scale}: "
            f"{counted(len(summary.cells), 'cell')}, {ended}"
            + (f"; {counted(left, 'run')} still to be finished." if left else ".")
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
    """Describe in a sentence which models were trained or measured, and how."""
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
            subject = f"{Path(document.model).name} on {counted(len(data.runs), 'domain')}"
        case ComparisonDocument():
            subject += " side by side"
        case CheckpointsDocument() as document:
            subject = f"{Path(document.model).name} at {counted(len(data.runs), 'checkpoint')}"
        case _ if names and len(names) < len(data.runs):
            subject = f"{counted(len(data.runs), 'measurement').capitalize()} of {counted(len(names), 'model')}"
    return f"{subject}: {measured}."


def _main_result(sinks: list[tuple[Spread, str]], biases: list[tuple[Spread, str]]) -> str:
    rate, strongest = max(sinks, key=lambda one: one[0].mean)
    if len(sinks) == 1:
        return f"The first token is a sink in {rate.text(1)} % of the heads."
    if rate.mean < SHOWN:
        text = "No model has a sink on the first token"
    else:
        text = f"The sink on the first token is strongest in “{strongest}” ({rate.text(1)} % of heads)"
    rate, top = max(biases, key=lambda one: one[0].mean, default=(Spread((0.0,)), ""))
    if rate.mean >= SHOWN:
        text += f"; the strongest sink on a bias is in “{top}” ({rate.text(1)} % of heads)"
    return text + "."
