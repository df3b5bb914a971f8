"""Results collected from disk for the report: runs, seeds, unfinished work, damaged files."""

import json
from pathlib import Path
from typing import Any

import pytest
from made_assessment import make_assessment
from report_fixtures import LAB, make_lab, make_measurement, make_run, write
from table_texts import table_texts
from tiny_models import text_file, tiny_model

from sinklab.errors import InputError
from sinklab.experiments.definition import Experiment
from sinklab.experiments.documents import RunRecord
from sinklab.experiments.measured import measure_experiment
from sinklab.measuring.measurement import Measurement
from sinklab.report.cells import cells_table, headline, spread_over_seeds
from sinklab.report.collect import collect
from sinklab.report.figures import figures


def test_a_lab_directory_gives_its_cells_in_the_order_of_its_summary(tmp_path: Path) -> None:
    data = collect([make_lab(tmp_path / "lab")])
    assert data.cells == list(LAB)
    assert [run.cell for run in data.runs] == list(LAB)


def test_folders_named_by_seed_are_one_cell_with_mean_and_spread(tmp_path: Path) -> None:
    data = collect([make_lab(tmp_path / "lab", seeds=3)])
    softmax = spread_over_seeds(data, "sink_1")["softmax"]
    assert [run.seed for run in data.runs_of("softmax")] == [0, 1, 2]
    assert softmax["runs"] == 3
    assert (softmax["low"], softmax["high"]) == pytest.approx((8.6, 8.6 * 1.1))
    assert softmax["value"] == pytest.approx(9.03)
    assert softmax["deviation"] == pytest.approx(0.43)
    assert "9.0 ± 0.4" in table_texts(cells_table(data))[1][0]


def test_a_run_in_progress_is_read_up_to_its_half_written_line(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2000, reached=500)
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 600, "tokens": 12')
    data = collect([run])
    assert data.runs[0].steps_done == 500
    assert data.runs[0].unfinished == "step 500 of 2000"
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


def test_directories_of_one_name_are_kept_apart_and_one_that_is_passed_twice_is_read_once(tmp_path: Path) -> None:
    first, second, third = (make_run(tmp_path / name / "res" / "k").parent for name in ("a", "b", "c"))
    data = collect([first, second, third, tmp_path / "a" / ".." / "c" / "res"])
    assert data.cells == ["k", "res/k", "c/res/k"]
    assert [run.path.parent.resolve() for run in data.runs] == [first, second, third]


def test_a_directory_within_another_given_directory_is_refused(tmp_path: Path) -> None:
    lab = make_run(tmp_path / "lab" / "k").parent
    for dirs in ([tmp_path, lab], [lab / "k", tmp_path], [lab, lab / "k"]):
        with pytest.raises(InputError, match="whose runs would be counted twice"):
            collect(dirs)
    inside = make_measurement(lab / "k" / "measured")  # the folders of a run are not searched
    assert collect([lab, inside]).cells == ["k", "tiny"]


def test_an_assessment_in_two_directories_is_read_once(tmp_path: Path) -> None:
    lab = make_run(tmp_path / "lab" / "k").parent
    assessed = lab / "k" / "assessed"
    make_assessment(assessed, "tiny", 0.5)
    assert len(collect([lab, assessed]).assessed) == 1


def test_the_step_of_a_failed_run_is_shown_with_a_failed_file_or_a_failed_record(tmp_path: Path) -> None:
    first, second = (make_run(tmp_path / name, seed=seed, reached=300) for seed, name in enumerate(("a", "b")))
    write(first / "failed.json", {"step": 300, "message": "the loss is not finite"})
    RunRecord(hash="0", name="softmax", seed=1, status="failed").save(second)
    data = collect([tmp_path])
    assert [run.unfinished for run in data.runs] == ["failed at step 300 of 2000"] * 2
    assert not any("unfinished" in sentence for sentence in headline(data))


def test_cells_that_share_a_pass_have_the_numbers_of_their_own_threshold_and_length(tmp_path: Path) -> None:
    model, text = str(tiny_model(tmp_path / "gpt2")), text_file(tmp_path / "text.jsonl")
    cells = {
        f"eps_{eps}_length_{length}": {"inputs": "natural", "eps": eps, "length": length, "sequences": 6}
        for eps in (0.1, 0.3)
        for length in (8, 16)
    }
    experiment = Experiment.model_validate({"id": "mine", "title": "Mine", "cells": cells, "claims": []})
    summary = measure_experiment(experiment, [model], text, 2, out=tmp_path / "out").summary()
    data = collect([tmp_path / "out"])
    rates = {cell: row["value"] for cell, row in spread_over_seeds(data, "sink_1").items()}
    assert len({cell.sink_rate[0] for cell in summary.cells.values()}) > 1
    assert {name: rates[name] for name in cells} == {name: cell.sink_rate[0] for name, cell in summary.cells.items()}
    assert [run.cell for run in data.runs] == ["natural"] * 2  # the pass has a row with the numbers of all sequences
    columns, rows = table_texts(cells_table(data))
    place = [name for name, _ in columns].index("ε")
    assert [row[place] for row in rows] == ["0.1", "0.1", "0.3", "0.3", "0.1"]


