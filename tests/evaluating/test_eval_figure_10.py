"""Figure 10: every model is measured and scored, finished models are kept, and the figure has a point per model."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Run, on_one_line
from hellaswag_files import hellaswag_file, sheep_items
from tiny_models import text_file, tiny_model

from sinklab.experiments.documents import CellEstimate, CellRun, CellSummary, ExperimentSummary
from sinklab.report.sweep_figures import quantity_scatter
from sinklab.tables import SINK_1

OWN = """
id: asked
title: "Asked"
each: model
cells:
  hellaswag: {inputs: natural, sequences: 4, length: 16, task: {name: hellaswag, items: 5}}
columns: [sink_1, accuracy_norm]
scatter: [sink_1, accuracy_norm]
"""


@pytest.fixture
def folder(run: Run) -> Run:
    """`sinklab ARGS` in a folder with two models, a text, items and an experiment."""
    pytest.importorskip("lm_eval", reason="needs lm-eval (extra eval)")
    tiny_model(Path("gpt2"))
    tiny_model(Path("neox"), "gptneox")
    text_file(Path("text.jsonl"))
    hellaswag_file(Path("items.jsonl"), sheep_items(12))
    Path("own.yaml").write_text(OWN)
    return run


CALL = ("reproduce", "own.yaml", "--model", "gpt2", "--model", "neox", "--text", "text.jsonl", "--data", "items.jsonl")


def test_every_model_has_its_sink_and_its_accuracy(folder: Run) -> None:
    status, out, err = folder(*CALL, "--seeds", 2, "--out", "out", "--json")
    assert status == 0, err
    summary = json.loads(out)
    assert list(summary["cells"]) == ["gpt2/hellaswag", "neox/hellaswag"]
    for model in ("gpt2", "neox"):
        runs = summary["cells"][f"{model}/hellaswag"]["runs"]
        for draw, one in enumerate(runs):
            place = Path("out") / model / "hellaswag" / f"seed_{draw}"
            task = json.loads((place / "evaluation.json").read_text())["tasks"]["hellaswag"]
            assert (task["items"], task["seed"]) == (5, draw)
            assert one["values"]["accuracy_norm"] == pytest.approx(100 * task["metrics"]["acc_norm"]["value"])
            measured = json.loads((place / "measurement.json").read_text())
            assert one["values"]["sink_1"] == measured["sink_rate"][0]
    page = Path("out/report.html").read_text()
    assert f"Accuracy, by likelihood per character versus {SINK_1}" in page


def test_finished_models_are_kept_and_another_file_of_items_is_refused(folder: Run) -> None:
    assert folder(*CALL, "--seeds", 1, "--out", "out")[0] == 0
    status, _, err = folder(*CALL, "--seeds", 1, "--out", "out")
    assert status == 0
    assert err.count("(kept)") == 2
    hellaswag_file(Path("others.jsonl"), sheep_items(13))
    status, _, err = on_one_line(folder)(*CALL[:-1], "others.jsonl", "--seeds", 1, "--out", "out")
    assert status == 2
    assert "with other settings (task is" in err


def test_a_scored_task_is_not_run_again_if_its_measurement_is_missing(folder: Run) -> None:
    assert folder(*CALL, "--seeds", 1, "--out", "out")[0] == 0
    place = Path("out/gpt2/hellaswag/seed_0")
    before = (place / "evaluation.json").read_bytes()
    (place / "measurement.json").unlink()
    assert folder(*CALL, "--seeds", 1, "--out", "out")[0] == 0
    assert (place / "evaluation.json").read_bytes() == before  # its seconds included
    assert (place / "measurement.json").is_file()


@pytest.mark.parametrize(
    ("experiment", "said"),
    [("table_1", "table_1 has none: remove it"), ("table_4", "table_4 has neither: remove it")],
)
def test_items_are_refused_for_an_experiment_without_a_task(experiment: str, said: str, run: Run) -> None:
    model = () if experiment == "table_4" else ("--model", tiny_model(Path("gpt2")))
    status, _, err = on_one_line(run)("reproduce", experiment, *model, "--text", ".", "--data", "items.jsonl")
    assert status == 2
    assert said in err


def cell(sink: float, accuracy: float | None) -> CellSummary:
    values = {
        "sink_1": CellEstimate(seeds=[sink - 1, sink, sink + 1], median=sink, smallest=sink - 1, largest=sink + 1)
    }
    if accuracy is not None:
        values["accuracy_norm"] = CellEstimate(seeds=[accuracy], median=accuracy, smallest=accuracy, largest=accuracy)
    run = CellRun(seed=0, hash="0", directory="", status="done")
    return CellSummary(values=values, runs=[run])


def drawn(cells: dict[str, CellSummary]) -> dict[str, Any] | None:
    experiment = ExperimentSummary(
        cells=list(cells), against=["sink_1", "accuracy_norm"], families={"a-1b/x": "a", "a-2b/x": "a"}
    )
    chart = quantity_scatter(cells, experiment)
    return None if chart is None else chart.to_dict()


def test_the_figure_has_a_point_for_each_model_with_both_numbers() -> None:
    chart = drawn({"a-1b/x": cell(20, 30), "a-2b/x": cell(40, 45), "b/x": cell(5, 50), "c/x": cell(5, None)})
    assert chart is not None
    rows = chart["data"]["values"]
    assert [(row["model"], row["family"], row["x"], row["y"]) for row in rows] == [
        ("a-1b", "a", 20, 30),
        ("a-2b", "a", 40, 45),
        ("b", "other models", 5, 50),
    ]
    assert all("x_low" in row and "y_low" not in row for row in rows)
    assert chart["layer"][0]["encoding"]["x"]["title"] == "Sink₁ (%)"


def test_there_is_no_figure_where_no_model_has_both_numbers() -> None:
    assert drawn({"c/x": cell(5, None)}) is None
