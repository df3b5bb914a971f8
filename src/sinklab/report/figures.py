"""Figures of runs, suites and assessments, such as curves over training steps, checkpoints and sequence lengths."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sinklab.assessing.assess_model import Assessment
from sinklab.assessing.part import LOSS_ADDED
from sinklab.assessing.settings import TOLERANCE
from sinklab.experiments.documents import CellSummary
from sinklab.measuring.findings import LEVELS
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.registry import METRICS, Evaluation
from sinklab.report.cells import later_sink_of_cell
from sinklab.report.charts import (
    KEYS,
    QUERIES,
    STEPS,
    ColourScale,
    Figure,
    HeatmapAxis,
    heatmaps,
    layer_axis,
    lines,
    scale_over,
    scatter,
)
from sinklab.report.data import ReportData, ReportedRun, by_layer, over_seeds, rates_by_eps, run_table
from sinklab.report.html import VERDICT_COLOURS, caption
from sinklab.report.measurement_figures import details_figures, importance_figures
from sinklab.schema import finite_or_none
from sinklab.survey.suites import SavedCheckpoint
from sinklab.tables import SINK_1, PlotAxis

SPREAD = (("low", "lowest seed", ".3f"), ("high", "highest seed", ".3f"), ("runs", "runs", "d"))
SYMLOG_RATIO = 100
"""Minimum ratio of the last checkpoint's step to the first step above 0 for a symlog axis.

