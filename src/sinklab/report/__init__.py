"""Reports on results: an HTML page, chart files, tables for page, terminal and notebooks, and packed sweeps.

Only the modules that draw charts import Altair and vl-convert; reading (`collect`), aggregation (`cells`) and tables do
not.
"""

from pathlib import Path


def write_report(dirs: list[Path], out: Path | None = None, formats: tuple[str, ...] = ()) -> Path:
    """Write the page of the results in `dirs` and return its path; see `sinklab.report.page.write_report`."""
    from sinklab.report import page

    return page.write_report(dirs, out, formats)
