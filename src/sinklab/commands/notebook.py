"""A measurement in a notebook: as a chart, and as what a cell that ends with it shows."""

from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from sinklab.errors import InputError

if TYPE_CHECKING:
    from sinklab.measuring.measurement import Measurement

CHARTS = {"heads": "importance-heads", "layers": "importance-layers", "positions": "importance-positions"}
CHARTS |= {"norms": "norms"}
WIDTH = 110


def chart(measurement: "Measurement", what: str = "heads") -> Any:
    """One of the figures of the report as an Altair chart.

    Args:
        what: "heads", "layers", "positions" or "norms".

    Raises:
        InputError: there is no such figure, the measurement has nothing for it, or altair is not installed.
    """
    if what not in CHARTS:
        raise InputError(f"there is no chart {what!r}: choose from {', '.join(CHARTS)}")
    try:
        import altair as alt

        from sinklab.report import theme
        from sinklab.report.data import ReportData, ReportedRun
        from sinklab.report.importance_figures import importance_figures
    except ModuleNotFoundError as error:
        raise InputError(f"a chart needs {error.name}, which is not installed: pip install altair") from error
    data = ReportData([Path()], [ReportedRun.of(measurement)])
    figures = {figure.key: figure for figure in importance_figures(data, 480) if figure is not None}
    if CHARTS[what] not in figures:
        raise InputError(f"the measurement has no norms of two positions to draw: choose {', '.join(list(CHARTS)[:3])}")
    figure = figures[CHARTS[what]]
    drawn = figure.charts[0] if len(figure.charts) == 1 else alt.vconcat(*figure.charts)
    config = theme.on_paper()
    config["legend"].pop("layout")  # Altair's own check does not know it
    return drawn.configure(**config)


def html(measurement: "Measurement") -> str:
    """The tables of the terminal as a piece of HTML that runs nothing and loads nothing."""
    from sinklab.commands.terminal.measurement import print_measurement

    console = Console(record=True, file=StringIO(), width=WIDTH, force_jupyter=False, force_terminal=True)
    print_measurement(measurement, console)
    return console.export_html(
        inline_styles=True, code_format='<pre style="line-height: 1.25; overflow-x: auto">{code}</pre>'
    )
