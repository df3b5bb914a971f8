"""Reports: from results on disk to a page, chart files and tables in the terminal.

Reading (`collect`), aggregation (`cells`), tables and the terminal need no chart library; Altair and Vega are imported
when the first chart is drawn.
"""

from pathlib import Path


def write_report(dirs: list[Path], out: Path | None = None, formats: tuple[str, ...] = ()) -> Path:
    """Draw `report.html` from the results in `dirs`; see `sinklab.report.page.write_report`."""
    from sinklab.report import page

    return page.write_report(dirs, out, formats)
