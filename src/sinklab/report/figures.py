"""Figures of runs, suites and assessments, such as curves over training steps, checkpoints and sequence lengths."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sinklab.assessing.assessment import Assessment
from sinklab.assessing.part import LOSS_ADDED
from sinklab.experiments.documents import CellSummary
from sinklab.measuring.measurement import Measurement
from sinklab.plots import PlotAxis
from sinklab.report.cells import averaged, cell_rows, curve
from sinklab.report.charts import STEPS, Drawing, Figure, HeatmapAxis, heatmaps, layer_axis, lines, scale_over, scatter
from sinklab.report.data import ReportData, ReportedRun, rates_by_eps
from sinklab.report.measurement_figures import details_figures, importance_figures
from sinklab.survey import suites
from sinklab.tables import SINK_1

SPREAD = (("low", "lowest seed", ".3f"), ("high", "highest seed", ".3f"), ("runs", "runs", "d"))
SYMLOG_RATIO = 100
"""Minimum ratio of the last checkpoint's step to the first step above 0 for a symlog axis.

The early checkpoints of public runs are often at powers of two.
"""
FEWEST = 2
"""Minimum number of sequence lengths for a figure by length."""


def figures(data: ReportData) -> list[Figure]:
    """Draw all figures of runs, suites and assessments that have data, in page order; sweeps are not included."""
    made = [
        *suite_figures(data),
        length_figure(data.summary_cells),
        _sink_by_step(data),
        *importance_figures(data),
        *details_figures(data),
        _norm_ratio(data),
        _loss(data),
        *assessment_figures(data),
    ]
    return [figure for figure in made if figure is not None]


def _sink_by_step(data: ReportData) -> Figure | None:
    elsewhere = sorted({row.later_sink[0] for row in cell_rows(data) if row.later_sink})
    rows: list[dict[str, Any]] = []
    for position in [1, *elsewhere][:3]:
        where = "first token" if position == 1 else f"position {position}"
        rows += curve(data.runs, lambda one, k=position: dict(enumerate(one.sink_rate, 1)).get(k), where)
    rows += curve(data.runs, lambda one: one.sink_rate_bias, "added sink")
    if not rows:
        return None
    places = {row["where"] for row in rows}
    caption = (
        f"Share of (sequence, layer, head) triples whose importance exceeds ε = {data.eps}, at every evaluation. "
        "The threshold is applied to each sequence before any averaging. "
        + ("The line style indicates the position of the sink. " if len(places) > 1 else "")
        + (
            "An added sink is a bias, a sink logit, a sink token, registers or the remainder of stick-breaking. "
            if "added sink" in places
            else ""
        )
        + _band(data)
    )
    title = f"Sink rate (percent of heads, ε = {data.eps})"
    rate = PlotAxis(title, "value", "percent", at_least=1, format="~g", precision=".2f")
    chart = _over_steps(rows, data, rate)
    return Figure("sink-by-step", "Sink rate during training", caption, [chart])


def _loss(data: ReportData) -> Figure | None:
    rows = curve(data.runs, lambda one: one.valid_loss, "validation")
    rows += curve(data.runs, lambda one: one.train_loss, "training")
    if not rows:
        return None
    caption = (
        "Mean next-token cross-entropy on held-out documents (solid) and on training batches (dashed). "
        "Sinks should be compared only between models of similar loss. " + _band(data)
    )
    loss = PlotAxis("Loss (nats per token)", "value", zero=False, precision=".3f")
    chart = _over_steps(rows, data, loss)
    return Figure("loss-by-step", "Loss during training", caption, [chart])


def _over_steps(rows: Sequence[dict[str, Any]], data: ReportData, y: PlotAxis) -> Drawing:
    return lines(rows, STEPS, y, order=data.cells, dash="where", band=("low", "high"), tips=SPREAD)


def _norm_ratio(data: ReportData) -> Figure | None:
    rows = averaged(
        ("cell", "layer"),
        (
            (run.cell, layer, ratio)
            for run in data.runs
            for layer, ratio in enumerate(run.latest.hidden_norm_ratio)
            if math.isfinite(ratio)
        ),
    )
    if not rows:
        return None
    infinite = any(run.latest.largest_norm_ratio == math.inf for run in data.runs)
    caption = (
        "Norm of the hidden state at the first position relative to the mean norm at the other positions, after each "
        "block (for the last block, before the final normalisation). A ratio of 1 (dashed line) means that the first "
        "token does not differ from the others; large ratios indicate the massive activations that accompany a sink. "
        + ("Infinite ratios (all other norms are zero) are omitted. " if infinite else "")
        + _band(data)
    )
    x, title = layer_axis(rows, "After block (0 is the embedding)"), "Norm ratio (first token / mean of the others)"
    y = PlotAxis(title, "value", "ratio", scale="auto", format="~g", precision=".3f")
    chart = lines(rows, x, y, order=data.cells, band=("low", "high"), reference=1.0, tips=SPREAD)
    return Figure("norm-ratio", "Norm ratio of the first token's hidden state", caption, [chart])


def _band(data: ReportData) -> str:
    several = any(len(data.runs_of(cell)) > 1 for cell in data.cells)
    return "Lines are means over seeds, and bands extend from the lowest to the highest seed." if several else ""


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
    caption = (
        "Sink rate of the first token of the same sequences truncated to different lengths, for several thresholds ε. "
        "Points are medians over draws of sequences, and bands extend from the minimum to the maximum."
    )
    x = PlotAxis("Tokens per sequence", "length", "tokens", scale="log", whole=True, precision="d", ticks=lengths)
    y = PlotAxis(f"{SINK_1} (percent of heads)", "median", "percent", domain=(0, 100), precision=".1f")
    tips = (("name", "cell", ""), ("low", "from", ".1f"), ("high", "to", ".1f"))
    thresholds = list(dict.fromkeys(row["cell"] for row in rows))
    chart = lines(rows, x, y, order=thresholds, band=("low", "high"), tips=tips)
    return Figure("sink-by-length", "Sink rate by threshold and sequence length", caption, [chart])


def suite_figures(data: ReportData) -> list[Figure]:
    """Draw the figures of each suite, in the order of `data.suites`."""
    found: list[Figure] = []
    for number, suite in enumerate(data.suites):
        measured = [(run, run.measurement) for _, run in suite.runs(data) if run.measurement]
        match suite.document:
            case suites.FamiliesDocument() as document if document.measured:
                found.append(_families(document, number))
            case suites.DomainsDocument() if measured:
                found.append(_domains(measured, number))
            case suites.ComparisonDocument() if measured:
                found.append(_comparison(measured, data.cells, number))
            case suites.CheckpointsDocument() as document if measured:
                found += _checkpoints(document, measured[0][1].eps, number)
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
    caption = (
        "Sink rate of the first token and loss on each text, ordered by decreasing sink rate. Model, tokenizer and "
        "number of tokens per sequence are the same for all texts. A text may have fewer sequences than requested; the "
        "table and the tooltips of the points state their number."
    )
    return Figure(f"domains-{number}", "Sink rate by text domain", caption, drawn)


def _comparison(measured: Measured, cells: Sequence[str], number: int) -> Figure:
    rows = [
        {"cell": run.cell, "layer": layer, "value": float(rate)}
        for run, one in measured
        for layer, rate in enumerate(one.sink_rate_of_heads().mean(1), start=1)
    ]
    eps = measured[0][1].eps
    caption = (
        f"Share of the (sequence, head) pairs of a layer in which the importance of position 1 exceeds "
        f"ε = {eps:g}. The mean over layers is {SINK_1}."
    )
    title = f"{SINK_1} of the layer (percent of heads, ε = {eps:g})"
    y = PlotAxis(title, "value", "percent", domain=(0, 100), precision=".2f")
    chart = lines(rows, layer_axis(rows, "Layer"), y, order=cells)
    return Figure(f"comparison-layers-{number}", "Sink rate by layer", caption, [chart])


def _families(document: suites.FamiliesDocument, number: int) -> Figure:
    found = document.measured
    about = {name: {"model": name, "family": one.family, "parameters": one.parameters} for name, one in found.items()}
    x = PlotAxis("Parameters", "parameters", scale="log", format="~s", precision=",d")
    y = PlotAxis(f"{SINK_1} (percent of heads)", "value", f"{SINK_1}, percent", domain=(0, 100), precision=".2f")
    rows = [{**about[name], "value": one.sink_1} for name, one in found.items()]
    published = [{**about[name], "value": one.published} for name, one in found.items() if one.published is not None]
    families, tips = list(dict.fromkeys(one.family for one in found.values())), [("model", "model", "")]
    chart = scatter(rows, x, y, "family", families, join="family", published=published, tips=tips)
    caption = (
        "Sink rate of the first token by number of parameters; lines connect the models of a family. Diamonds are the "
        "values of arXiv 2410.10781, shown only for the paper's setting (100 sequences of 64 tokens, ε = 0.3, the same "
        "kind of input). The paper's text sample was not released."
    )
    return Figure(f"families-{number}", "Measured and published sink rates", caption, [chart])


CHECKPOINT_CURVES = {
    "sink_1": f"{SINK_1} (percent of heads)",
    "sink_bias": "Sink rate of the bias (percent of heads)",
    "uniform_ratio": "Importance of the first token (times uniform)",
    "loss": "Loss (nats per token)",
    "norm_ratio": "Norm ratio of the first token",
}
"""Quantities plotted over checkpoints: axis titles by field of `MeasuredCheckpoint`."""


def _checkpoints(document: suites.CheckpointsDocument, eps: float, number: int) -> list[Figure]:
    """Draw a suite of checkpoints: curves over steps or tokens, and the sink rate by layer and checkpoint."""
    found = sorted(document.measured.values(), key=lambda one: one.step)
    steps = [one.step for one in found if one.step > 0]
    far = bool(steps) and steps[-1] >= SYMLOG_RATIO * steps[0]
    counted, title = ("tokens", "Training tokens") if found[0].unit == "tokens" else ("steps", "Training step")
    ticks = [0, *(10**power for power in range(len(str(found[-1].step))))] if far else None
    scale = "symlog" if far else "linear"
    x = PlotAxis(title, "step", found[0].unit, scale=scale, zero=False, whole=True, precision=",d", ticks=ticks)
    drawn = []
    for field, title in CHECKPOINT_CURVES.items():
        values = [(one, getattr(one, field)) for one in found]
        rows = [
            {"step": one.step, "checkpoint": one.checkpoint, "value": value}
            for one, value in values
            if value is not None
        ]
        if rows:
            y = PlotAxis(title, "value", "value", zero=field != "loss", precision=".3f")
            drawn.append(lines(rows, x, y, None, tips=[("checkpoint", "checkpoint", "")]))
    caption = (
        "All checkpoints are measured on the same sequences. The charts show, if measured, the share of (sequence, "
        f"layer, head) triples in which the importance of the first token exceeds ε = {eps:g}, this importance "
        "relative to uniform attention, the sink rate of a bias, the loss, and the norm of the first token's hidden "
        "state relative to the mean of the others (maximum over blocks)."
    )
    curves = Figure(f"checkpoints-{number}", "Emergence of the sink", caption, drawn, small=True)
    layers_LS = np.array([one.by_layer for one in found]).T
    layers = heatmaps(
        f"checkpoint-layers-{number}",
        "Sink by layer and checkpoint",
        f"Share of the (sequence, head) pairs of a layer in which the importance of the first token exceeds ε = "
        f"{eps:g}. Checkpoints are ordered by {counted}, from {found[0].step:,} to {found[-1].step:,}.",
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
        if (figure := _answers(one, of, number)) is not None:
            found.append(figure)
        for name, part in one.results.items():
            figure = part.figure()
            order = figure.series or list(dict.fromkeys(str(row[figure.colour]) for row in figure.rows))
            axes = (figure.rows, figure.x, figure.y, figure.colour, order)
            more: Any = {"reference": figure.reference, "tips": figure.tooltip}
            if figure.kind == "lines":
                chart = lines(*axes, **more)
            else:
                chart = scatter(*axes, join=figure.y.field if figure.kind == "dots" else None, **more)
            found.append(Figure(f"{name}-{number}", figure.title + of, figure.caption, [chart]))
    return found


def _answers(document: Assessment, of: str, number: int) -> Figure | None:
    """Draw the added losses of the answers of an assessment; None if no answer has one."""
    kinds = ("loss without the sink", "cost of the sink", "other changes")
    rows = [
        {
            "change": one.lost or one.gained or one.answer,
            "kind": kinds[0 if one.lost else 1 if one.gained else 2],
            "question": question,
            "added": one.added,
        }
        for question, one in document.answers()
        if one.added is not None
    ]
    if not rows:
        return None
    rows.sort(key=lambda row: kinds.index(row["kind"]))
    changes = PlotAxis("", "change", order=list(dict.fromkeys(row["change"] for row in rows)))
    added = PlotAxis(LOSS_ADDED, "added", "loss added, nats per token", format="+~g", precision="+.4f")
    chart = scatter(rows, added, changes, "kind", kinds, reference=0.0, tips=[("question", "question", "")])
    caption = (
        "Loss that each change adds relative to the unchanged model (dashed line), or the difference described in its "
        "label. The table lists the question that each change answers."
    )
    return Figure(f"answers-chart-{number}", f"Loss added by each change{of}", caption, [chart])
