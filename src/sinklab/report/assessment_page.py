"""The tables and figures of assessments, as their parts declare them (`assessing/part.py`)."""

from collections.abc import Sequence
from typing import TypeVar

import altair as alt

from sinklab.assessing.assessment import Assessment
from sinklab.assessing.part import PartFigure, PlotAxis
from sinklab.report import theme
from sinklab.report.assessments import Assessed
from sinklab.report.charts import HEIGHT, Drawing, Width, cell_colour
from sinklab.report.figure import Figure
from sinklab.report.tables import Table

COLUMNS = [
    ("What was done", ""),
    ("Loss", "nats / token"),
    ("Perplexity", ""),
    ("KL", "from the unchanged model"),
    ("", ""),
]


ROW_HEIGHT = 30
Channel = TypeVar("Channel", alt.X, alt.Y)


def assessment_tables(assessed: Sequence[Assessed]) -> list[Table]:
    """One per assessment: a row for every change, a note for every remark."""
    return [_table(number, one.name, one.document) for number, one in enumerate(assessed)]


def _table(number: int, name: str, document: Assessment) -> Table:
    rows = [
        [f"{part}: {row.what}", f"{row.effect.loss:.4f}", row.perplexity, f"{row.effect.kl:.4f}", row.more]
        for part, row in document.rows()
    ]
    notes = [
        *(f"{remark}." for remark in document.remarks()),
        *(f"Skipped: {part}: {why}" for part, why in document.skipped.items()),
        *document.notes,
    ]
    return Table(f"assessment-{number}", f"What the sink costs and buys: {name}", COLUMNS, rows, notes)


def assessment_figures(assessed: Sequence[Assessed], width: Width) -> list[Figure]:
    """The figures of every assessment; where there are several, their titles name the model."""
    found = []
    for number, one in enumerate(assessed):
        of = f": {one.name}" if len(assessed) > 1 else ""
        for name, part in one.document.results.items():
            if figure := part.figure():
                found.append(Figure(f"{name}-{number}", figure.title + of, figure.caption, [_drawn(figure, width)]))
    return found


def _drawn(figure: PartFigure, width: Width) -> Drawing:
    series = figure.series or list(dict.fromkeys(str(row[figure.colour]) for row in figure.rows))
    base = alt.Chart(alt.Data(values=list(figure.rows))).encode(
        x=_axis(alt.X, figure.x, grid=figure.kind == "scatter"), y=_axis(alt.Y, figure.y)
    )
    tooltip = [
        alt.Tooltip(f"{figure.colour}:N", title="kind" if figure.colour == "kind" else "what"),
        *(_hint(axis) for axis in (figure.x, figure.y)),
        *(alt.Tooltip(f"{field}:Q", title=title, format=form) for field, title, form in figure.tooltip),
    ]
    coloured = base.encode(color=cell_colour(series, figure.colour))
    layers: list[alt.Chart] = []
    if figure.reference is not None:
        across = figure.kind == "dots"
        rule = alt.Chart(alt.Data(values=[{"reference": figure.reference}])).mark_rule(
            strokeDash=[4, 3], strokeWidth=1.4, color=theme.REFERENCE
        )
        layers.append(rule.encode(x="reference:Q") if across else rule.encode(y="reference:Q"))
    match figure.kind:
        case "lines":
            layers += [coloured.mark_line(), coloured.mark_point(size=46, opacity=1).encode(tooltip=tooltip)]
        case "dots":
            joined = base.mark_line(strokeWidth=1.2, opacity=0.35, color="currentColor")
            layers += [
                joined.encode(detail=f"{figure.y.field}:N"),
                coloured.mark_point(size=64, opacity=1).encode(tooltip=tooltip),
            ]
        case "scatter":
            layers.append(coloured.mark_point(size=40, opacity=0.9).encode(tooltip=tooltip))
    height = alt.Step(ROW_HEIGHT) if figure.kind == "dots" else HEIGHT
    return alt.layer(*layers).properties(width=width, height=height)


def _axis(channel: type[Channel], axis: PlotAxis, grid: bool = True) -> Channel:
    """The channel of an axis: categories in their order, or a number line."""
    if axis.order is not None:
        upright = alt.Axis(labelAngle=0, labelOverlap=True, grid=False)
        rows = alt.Axis(grid=True, ticks=False, domain=False, labelLimit=220)
        look = upright if channel is alt.X else rows
        return channel(f"{axis.field}:O", title=axis.title or None, sort=axis.order, axis=look)
    scale = alt.Scale(zero=axis.zero)
    if axis.log:
        scale = alt.Scale(type="log", nice=False, padding=10)
    elif axis.domain:
        scale = alt.Scale(domain=list(axis.domain))
    look = alt.Axis(format=axis.format or ",~r", tickCount=6 if channel is alt.X else 5, grid=grid)
    return channel(f"{axis.field}:Q", title=axis.title, scale=scale, axis=look)


def _hint(axis: PlotAxis) -> alt.Tooltip:
    if axis.order is not None:
        return alt.Tooltip(f"{axis.field}:N", title=axis.short)
    return alt.Tooltip(f"{axis.field}:Q", title=axis.short, format=".4~f")
