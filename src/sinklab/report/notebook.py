"""A measurement in a notebook: as a chart, and as the HTML of a cell that ends with it."""

from pathlib import Path
from typing import Any

from markupsafe import Markup

from sinklab.errors import InputError
from sinklab.measuring.measurement import Measurement
from sinklab.report.tables import measurement_facts, measurement_tables, templates

CHARTS = {
    "heads": "importance-heads",
    "layers": "importance-layers",
    "positions": "importance-positions",
    "norms": "norms",
}


def chart(measurement: Measurement, what: str = "heads") -> Any:
    """One of the figures of the report as an Altair chart.

    Args:
        what: "heads", "layers", "positions" or "norms".

    Raises:
        InputError: there is no such figure, or the measurement has nothing for it.
    """
    if what not in CHARTS:
        raise InputError(f"there is no chart {what!r}: choose from {', '.join(CHARTS)}")
    import altair as alt

    from sinklab.report import theme
    from sinklab.report.data import ReportData, ReportedRun
    from sinklab.report.measurement_figures import importance_figures

    data = ReportData([Path()], [ReportedRun.of(measurement)])
    figures = {figure.key: figure for figure in importance_figures(data, 480) if figure is not None}
    if CHARTS[what] not in figures:
        raise InputError(f"the measurement has no norms of two positions to draw: choose {', '.join(list(CHARTS)[:3])}")
    figure = figures[CHARTS[what]]
    drawn = figure.charts[0] if len(figure.charts) == 1 else alt.vconcat(*figure.charts)
    config = theme.on_paper()
    config["legend"].pop("layout")  # Altair's own check does not know it
    return drawn.configure(**config)


def html(m: Measurement) -> str:
    """The tables of the terminal as a piece of HTML that runs nothing and loads nothing."""
    draw = templates().get_template("table.html.j2").module.draw  # type: ignore[attr-defined]
    parts = [
        Markup("<p><b>{}</b><br>{}</p>").format(
            f"{m.model or 'model'}: {m.sequences} sequences of {m.length} tokens, {m.inputs}",
            ", ".join(measurement_facts(m)),
        )
    ]
    for table in measurement_tables(m):
        parts += [Markup("<h4>{}</h4>").format(table.title), draw(table)]
    parts += [Markup("<p>note: {}</p>").format(note) for note in m.notes]
    return str(Markup("").join(parts))
