"""A sink that has moved from the first token to another: every table that shows Sink_1 of a change says where it is."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_fixtures import evaluation
from rich.console import Console
from sweep_fixtures import make_sweep

from sinklab.commands.results import print_report, print_runs, print_summary
from sinklab.commands.terminal import describe
from sinklab.experiments.documents import CellSummary, Summary
from sinklab.report.collect import ListedRun, collect
from sinklab.report.sections import experiment_sections, leaderboard
from sinklab.tables import highest_rate, later_sink

MOVED: list[float | None] = [0.4, 76.8, 3.0, 0.0, 0.0, 100.0]
SAID = "76.8 % at position 2"


@pytest.fixture(scope="module")
def sweep_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep whose cell sink_token has its sink at position 2."""
    folder = make_sweep(tmp_path_factory.mktemp("moved") / "tiny")
    document = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    document["cells"]["sink_token"]["sink_rate"] = MOVED
    (folder / "summary.json").write_text(json.dumps(document), encoding="utf-8")
    return folder


def printed(print_it: Callable[[Console], Any]) -> str:
    text = io.StringIO()
    print_it(Console(file=text, width=300))
    return text.getvalue()


def line_of(text: str, name: str) -> str:
    return next(line for line in text.splitlines() if line.strip(" │").startswith(name))


def test_the_highest_sink_rate_is_over_positions_that_many_queries_see() -> None:
    assert highest_rate(MOVED) == (2, 76.8)
    assert highest_rate([5.0]) == (1, 5.0)
    assert highest_rate([]) is None
    assert highest_rate([None, None, 3.0, 0.0]) is None
    assert later_sink([80.0, 76.8, 0.0, 0.0]) is None
    assert later_sink([0.1, 0.9, 0.0, 0.0]) is None  # noise is no sink


def test_tables_of_experiments_state_the_position_of_a_moved_sink(sweep_folder: Path) -> None:
    [sweep] = collect([sweep_folder]).sweeps
    summary: Summary = sweep.summary
    texts = [
        printed(lambda console: print_report(collect([sweep_folder]), console)),
        printed(lambda console: print_summary(summary, ["table_4"], console)),
    ]
    for text in texts:
        assert SAID in line_of(text, "sink_token")
        assert "at position" not in line_of(text, "softmax")


def test_the_page_and_the_leaderboard_state_the_position_of_a_moved_sink(sweep_folder: Path) -> None:
    [sweep] = collect([sweep_folder]).sweeps
    section = next(one for one in experiment_sections([sweep], sweep_folder) if one.name == "table_4")
    rows = {name: [cell.note for _, cell in cells] for (name, _), *cells in section.table.cells()}
    assert [note.endswith(f"({SAID})") for note in rows["sink_token"]].count(True) == 1
    assert not any("at position" in note for note in rows["softmax"])
    board = leaderboard(sweep)
    assert board is not None
    notes = {cell: score.note for cell, score in board.column("Sink₁").items()}
    assert notes["sink_token"] == SAID
    assert notes["softmax"] == ""


def test_summary_json_has_the_highest_rate_and_its_position() -> None:
    document = CellSummary(sink_rate=MOVED).model_dump()
    assert (document["sink_max"], document["sink_max_position"]) == (76.8, 2)
    assert CellSummary.model_validate(document).model_dump() == document
    assert CellSummary().model_dump()["sink_max"] is None


def test_the_lines_of_a_run_and_the_list_of_runs_state_the_position_of_a_moved_sink(tmp_path: Path) -> None:
    import numpy as np

    row = evaluation(100, 100, (18.0, None, 2.0, 3.0), np.random.default_rng(0)) | {"sink_rate": MOVED}
    assert f"Sink_1 0.4 % ({SAID})" in describe(row)
    listed = ListedRun("runs/a", "done", steps=100, sink_rate=0.4, sink_elsewhere=SAID)
    assert f"0.4 ({SAID})" in printed(lambda console: print_runs([listed], console))