The early checkpoints of public runs are often at powers of two.
"""
FAR = 10
"""Ratio of the largest added loss to the tolerance above which the axis of settings is symlog."""
MOST_MAPS, SIDE, SQUARE = 6, 32, 220
"""Maximum number of attention maps, number of tokens in a map, and its height in pixels."""
MOST_CURVES = 12
"""Maximum number of cells in the figure at the top of a sweep."""
FEWEST = 2
"""Minimum number of sequence lengths for a figure by length."""


def figures(data: ReportData) -> list[Figure]:
    """Draw all figures of runs, suites and assessments that have data, in page order; sweeps are not included."""
    made = [
        *suite_figures(data),
        length_figure(data.summary_cells),
        _maps(data),
        _sink_by_step(data),
        *importance_figures(data),
        *details_figures(data),
        _norm_ratio(data),
        _loss(data),
        *assessment_figures(data),
    ]
    return [figure for figure in made if figure is not None]


def _sink_by_step(data: ReportData) -> Figure | None:
    elsewhere = sorted({later[0] for cell in data.cells if (later := later_sink_of_cell(data, cell))})
    read = {
        "first token" if k == 1 else f"position {k}": lambda one, k=k: dict(enumerate(one.sink_rate, 1)).get(k)
        for k in [1, *elsewhere][:3]
    }
    rows = _by_step(data, {**read, "added sink": METRICS["sink_bias"].read})
    if not rows:
        return None
    places = {row["metric"] for row in rows}
    about = caption("sink_by_step", eps=data.eps, places=places, several=_several(data))
    title = f"Sink rate (percent of heads, ε = {data.eps})"
    rate = PlotAxis(title, "value", "percent", at_least=1, precision=".2f")
    chart = lines(rows, STEPS, rate, order=data.cells, dash="metric", band=("low", "high"), tips=SPREAD, ends=True)
    return Figure("sink-by-step", "Sink rate during training", about, [chart])


def leading_figures(data: ReportData, drawn: Sequence[Figure]) -> list[Figure]:
    """Return the figures at the top of the page: attention maps and the growth of the sink, or else the first figure.

    The growth of a packed sweep of one experiment is drawn from its packed metrics. Pages with sweeps of several
    experiments, and those with an explorer of the heads, have none.
    """
    by_key = {figure.key: figure for figure in drawn}
    first = ["importance-heads", *(key for key in by_key if key.startswith("comparison-layers"))]
    wanted = first if data.suites and data.suites[0].document.models else ["maps", "sink-by-step"]
    leading = [by_key[key] for key in wanted if key in by_key]
    if not data.sweeps:
        return [] if any(run.measurement and run.measurement.explored for run in data.runs) else leading or [*drawn[:1]]
    if leading or len(data.sweeps) > 1 or len(data.sweeps[0].summary.experiments) > 1:
        return leading
    [sweep] = data.sweeps
    runs = [
        ReportedRun(Path(run.directory), name, run.seed, history=sweep.history(run))
        for name, cell in sweep.summary.cells.items()
        for run in cell.runs
    ]
    growth = _sink_by_step(replace(data, runs=runs)) if len(sweep.summary.cells) <= MOST_CURVES else None
    return [] if growth is None else [growth]


def _maps(data: ReportData) -> Figure | None:
    """Draw the attention map of the strongest head of every trained model, if there are few; None without maps."""
    first = {run.cell: (run, run.measurement) for run in reversed(data.runs) if run.trained and run.measurement}
    maps = []
    for cell, (run, one) in reversed(first.items()):
        if one.explored is not None:
            heads = [(layer - 1, head - 1) for layer, head in one.explored.heads]
            strongest = max(range(len(heads)), key=lambda at: one.importance[*heads[at], 0])
            weights_SS = (one.explored.attention[strongest, :SIDE, :SIDE] / LEVELS) ** 2
            seen_SS = np.where(np.tri(len(weights_SS), dtype=bool), weights_SS, np.nan)
            known = {"sink_1": one.sink_rate[0], "valid_loss": run.latest.valid_loss}
            if (summary := data.summary_cells.get(cell)) is not None:  # the numbers of the tables
                known |= {name: found.median for name in known if (found := summary.estimate(name))}
            forms = zip(known.values(), ("{:.0f} %", "loss {:.2f}"), strict=True)
            numbers = ", ".join(form.format(value) for value, form in forms if value is not None)
            maps.append((f"{cell}: {numbers}", seen_SS))
    if not maps or len(maps) > MOST_MAPS:
        return None
    scale = ColourScale("attention", 0, 1)
    return heatmaps("maps", "Attention of the strongest head", caption("maps"), maps, scale, QUERIES, KEYS, SQUARE)


def _loss(data: ReportData) -> Figure | None:
    rows = _by_step(data, {"validation": METRICS["valid_loss"].read, "training": METRICS["train_loss"].read})
    if not rows:
        return None
    about = caption("loss_by_step", several=_several(data))
    loss = PlotAxis("Loss (nats per token)", "value", zero=False, precision=".3f")
    chart = lines(rows, STEPS, loss, order=data.cells, dash="metric", band=("low", "high"), tips=SPREAD)
    return Figure("loss-by-step", "Loss during training", about, [chart])


def _by_step(data: ReportData, read: Mapping[str, Callable[[Evaluation], float | None]]) -> list[dict[str, Any]]:
    """Return numbers of the evaluations, averaged over seeds, in the order of `read`."""
    rows = over_seeds(run_table(data.runs, {}, read), "cell", "metric", "step")
    return sorted(rows, key=lambda row: [*read].index(row["metric"]))


def _norm_ratio(data: ReportData) -> Figure | None:
    rows = by_layer((run.cell, "", run.latest.hidden_norm_ratio) for run in data.runs)
    if not rows:
        return None
    infinite = any(run.latest.largest_norm_ratio == math.inf for run in data.runs)
    about = caption("norm_ratio", infinite=infinite, several=_several(data))
    x, title = layer_axis(rows, "After block (0 is the embedding)"), "Norm ratio (first token / mean of the others)"
    y = PlotAxis(title, "value", "ratio", scale="auto", format="~g", precision=".3f")
    chart = lines(rows, x, y, order=data.cells, band=("low", "high"), reference=1.0, tips=SPREAD)
    return Figure("norm-ratio", "Norm ratio of the first token's hidden state", about, [chart])


def _several(data: ReportData) -> bool:
    return any(len(data.runs_of(cell)) > 1 for cell in data.cells)


def length_figure(cells: Mapping[str, CellSummary]) -> Figure | None:
    """Draw Sink_1 by eps and sequence length (figure 3 of the paper); None if the cells have fewer than two lengths.

    Cells whose changes do not include both `eps` and `length` are omitted.
    """
    rows: list[dict[str, Any]] = []
    for name, cell in cells.items():
        eps, length, found = cell.change.get("eps"), cell.change.get("length"), cell.values.get("sink_1")
        if isinstance(eps, float) and isinstance(length, int) and found is not None:
            numbers = {"median": found.median, "low": found.smallest, "high": found.largest}
            where = name.rpartition("/")[0]  # the directory, if several have cells of this name
            label = f"ε = {eps:g}" + (f", {where}" if where else "")
            rows.append({"cell": label, "where": where, "name": name, "eps": eps, "length": length, **numbers})
    lengths = sorted({row["length"] for row in rows})
    if len(lengths) < FEWEST:
        return None
    rows.sort(key=lambda row: (row["where"], row["eps"], row["length"]))
    about = caption("sink_by_length")
    x = PlotAxis("Tokens per sequence", "length", "tokens", scale="log", whole=True, precision="d", ticks=lengths)
    y = PlotAxis(f"{SINK_1} (percent of heads)", "median", "percent", domain=(0, 100), precision=".1f")
    tips = (("name", "cell", ""), ("low", "from", ".1f"), ("high", "to", ".1f"))
    thresholds = list(dict.fromkeys(row["cell"] for row in rows))
    chart = lines(rows, x, y, order=thresholds, band=("low", "high"), tips=tips)
    return Figure("sink-by-length", "Sink rate by threshold and sequence length", about, [chart])


def suite_figures(data: ReportData) -> list[Figure]:
    """Draw the figures of each suite, in the order of `data.suites`."""
    found: list[Figure] = []
    for number, suite in enumerate(data.suites):
        measured = [(run, run.measurement) for _, run in suite.runs(data) if run.measurement]
        if measured:
            match suite.document.kind:
                case "domains":
                    found.append(_domains(measured, number))
                case "models":
                    found.append(_comparison(measured, data.cells, number))
                case "checkpoints":
                    found += _checkpoints(measured, data.checkpoints, number)
    return found


Measured = list[tuple[ReportedRun, Measurement]]


def _domains(measured: Measured, number: int) -> Figure:
    measured = sorted(measured, key=lambda pair: -pair[1].sink_rate[0])
    domain = PlotAxis("", "domain", "domain", order=[run.cell for run, _ in measured])
    rates = [
        {"domain": run.cell, "threshold": f"ε = {eps}", "value": rate[0], "sequences": one.sequences}
        for run, one in measured
        for eps, rate in rates_by_eps(one).items()
    ]
    losses = [
        {"domain": run.cell, "threshold": "loss", "value": one.loss, "sequences": one.sequences}
        for run, one in measured
        if one.loss is not None
    ]
    drawn = []
    for rows, title, zero in ((rates, f"{SINK_1} (percent of heads)", True), (losses, "Loss (nats per token)", False)):
        if rows:
            x, thresholds = PlotAxis(title, "value", zero=zero), list(dict.fromkeys(row["threshold"] for row in rows))
            tips = [("sequences", "sequences", "d")]
            drawn.append(scatter(rows, x, domain, "threshold", thresholds, join="domain", tips=tips))
    about = caption("domains")
    return Figure(f"domains-{number}", "Sink rate by text domain", about, drawn)


def _comparison(measured: Measured, cells: Sequence[str], number: int) -> Figure:
    rows = by_layer(((run.cell, "", one.sink_rate_of_heads().mean(1)) for run, one in measured), 1)
    eps = measured[0][1].eps
    about = caption("comparison_layers", eps=f"{eps:g}")
    title = f"{SINK_1} of the layer (percent of heads, ε = {eps:g})"
    y = PlotAxis(title, "value", "percent", domain=(0, 100), precision=".2f")
    chart = lines(rows, layer_axis(rows, "Layer"), y, order=cells)
    return Figure(f"comparison-layers-{number}", "Sink rate by layer", about, [chart])


CHECKPOINT_CURVES: Mapping[str, Callable[[Measurement], float | None]] = {
    f"{SINK_1} (percent of heads)": lambda m: m.sink_rate[0],
    "Sink rate of the bias (percent of heads)": lambda m: m.sink_rate_bias,
    "Importance of the first token (times uniform)": lambda m: m.uniform_ratio[0],
    "Loss (nats per token)": lambda m: m.loss,
    "Norm ratio of the first token": lambda m: finite_or_none(max(m.hidden_norm_ratio or [], default=None)),
}
"""Numbers plotted over checkpoints, by axis title."""


def _checkpoints(measured: Measured, saved: Mapping[str, SavedCheckpoint], number: int) -> list[Figure]:
    """Draw a suite of checkpoints: curves over steps or tokens, and the sink rate by layer and checkpoint."""
    found = sorted(((saved[run.cell], one) for run, one in measured), key=lambda pair: pair[0].step)
    (first, m), (last, _) = found[0], found[-1]
    steps = [one.step for one, _ in found if one.step > 0]
    far = bool(steps) and steps[-1] >= SYMLOG_RATIO * steps[0]
    counted, title = ("tokens", "Training tokens") if first.unit == "tokens" else ("steps", "Training step")
    ticks = [0, *(10**power for power in range(len(str(last.step))))] if far else None
    scale = "symlog" if far else "linear"
    x = PlotAxis(title, "step", first.unit, scale=scale, zero=False, whole=True, precision=",d", ticks=ticks)
    drawn = []
    for title, read in CHECKPOINT_CURVES.items():
        rows = [
            {"step": at.step, "checkpoint": at.checkpoint, "value": value}
            for at, one in found
            if (value := read(one)) is not None
        ]
        if rows:
            y = PlotAxis(title, "value", "value", zero=not title.startswith("Loss"), precision=".3f")
            drawn.append(lines(rows, x, y, None, tips=[("checkpoint", "checkpoint", "")]))
    about = caption("checkpoints", eps=f"{m.eps:g}")
    curves = Figure(f"checkpoints-{number}", "Emergence of the sink", about, drawn, small=True)
    layers_LS = np.array([one.sink_rate_of_heads().mean(1) for _, one in found]).T
    layers = heatmaps(
        f"checkpoint-layers-{number}",
        "Sink by layer and checkpoint",
        f"Share of the (sequence, head) pairs of a layer in which the importance of the first token exceeds ε = "
        f"{m.eps:g}. Checkpoints are ordered by {counted}, from {first.step:,} to {last.step:,}.",
        [("first token", layers_LS)],
        scale_over("percent of heads", [layers_LS]),
        columns=HeatmapAxis("Checkpoint"),
        small=False,
    )
    return [curves, layers]


def assessment_figures(data: ReportData) -> list[Figure]:
    """Draw the figures of every assessment; titles contain the model's name if there are several assessments."""
    found = []
    for number, one in enumerate(data.assessed):
        of = data.of_model(one)
        if (settings := settings_figure(one, of, number)) is not None:
            found.append(settings)
        for name, part in one.results.items():
            figure = part.figure()
            if not figure.rows:
                continue
            order = figure.series or list(dict.fromkeys(str(row[figure.colour]) for row in figure.rows))
            axes = (figure.rows, figure.x, figure.y, figure.colour, order)
            more: Any = {"reference": figure.reference, "tips": figure.tooltip}
            if figure.kind == "lines":
                chart = lines(*axes, **more)
            else:
                chart = scatter(*axes, join=figure.y.field if figure.kind == "dots" else None, **more)
            found.append(Figure(f"{name}-{number}", figure.title + of, figure.caption, [chart]))
    return found


