"""Charts of an assessment; conventions as in ../charts.py: plain rows in, an Altair chart out, names are data."""

from collections.abc import Sequence

import altair as alt

from sinklab.report import theme
from sinklab.report.charts import HEIGHT, ChartRows, Drawing, Width, cell_colour

ROW_HEIGHT = 30


def over_numbers(
    rows: ChartRows, across: tuple[str, alt.X], y: tuple[str, alt.Y], width: Width = 640, reference: float | None = None
) -> Drawing:
    """A line per series.

    Args:
        rows: `series, x, y, loss, kl`.
        across, y: of the fields `x:Q` (or `x:O`) and `y:Q`, each with its name in a tooltip.
        reference: of the unchanged model, a dashed line.
    """
    base = alt.Chart(alt.Data(values=list(rows))).encode(
        x=across[1], y=y[1], color=cell_colour(series_of(rows), "series")
    )
    points = base.mark_point(size=46, opacity=1).encode(tooltip=_tooltip(across[0], y[0]))
    layers = [base.mark_line(), points]
    if reference is not None:
        dashed = alt.Chart(alt.Data(values=[{"y": reference}])).mark_rule(
            strokeDash=[4, 3], strokeWidth=1.4, color=theme.REFERENCE
        )
        layers.insert(0, dashed.encode(y="y:Q"))
    return alt.layer(*layers).properties(width=width, height=HEIGHT)


def beside_each_other(rows: ChartRows, title: str, width: Width = 640) -> Drawing:
    """A line of points per setting, joined.

    Args:
        rows: `setting, series, y, loss, kl`.
        title: of y, with its unit.
    """
    base = alt.Chart(alt.Data(values=list(rows))).encode(
        y=alt.Y(
            "setting:N",
            title=None,
            sort=list(dict.fromkeys(row["setting"] for row in rows)),
            axis=alt.Axis(grid=True, ticks=False, domain=False, labelLimit=220),
        ),
        x=alt.X("y:Q", title=title, axis=alt.Axis(grid=False, tickCount=6)),
    )
    tooltip = [alt.Tooltip("setting:N", title="setting"), *_tooltip(None, "nats per token")]
    joined = base.mark_line(strokeWidth=1.2, opacity=0.35, color="currentColor").encode(detail="setting:N")
    points = base.mark_point(size=64, opacity=1).encode(color=cell_colour(series_of(rows), "series"), tooltip=tooltip)
    zero = alt.Chart(alt.Data(values=[{"y": 0}])).mark_rule(strokeDash=[2, 3], opacity=0.5).encode(x="y:Q")
    return alt.layer(zero, joined, points).properties(width=width, height=alt.Step(ROW_HEIGHT))


def heads_by_share(rows: ChartRows, kinds: Sequence[str], width: Width = 640) -> Drawing:
    """A point per head: its share on the sink against the size of the sink's value.

    Args:
        rows: `kind, layer, head, share` (percent), `value_norm, output_share, rank`.
        kinds: in the order of the legend.
    """
    logarithmic = all(row["value_norm"] > 0 for row in rows)
    base = alt.Chart(alt.Data(values=list(rows))).encode(
        x=alt.X("share:Q", title="Share of attention on the sink (percent)", scale=alt.Scale(domain=[0, 100])),
        y=alt.Y(
            "value_norm:Q",
            title="|v| of the sink over that of the others" + (" (log scale)" if logarithmic else ""),
            scale=alt.Scale(type="log", nice=False, padding=12) if logarithmic else alt.Scale(zero=True),
            axis=alt.Axis(format="~g", tickCount=5),
        ),
        color=cell_colour(kinds, "kind"),
        tooltip=[
            alt.Tooltip("kind:N", title="kind"),
            alt.Tooltip("layer:Q", title="layer"),
            alt.Tooltip("head:Q", title="head"),
            alt.Tooltip("share:Q", title="share, percent", format=".1f"),
            alt.Tooltip("value_norm:Q", title="value's norm, times the others'", format=".3f"),
            alt.Tooltip("output_share:Q", title="of the head's output", format=".3f"),
            alt.Tooltip("rank:Q", title="effective rank", format=".1f"),
        ],
    )
    even = alt.Chart(alt.Data(values=[{"ratio": 1}])).mark_rule(strokeDash=[2, 3], opacity=0.5).encode(y="ratio:Q")
    return alt.layer(even, base.mark_point(size=40, opacity=0.9)).properties(width=width, height=HEIGHT)


def series_of(rows: ChartRows) -> list[str]:
    """The series, in order of appearance."""
    return list(dict.fromkeys(row["series"] for row in rows))


def _tooltip(x: str | None, y: str) -> list[alt.Tooltip]:
    across = [alt.Tooltip("x:N", title=x)] if x else []
    return [
        alt.Tooltip("series:N", title="what"),
        *across,
        alt.Tooltip("y:Q", title=y, format=".4f"),
        alt.Tooltip("loss:Q", title="loss, nats", format=".4f"),
        alt.Tooltip("kl:Q", title="KL from the unchanged model", format=".4f"),
    ]
