"""Every chart as a file of its own: SVG and PDF for papers, PNG for slides.

Each ends with a mark by which it is known again: a comment in SVG and PDF, a text chunk in PNG.
"""

import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import vl_convert as vlc

from sinklab.errors import InputError
from sinklab.files import written_aside
from sinklab.outputs import CHART_MARK, check_chart
from sinklab.report import theme
from sinklab.report.data import ReportData
from sinklab.report.experiments.figures import all_experiment_figures
from sinklab.report.experiments.glance import forests
from sinklab.report.experiments.sections import board_sections
from sinklab.report.figures import figures

# No chart refers to data elsewhere, and none may: the converter is given no address it could load from.
OFFLINE: dict[str, Any] = {"allowed_base_urls": []}

EXPERIMENT_WIDTH, ALONE = 420, 640

PNG_END = 12  # bytes of the last chunk

WRITERS: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "svg": lambda spec: vlc.vegalite_to_svg(spec, **OFFLINE).encode() + b"\n<!-- " + CHART_MARK + b" -->\n",
    "pdf": lambda spec: vlc.vegalite_to_pdf(spec, **OFFLINE) + b"\n% " + CHART_MARK + b"\n",
    "png": lambda spec: _marked_png(vlc.vegalite_to_png(spec, scale=2, **OFFLINE)),
}


def export_charts(data: ReportData, out_dir: Path, formats: Sequence[str] = ("svg", "pdf")) -> list[Path]:
    """Write every chart of the report as `<figure>[-<number>].<format>` into `out_dir`.

    Returns:
        The paths written, in reading order.

    Raises:
        InputError: a format other than svg, pdf or png, or a file that is not a chart of ours is where one belongs.
        SinklabError: a file cannot be written.
    """
    unknown = sorted(set(formats) - set(WRITERS))
    if unknown:
        raise InputError(f"unknown chart format {', '.join(unknown)}: choose from {', '.join(WRITERS)}.")
    drawn = [
        *forests(data.sweeps, out_dir, ALONE),
        *(board.figure for board in board_sections(data.sweeps, ALONE) if board.figure),
        *all_experiment_figures(data.sweeps, out_dir, EXPERIMENT_WIDTH),
        *figures(data, ALONE),
    ]
    wanted = [
        (out_dir / f"{figure.key if len(figure.charts) == 1 else f'{figure.key}-{number}'}.{kind}", kind, chart)
        for figure in drawn
        for number, chart in enumerate(figure.charts, start=1)
        for kind in formats
    ]
    for path, _, _ in wanted:
        check_chart(path)
    for path, kind, chart in wanted:
        spec = chart.to_dict(validate=False) | {"config": theme.on_paper()}
        with written_aside(path) as aside:
            aside.write_bytes(WRITERS[kind](spec))
    return [path for path, _, _ in wanted]


def _marked_png(png: bytes) -> bytes:
    """A chunk of text before the last one (PNG specification, section 11.3.4.3)."""
    chunk = b"tEXtSoftware\0" + CHART_MARK
    whole = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return png[:-PNG_END] + whole + png[-PNG_END:]
