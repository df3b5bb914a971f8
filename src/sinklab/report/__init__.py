"""Reports on results: the HTML page, chart files, packed sweeps, and tables for the page, terminal and notebooks.

Altair and vl-convert are imported only by the modules that draw charts. Reading results (`collect`), aggregating them
(`cells`) and making tables (`result_tables`, `sweeps`) do not need them.
"""

from pathlib import Path


def write_report(dirs: list[Path], out: Path | None = None, formats: tuple[str, ...] = ()) -> Path:
    """Write the HTML report on the results in `dirs` and return its path.

    Arguments and errors: see `sinklab.report.page.write_report`.
    """
    from sinklab.report import page

    return page.write_report(dirs, out, formats)
