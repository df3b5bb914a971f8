"""Lines over layers, distances and queries, one colour for each cell; conventions as in charts.py."""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean

import altair as alt
import numpy as np

from sinklab.report.charts import ChartRows, Drawing, Width, cell_colour, layers_across, legend
from sinklab.report.summary import by_key

SHORT = 220


def by_bucket(
    rows: ChartRows, cells: Sequence[str], x_title: str, y_title: str, width: Width = 640, logarithmic: bool = False
) -> Drawing:
    """A share of the attention by buckets of distances or queries.

    Args:
        rows: `cell, where, bucket` ("4..7"), `order` (of the bucket), `value`; each `where` has its own dash.
        logarithmic: of the values; those of zero are left out.
    """
    drawn = [row for row in rows if not logarithmic or row["value"] > 0]
    buckets = [row["bucket"] for row in sorted(rows, key=lambda row: row["order"])]
    return _lines(
        drawn,
        cells,
        alt.X(
            "bucket:O", title=x_title, sort=list(dict.fromkeys(buckets)), axis=alt.Axis(labelAngle=0, labelOverlap=True)
        ),
        alt.Y(
            "value:Q",
            title=y_title + (" (log scale)" if logarithmic else ""),
            scale=alt.Scale(type="log", nice=False) if logarithmic else alt.Scale(zero=True),
            axis=alt.Axis(format=",~r", tickCount=5),
        ),
        alt.Tooltip("bucket:O", title=x_title.split(" (")[0].lower()),
        width,
    )


def first_and_rest(arrays: Iterable[tuple[str, np.ndarray]], first_layer: int = 0) -> ChartRows:
    """Rows for `by_layer`: the first position and the mean of the others, mean over the runs of a cell.

    Args:
        arrays: (layers, positions) of each run, with its cell; those of one position are left out.
        first_layer: number of the first layer.
    """
    collected = by_key(
        ((cell, where, layer), float(value))
        for cell, array_LT in arrays
        if array_LT.shape[1] > 1
        for where, values in (("first token", array_LT[:, 0]), ("the others", array_LT[:, 1:].mean(1)))
        for layer, value in enumerate(values, first_layer)
    )
    return [
        {"cell": cell, "where": where, "layer": layer, "value": fmean(values)}
        for (cell, where, layer), values in collected.items()
    ]


def means(arrays: Iterable[tuple[str, np.ndarray]], first_layer: int = 0) -> ChartRows:
    """Rows for `by_layer`: one value for each layer, mean over the runs of a cell; what is not finite is left out.

    Args:
        arrays: (layers,) of each run, with its cell.
        first_layer: number of the first layer.
    """
    collected = by_key(
        ((cell, layer), float(value))
        for cell, array_L in arrays
        for layer, value in enumerate(array_L, first_layer)
        if math.isfinite(value)
    )
    return [
        {"cell": cell, "where": "mean", "layer": layer, "value": fmean(values)}
        for (cell, layer), values in collected.items()
    ]


def by_layer(
    rows: ChartRows, cells: Sequence[str], at: str, y_title: str, width: Width = 640, title: str | None = None
) -> Drawing:
    """A quantity layer by layer; logarithmic where it spans more than a factor of 30.

    Args:
        rows: `cell, where, layer, value`.
        at: title of the layer axis.
    """
    values = [row["value"] for row in rows]
    logarithmic = min(values) > 0 and max(values) > 30 * min(values)
    return _lines(
        rows,
        cells,
        layers_across(rows, at),
        alt.Y(
            "value:Q",
            title=y_title + (" (log scale)" if logarithmic else ""),
            scale=alt.Scale(type="log") if logarithmic else alt.Scale(zero=True),
            axis=alt.Axis(format=",~r", tickCount=5),
        ),
        alt.Tooltip("layer:Q", title="layer"),
        width,
        title,
    )


def _lines(
    rows: ChartRows, cells: Sequence[str], x: alt.X, y: alt.Y, at: alt.Tooltip, width: Width, title: str | None = None
) -> Drawing:
    places = list(dict.fromkeys(row["where"] for row in rows))
    base = alt.Chart(alt.Data(values=list(rows))).encode(
        x=x,
        y=y,
        color=cell_colour(cells),
        tooltip=[
            alt.Tooltip("cell:N", title="cell"),
            alt.Tooltip("where:N", title="where"),
            at,
            alt.Tooltip("value:Q", title="value", format=".4f"),
        ],
    )
    dash = alt.StrokeDash(
        "where:N",
        title=None,
        scale=alt.Scale(domain=places, range=[[1, 0], [4, 3], [1, 3]][: len(places)]),
        legend=legend(2) if len(places) > 1 else None,
    )
    lines = base.mark_line().encode(strokeDash=dash)
    drawn = alt.layer(lines, base.mark_point(size=30).encode(detail="where:N")).properties(width=width, height=SHORT)
    if title is None:
        return drawn
    return drawn.properties(title=alt.Title(title, fontSize=13, fontWeight=500, limit=280))
