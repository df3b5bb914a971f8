"""The figures of suites: domains side by side, a comparison by layer, families by size, checkpoints by step.

As in `charts.py`, names are data and nothing else.
"""

from collections.abc import Sequence

import altair as alt
import numpy as np

from sinklab.measuring.measurement import Measurement
from sinklab.report import theme
from sinklab.report.charts import HEIGHT, ChartRows, Drawing, Width, cell_colour, legend
from sinklab.report.checkpoint_figures import checkpoint_figures
from sinklab.report.data import ReportData, ReportedRun, Suite
from sinklab.report.figure import Figure
from sinklab.survey.documents import CheckpointsDocument, ComparisonDocument, DomainsDocument, FamiliesDocument

ROW_HEIGHT = 22
LABEL_WIDTH = 220

Measured = list[tuple[ReportedRun, Measurement]]


def suite_figures(data: ReportData, width: Width) -> list[Figure]:
    """What each suite is made for, in the order of the directories."""
    return [figure for number, suite in enumerate(data.suites) for figure in _figures(suite, data, width, number)]


def _figures(suite: Suite, data: ReportData, width: Width, number: int) -> list[Figure]:
    measured = [(run, run.measurement) for _, run in suite.runs(data) if run.measurement]
    match suite.document:
        case DomainsDocument():
            return [_domains(measured, width, number)] if measured else []
        case ComparisonDocument():
            return [_comparison(measured, data.cells, width, number)] if measured else []
        case FamiliesDocument() as document:
            return _families(document, width, number)
        case CheckpointsDocument() as document:
            return checkpoint_figures(document.measured, measured[0][1].eps, width, number) if measured else []


def _domains(measured: Measured, width: Width, number: int) -> Figure:
    measured = sorted(measured, key=lambda pair: -pair[1].sink_rate[0])
    order = [run.cell for run, _ in measured]
    rates = [
        _row(run, one, f"ε = {eps}", rate[0])
        for run, one in measured
        for eps, rate in (one.sink_rates or {f"{one.eps:g}": one.sink_rate}).items()
    ]
    drawn = [_values_by_domain(rates, order, "Sink₁ (percent of heads)", width)]
    losses = [_row(run, one, "loss", one.loss) for run, one in measured if one.loss is not None]
    if losses:
        drawn.append(_values_by_domain(losses, order, "Loss (nats per token)", width, zero=False))
    caption = (
        "Sink rate of the first token and loss on each text, the text with the strongest sink first. One model, one "
        "tokenizer, the same number of tokens per sequence. A text may have fewer sequences than were asked for; the "
        "table and the points say how many."
    )
    return Figure(f"domains-{number}", "The sink by domain", caption, drawn)


def _row(run: ReportedRun, measurement: Measurement, series: str, value: float) -> dict[str, object]:
    return {"domain": run.cell, "series": series, "value": value, "sequences": measurement.sequences}


def _comparison(measured: Measured, cells: Sequence[str], width: Width, number: int) -> Figure:
    rows = [
        {"cell": run.cell, "layer": layer, "value": float(100 * np.mean(first_NH > one.eps))}
        for run, one in measured
        for layer, first_NH in enumerate(np.swapaxes(one.importance_first, 0, 1), start=1)
    ]
    eps = measured[0][1].eps
    caption = (
        f"Share of the (sequence, head) pairs of a layer in which the importance of position 1 exceeds "
        f"ε = {eps:g}. The mean over layers is Sink₁."
    )
    return Figure(
        f"comparison-layers-{number}", "The sink by layer", caption, [_sink_by_layer(rows, cells, eps, width)]
    )


def _families(document: FamiliesDocument, width: Width, number: int) -> list[Figure]:
    rows = [
        {"model": name, "family": model.family, "parameters": model.parameters, "what": what, "value": value}
        for name, model in document.measured.items()
        for what, value in (("measured", model.sink_1), ("published", model.published))
        if value is not None
    ]
    if not rows:
        return []
    caption = (
        "Sink rate of the first token against the number of parameters, joined within a family. Diamonds are what "
        "arXiv 2410.10781 prints; they stand here only where the setting is the paper's (100 sequences of 64 tokens, "
        "ε = 0.3, the same kind of input). The text that the paper measured on was not released."
    )
    return [Figure(f"families-{number}", "Measured and published", caption, [_sink_by_size(rows, width)])]


