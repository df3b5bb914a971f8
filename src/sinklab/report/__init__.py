"""Reports: from what runs left on disk to a page, chart files and tables in the terminal.

Reading (`collect`), adding up (`summary`), tables and the terminal need no chart library; Altair and Vega are imported
when the first chart is drawn.
"""

from pathlib import Path


def write_report(dirs: list[Path], out: Path | None = None, formats: tuple[str, ...] = ()) -> Path:
    """Draw `report.html` from what is on disk in `dirs`; see `sinklab.report.html.write_report`."""
    from sinklab.report import html

    return html.write_report(dirs, out, formats)
