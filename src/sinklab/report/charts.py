"""The charts, one function each: plain rows in, an Altair chart out.

No function here reads a file or knows what a run is. A row is a dict; `cell` is the name that fixes its colour.
Positions are 1-based, as a person reads them. Names are data, never parts of an expression or a field name,
so that no text from a model or a file can be taken for code.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from sinklab.report import theme

ChartRows = Sequence[Mapping[str, Any]]
Width = int | str
Drawing = alt.LayerChart | alt.FacetChart

HEIGHT = 260


def sink_by_step(rows: ChartRows, cells: Sequence[str], eps: float, width: Width = 640) -> Drawing:
    """Sink rate against training step.

    Args:
        rows: `cell, where, step, mean, low, high, runs`; `where` names the position the rate is taken at,
            `mean, low, high` are percent of heads over the seeds.
    """
    places = list(dict.fromkeys(row["where"] for row in rows))
    dashes = [[1, 0], [6, 4], [2, 3], [8, 3, 2, 3]]
    dash = alt.StrokeDash(
        "where:N",
        title=None,
        scale=alt.Scale(domain=places, range=[dashes[i % len(dashes)] for i in range(len(places))]),
        legend=legend(columns=2) if len(places) > 1 else None,
    )
    return _curves(rows, cells, f"Sink rate (percent of heads, ε = {eps:g})", width, "percent", dash)


def loss_by_step(rows: ChartRows, cells: Sequence[str], width: Width = 640) -> Drawing:
    """Validation loss (solid) and training loss (dashed) against step; rows as in `sink_by_step`, in nats."""
    dash = alt.StrokeDash(
        "where:N",
        title=None,
        scale=alt.Scale(domain=["validation", "training"], range=[[1, 0], [3, 3]]),
        legend=legend(columns=2),
    )
    return _curves(rows, cells, "Loss (nats per token)", width, "loss", dash, zero=False)


def _curves(
    rows: ChartRows,
    cells: Sequence[str],
    title: str,
    width: Width,
    quantity: str,
    dash: alt.StrokeDash,
    zero: bool = True,
) -> Drawing:
    chosen = alt.selection_point(fields=["cell"], bind="legend", name="chosen")
    faded = alt.condition(chosen, alt.value(1.0), alt.value(0.12))
    base = alt.Chart(alt.Data(values=list(rows))).encode(
        x=alt.X("step:Q", title="Training step", axis=alt.Axis(format=",d", tickMinStep=1, grid=False)),
        color=cell_colour(cells),
        detail="where:N",
    )
    flat = zero and max(row["high"] for row in rows) < 1
    scale = alt.Scale(domain=[0, 1]) if flat else alt.Scale(zero=zero, nice=True)  # noise is not a sink
    spread = base.mark_area(strokeWidth=0).encode(
        y=alt.Y("low:Q", title=title, scale=scale),
        y2="high:Q",
        opacity=alt.condition(chosen, alt.value(0.16), alt.value(0.02)),
    )
    value = alt.Y("mean:Q", title=title, scale=scale)
    tooltip = [
        alt.Tooltip("cell:N", title="cell"),
        alt.Tooltip("where:N", title="where" if quantity == "percent" else "data"),
        alt.Tooltip("step:Q", title="step", format=",d"),
        alt.Tooltip("mean:Q", title=quantity, format=".2f" if quantity == "percent" else ".3f"),
        alt.Tooltip("low:Q", title="lowest seed", format=".3f"),
        alt.Tooltip("high:Q", title="highest seed", format=".3f"),
        alt.Tooltip("runs:Q", title="runs"),
    ]
    lines = base.mark_line().encode(y=value, strokeDash=dash, opacity=faded)
    points = base.mark_point(size=26, opacity=1).encode(y=value, opacity=faded, tooltip=tooltip)
    return alt.layer(spread, lines, points.add_params(chosen)).properties(width=width, height=HEIGHT)


def importance_by_position(
    rows: ChartRows, cells: Sequence[str], eps: float, uniform: ChartRows = (), width: Width = 640
) -> Drawing:
    """Mean importance over layers and heads against position; logarithmic where every value is above zero.

    Args:
        rows: `cell, position` (1-based), `value, runs`.
        eps: the scale reaches up to it at least.
        uniform: `length, position, value`: what uniform attention gives in sequences of each length, a dashed line.
    """
    logarithmic = all(row["value"] > 0 for row in rows)
    values = [row["value"] for row in (*rows, *uniform)]
    domain = [min(values) if logarithmic else 0, max(*values, eps)]
    chosen = alt.selection_point(fields=["cell"], bind="legend", name="chosen")
    base = alt.Chart(alt.Data(values=list(rows))).encode(
        x=alt.X(
            "position:Q",
            title="Position of the key (the first token is 1)",
            scale=alt.Scale(nice=False, domainMin=1),
            axis=alt.Axis(grid=False, format="d", values=_every_eighth(rows)),
        ),
        y=alt.Y(
            "value:Q",
            title="Importance (mean attention received" + (", log scale)" if logarithmic else ")"),
            scale=alt.Scale(type="log" if logarithmic else "linear", nice=False, domain=domain),
            axis=alt.Axis(tickCount=6, format="~g"),
        ),
        color=cell_colour(cells),
        opacity=alt.condition(chosen, alt.value(1.0), alt.value(0.12)),
    )
    tooltip = [
        alt.Tooltip("cell:N", title="cell"),
        alt.Tooltip("position:Q", title="position"),
        alt.Tooltip("value:Q", title="importance", format=".4f"),
        alt.Tooltip("runs:Q", title="runs"),
    ]
    points = base.mark_point(size=24).encode(tooltip=tooltip).add_params(chosen)
    reference = alt.Chart(alt.Data(values=list(uniform))).encode(
        x="position:Q",
        y="value:Q",
        detail="length:N",
        tooltip=[
            alt.Tooltip("length:Q", title="uniform attention, T"),
            alt.Tooltip("position:Q", title="position"),
            alt.Tooltip("value:Q", title="importance", format=".4f"),
        ],
    )
    layers = [reference.mark_line(strokeWidth=1.4, strokeDash=[4, 3], color=theme.REFERENCE)] if uniform else []
    layers += [base.mark_line(strokeWidth=1.6), points]
    return alt.layer(*layers).properties(width=width, height=HEIGHT)


def norm_ratio_by_layer(rows: ChartRows, cells: Sequence[str], width: Width = 640) -> Drawing:
    """Hidden-state norm at position 1 over that of the rest, by block; logarithmic beyond a ratio of 30.

    Args:
        rows: `cell, layer` (0 is the embedding), `mean, low, high, runs`.
    """
    largest = max((row["high"] for row in rows), default=1.0)
    logarithmic = largest > 30 and all(row["low"] > 0 for row in rows)
    chosen = alt.selection_point(fields=["cell"], bind="legend", name="chosen")
    scale = alt.Scale(type="log") if logarithmic else alt.Scale(zero=True, nice=True)
    title = "Norm ratio (first token / mean of the others" + (", log scale)" if logarithmic else ")")
    axis = alt.Axis(format="~g", tickCount=5)
    base = alt.Chart(alt.Data(values=list(rows))).encode(
        x=layers_across(rows, "After block (0 is the embedding)"), color=cell_colour(cells)
    )
    spread = base.mark_area(strokeWidth=0).encode(
        y=alt.Y("low:Q", title=title, scale=scale, axis=axis),
        y2="high:Q",
        opacity=alt.condition(chosen, alt.value(0.16), alt.value(0.02)),
    )
    value = alt.Y("mean:Q", title=title, scale=scale, axis=axis)
    faded = alt.condition(chosen, alt.value(1.0), alt.value(0.12))
    tooltip = [
        alt.Tooltip("cell:N", title="cell"),
        alt.Tooltip("layer:Q", title="after block"),
        alt.Tooltip("mean:Q", title="ratio", format=".3f"),
        alt.Tooltip("runs:Q", title="runs"),
    ]
    even = alt.Chart(alt.Data(values=[{"ratio": 1}])).mark_rule(strokeDash=[2, 3], opacity=0.5).encode(y="ratio:Q")
    lines = base.mark_line().encode(y=value, opacity=faded)
    points = base.mark_point(size=42).encode(y=value, opacity=faded, tooltip=tooltip).add_params(chosen)
    return alt.layer(even, spread, lines, points).properties(width=width, height=HEIGHT)


def layers_across(rows: ChartRows, title: str) -> alt.X:
    """The layers of the rows from left to right, each with a tick where they are few."""
    ticks = sorted({row["layer"] for row in rows})
    axis = alt.Axis(grid=False, format="d", values=ticks if len(ticks) <= 14 else alt.Undefined, tickMinStep=1)
    return alt.X("layer:Q", title=title, axis=axis)


def cell_colour(cells: Sequence[str], field: str = "cell") -> alt.Color:
    """The colour of each cell, the same in every chart, with its legend on top."""
    palette = theme.colours(list(cells))
    longest = max((len(cell) for cell in cells), default=1)
    columns = max(1, min(4, 44 // (longest + 4)))
    return alt.Color(
        f"{field}:N",
        title=None,
        sort=list(cells),
        scale=alt.Scale(domain=list(palette), range=list(palette.values())),
        legend=legend(columns),
    )


def legend(columns: int) -> alt.Legend:
    """A legend above the chart."""
    return alt.Legend(orient="top", direction="horizontal", columns=columns, offset=6, symbolOpacity=1)


def _every_eighth(rows: ChartRows) -> list[int]:
    last = max((row["position"] for row in rows), default=1)
    step = 8 if last > 12 else 1
    return [1, *range(step if step > 1 else 2, last + 1, step)]


def thinned(count: int, first: int = 1, more: Sequence[str] | None = None, **settings: Any) -> alt.Axis:
    """An axis over `count` cells from `first` on with at most a dozen labels, so that they never overlap.

    Args:
        more: labels of cells after them; the cells are then called by texts, not numbers.
    """
    every = -(-count // 12)
    last = first + count
    values = [index for index in range(first, last) if every == 1 or index == first or index % every == 0]
    labels = values if more is None else [*map(str, values), *more]
    return alt.Axis(values=labels, grid=False, ticks=False, domain=False, **settings)
