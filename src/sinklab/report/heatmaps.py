"""Heatmaps: a matrix in, an Altair chart out. Several that stand side by side share one colour scale.

As in charts.py no name is part of an expression or of a field. Rows and columns are counted from 1 unless said
otherwise, as a person reads them.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import altair as alt
import numpy as np

from sinklab.report import theme
from sinklab.report.charts import Drawing, Width, thinned
from sinklab.report.figure import ColourScale, Figure

OUTLINE = "#FF2D87"
UNIFORM = "uniform"
Named = tuple[str, np.ndarray]


@dataclass(frozen=True)
class Side:
    """One side of a heatmap: its title, the number of the first cell, and which way it runs."""

    title: str
    first: int = 1
    upwards: bool = False


LAYERS = Side("Layer", upwards=True)
BLOCKS = Side("After block", first=0, upwards=True)
HEADS = Side("Head")
POSITIONS = Side("Position (the first token is 1)")
KEYS = Side("Position of the key")
QUERIES = Side("Position of the query")


def scale_over(what: str, matrices: Iterable[np.ndarray], diverging: bool = False) -> ColourScale:
    """A scale that holds all values, from zero where none is negative; symmetric where it is diverging."""
    values = np.concatenate([matrix[np.isfinite(matrix)] for matrix in matrices])
    low, high = float(values.min(initial=0.0)), float(values.max(initial=0.0))
    if diverging:
        high = max(high, -low)
        low = -_rounded_up(high)
    step = _rounded_up(high) if high > 0 else 0.0
    return ColourScale(what, low if diverging or low == 0 else -_rounded_up(-low), step or 1.0, diverging=diverging)


def side_by_side(
    key: str,
    title: str,
    caption: str,
    named: Iterable[Named],
    scale: ColourScale,
    width: Width,
    rows: Side = LAYERS,
    columns: Side = HEADS,
    height: int | None = None,
) -> Figure:
    """Heatmaps that share a colour scale; inside the page it is drawn once for all of them."""
    legend = width != "container"
    drawn = [heatmap(matrix, scale, name, rows, columns, width, height, legend) for name, matrix in named]
    return Figure(key, title, caption, drawn, scale)


def heatmap(
    values_YX: np.ndarray,
    scale: ColourScale,
    title: str,
    rows: Side = LAYERS,
    columns: Side = HEADS,
    width: Width = 300,
    height: int | None = None,
    legend: bool = True,
    lowest: np.ndarray | None = None,
) -> Drawing:
    """A matrix as coloured cells; what is NaN or infinite is left out.

    Args:
        values_YX: one row of cells for each row of the matrix.
        scale: of the colours, shared by all heatmaps that are to be compared.
        height: of the whole, in pixels; by default it grows with the rows.
        legend: draw the colour scale below the cells.
        lowest: another row of cells below the others (X,): what attention that is uniform over the past would give.
    """
    Y, X = values_YX.shape
    numbers = range(rows.first, rows.first + Y)
    names: list[Any] = [*numbers] if lowest is None else [*map(str, numbers)]
    order = list(reversed(names)) if rows.upwards else names
    shown = dict(zip(names, values_YX, strict=True))
    if lowest is not None:
        shown[UNIFORM] = lowest
        order = [*order, UNIFORM]
    cells = [
        {"x": x + columns.first, "y": name, "value": round(float(value), 6)}
        for name, row_X in shown.items()
        for x, value in enumerate(row_X)
        if math.isfinite(value)
    ]
    axis = thinned(Y, rows.first, more=None if lowest is None else [UNIFORM])
    base = alt.Chart(alt.Data(values=cells)).encode(
        x=alt.X("x:O", title=columns.title, axis=thinned(X, columns.first, labelAngle=0)),
        y=alt.Y("y:O", title=rows.title, sort=order, axis=axis),
    )
    tooltip = [
        alt.Tooltip("y:O", title=rows.title.split(" (")[0].lower()),
        alt.Tooltip("x:O", title=columns.title.split(" (")[0].lower()),
        alt.Tooltip("value:Q", title=scale.what, format=".4f"),
    ]
    colour = alt.Color(
        "value:Q",
        title=_title(scale),
        scale=alt.Scale(
            scheme=theme.DIVERGING_SCHEME if scale.diverging else theme.HEAT_SCHEME, domain=[scale.low, scale.high]
        ),
        legend=alt.Legend(
            orient="bottom",
            direction="horizontal",
            gradientLength=150,
            gradientThickness=9,
            values=[scale.low, *scale.references, scale.high] if scale.references else alt.Undefined,
            format=".3~f" if scale.references else alt.Undefined,
        )
        if legend
        else None,
    )
    layers = [base.mark_rect(stroke=None, xOffset=0).encode(color=colour, tooltip=tooltip)]
    if scale.outlined is not None:
        outline = {"stroke": OUTLINE, "strokeWidth": 2 if X <= 16 else 1}
        above = base.transform_filter(alt.datum.value > scale.outlined)
        layers.append(above.mark_rect(filled=False, fill=None, tooltip=False, **outline).encode())
    heading = alt.Title(title, fontSize=13, fontWeight=500, limit=280)
    tall = height or min(34, max(9, 300 // Y)) * len(shown)
    return alt.layer(*layers).properties(width=width, height=tall, title=heading)


def pooled(matrix_TT: np.ndarray, cells: int) -> np.ndarray:
    """A square matrix thinned to at most `cells` x `cells` by means over squares; NaN only where nothing is known."""
    size = -(-len(matrix_TT) // cells)
    if size == 1:
        return matrix_TT
    length = -(-len(matrix_TT) // size) * size
    padded = np.full((length, length), np.nan)
    padded[: len(matrix_TT), : len(matrix_TT)] = matrix_TT
    squares = padded.reshape(length // size, size, length // size, size)
    known = np.isfinite(squares)
    count = known.sum((1, 3))
    return np.where(count > 0, np.where(known, squares, 0).sum((1, 3)) / np.maximum(count, 1), np.nan)


def _title(scale: ColourScale) -> str:
    uniform = ", ".join(f"{value:.3f}" for value in scale.references)
    return scale.what[:1].upper() + scale.what[1:] + (f" ({UNIFORM}: {uniform})" if uniform else "")


def _rounded_up(value: float) -> float:
    """The next number with one digit: 0.37 is 0.4, 23 is 30."""
    step = 10.0 ** math.floor(math.log10(value))
    return float(f"{math.ceil(value / step - 1e-9) * step:.12g}")
