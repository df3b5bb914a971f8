"""One number of an experiment's cells as a chart: seeds, median, smallest and largest, and the paper's number.

As in `charts.py`, names are data and nothing else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import altair as alt

from sinklab.report import theme
from sinklab.report.charts import ChartRows, Drawing, Width

OURS, PAPER = theme.PALETTE[0], theme.PALETTE[1]
ROW, TALL = 26, 210
SPREAD = 30
"""A quantity that spans more than this factor is drawn on a logarithmic axis."""


@dataclass(frozen=True)
class Dots:
    """What one chart shows.

    Attributes:
        title: of the quantity, with its unit.
        cells: in the order to be shown.
        labels: of the cells where they stand in an order, as `at` in the rows.
        seeds: rows `cell, at, seed, value, run, link`.
        middles: rows `cell, at, never_reached`, and `median`, `smallest`, `largest` where there are such; where seeds
            never reached the step that is asked for, `beyond`, the largest that did: an arrow points to what lies
            behind it.
        paper: rows `cell, at, value`.
        decimals: that a value has.
        from_zero: whether the axis begins at zero.
    """

    title: str
    cells: Sequence[str]
    labels: Sequence[str]
    seeds: ChartRows
    middles: ChartRows
    paper: ChartRows
    decimals: int
    from_zero: bool

    @property
    def axis(self) -> tuple[str, alt.Scale]:
        """Title and scale of the values."""
        values = [
            row[key] for rows in (self.seeds, self.middles, self.paper) for row in rows for key in _NUMBERS & {*row}
        ]
        if values and min(values) > 0 and max(values) > SPREAD * min(values) and not self.from_zero:
            return f"{self.title}, log scale", alt.Scale(type="log", nice=True)
        if self.from_zero and max(values, default=0.0) < 1:
            return self.title, alt.Scale(domain=[0, 1])  # noise is not a sink
        return self.title, alt.Scale(zero=self.from_zero, nice=True)


_NUMBERS = {"value", "median", "smallest", "largest"}


def by_cell(dots: Dots, width: Width = 420, labels: int = 150) -> Drawing:
    """A row per cell, values from left to right.

    Args:
        labels: pixels for the names of cells, of which more is cut off.
    """
    cell = alt.Y(
        "cell:N",
        title=None,
        scale=alt.Scale(domain=list(dots.cells)),
        axis=alt.Axis(grid=True, ticks=False, domain=False, labelLimit=labels, labelPadding=8),
    )
    title, scale = dots.axis

    def placed(mark: alt.Chart, field: str) -> alt.Chart:
        axis = alt.Axis(format=_format(scale), grid=False, tickCount=4)
        return mark.encode(y=cell, x=alt.X(field, title=title, scale=scale, axis=axis))

    offset = alt.YOffset("place:Q", scale=alt.Scale(domain=[-2, 2]))
    layers = _marks(
        dots, placed, _bars().encode(x2="largest:Q"), _points(dots).encode(yOffset=offset), "triangle-right"
    )
    return _drawn(dots, layers, width, ROW * len(dots.cells))


def in_order(dots: Dots, what: str, width: Width = 420) -> Drawing:
    """Cells in their order from left to right, values upwards, the medians joined.

    Args:
        what: is varied from cell to cell.
    """
    scale_of_places = alt.Scale(domain=list(dots.labels))
    place = alt.X("at:N", title=what, scale=scale_of_places, axis=alt.Axis(grid=False, labelAngle=0, labelOverlap=True))
    title, scale = dots.axis

    def placed(mark: alt.Chart, field: str) -> alt.Chart:
        axis = alt.Axis(format=_format(scale), tickCount=5)
        return mark.encode(x=place, y=alt.Y(field, title=title, scale=scale, axis=axis))

    layers = []
    if dots.paper:
        line = alt.Chart(PAPERS).mark_line(strokeWidth=1.2, strokeDash=[4, 3], opacity=0.7, color=PAPER)
        layers.append(placed(line, "value:Q"))
    if _have(dots, "median"):
        layers.append(placed(alt.Chart(MIDDLES).mark_line(strokeWidth=1.8, color=OURS), "median:Q"))
    offset = alt.XOffset("place:Q", scale=alt.Scale(domain=[-4, 4]))
    layers += _marks(dots, placed, _bars().encode(y2="largest:Q"), _points(dots).encode(xOffset=offset), "triangle-up")
    return _drawn(dots, layers, width, TALL)


def _marks(
    dots: Dots, placed: Callable[[alt.Chart, str], alt.Chart], bars: alt.Chart, points: alt.Chart, beyond: str
) -> list[alt.Chart]:
    """Lines from smallest to largest, medians, the paper's numbers and seeds, one drawn over the other.

    Args:
        placed: a mark in its cell, by the field of its value.
        bars: lines that know where they end.
        points: seeds that know how they are set apart.
        beyond: shape that points to larger values.
    """
    layers = []
    if _have(dots, "smallest"):
        layers.append(placed(bars, "smallest:Q"))
    if _have(dots, "median"):
        layers.append(placed(_medians(dots), "median:Q"))
    if _have(dots, "beyond"):
        layers.append(placed(_never_reached(dots, beyond), "beyond:Q"))
    if dots.paper:
        layers.append(placed(_diamonds(dots), "value:Q"))
    if dots.seeds:
        layers.append(placed(points, "value:Q"))
    return layers


SEEDS, MIDDLES, PAPERS = (alt.NamedData(name) for name in ("seeds", "middles", "paper"))
"""The rows are put beside the layers, which Altair copies again and again while it builds them."""


def _drawn(dots: Dots, layers: Sequence[alt.Chart], width: Width, height: int) -> Drawing:
    rows = {"seeds": _apart(dots.seeds), "middles": list(dots.middles), "paper": list(dots.paper)}
    filled = {name: found for name, found in rows.items() if found}
    return alt.layer(*layers, width=width, height=height, datasets=filled)


def _have(dots: Dots, field: str) -> bool:
    return any(field in row for row in dots.middles)


def _format(scale: alt.Scale) -> str:
    return "~g" if scale.to_dict().get("type") == "log" else ",~r"


def _bars() -> alt.Chart:
    rules = alt.Chart(MIDDLES).mark_rule(strokeWidth=2, opacity=0.55, color=OURS)
    return rules.transform_filter("isValid(datum.smallest)")


def _medians(dots: Dots) -> alt.Chart:
    marks = alt.Chart(MIDDLES).mark_tick(thickness=2.5, size=15, color=OURS).encode(tooltip=_of_median(dots))
    return marks.transform_filter("isValid(datum.median)")


def _never_reached(dots: Dots, shape: str) -> alt.Chart:
    tooltip = [
        alt.Tooltip("cell:N", title="cell"),
        alt.Tooltip("never_reached:Q", title="seeds that did not get there"),
    ]
    marks = alt.Chart(MIDDLES).mark_point(shape=shape, size=90, filled=True, opacity=1, color=OURS)
    return marks.encode(tooltip=tooltip).transform_filter("isValid(datum.beyond)")


def _diamonds(dots: Dots) -> alt.Chart:
    marks = alt.Chart(PAPERS).mark_point(shape="diamond", size=85, filled=False, strokeWidth=2, color=PAPER)
    return marks.encode(tooltip=_of_paper(dots))


def _points(dots: Dots) -> alt.Chart:
    marks = alt.Chart(SEEDS).mark_point(size=38, opacity=0.85, color=OURS, cursor="pointer")
    return marks.encode(tooltip=_of_seed(dots), href="link:N")


def _apart(seeds: ChartRows) -> ChartRows:
    """The seeds of a cell a little beside each other, so that equal ones can be told apart."""
    count = {row["cell"]: 0 for row in seeds}
    placed = []
    for row in seeds:
        count[row["cell"]] += 1
        placed.append((row, count[row["cell"]]))
    return [{**row, "place": number - (count[row["cell"]] + 1) / 2} for row, number in placed]


def _of_median(dots: Dots) -> list[alt.Tooltip]:
    bounds = [alt.Tooltip(f"{key}:Q", title=said, format=f",.{dots.decimals}f") for key, said in _BOUNDS]
    return [alt.Tooltip("cell:N", title="cell"), *bounds]


_BOUNDS = (("median", "median over seeds"), ("smallest", "smallest"), ("largest", "largest"))


def _of_paper(dots: Dots) -> list[alt.Tooltip]:
    value = alt.Tooltip("value:Q", title="the paper's", format=f",.{max(dots.decimals, 2)}f")
    return [alt.Tooltip("cell:N", title="cell"), value]


def _of_seed(dots: Dots) -> list[alt.Tooltip]:
    return [
        alt.Tooltip("cell:N", title="cell"),
        alt.Tooltip("seed:Q", title="seed"),
        alt.Tooltip("value:Q", title="value", format=f",.{dots.decimals + 1}f"),
        alt.Tooltip("run:N", title="run"),
    ]