def settings_figure(document: Assessment, of: str, number: int) -> Figure | None:
    """Draw the added losses of the settings of an assessment as bars, with the tolerance; None if there are none."""
    settings = document.settings()
    if not settings:
        return None
    rows = [
        {
            "setting": one.name,
            "verdict": one.verdict,
            "kind": one.kind,
            "added": one.added,
            "added_low": one.added - (one.error or 0.0),
            "added_high": one.added + (one.error or 0.0),
        }
        for one in settings
    ]
    least = document.tolerance or TOLERANCE
    far = max(abs(one.added) for one in settings) > FAR * least
    low = min(0.0, *(row["added_low"] for row in rows))
    high = max(document.tolerance, *(row["added_high"] for row in rows))
    powers = [least * 10**power for power in range(8) if least * 10**power <= max(abs(one.added) for one in settings)]
    added = PlotAxis(
        LOSS_ADDED,
        "added",
        "loss added, nats per token",
        scale="symlog" if far else "linear",
        constant=least,
        format="+~g",
        precision="+.4f",
        ticks=[*(-power for power in reversed(powers) if power <= -low), 0, *powers] if far else None,
        domain=(1.05 * low, 1.05 * high),
    )
    names = PlotAxis("", "setting", order=[row["setting"] for row in rows])
    shown: Any = {"reference": document.tolerance, "bars": VERDICT_COLOURS, "tips": [("kind", "kind", "")]}
    chart = scatter(rows, added, names, "verdict", list(VERDICT_COLOURS), **shown)
    about = caption("settings", tolerance=f"{document.tolerance:g}")
    return Figure(f"settings-{number}", f"Loss added by each setting{of}", about, [chart])
