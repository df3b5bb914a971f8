"""Assessments in the page, on the leaderboard, and in packed sweeps."""

import json
import re
from pathlib import Path

import pytest
from made_assessment import make_assessment
from sweep_fixtures import make_sweep
from test_report_html import Page

from sinklab.assessing.parts import PARTS
from sinklab.errors import InputError
from sinklab.experiments.sweep.packed import read_packed
from sinklab.report.collect import collect
from sinklab.report.packing import pack_sweep
from sinklab.report.page import write_report
from sinklab.report.sections import Leaderboard, SeedScore, leaderboard
from sinklab.tables import TableCell

HOSTILE = "<img src=x onerror=alert(1)>"


def headings(page: Page) -> set[str]:
    return {str(a["id"]) for tag, a in page.elements if tag == "h2"}


def board_of(folder: Path) -> Leaderboard:
    board = leaderboard(collect([folder]).sweeps[0])
    assert board is not None
    return board


def numbers(board: Leaderboard, cell: str) -> dict[str, tuple[float, ...]]:
    scores = zip(board.columns, board.scores[cell], strict=True)
    return {column.title: score.seeds for column, score in scores if score is not None}


def assess_runs(folder: Path, cell: str, costs: list[float], **changes: object) -> None:
    for run, cost in zip(sorted(folder.glob(f"{cell}-*")), costs, strict=True):
        make_assessment(run, str(run), cost, **changes)


def test_an_assessment_alone_is_a_report_with_a_table_and_a_figure_for_each_part(tmp_path: Path) -> None:
    page = Page(write_report([make_assessment(tmp_path / "out")]).read_text(encoding="utf-8"))
    assert {"assessment-0", *(f"{part}-0" for part in PARTS)} <= headings(page)
    assert "recent, 8 keys 3.5000 +0.5000 33.12 0.2000" in page.text
    assert "read with care" in page.text


def test_an_assessment_begins_with_the_recommendation_and_folds_every_change(tmp_path: Path) -> None:
    folder = make_assessment(tmp_path / "out")
    html = write_report([folder]).read_text(encoding="utf-8")
    text = Page(html).text
    parts = [
        "No setting was safe for KV cache",
        "very large loss without the sink: +0.500 nats",
        "Loss added by each setting",
        "safe up to +0.01 nats per token",
        "Can the model stream without the sink?",
    ]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert '<th scope="rowgroup" colspan="3">Can the model stream without the sink?</th>' in html
    assert '<th scope="rowgroup" colspan="4">KV cache</th>' in html
    assert html.index('id="streaming-0"') < html.index('id="assessment-0"')
    assert re.search(r'<details>\s*<summary><h2 id="assessment-0">', html)


def test_parts_that_were_not_assessed_have_no_figure(tmp_path: Path) -> None:
    folder = make_assessment(tmp_path / "out", heads=None, streaming=None, skipped={"streaming": "no such positions"})
    page = Page(write_report([folder]).read_text(encoding="utf-8"))
    assert "quantisation-0" in headings(page)
    assert not {"heads-0", "streaming-0"} & headings(page)
    assert "no such positions" in page.text


def test_two_assessments_are_distinguished_by_name_and_names_are_escaped(tmp_path: Path) -> None:
    folders = [make_assessment(tmp_path / "a", "first"), make_assessment(tmp_path / "b", HOSTILE)]
    page = Page(write_report(folders).read_text(encoding="utf-8"))
    assert f"Evicting keys: {HOSTILE}" in page.text
    assert "Evicting keys: first" in page.text
    assert not [a for tag, a in page.elements if tag == "img"]


def test_an_assessment_that_is_damaged_is_named(tmp_path: Path) -> None:
    folder = make_assessment(tmp_path / "out")
    (folder / "assessment.json").write_text("{", encoding="utf-8")
    with pytest.raises(InputError, match=r"assessment\.json"):
        write_report([folder])


def test_the_leaderboard_has_the_assessed_numbers_of_each_seed(tmp_path: Path) -> None:
    folder = make_sweep(tmp_path / "tiny")
    assert not board_of(folder).assessed
    assess_runs(folder, "softmax", [0.25, 0.5, 1.0])
    board = board_of(folder)
    assert board.assessed
    found = numbers(board, "softmax")
    assert sorted(found["Streaming"]) == pytest.approx([0.5, 1.0, 2.0])  # the smaller cache, none kept
    assert sorted(found["First kept"]) == pytest.approx([0.25, 0.5, 1.0])
    assert sorted(found["Int8"]) == pytest.approx([0.25, 0.5, 1.0])
    assert sorted(found["of the sink"]) == pytest.approx([0.1875, 0.375, 0.75])
    assert sorted(found["Recent keys"]) == pytest.approx([0.25, 0.5, 1.0])
    assert sorted(found["Twice as long"]) == pytest.approx([0.75, 1.5, 3.0])
    assert sorted(found["Sink hidden"]) == pytest.approx([1.0, 2.0, 4.0])
    assert sorted(found["KV cache"]) == pytest.approx([0.25, 0.5, 1.0])
    assert sorted(found["Sink heads"]) == pytest.approx([0.025, 0.05, 0.1])
    assert sorted(found["Single weight"]) == pytest.approx([0.25, 0.5, 1.0])
    assert sorted(found["By head"]) == pytest.approx([0.125, 0.25, 0.5])
    assert "Int8" not in numbers(board, "sigmoid")


def test_the_leaderboard_omits_runs_assessed_on_another_text(tmp_path: Path) -> None:
    folder = make_sweep(tmp_path / "tiny")
    assess_runs(folder, "softmax", [0.5, 0.5, 0.5])
    other = sorted(folder.glob("k_biases-*"))[0]
    make_assessment(other, asked={"model": "x", "files": "x", "text": "another", "caches": [16, 32]})
    board = board_of(folder)
    assert len(numbers(board, "softmax")["Int8"]) == 3
    assert "Int8" not in numbers(board, "k_biases")


def test_a_packed_sweep_keeps_assessments_without_paths_of_this_machine(tmp_path: Path) -> None:
    folder = make_sweep(tmp_path / "tiny")
    assess_runs(folder, "softmax", [0.5, 0.5, 0.5])
    packed = pack_sweep(collect([folder]), tmp_path / "packed")
    assert numbers(board_of(packed), "softmax") == numbers(board_of(folder), "softmax")
    runs = [run for file in packed.glob("*/runs.jsonl") for run in read_packed(file.parent)]
    kept = {run.directory: run.assessment for run in runs if run.assessment}
    assert len(kept) == 3
    assert all(name.startswith("softmax-") for name in kept)
    assert str(tmp_path) not in json.dumps(kept)
    assert all(found["model"] == name for name, found in kept.items())
    page = (packed / "report.html").read_text(encoding="utf-8")
    assert "Sink hidden" in page
    assert "sinklab assess" in page


def test_a_score_without_its_seeds_has_no_range() -> None:
    assert SeedScore(2.5, ()).cell(".1f") == TableCell(2.5)
