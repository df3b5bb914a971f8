"""The charts of suites, plain rows in, an Altair chart out; as in `charts.py`, names are data and nothing else."""

from collections.abc import Sequence

import altair as alt

from sinklab.report import theme
from sinklab.report.charts import HEIGHT, Drawing, Rows, Width, cell_colour, legend

ROW_HEIGHT = 22
LABEL_WIDTH = 220


def values_by_domain(rows: Rows, domains: Sequence[str], title: str, width: Width = 640, zero: bool = True) -> Drawing:
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


def sink_by_layer(rows: Rows, cells: Sequence[str], eps: float, width: Width = 640) -> Drawing:
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


def sink_by_size(rows: Rows, width: Width = 640) -> Drawing:
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


def _some(rows: Rows, key: str) -> list[int]:
    """The whole numbers that occur, at most fourteen of them, evenly spaced."""
    found = sorted({row[key] for row in rows})
    return found[:: -(-len(found) // 14)]