def _values_by_domain(
    rows: ChartRows, domains: Sequence[str], title: str, width: Width = 640, zero: bool = True
) -> Drawing:
    """A row of points per domain, joined where there are several thresholds.

    Args:
        rows: `domain, series, value, sequences`; `series` names the threshold, or is empty where there is one kind.
        domains: in the order to be shown.
        title: of the values' axis, with its unit.
        zero: whether the axis begins at zero.
    """
    series = list(dict.fromkeys(row["series"] for row in rows))
    base = alt.Chart(alt.Data(values=list(rows))).encode(
        y=alt.Y(
            "domain:N",
            title=None,
            sort=list(domains),
            axis=alt.Axis(grid=True, ticks=False, domain=False, labelLimit=LABEL_WIDTH),
        ),
        x=alt.X("value:Q", title=title, scale=alt.Scale(zero=zero), axis=alt.Axis(grid=False, tickCount=8)),
    )
    tooltip = [
        alt.Tooltip("domain:N", title="domain"),
        alt.Tooltip("series:N", title="series"),
        alt.Tooltip("value:Q", title="value", format=".4f"),
        alt.Tooltip("sequences:Q", title="sequences"),
    ]
    colour = alt.Color(
        "series:N",
        title=None,
        scale=alt.Scale(domain=series, range=theme.PALETTE[: len(series)]),
        legend=legend(min(4, len(series))) if len(series) > 1 else None,
    )
    joined = base.mark_line(strokeWidth=1.2, opacity=0.35, color="currentColor").encode(detail="domain:N")
    points = base.mark_point(size=64, opacity=1).encode(color=colour, tooltip=tooltip)
    return alt.layer(joined, points).properties(width=width, height=alt.Step(ROW_HEIGHT))


def _sink_by_layer(rows: ChartRows, cells: Sequence[str], eps: float, width: Width = 640) -> Drawing:
    """Sink rate of the first token in every layer; rows: `cell, layer` (1-based), `value` in percent."""
    base = alt.Chart(alt.Data(values=list(rows))).encode(
        x=alt.X("layer:Q", title="Layer", axis=alt.Axis(grid=False, format="d", values=_some(rows, "layer"))),
        y=alt.Y(
            "value:Q",
            title=f"Sink₁ of the layer (percent of heads, ε = {eps:g})",
            scale=alt.Scale(domain=[0, 100]),
        ),
        color=cell_colour(cells),
    )
    tooltip = [
        alt.Tooltip("cell:N", title="model"),
        alt.Tooltip("layer:Q", title="layer"),
        alt.Tooltip("value:Q", title="percent", format=".2f"),
    ]
    points = base.mark_point(size=42).encode(tooltip=tooltip)
    return alt.layer(base.mark_line(), points).properties(width=width, height=HEIGHT)


def _sink_by_size(rows: ChartRows, width: Width = 640) -> Drawing:
    """Sink rate against the number of parameters: measured, joined by family, and published.

    Args:
        rows: `model, family, parameters, what` ("measured" or "published"), `value` in percent.
    """
    families = list(dict.fromkeys(row["family"] for row in rows))
    base = alt.Chart(alt.Data(values=list(rows))).encode(
        x=alt.X(
            "parameters:Q",
            title="Parameters (log scale)",
            scale=alt.Scale(type="log", nice=False, padding=24),
            axis=alt.Axis(grid=False, format="~s", tickCount=6),
        ),
        y=alt.Y("value:Q", title="Sink₁ (percent of heads)", scale=alt.Scale(domain=[0, 100])),
        color=cell_colour(families, "family"),
    )
    shape = alt.Shape(
        "what:N",
        title=None,
        scale=alt.Scale(domain=["measured", "published"], range=["circle", "diamond"]),
        legend=alt.Legend(
            orient="top", direction="horizontal", symbolFillColor="transparent", symbolStrokeColor="gray"
        ),
    )
    tooltip = [
        alt.Tooltip("model:N", title="model"),
        alt.Tooltip("what:N", title="what"),
        alt.Tooltip("parameters:Q", title="parameters", format=",d"),
        alt.Tooltip("value:Q", title="Sink₁, percent", format=".2f"),
    ]
    lines = base.transform_filter(alt.datum.what == "measured").mark_line(strokeWidth=1.4)
    measured = base.transform_filter(alt.datum.what == "measured").mark_point(size=56).encode(shape=shape)
    published = base.transform_filter(alt.datum.what == "published").mark_point(size=110, filled=False, strokeWidth=2)
    points = [measured.encode(tooltip=tooltip), published.encode(shape=shape, tooltip=tooltip)]
    return alt.layer(lines, *points).properties(width=width, height=HEIGHT)


def _some(rows: ChartRows, key: str) -> list[int]:
    """The whole numbers that occur, at most fourteen of them, evenly spaced."""
    found = sorted({row[key] for row in rows})
    return found[:: -(-len(found) // 14)]
