"""Figures, and the four functions that draw their Altair charts: `lines`, `dots`, `scatter` and `heatmap`.

The functions read no files and do not depend on runs; data are rows (dicts by field) or matrices. Texts from models and
files are passed as data, never as part of an expression or a field name, so that they are not evaluated. Positions,
layers and heads are 1-based; block 0 is the embedding.
"""

import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import numpy as np

from sinklab.report import html as theme
from sinklab.tables import PlotAxis, Table

ChartRows = Sequence[Mapping[str, Any]]
Drawing = alt.LayerChart | alt.FacetChart
"""A chart without a width, which depends on the output: page, chart file or notebook."""
TooltipField = tuple[str, str, str]
"""A field of a tooltip with its title and number format; the format is empty for text."""

HEIGHT, SHORT, ROW_HEIGHT, LINE_HEIGHT, SEED_HEIGHT = 260, 220, 26, 12, 7
SMALL, WIDE_CHART = 300, 640
"""Widths in pixels of small charts (`Figure.small`) in files and notebooks, and of other charts in files."""
LABEL_WIDTH = 220
LETTER = 7
"""Mean width of a character of an axis label in pixels."""
TITLE_LETTERS = 36
"""Maximum number of characters in a line of a chart's title."""
LOG_RATIO = 30
"""Ratio of the largest to the smallest value above which an `auto` scale of positive values is logarithmic."""
DASHES = ([1, 0], [6, 4], [2, 3], [8, 3, 2, 3])
OURS, PAPER = theme.PALETTE[0], theme.PALETTE[1]
OUTLINE = "#FF2D87"
UNIFORM = "uniform"


