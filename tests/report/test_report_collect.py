"""What is on disk becomes what is reported: runs, seeds, unfinished work, damaged files."""

import json
from pathlib import Path

import pytest
from report_fixtures import LAB, make_lab, make_measurement, make_run, write
from table_texts import table_texts

from sinklab.errors import InputError
from sinklab.report.cells import cell_rows, cells_table, headline
from sinklab.report.collect import collect


def test_a_lab_directory_gives_its_cells_in_the_order_of_its_summary(tmp_path: Path) -> None:
    data = collect([make_lab(tmp_path / "lab")])
    assert data.cells == list(LAB)
    assert [run.cell for run in data.runs] == list(LAB)
    assert [claim.verdict for claim in data.claims] == ["reproduced", "contradicted", "inconclusive"]


def test_folders_named_by_seed_are_one_cell_with_mean_and_spread(tmp_path: Path) -> None:
    data = collect([make_lab(tmp_path / "lab", seeds=3)])
    softmax = cell_rows(data)[0]
    assert [run.seed for run in data.runs_of("softmax")] == [0, 1, 2]
    assert softmax.seeds == 3
    assert softmax.sink_first is not None
    assert softmax.sink_first.values == pytest.approx((8.6, 8.6 * 1.05, 8.6 * 1.1))
    assert softmax.sink_first.mean == pytest.approx(9.03)
    assert softmax.sink_first.deviation == pytest.approx(0.43)
    assert "9.0 ± 0.4" in table_texts(cells_table(data))[1][0]


def test_a_run_in_progress_is_read_up_to_its_half_written_line(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2000, reached=500)
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 600, "tokens": 12')
    data = collect([run])
    assert data.runs[0].steps_done == 500
    assert data.runs[0].in_progress
    assert "step 500 of 2000" in table_texts(cells_table(data))[1][0][1]
    assert "One run is unfinished" in " ".join(headline(data))


def test_a_run_that_has_not_evaluated_yet_is_reported_without_numbers(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", reached=0)
    (run / "metrics.jsonl").unlink()
    columns, rows = table_texts(cells_table(collect([run])))
    assert [name for name, _ in columns] == ["Cell", "Runs"]
    assert rows == [["softmax", "1 (step 0 of 2000)"]]


def test_a_step_repeated_after_an_interruption_counts_once_and_the_later_line_wins(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", reached=300)
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": 200, "valid_loss": 9.0}) + "\n")
    history = collect([run]).runs[0].history
    assert [evaluation.step for evaluation in history] == [0, 100, 200, 300]
    assert history[2].valid_loss == 9.0


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", reached=300)
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    (run / "metrics.jsonl").write_text("\n".join([lines[0], "{broken", *lines[2:]]), encoding="utf-8")
    with pytest.raises(InputError, match="line 2"):
        collect([run])


def test_a_non_finite_number_is_a_gap_and_not_a_crash(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", reached=300)
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 400, "valid_loss": NaN, "sink_rate": [Infinity]}\n')
    last = collect([run]).runs[0].history[-1]
    assert (last.step, last.valid_loss, last.sink_rate) == (400, None, [None])


def test_a_measured_model_is_named_by_its_hub_id(tmp_path: Path) -> None:
    data = collect([make_measurement(tmp_path / "out", model="openai-community/gpt2")])
    assert data.cells == ["openai-community/gpt2"]
    assert not data.runs[0].trained


def test_a_measured_directory_is_named_by_its_last_folder(tmp_path: Path) -> None:
    assert collect([make_measurement(tmp_path / "out", model="/models/mine/tiny")]).cells == ["tiny"]


def test_directories_with_the_same_cells_are_kept_apart(tmp_path: Path) -> None:
    data = collect([make_run(tmp_path / "first"), make_run(tmp_path / "second")])
    assert data.cells == ["softmax", "second/softmax"]


def test_folders_inside_a_run_are_not_taken_for_runs(tmp_path: Path) -> None:
    run = make_run(tmp_path / "lab" / "softmax", reached=100)
    make_run(run / "checkpoints" / "step_100", reached=100)
    assert len(collect([tmp_path / "lab"]).runs) == 1


def test_a_sink_on_another_early_position_gets_its_own_column(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", reached=0)
    write(run / "metrics.jsonl", {"step": 100, "sink_rate": [0.0, 4.3, 0.0, 50.0, 100.0]})
    columns, rows = table_texts(cells_table(collect([run])))
    assert rows[0][[name for name, _ in columns].index("Sink elsewhere")] == "4.3 at 2"


def test_a_cell_whose_runs_are_gone_is_reported_from_the_summary(tmp_path: Path) -> None:
    write(tmp_path / "summary.json", {"cells": {"gone": {"sink_rate": [8.0], "seeds": 3, "seconds": 60}}, "claims": []})
    row = cell_rows(collect([tmp_path]))[0]
    assert (row.cell, row.seeds) == ("gone", 3)
    assert row.sink_first is not None
    assert row.sink_first.mean == 8.0


@pytest.mark.parametrize("exists", [True, False])
def test_an_empty_or_missing_directory_says_what_was_looked_for(tmp_path: Path, exists: bool) -> None:
    folder = tmp_path / "nothing"
    if exists:
        folder.mkdir()
    with pytest.raises(InputError, match=r"recipe\.yaml.*measurement\.json.*summary\.json"):
        collect([folder])


@pytest.mark.parametrize(
    "text",
    [
        "a: [1",
        "train: &all {steps: *all}",
        "name: [tiny]",
        "name: 5",
        "train: {steps: many}",
        "train: 5",
        "metric: {eps: low}",
    ],
)
def test_a_damaged_recipe_is_named(text: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", reached=0)
    (run / "recipe.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"recipe\.yaml"):
        collect([run])
