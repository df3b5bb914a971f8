"""The tables at the end of a command."""

import io
from pathlib import Path

from report_fixtures import make_lab, make_measurement, make_run
from rich.console import Console

from sinklab.commands.results import print_report
from sinklab.measuring.measurement import Measurement
from sinklab.report.collect import collect
from sinklab.report.data import ReportData


def printed(data: ReportData, width: int = 140) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_report(data, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_terminal_shows_the_cells(tmp_path: Path) -> None:
    text = printed(collect([make_lab(tmp_path / "lab")]))
    for expected in ("softmax", "K biases", "21.9", "2.84"):
        assert expected in text


def test_the_terminal_shows_the_notes_of_a_measurement(tmp_path: Path) -> None:
    measured = Measurement.load(make_measurement(tmp_path / "model", model="tiny"))
    measured.model_copy(update={"notes": ["out of memory: \x1b[2Jhalved"]}).save(tmp_path / "model")
    assert "note: tiny: out of memory: �[2Jhalved" in printed(collect([tmp_path / "model"]))


def test_a_name_cannot_control_the_terminal_or_its_markup(tmp_path: Path) -> None:
    text = printed(collect([make_run(tmp_path / "run", name="[red]a\x1b[2Jb")]))
    assert "[red]a" in text
    assert "\x1b" not in text


def test_a_narrow_terminal_repeats_the_cells_with_the_last_columns_below(tmp_path: Path) -> None:
    data = collect([make_lab(tmp_path / "lab")])
    text = printed(data, width=60)
    wide = printed(data, width=200)
    for kept in ("8.6", "21.9", "seconds"):
        assert kept in text
        assert kept in wide
    rows = [[line for line in shown.splitlines() if line.startswith("  sigmoid")] for shown in (text, wide)]
    assert len(rows[0]) > len(rows[1]) == 1
    assert max(len(line) for line in text.splitlines() if "─" in line) <= 60