def test_a_cell_named_like_the_inputs_of_a_shared_pass_has_its_own_numbers(tmp_path: Path) -> None:
    model, text = str(tiny_model(tmp_path / "gpt2")), text_file(tmp_path / "text.jsonl")
    cells = {
        "natural": {"inputs": "natural", "eps": 0.3, "length": 8, "sequences": 6},
        "long": {"inputs": "natural", "eps": 0.1, "length": 16, "sequences": 6},
    }
    experiment = Experiment.model_validate({"id": "mine", "title": "Mine", "cells": cells, "claims": []})
    summary = measure_experiment(experiment, [model], text, 2, out=tmp_path / "out").summary()
    rates = {cell: row["value"] for cell, row in spread_over_seeds(collect([tmp_path / "out"]), "sink_1").items()}
    assert rates == {**{name: cell.sink_rate[0] for name, cell in summary.cells.items()}, "pass natural": 0.0}


def test_measurements_with_different_thresholds_are_distinguished(tmp_path: Path) -> None:
    def with_eps(name: str, eps: float, rates: dict[str, list[float]] | None = None) -> Path:
        one = Measurement.load(make_measurement(tmp_path / name, model=name))
        one.model_copy(update={"eps": eps, "sink_rates": rates}).save(tmp_path / name)
        return tmp_path / name

    alone = with_eps("alone", 0.3)
    data = collect([alone, with_eps("other", 0.2, {"0.2": [8.6] * 64, "0.3": [5.0] * 64})])
    columns, rows = table_texts(cells_table(data))
    shown = {name: [row[at] for row in rows] for at, (name, _) in enumerate(columns)}
    assert (shown["ε"], shown["Sink₁"]) == (["0.3", "0.2"], ["8.60", "8.60"])
    assert shown["at ε = 0.3"] == ["8.60", "5.00"]
    assert "ε = 0.2 or 0.3" in headline(data)[0]
    heads = next(figure for figure in figures(data) if figure.key == "importance-heads")
    outlined = [chart.to_dict()["layer"][1]["transform"][0]["filter"] for chart in heads.charts]
    assert outlined == ["(datum.value > 0.3)", "(datum.value > 0.2)"]
    assert "ε" not in [name for name, _ in table_texts(cells_table(collect([alone])))[0]]


def test_the_sink_by_step_names_the_thresholds_of_all_runs(tmp_path: Path) -> None:
    for name in ("0.2", "0.3"):
        run = make_run(tmp_path / name, reached=300)
        text = (run / "recipe.yaml").read_text(encoding="utf-8")
        (run / "recipe.yaml").write_text(f"{text}metric: {{eps: {name}}}\n", encoding="utf-8")
    figure = figures(collect([tmp_path]))[0]
    assert "ε = 0.2 or 0.3" in figure.caption
    assert "ε = 0.2 or 0.3" in str(figure.charts[0].to_dict())


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
    _, rows = table_texts(cells_table(collect([tmp_path])))
    assert rows[0][:3] == ["gone", "3", "8.0"]


@pytest.mark.parametrize("exists", [True, False])
def test_the_error_on_an_empty_or_missing_directory_lists_the_expected_files(tmp_path: Path, exists: bool) -> None:
    folder = tmp_path / "nothing"
    if exists:
        folder.mkdir()
    with pytest.raises(InputError, match=r"recipe\.yaml.*measurement\.json.*summary\.json"):
        collect([folder])


@pytest.mark.parametrize(
    "text",
    [
        "a: [1",
        "name: [tiny]",
        "name: 5",
        "train: {steps: many}",
        "train: {steps: '100'}",
        "train: 5",
        "seed: '1'",
        "metric: {eps: low}",
    ],
)
def test_a_damaged_recipe_is_named(text: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", reached=0)
    (run / "recipe.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"recipe\.yaml"):
        collect([run])


def test_a_summary_with_a_wrong_value_is_named_with_its_key(tmp_path: Path) -> None:
    write(tmp_path / "summary.json", {"cells": {"mine": {"seeds": "many"}}})
    with pytest.raises(InputError, match=r"summary\.json cannot be read \(cells\.mine\.seeds: "):
        collect([tmp_path])


def test_a_result_of_several_measurements_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_measurement(tmp_path)
    write(tmp_path / "domains.json", {"schema": 1})
    with pytest.raises(InputError, match=r"domains\.json"):
        collect([tmp_path])
    read = Path.read_text

    def refuse(path: Path, *args: Any, **kwargs: Any) -> str:
        if path.name == "domains.json":
            raise PermissionError(13, "Permission denied")
        return read(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", refuse)  # root reads any file
    with pytest.raises(InputError, match=r"domains\.json cannot be read \(Permission denied\): rerun"):
        collect([tmp_path])
