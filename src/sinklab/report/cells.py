"""The table of cells (runs that differ only in the seed), and the headline of a report."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from sinklab.measuring.registry import METRICS, Evaluation
from sinklab.report.data import DEVIATION, ReportData, ReportedRun, model_label, over_seeds, rates_by_eps, run_table
from sinklab.tables import (
    SINK_1,
    Table,
    TableCell,
    TableColumn,
    Value,
    counted,
    later_sink,
    table_of,
)

SHOWN = 0.05
"""Minimum sink rate, percent, at which a headline on several models names a sink; lower rates round to 0.0."""
TITLES = {
    "domains": ("Domain", "one file each"),
    "models": ("Model", ""),
    "checkpoints": ("Checkpoint", "step or tokens"),
}
"""Heading and unit of the first column if all runs belong to a suite."""
CellColumn = tuple[TableColumn, Callable[[str], Value]]
"""A column of the table of cells, and the function from the name of a cell to its value."""


def shown_runs(data: ReportData, cell: str) -> list[ReportedRun]:
    """Return the runs of a cell; if none is on disk, one with the medians of the summary."""
    if runs := data.runs_of(cell):
        return runs
    known = data.summary_cells[cell]
    ratio = [] if known.hidden_norm_ratio_max is None else [known.hidden_norm_ratio_max]
    rates = {"sink_rate": known.sink_rate, "sink_rate_bias": known.sink_rate_bias}
    stored = Evaluation(step=0, valid_loss=known.valid_loss, hidden_norm_ratio=ratio, **rates)
    return [ReportedRun(Path(), cell, history=[stored])]


def spread_over_seeds(data: ReportData, metric: str) -> dict[str, dict[str, Any]]:
    """Return mean, deviation, minimum and maximum of a metric of the last evaluation, by cell (`over_seeds`)."""
    runs = [run for cell in data.cells for run in shown_runs(data, cell)]
    read = METRICS[metric].read
    table = run_table(runs, {metric: lambda run: read(run.latest)})
    return {row["cell"]: row for row in over_seeds(table, "cell", deviation=DEVIATION)}


def later_sink_of_cell(data: ReportData, cell: str) -> tuple[int, float] | None:
    """Return position (1-based) and mean rate over runs, in percent, of the highest sink at positions 1 to T / 2.

    None if the highest sink is at the first token, is below 1 % or is unknown.
    """
    rates = [run.latest.sink_rate for run in shown_runs(data, cell) if run.latest.sink_rate]
    # averaged at positions that all runs have
    return later_sink([fmean(rate or 0.0 for rate in at) for at in zip(*rates, strict=False)])


def cells_table(data: ReportData) -> Table:
    """Make the table of results with a row per cell, in the order of `data.cells`; empty columns are omitted."""
    trained = not data.runs or any(run.trained for run in data.runs)
    title, unit = TITLES[data.only_suite.kind] if data.only_suite else ("Cell" if trained else "Model", "")
    rate, loss = (".1f", ".3f") if trained else (".2f", ".4f")
    runs, checkpoints = {cell: shown_runs(data, cell) for cell in data.cells}, data.checkpoints
    seeds = {cell: len(data.runs_of(cell)) or data.summary_cells[cell].seeds for cell in runs}
    eps: dict[str, list[float]] = {}  # of the runs of a cell or, if none is on disk, as in its changes
    for cell in runs:
        change = data.summary_cells[cell].change if cell in data.summary_cells else {}
        known = [run.eps for run in data.runs_of(cell)] or [change.get(key) for key in ("eps", "metric.eps")]
        eps[cell] = sorted({one for one in known if isinstance(one, float)})
    differing = len({one for found in eps.values() for one in found}) > 1
    by_domain = any(suite.document.domains for suite in data.suites)
    tokens = [one.unit for one in checkpoints.values()][:1] == ["tokens"]
    thresholds = dict.fromkeys(eps for _, one in data.measured for eps in list(one.sink_rates or {})[1:])

    def spread(column: TableColumn, read: Callable[[ReportedRun], float | None]) -> CellColumn:
        """Return the column of a number with its mean and deviation over the runs of a cell."""
        table = run_table([run for found in runs.values() for run in found], {column.title: read})
        found = {row["cell"]: row for row in over_seeds(table, "cell", deviation=DEVIATION)}

        def value(cell: str) -> Value:
            if (row := found.get(cell)) is None:
                return None
            return TableCell(row["value"], "" if row["deviation"] is None else f"± {row['deviation']:{column.form}}")

        return column, value

    def of_metric(
        name: str, form: str, read: Callable[[Evaluation], float | None] | None = None, title: str = ""
    ) -> CellColumn:
        one = METRICS[name]
        return spread(TableColumn(title or one.title, one.place, form), lambda run: (read or one.read)(run.latest))

    def of_measurement(title: str, unit: str, form: str, read: Callable[[Any], float | None]) -> CellColumn:
        return spread(TableColumn(title, unit, form), lambda run: read(run.measurement) if run.measurement else None)

    def named(cell: str) -> Value:
        saved = checkpoints.get(cell)
        return TableCell(cell, saved.checkpoint if saved and saved.checkpoint != cell else "")

    def elsewhere(cell: str) -> Value:
        later = later_sink_of_cell(data, cell)
        return f"{later[1]:.1f} at {later[0]}" if later else None

    def sequences(cell: str) -> Value:
        known = {str(run.measurement.sequences) for run in runs[cell] if run.measurement}
        return ", ".join(sorted(known)) or None if by_domain else None

    visible = of_metric("sink_1_visible", rate, lambda one: next(iter(one.sink_rate_visible or ()), None))
    columns: list[CellColumn] = [
        (TableColumn(title, unit, text=True), named),
        (TableColumn("Runs", "seeds"), lambda cell: TableCell(seeds[cell], progress_of(runs[cell]))),
        (
            TableColumn("Tokens" if tokens else "Step", form=",d"),
            lambda cell: checkpoints[cell].step if cell in checkpoints else None,
        ),
        (
            TableColumn("ε", "of the sink rates"),
            lambda cell: ", ".join(f"{one:g}" for one in eps[cell]) if differing else None,
        ),
        of_metric("sink_1", rate),
        *(
            of_measurement(f"at ε = {eps}", "% of heads", rate, lambda m, eps=eps: rates_by_eps(m).get(eps, [None])[0])
            for eps in thresholds
        ),
        visible,
        (TableColumn("Sink elsewhere", "% at position"), elsewhere),
        of_measurement("Importance", "of the first token, times uniform", rate, lambda m: m.uniform_ratio[0]),
        (TableColumn("Sequences", "measured"), sequences),
        of_metric("sink_bias", rate),
        of_metric("valid_loss", loss, title="" if trained else "Loss"),
        of_measurement("Bits per byte", "of the text", loss, lambda m: m.bits_per_byte),
        of_metric("norm_ratio", rate, lambda one: one.largest_norm_ratio),  # also if it is infinite
        of_measurement("Row sum", "of raw scores", ".2f", lambda m: None if m.row_sums is None else m.row_sums.mean()),
        spread(
            TableColumn("Time", "seconds", ".0f"),
            lambda run: run.seconds if run.recipe or run.measurement else data.summary_cells[run.cell].seconds,
        ),
    ]
    notes = [
        "Sink rates are the percentage of (sequence, layer, head) triples whose importance exceeds ε."
        + " Values are mean ± sample standard deviation over seeds." * any(count > 1 for count in seeds.values())
        + " An en dash marks values that were not recorded or do not apply."
    ]
    if any(visible[1](cell) for cell in runs):
        notes.append(
            f"{SINK_1} averages the attention to a key over all queries at its position or later, {SINK_1} visible "
            "only over the queries that can see the key."
        )
    if proxied := list(dict.fromkeys(run.cell for run, measured in data.measured if measured.proxy)):
        notes.append(
            f"The attention scores of {', '.join(proxied)} do not sum to one; importance is computed from the proxy "
            "scores |sim| / Σ |sim|."
        )
    return replace(table_of(f"{title}s", runs, columns, notes), key="cells").without_empty_columns()


def progress_of(runs: Sequence[ReportedRun]) -> str:
    """Return the steps of unfinished runs, such as `(step 500 of 2000)`; empty if all are finished."""
    unfinished = [run.unfinished for run in runs if run.unfinished]
    return f"({', '.join(unfinished)})" if unfinished else ""


def headline(data: ReportData, setting_only: bool = False) -> list[str]:
    """Return the sentences of the headline: one per sweep whose runs are not listed, then up to three about the runs.

    The runs of packed sweeps and of sweeps of several experiments are not listed. The sentences about the runs state
    the setting, the main result (not with `setting_only`), and the number of unfinished runs.
    """
    cells = data.cells
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
    if cells:
        stored = f"The summary contains {counted(len(cells), 'cell')}; their runs are not on disk."
        sentences.append(_setting(data, trained) if data.runs else stored)
    if not setting_only and (sinks := spread_over_seeds(data, "sink_1")):
        biases = {cell: row for cell, row in spread_over_seeds(data, "sink_bias").items() if cell in sinks}
        sentences.append(_main_result(sinks, biases))
    if unfinished := sum(bool(run.unfinished) and not run.failed for run in trained):
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
    suite = data.only_suite
    if suite and suite.kind == "models":
        subject += " side by side"
    elif suite:
        place = "on" if suite.kind == "domains" else "at"
        subject = f"{model_label(suite.model)} {place} {counted(len(data.runs), suite.kind.removesuffix('s'))}"
    elif names and len(names) < len(data.runs):
        subject = f"{counted(len(data.runs), 'measurement').capitalize()} of {counted(len(names), 'model')}"
    return f"{subject}: {measured}."


def _main_result(sinks: dict[str, dict[str, Any]], biases: dict[str, dict[str, Any]]) -> str:
    def text(row: dict[str, Any]) -> str:
        mean = f"{row['value']:.1f}"
        return mean if row["deviation"] is None else f"{mean} ± {row['deviation']:.1f}"

    strongest, rate = max(sinks.items(), key=lambda one: one[1]["value"])
    top = max(biases.items(), key=lambda one: one[1]["value"], default=None)
    if len(sinks) == 1:
        return f"The first token is a sink in {text(rate)} % of the heads."
    sentence = f"The sink on the first token is strongest in “{strongest}” ({text(rate)} % of heads)"
    if rate["value"] < SHOWN:
        sentence = "No model has a sink on the first token"
    if top and top[1]["value"] >= SHOWN:
        sentence += f"; the strongest sink on a bias is in “{top[0]}” ({text(top[1])} % of heads)"
    return sentence + "."
