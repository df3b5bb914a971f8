"""The sink on the first token, and what goes with it, while models train: a line per seed, or per layer of each."""

from collections.abc import Sequence

import altair as alt

from sinklab.report.charts import HEIGHT, ChartRows, Drawing, Width, cell_colour


def curve_of_every_seed(
    rows: ChartRows, title: str, cells: Sequence[str], from_zero: bool, width: Width = 640
) -> Drawing:
    """A number against training step.

    Args:
        rows: `cell, seed, step, value`.
        title: of the number, with its unit.
        from_zero: whether the axis begins at zero.
    """
    return _lines(rows, title, cell_colour(cells), ["seed:N"], from_zero, width)


def sink_of_every_layer(rows: ChartRows, width: Width = 640) -> Drawing:
    """How often a head of each layer sinks, against training step.

    Args:
        rows: `cell, seed, layer, step, value` in percent of sequences.
    """
    colour = alt.Color("layer:O", title="layer", scale=alt.Scale(scheme="viridis"))
    return _lines(rows, "Sequences in which a head sinks (percent)", colour, ["cell:N", "seed:N"], True, width)


def _lines(
    rows: ChartRows, title: str, colour: alt.Color, apart: Sequence[str], from_zero: bool, width: Width
) -> Drawing:
    noise = from_zero and max(row["value"] for row in rows) < 1
    scale = alt.Scale(domain=[0, 1]) if noise else alt.Scale(zero=from_zero, nice=True)
    base = alt.Chart(alt.Data(values=list(rows))).encode(
        x=alt.X(
            "step:Q",
            title="Training step",
            scale=alt.Scale(nice=False),
            axis=alt.Axis(format=",d", tickMinStep=1, grid=False),
        ),
        y=alt.Y("value:Q", title=title, scale=scale),
        color=colour,
        detail=list(apart),
    )
    tooltip = [
        alt.Tooltip("cell:N", title="cell"),
        alt.Tooltip("seed:Q", title="seed"),
        *([alt.Tooltip("layer:O", title="layer")] if "layer" in rows[0] else []),
        alt.Tooltip("step:Q", title="step", format=",d"),
        alt.Tooltip("value:Q", title=title, format=".2f"),
    ]
    lines = base.mark_line(strokeWidth=1.4, opacity=0.75)
    points = base.mark_point(size=18, opacity=0.9).encode(tooltip=tooltip)
    return alt.layer(lines, points).properties(width=width, height=HEIGHT)
