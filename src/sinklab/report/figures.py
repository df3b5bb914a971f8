"""Which charts the data at hand allows, each with its title and a caption that says how it was computed."""

import math
from collections.abc import Sequence

from sinklab.report import charts
from sinklab.report.assessment_page import assessment_figures
from sinklab.report.data import ReportData
from sinklab.report.details_figures import details_figures
from sinklab.report.figure import Figure
from sinklab.report.importance_figures import importance_figures
from sinklab.report.length_figures import length_figure
from sinklab.report.suite_figures import suite_figures
from sinklab.report.summary import CurvePoint, by_key, cell_rows, curve, over_seeds


def figures(data: ReportData, width: int | str = "container") -> list[Figure]:
    """All figures the data allows, in reading order. `width` is in pixels, or "container" inside a page."""
    made = [
        *suite_figures(data, width),
        length_figure(data.summary_cells, width),
        _sink_by_step(data, width),
        *importance_figures(data, width),
        *details_figures(data, width),
        _norm_ratio(data, width),
        _loss(data, width),
        *assessment_figures(data.assessed, width),
    ]
    return [figure for figure in made if figure is not None]


def _sink_by_step(data: ReportData, width: int | str) -> Figure | None:
    elsewhere = sorted({row.sink_elsewhere[0] for row in cell_rows(data) if row.sink_elsewhere})
    positions = [1, *elsewhere][:3]
    rows: list[CurvePoint] = []
    for position in positions:
        where = "first token" if position == 1 else f"position {position}"
        rows += curve(data.runs, lambda one, k=position: _at(one.sink_rate, k - 1), where)
    rows += curve(data.runs, lambda one: one.sink_rate_bias, "bias or sink token")
    if not rows:
        return None
    eps = data.runs[0].eps
    caption = (
        f"Share of (sequence, layer, head) triples whose importance exceeds ε = {eps:g}, at every evaluation. "
        "The threshold is applied to each sequence before any averaging. "
        + ("Line styles tell where the attention goes. " if len({row["where"] for row in rows}) > 1 else "")
        + _band(data)
    )
    chart = charts.sink_by_step(rows, data.cells, eps, width)
    return Figure("sink-by-step", "The sink while the model trains", caption, [chart])


def _loss(data: ReportData, width: int | str) -> Figure | None:
    rows = curve(data.runs, lambda one: one.valid_loss, "validation")
    rows += curve(data.runs, lambda one: one.train_loss, "training")
    if not rows:
        return None
    caption = (
        "Mean cross-entropy of the next token on held-out documents (solid) and on the training batches (dashed). "
        "Sinks are worth comparing only between models that have learned about equally well. " + _band(data)
    )
    return Figure(
        "loss-by-step", "Loss while the model trains", caption, [charts.loss_by_step(rows, data.cells, width)]
    )


def _norm_ratio(data: ReportData, width: int | str) -> Figure | None:
    found = by_key(
        ((run.cell, layer), ratio)
        for run in data.runs
        for layer, ratio in enumerate(run.latest.hidden_norm_ratio)
        if math.isfinite(ratio)
    )
    if not found:
        return None
    infinite = any(run.latest.largest_norm_ratio == math.inf for run in data.runs)
    rows = [{"cell": cell, "layer": layer, **over_seeds(numbers)} for (cell, layer), numbers in found.items()]
    caption = (
        "Norm of the hidden state at the first position over the mean norm at the others, after each block (the last "
        "one before the final normalisation). A ratio of 1, the dotted line, means that the first token is like any "
        "other; large ratios are the massive activations that come with a sink. "
        + ("Where the others are all zero the ratio is infinite, and left out. " if infinite else "")
        + _band(data)
    )
    chart = charts.norm_ratio_by_layer(rows, data.cells, width)
    return Figure("norm-ratio", "Size of the first token's hidden state", caption, [chart])


def _at(values: Sequence[float | None], index: int) -> float | None:
    return values[index] if index < len(values) else None


def _band(data: ReportData) -> str:
    several = any(len(data.runs_of(cell)) > 1 for cell in data.cells)
    return "Lines are means over seeds, bands reach from the lowest to the highest seed." if several else ""