@dataclass(frozen=True)
class ColourScale:
    """The colour scale, from `low` to `high`, shared by a figure's heatmaps of the quantity `what`.

    Attributes:
        outlined: threshold ε above which squares are outlined; None for no outline.
        diverging: whether zero is the centre of the scale (cosines).
        references: values of uniform attention, marked on the scale.
    """

    what: str
    low: float
    high: float
    outlined: float | None = None
    diverging: bool = False
    references: tuple[float, ...] = ()

    def place(self, value: float) -> float:
        """Return the position of a value on the scale, in percent of the scale's length."""
        return 100 * (value - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class Figure:
    """A figure of one or more charts.

    Attributes:
        key: anchor in the page, and start of the names of the chart files.
        scale: colour scale shared by the charts, drawn once on the page; None if they do not share one.
        small: whether the charts are small and side by side.
        table: table below the figure, usually of the plotted numbers; None for no table.
    """

    key: str
    title: str
    caption: str
    charts: list[Drawing]
    scale: ColourScale | None = None
    small: bool = False
    table: Table | None = None


def lines(
    rows: ChartRows,
    x: PlotAxis,
    y: PlotAxis,
    colour: str | None = "cell",
    order: Sequence[str] | None = None,
    *,
    dash: str | None = None,
    dashes: Sequence[str] = (),
    apart: Sequence[str] = (),
    band: tuple[str, str] | None = None,
    reference: float | None = None,
    curves: ChartRows = (),
    ends: bool = False,
    tips: Sequence[TooltipField] = (),
    height: int = HEIGHT,
    title: str | None = None,
) -> Drawing:
    """Draw a line chart: a line per combination of `colour`, `dash` and `apart`, with points and an optional band.

    Args:
        rows: one point each: values by field, with the fields of the axes and those named by `colour`, `dash`, `apart`
            and `band`.
        x, y: axes.
        colour: field that determines the colour; None for one colour. If `order` has several values, a click on a
            value in the legend highlights its lines.
        order: values of `colour`, in the order of the palette; None for numbers on a sequential scale.
        dash: field that determines the dash pattern.
        dashes: values of `dash` in the order of the patterns; default: those of `rows`, in order of appearance.
        apart: fields that split a line into thinner lines of the same colour, one per combination of their values.
        band: fields of the lower and upper ends of the band.
        reference: y value of a dashed horizontal line.
        curves: rows of dashed grey curves, with the fields of both axes and `of`, the name of the curve.
        ends: whether the last points of the lines are labelled with the values of `colour`.
        tips: further fields in the tooltip of a point.
        height: height in pixels.
        title: title above the chart; None for none.
    """
    fields = [y.field, *(band or ())]
    across, up = _channel("x", x, rows, [x.field]), _channel("y", y, [*rows, *curves], fields)
    base = _chart(rows).encode(x=across, y=up)
    if colour is not None:
        base = base.encode(color=colour_of(order, colour))
    several = len(order or ()) > 1
    chosen = alt.selection_point(fields=[colour], bind="legend", name="chosen") if colour and several else None

    def faded(opacity: float, others: float) -> Any:
        full = alt.value(opacity)
        return full if chosen is None else alt.condition(chosen, full, alt.value(others))

    shown: Any = {"opacity": faded(0.75 if apart else 1.0, 0.12)} if apart or chosen is not None else {}
    detail = [f"{field}:N" for field in apart]
    dashed = [*detail, f"{dash}:N"] if dash else detail
    layers: list[alt.Chart] = [*_rules(reference, "y")]
    if curves:
        of_curve = [_tip("of", "", ""), _tip(x.field, x.name, x.precision), _tip(y.field, y.name, y.precision)]
        layers.append(_chart(curves).encode(x=across, y=up, detail="of:N", tooltip=of_curve).mark_line(**_DASHED))
    if band is not None:
        spread = base.encode(y=_channel("y", y, rows, fields, band[0]), y2=f"{band[1]}:Q", detail=dashed)
        layers.append(spread.mark_area(strokeWidth=0).encode(opacity=faded(0.16, 0.02)))
    drawn = base.mark_line(strokeWidth=1.4 if apart else 2).encode(detail=detail, **shown)
    if dash is not None:
        places = list(dashes or dict.fromkeys(row[dash] for row in rows))
        patterns = alt.Scale(domain=places, range=[DASHES[at % len(DASHES)] for at in range(len(places))])
        key = legend(2) if len(places) > 1 else None
        drawn = drawn.encode(strokeDash=alt.StrokeDash(f"{dash}:N", title=None, scale=patterns, legend=key))
    tooltip = [_tip(field, field, "") for field in (colour, dash, *apart) if field]
    tooltip += [_tip_of(x), _tip_of(y), *(_tip(*tip) for tip in tips)]
    points = base.mark_point(size=18 if apart else 32).encode(tooltip=tooltip, detail=dashed, **shown)
    layers += [drawn, points if chosen is None else points.add_params(chosen)]
    if ends and colour is not None:
        named, top = _line_ends(rows, x.field, y.field, colour), max(row[y.field] for row in rows)
        for above in (True, False):  # below the point where the label would leave the chart
            if shown := [row for row in named if (row[y.field] < 0.9 * top) is above]:
                label = _chart(shown).encode(x=across, y=up, text="ends:N")
                layers.append(label.mark_text(align="right", dy=-9 if above else 12, fontSize=11))
    return _titled(alt.layer(*layers).properties(height=height), title)


def _line_ends(rows: ChartRows, x: str, y: str, colour: str) -> list[dict[str, Any]]:
    """Return the last point of every value of `colour`, at its largest y; names that would overlap share a label."""
    last: dict[str, tuple[float, float]] = {}
    for row in rows:
        last[row[colour]] = max((row[x], row[y]), last.get(row[colour], (row[x], row[y])))
    near = 0.07 * max((abs(row[y]) for row in rows), default=1.0)
    found: list[tuple[float, float, list[str]]] = []
    for name, (at, value) in sorted(last.items(), key=lambda item: (item[1][0], -item[1][1])):
        if found and found[-1][0] == at and found[-1][1] - value < near:
            found[-1][2].append(name)
        else:
            found.append((at, value, [name]))
    ends = [", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "") for _, _, names in found]
    return [{x: at, y: value, "ends": text} for (at, value, _), text in zip(found, ends, strict=True)]


def scatter(
    rows: ChartRows,
    x: PlotAxis,
    y: PlotAxis,
    colour: str,
    order: Sequence[str],
    *,
    join: str | None = None,
    label: str | None = None,
    published: ChartRows = (),
    reference: float | None = None,
    bars: Mapping[str, str] | None = None,
    tips: Sequence[TooltipField] = (),
) -> Drawing:
    """Draw a scatter plot with a point per row of data; a categorical y axis has a row per category.

    Args:
        rows: one point each: values by field, with the fields of the axes and those named by `colour`, `join` and
            `label`; FIELD_low and FIELD_high, if present, are the ends of an error bar along the axis of FIELD.
        x, y: axes.
        colour: field that determines the colour, if `order` has several values.
        order: values of `colour`, in the order of the palette.
        join: field; points with the same value are connected by a line.
        label: field with the text next to each point.
        published: rows drawn as open diamonds.
        reference: y value of a dashed horizontal line; if the y axis is categorical, x value of a vertical one.
        bars: colour of each value of `colour`, to draw horizontal bars from 0 instead of points; None for points.
        tips: further fields in the tooltip of a point.
    """
    both = [*rows, *published]
    ends = {
        name: (axis, [axis.field, f"{axis.field}_low", f"{axis.field}_high"]) for name, axis in (("x", x), ("y", y))
    }
    placed: Any = {name: _channel(name, axis, both, fields) for name, (axis, fields) in ends.items()}
    base = _chart(rows).encode(**placed)
    coloured = base.encode(color=colour_of(order, colour, bars) if len(order) > 1 else alt.value(OURS))
    series = [(colour, colour, "")] if len(order) > 1 else []
    texts, numbers = [*series, *(tip for tip in tips if not tip[2])], [tip for tip in tips if tip[2]]
    tooltip = [*(_tip(*tip) for tip in texts), _tip_of(x), _tip_of(y), *(_tip(*tip) for tip in numbers)]
    layers: list[alt.Chart] = [*_rules(reference, "x" if y.order is not None else "y")]
    if join is not None:
        joined: Any = colour_of(order, colour) if join == colour else alt.value("currentColor")
        layers.append(base.mark_line(strokeWidth=1.2).encode(detail=f"{join}:N", opacity=alt.value(0.4), color=joined))
    for name, (axis, fields) in ends.items():
        if any(fields[1] in row for row in rows):
            bar: Any = {name: _channel(name, axis, both, fields, fields[1]), f"{name}2": f"{fields[2]}:Q"}
            layers.append(coloured.mark_rule(opacity=0.5).encode(**bar))
    if bars is not None:
        layers.insert(0, coloured.mark_bar(height=13, opacity=0.85).encode(x2=alt.datum(0), tooltip=tooltip))
    else:
        layers.append(coloured.mark_point(size=56, filled=True, opacity=0.9).encode(tooltip=tooltip))
    if published:
        paper = _chart(published).encode(**placed, color=colour_of(order, colour), tooltip=tooltip)
        layers.append(paper.mark_point(shape="diamond", **_OPEN))
    if label is not None:
        layers.append(coloured.mark_text(align="left", dx=8, dy=-8).encode(text=f"{label}:N"))
    row_height = 0 if y.order is None else _listed_height(y.order, LABEL_WIDTH) - (4 if bars else 0)
    height = HEIGHT if y.order is None else row_height * len(y.order)
    return alt.layer(*layers).properties(height=height)


_FIELDS = ("value", "median", "smallest", "largest")
_SEEDS, _MIDDLES, _PAPER = (alt.NamedData(name) for name in ("seeds", "middles", "paper"))
"""Named datasets, which layers share; Altair would copy inline data into every layer."""
_OFFSETS = {"x": alt.XOffset, "y": alt.YOffset}


def dots(
    labels: Mapping[str, str],
    seeds: ChartRows,
    middles: ChartRows,
    paper: ChartRows,
    values: PlotAxis,
    decimals: int,
    varied: str | None = None,
    *,
    replicate: str = "seed",
    label_width: int = 150,
) -> Drawing:
    """Draw the values of cells: a point per seed (draw or model), median and range, and the paper's value as a diamond.

    Args:
        labels: label of every cell by its name, in display order.
        seeds: rows `cell, seed, value, run`, with `link` if a point links to the recipe or measurement of its run.
        middles: rows `cell, never_reached`, with `median`, `smallest` and `largest` if they are known. If the event of
            a step quantity did not occur at some seeds, the row also has `beyond`, the largest value of the other
            seeds, where an arrow is drawn.
        paper: rows `cell, value`.
        values: axis of the values.
        decimals: number of decimals of the median in the tooltips; values of single seeds have one more.
        varied: title of the x axis if the cells are ordered from left to right, with connected medians; None to draw
            each cell as a row.
        replicate: noun for a point in the tooltips: seed, draw or model.
        label_width: width in pixels at which the name of a cell is wrapped.
    """
    upright = varied is not None
    places, count = [], Counter[str]()
    for row in seeds:
        count[row["cell"]] += 1
        places.append(count[row["cell"]])
    # `place` is the offset of a point within its cell, so that points do not overlap
    seeds = [{**row, "place": at - (count[row["cell"]] + 1) / 2} for row, at in zip(seeds, places, strict=True)]
    everything = [*seeds, *middles, *paper]
    names = PlotAxis(varied or "", "at" if upright else "cell", order=list(labels.values() if upright else labels))
    along, across = ("y", "x") if upright else ("x", "y")

    def placed(mark: alt.Chart, field: str, **more: Any) -> alt.Chart:
        channels: Any = {
            along: _channel(along, values, everything, _FIELDS, field),
            across: _channel(across, names, [], [], label_width=label_width),
        }
        return mark.encode(**channels, **more)

    def tooltip_of(*tips: TooltipField) -> list[alt.Tooltip]:
        return [_tip("cell", "cell", ""), *(_tip(*tip) for tip in tips)]

    known = {field for row in middles for field in row}
    middle = alt.Chart(_MIDDLES)
    layers: list[alt.Chart] = []
    if upright and paper:
        layers.append(placed(alt.Chart(_PAPER).mark_line(strokeWidth=1.2, strokeDash=[4, 3], color=PAPER), "value"))
    if upright and "median" in known:
        layers.append(placed(middle.mark_line(strokeWidth=1.8, color=OURS), "median"))
    if "smallest" in known:
        rule = middle.mark_rule(strokeWidth=2, opacity=0.55, color=OURS)
        end: Any = {f"{along}2": "largest:Q"}
        layers.append(placed(rule.transform_filter("isValid(datum.smallest)"), "smallest", **end))
    form = f",.{decimals}f"
    if "median" in known:
        tick = middle.mark_tick(thickness=2.5, size=15, color=OURS).transform_filter("isValid(datum.median)")
        tooltip = tooltip_of(*((name, name, form) for name in ("median", "smallest", "largest")))
        layers.append(placed(tick, "median", tooltip=tooltip))
    if "beyond" in known:
        shape = "triangle-up" if upright else "triangle-right"
        arrow = middle.mark_point(shape=shape, size=90, filled=True, opacity=1, color=OURS)
        tooltip = tooltip_of(("never_reached", f"{replicate}s without the event", "d"))
        layers.append(placed(arrow.transform_filter("isValid(datum.beyond)"), "beyond", tooltip=tooltip))
    if paper:
        diamond = alt.Chart(_PAPER).mark_point(shape="diamond", color=PAPER, **_OPEN)
        layers.append(placed(diamond, "value", tooltip=tooltip_of(("value", "paper", f",.{max(decimals, 2)}f"))))
    if seeds:
        point = alt.Chart(_SEEDS).mark_point(size=38, opacity=0.85, color=OURS)
        if any("link" in row for row in seeds):
            point = point.encode(href="link:N")
        # points use at most half of their column, or two thirds of their row, so that cells are separated
        reach = (2 if upright else 1.5) * max(2.0, *(abs(row["place"]) for row in seeds))
        offset: Any = {f"{across}Offset": _OFFSETS[across]("place:Q", scale=alt.Scale(domain=[-reach, reach]))}
        tooltip = tooltip_of(("seed", replicate, "d"), ("value", "value", f",.{decimals + 1}f"), ("run", "run", ""))
        layers.append(placed(point, "value", **offset, tooltip=tooltip))
    most_seeds = max(count.values(), default=1)  # the points of a row are offset vertically
    row_height = max(_listed_height([*labels], label_width), SEED_HEIGHT * (most_seeds + 1))
    rows = {"seeds": seeds, "middles": middles, "paper": paper}
    data = {name: [{**row, "at": labels[row["cell"]]} for row in found] for name, found in rows.items() if found}
    return alt.layer(*layers, height=SHORT if upright else row_height * len(labels), datasets=data)


def _listed_height(labels: Sequence[Any], label_width: int) -> int:
    """Return the height in pixels of a chart row that fits the longest label, wrapped at `label_width`."""
    return ROW_HEIGHT + LINE_HEIGHT * max(len(str(one)) * LETTER // label_width for one in labels)


@dataclass(frozen=True)
class HeatmapAxis:
    """An axis of a heatmap: title, number of the first row or column, and whether row numbers increase upwards."""

    title: str
    first: int = 1
    upwards: bool = False


LAYERS = HeatmapAxis("Layer", upwards=True)
BLOCKS = HeatmapAxis("After block", first=0, upwards=True)
HEADS = HeatmapAxis("Head")
POSITIONS = HeatmapAxis("Position (the first token is 1)")
KEYS = HeatmapAxis("Position of the key")
QUERIES = HeatmapAxis("Position of the query")
Named = tuple[str, np.ndarray]


def heatmaps(
    key: str,
    title: str,
    caption: str,
    named: Iterable[Named],
    scale: ColourScale,
    rows: HeatmapAxis = LAYERS,
    columns: HeatmapAxis = HEADS,
    height: int | None = None,
    small: bool = True,
) -> Figure:
    """Draw a figure of heatmaps, one per (title, matrix), that share a colour scale (see `Figure` and `heatmap`)."""
    drawn = [heatmap(matrix, scale, name, rows, columns, height) for name, matrix in named]
    return Figure(key, title, caption, drawn, scale, small)


def heatmap(
    values_YX: np.ndarray,
    scale: ColourScale,
    title: str,
    rows: HeatmapAxis = LAYERS,
    columns: HeatmapAxis = HEADS,
    height: int | None = None,
    lowest: np.ndarray | None = None,
) -> Drawing:
    """Draw a matrix as a heatmap; NaN and infinite entries are left blank.

    Args:
        values_YX: matrix (Y rows, X columns); its first row is at the top, or at the bottom if `rows.upwards`.
        rows, columns: titles and numbering of the axes.
        height: total height in pixels; default: about 300, but at least 9 and at most 34 per row.
        lowest: values of an additional lowest row, shape (X,), labelled `uniform` (attention).
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
        {"x": x, "y": name, "value": round(float(value), 6)}
        for name, row_X in shown.items()
        for x, value in enumerate(row_X, columns.first)
        if math.isfinite(value)
    ]
    base = _chart(cells).encode(
        x=alt.X("x:O", title=columns.title, axis=_thinned(X, columns.first, labelAngle=0)),
        y=alt.Y("y:O", title=rows.title, sort=order, axis=_thinned(Y, rows.first, [UNIFORM] * (lowest is not None))),
    )
    tooltip = [
        alt.Tooltip("y:O", title=rows.title.split(" (")[0].lower()),
        alt.Tooltip("x:O", title=columns.title.split(" (")[0].lower()),
        alt.Tooltip("value:Q", title=scale.what, format=".4f"),
    ]
    uniform = ", ".join(f"{value:.3f}" for value in scale.references)
    marked: dict[str, Any] = {"values": [scale.low, *scale.references, scale.high], "format": ".3~f"} if uniform else {}
    colour = alt.Color(
        "value:Q",
        title=scale.what[:1].upper() + scale.what[1:] + (f" ({UNIFORM}: {uniform})" if uniform else ""),
        scale=alt.Scale(
            scheme=theme.DIVERGING_SCHEME if scale.diverging else theme.HEAT_SCHEME, domain=[scale.low, scale.high]
        ),
        legend=alt.Legend(orient="bottom", direction="horizontal", gradientLength=150, gradientThickness=9, **marked),
    )
    layers = [base.mark_rect(stroke=None, xOffset=0).encode(color=colour, tooltip=tooltip)]
    if scale.outlined is not None:
        outline = {"stroke": OUTLINE, "strokeWidth": 2 if X <= 16 else 1}
        above = base.transform_filter(alt.datum.value > scale.outlined)
        layers.append(above.mark_rect(filled=False, fill=None, tooltip=False, **outline).encode())
    tall = height or min(34, max(9, 300 // Y)) * len(shown)
    return _titled(alt.layer(*layers).properties(height=tall), title)


def scale_over(what: str, matrices: Iterable[np.ndarray], diverging: bool = False) -> ColourScale:
    """Return a colour scale of zero and all finite values, with ends rounded outwards to one significant digit.

    A diverging scale is symmetric about zero. The upper end is 1 if it would otherwise be zero.
    """
    values = np.concatenate([matrix[np.isfinite(matrix)] for matrix in matrices])
    low, high = float(values.min(initial=0.0)), float(values.max(initial=0.0))
    high = max(high, -low) if diverging else high
    top = _rounded_up(high) if high > 0 else 1.0
    bottom = -top if diverging else -_rounded_up(-low) if low < 0 else 0.0
    return ColourScale(what, bottom, top, diverging=diverging)


def pooled(matrix_TT: np.ndarray, cells: int) -> np.ndarray:
    """Downsample a square matrix to at most `cells` x `cells` entries by averaging the finite values of square blocks.

    An entry is NaN if its block has no finite values. A matrix that is small enough is returned unchanged.
    """
    size = -(-len(matrix_TT) // cells)
    if size == 1:
        return matrix_TT
    padded = np.pad(matrix_TT.astype(float), (0, -len(matrix_TT) % size), constant_values=np.nan)
    count = len(padded) // size
    squares = np.ma.masked_invalid(padded.reshape(count, size, count, size))
    return squares.mean((1, 3)).filled(np.nan)


def _rounded_up(value: float) -> float:
    """Round a positive number up to one significant digit: 0.37 to 0.4, 23 to 30."""
    step = 10.0 ** math.floor(math.log10(value))
    return float(f"{math.ceil(value / step - 1e-9) * step:.12g}")


def _thinned(count: int, first: int, more: Sequence[str] = (), **settings: Any) -> alt.Axis:
    """Make an axis over `count` rows or columns, numbered from `first`, with at most about twelve labels.

    Args:
        more: labels of additional rows or columns. If there are any, all labels are strings.
    """
    every = -(-count // 12)
    begins = [] if more else [first]  # the label of an additional row would overlap with the first
    values = [at for at in range(first, first + count) if every == 1 or at in begins or at % every == 0]
    labels = [*map(str, values), *more] if more else values
    return alt.Axis(values=labels, grid=False, ticks=False, domain=False, **settings)


_DASHED: dict[str, Any] = {"strokeWidth": 1.4, "strokeDash": [4, 3], "color": theme.REFERENCE}
_OPEN: dict[str, Any] = {"size": 85, "filled": False, "strokeWidth": 2}


STEPS = PlotAxis("Training step", "step", "step", whole=True, precision=",d")


def layer_axis(rows: ChartRows, title: str) -> PlotAxis:
    """Make an axis of layers (field `layer` of the rows); it has a tick per layer if there are at most 14 layers."""
    found = sorted({row["layer"] for row in rows})
    ticks = found if len(found) <= 14 else None
    return PlotAxis(title, "layer", whole=True, precision="d", ticks=ticks, zero=False)


def colour_of(order: Sequence[str] | None, field: str = "cell", colours: Mapping[str, str] | None = None) -> alt.Color:
    """Encode a field as colour: `colours` or the palette in the given order; a sequential scale if `order` is None."""
    if order is None:
        return alt.Color(f"{field}:O", title=field, scale=alt.Scale(scheme=theme.HEAT_SCHEME))
    palette = colours or theme.colours(list(order))
    longest = max((len(one) for one in order), default=1)
    return alt.Color(
        f"{field}:N",
        title=None,
        sort=list(order),
        scale=alt.Scale(domain=list(palette), range=list(palette.values())),
        legend=legend(max(1, min(4, 44 // (longest + 4)))),
    )


def legend(columns: int) -> alt.Legend:
    """Make a legend with this number of columns above the chart."""
    return alt.Legend(orient="top", direction="horizontal", columns=columns, offset=6, symbolOpacity=1)


def _chart(rows: ChartRows) -> alt.Chart:
    return alt.Chart(alt.Data(values=list(rows)))


def _channel(
    name: str,
    axis: PlotAxis,
    rows: ChartRows,
    fields: Sequence[str],
    field: str = "",
    label_width: int = LABEL_WIDTH,
) -> Any:
    """Encode an axis as a Vega-Lite channel: ordered categories, or a continuous scale over all values of `fields`.

    Args:
        name: x or y.
        field: the encoded field; by default the field of the axis.
        label_width: width in pixels at which the label of a category on the y axis is wrapped.
    """
    field, kind, across = field or axis.field, {"x": alt.X, "y": alt.Y}[name], name == "x"
    if axis.order is not None:
        settings: dict[str, Any] = {"labelAngle": 0, "labelOverlap": True, "grid": False}
        if not across:
            settings = {"grid": True, "ticks": False, "domain": False, "labelLimit": 0, "labelPadding": 8}
            # Labels are wrapped, preferably after spaces and `_`.
            pattern = f"(.{{1,{label_width // LETTER}}}(?:[ _]|$)|.{{{label_width // LETTER}}})"
            wrapped = f"replace(datum.label, regexp('{pattern}', 'g'), '$1\\n')"
            settings["labelExpr"] = f"split(trim({wrapped}), '\\n')"
        scale = alt.Scale(domain=list(axis.order))
        return kind(f"{field}:N", title=axis.title or None, scale=scale, axis=alt.Axis(**settings))
    values = [row[name] for row in rows for name in fields if row.get(name) is not None]
    low, high = min(values, default=0.0), max(values, default=1.0)
    scale, title = axis.scale, axis.title
    if scale == "auto":
        scale = "log" if low > 0 and high > LOG_RATIO * low else "linear"
    settings: dict[str, Any] = {"zero": axis.zero, "nice": not axis.whole}
    form = axis.format or (",d" if axis.whole else ",~r")
    if scale == "log":
        settings = {"type": "log", "nice": False, "padding": 10}
        form = axis.format or "~g"
    elif scale == "symlog":
        settings = {"type": "symlog", "constant": axis.constant}
    if scale != "linear":
        title = f"{title[:-1]}, log scale)" if title.endswith(")") else f"{title} (log scale)"
    if axis.domain is not None:
        settings |= {"domain": list(axis.domain), "nice": False}
    elif axis.at_least is not None and high < axis.at_least:
        settings["domain"] = [low if scale == "log" or not axis.zero else min(low, 0.0), axis.at_least]
    if "domain" in settings:
        settings.pop("zero", None)
    look = alt.Axis(
        format=form,
        grid=not across,
        tickCount=alt.Undefined if axis.ticks is not None else 6 if across else 5,
        values=alt.Undefined if axis.ticks is None else list(axis.ticks),
        tickMinStep=1 if axis.whole else alt.Undefined,
    )
    return kind(f"{field}:Q", title=title, scale=alt.Scale(**settings), axis=look)


def _rules(value: float | None, channel: str) -> list[alt.Chart]:
    return [] if value is None else [_chart([{"at": value}]).mark_rule(**_DASHED).encode(**{channel: "at:Q"})]


def _tip(field: str, title: str, form: str) -> alt.Tooltip:
    if not form:
        return alt.Tooltip(f"{field}:N", title=title or field)
    return alt.Tooltip(f"{field}:Q", title=title, format=form)


def _tip_of(axis: PlotAxis) -> alt.Tooltip:
    return _tip(axis.field, axis.name, "" if axis.order is not None else axis.precision)


def _titled(drawing: Drawing, title: str | None) -> Drawing:
    if title is None:
        return drawing
    lines = textwrap.wrap(title, TITLE_LETTERS, break_on_hyphens=False)
    return drawing.properties(title=alt.Title(lines, fontSize=13, fontWeight=500, limit=0))
