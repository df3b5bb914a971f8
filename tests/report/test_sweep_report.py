"""The page and the terminal show the summary and the run directories of a sweep."""

import io
import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from rich.console import Console
from sweep_fixtures import CELLS, EXPERIMENTS, MadeCell, make_sweep
from table_texts import table_texts
from test_report_html import Page

from sinklab.commands.results import print_report
from sinklab.errors import InputError
from sinklab.experiments.documents import ExperimentSummary
from sinklab.report.collect import collect
from sinklab.report.page import export_charts, write_report
from sinklab.report.sections import leaderboard
from sinklab.report.sweep_figures import cell_order
from sinklab.report.sweeps import experiment_table

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def sweep_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sweep(tmp_path_factory.mktemp("sweep") / "tiny")


@pytest.fixture(scope="module")
def page(sweep_folder: Path) -> Page:
    return Page(write_report([sweep_folder]).read_text(encoding="utf-8"))


def test_the_page_counts_the_verdicts_with_their_scale_and_lists_every_experiment(page: Page) -> None:
    assert (
        "Claims at tiny: confirmatory 1 reproduced 1 contradicted 1 no verdict 1 not run "
        "exploratory 1 direction only 1 inconclusive 1 not asked" in page.text
    )
    anchors = {str(a.get("id")) for tag, a in page.elements if tag in ("h2", "h3")}
    links = {str(a["href"]).removeprefix("#") for tag, a in page.elements if tag == "a" and a["href"][0] == "#"}  # type: ignore[index]
    assert links == {"leaderboard", "confirmatory", "exploratory"}
    assert links | {f"experiment-{name}" for name in EXPERIMENTS} <= anchors


@pytest.mark.parametrize("name", ["charts", "cells", "provenance", "leaderboard", "confirmatory", "rule"])
def test_an_experiment_may_be_named_like_another_part_of_the_page(tmp_path: Path, name: str) -> None:
    top = make_sweep(tmp_path / "tiny", {name: EXPERIMENTS["table_2"]})
    ids = [a["id"] for _, a in Page(write_report([top]).read_text(encoding="utf-8")).elements if "id" in a]
    assert [one for one, count in Counter(ids).items() if count > 1] == []


def test_a_section_has_question_source_adaptation_numbers_claims_and_runs(page: Page) -> None:
    for said in (
        "Does the sink shift to learned biases or to a learned sink token?",
        "2410.10781, table 4",
        "so every chunk starts with BOS",
        "74.12",
        "reproduced at tiny",
        "In 0 of 9 pairs of seeds, k_biases is not below softmax.",
        "confirmatory, stated 2026-11-23",
        "model.attention.bias=k",
        "The base recipe",
    ):
        assert said in page.text


def test_the_page_reports_edited_failed_and_unfinished_runs(page: Page) -> None:
    assert "edited since it ended: metrics.jsonl" in page.text
    assert "the loss is not finite at step 312" in page.text
    assert "1 unfinished" in page.text
    assert "2 of 3" in page.text
    assert "training failed" in page.text


def test_a_file_that_is_edited_after_the_summary_was_written_is_named(tmp_path: Path) -> None:
    top = make_sweep(tmp_path / "tiny")
    recipe = next(top.glob("sigmoid-*/recipe.yaml"))
    recipe.write_text(recipe.read_text(encoding="utf-8") + "# mine\n", encoding="utf-8")
    found = collect([top]).sweeps[0].summary.cells["sigmoid"].runs
    assert [run.edited for run in found].count(["recipe.yaml"]) == 1


def test_every_link_to_a_recipe_leads_to_a_file(page: Page, sweep_folder: Path) -> None:
    links = [str(a["href"]) for tag, a in page.elements if tag == "a" and not str(a["href"]).startswith("#")]
    runs = sum(len(one.runs) for one in collect([sweep_folder]).sweeps[0].summary.cells.values())
    assert len(links) >= runs
    assert all((sweep_folder / unquote(link)).is_file() for link in links)


def test_links_lead_to_the_runs_from_a_page_in_another_folder(tmp_path: Path, sweep_folder: Path) -> None:
    written = write_report([sweep_folder], out=tmp_path / "else where" / "page.html")
    links = [str(a["href"]) for tag, a in Page(written.read_text(encoding="utf-8")).elements if tag == "a"]
    recipes = [link for link in links if not link.startswith("#")]
    assert recipes
    assert all((written.parent / unquote(link)).is_file() for link in recipes)


def test_chart_files_have_no_links(tmp_path: Path, sweep_folder: Path) -> None:
    # The converter resolves a relative link against an address of its own.
    written = export_charts(collect([sweep_folder]), tmp_path / "charts", ("svg",))
    assert any(path.stem.startswith("table_4-numbers") for path in written)
    assert not [path.name for path in written if "href" in path.read_text(encoding="utf-8")]


def test_points_of_a_chart_are_runs_with_their_seed_and_recipe(page: Page, sweep_folder: Path) -> None:
    document = json.loads(page.scripts[[s.startswith('{"config"') for s in page.scripts].index(True)])
    rows = document["specs"]["table_4-numbers-0"]["datasets"]
    cells = collect([sweep_folder]).sweeps[0].summary.cells
    expected = [
        (cell, run.seed, run.hash) for cell in EXPERIMENTS["table_4"].cells for run in cells[cell].runs if run.values
    ]
    assert [(row["cell"], row["seed"], row["run"]) for row in rows["seeds"]] == expected
    assert all((sweep_folder / unquote(row["link"])).is_file() for row in rows["seeds"])
    assert {row["cell"]: row["value"] for row in rows["paper"]} == {"softmax": 18.18, "sink_token": 0.0, "k_biases": 0}


def test_the_sink_is_drawn_by_step_where_an_experiment_asks_when_it_emerges(page: Page) -> None:
    document = json.loads(page.scripts[[s.startswith('{"config"') for s in page.scripts].index(True)])
    grown = [key for key in document["specs"] if "growth" in key]
    assert grown == ["table_2-growth-0"]


def test_the_norms_and_the_loss_are_drawn_where_an_experiment_asks_about_their_time(
    sweep_folder: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(sweep_folder, tmp_path / "sweep"))
    summary = json.loads((folder / "summary.json").read_text())
    summary["experiments"]["table_2"]["columns"] += ["norm_step", "loss_change"]
    (folder / "summary.json").write_text(json.dumps(summary))
    specs = charts_of(write_report([folder]).read_text(encoding="utf-8"))["specs"]
    drawn = {key: specs[key] for key in specs if key.startswith("table_2-growth")}
    assert [chart["layer"][0]["encoding"]["y"]["title"] for chart in drawn.values()] == [
        "Sink₁ (percent of heads)",
        "Norm ratio of the first token",
        "Validation loss (nats per token)",
    ]
    run = next(iter(collect([folder]).sweeps[0].summary.cells["weight_decay_0.5"].runs))
    rows = [json.loads(line) for line in (folder / run.directory / "metrics.jsonl").read_text().splitlines()]
    _, norms, losses = (
        [row["value"] for row in chart["data"]["values"] if (row["cell"], row["seed"]) == ("weight_decay_0.5", 0)]
        for chart in drawn.values()
    )
    assert norms == [max(row["hidden_norm_ratio"]) for row in rows]
    assert losses == [row["valid_loss"] for row in rows if row["step"]]


def test_the_layers_are_drawn_where_an_experiment_asks_which_comes_first(sweep_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sweep_folder, tmp_path / "sweep"))
    summary = json.loads((folder / "summary.json").read_text())
    summary["experiments"]["table_2"]["columns"].append("layer_step_2")
    (folder / "summary.json").write_text(json.dumps(summary))
    for metrics in folder.glob("*/metrics.jsonl"):
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        heads = [row | {"sink_rate_heads": [[0.0, 1.0], [row["step"], None]]} for row in rows]
        metrics.write_text("".join(json.dumps(row) + "\n" for row in heads))
    specs = charts_of(write_report([folder]).read_text(encoding="utf-8"))["specs"]
    assert [key for key in specs if "layers" in key and key.startswith("table_")] == ["table_2-layers-0"]
    rows = specs["table_2-layers-0"]["data"]["values"]
    assert {row["value"] for row in rows if row["layer"] == 1} == {1.0}
    assert all(row["value"] == row["step"] for row in rows if row["layer"] == 2)
    assert {row["cell"] for row in rows} == {*EXPERIMENTS["table_2"].cells}


def test_seeds_without_the_event_are_counted_and_marked_by_an_arrow(sweep_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sweep_folder, tmp_path / "sweep"))
    summary = json.loads((folder / "summary.json").read_text())
    never, once = EXPERIMENTS["table_2"].cells[:2]
    for run in [*summary["cells"][never]["runs"], summary["cells"][once]["runs"][0]]:
        run["values"].pop("emergence_step", None)
        run["never"] = ["emergence_step"]
    for run, step in zip(summary["cells"][once]["runs"][1:], (900.0, 1234.0), strict=True):
        run["values"]["emergence_step"] = step
    (folder / "summary.json").write_text(json.dumps(summary))
    text = write_report([folder]).read_text(encoding="utf-8")
    assert "never (three seeds without the event)" in Page(text).text
    assert "An arrow marks seeds at which the event did not occur" in Page(text).text
    assert "1,234 (one seed without the event)" in Page(text).text
    chart = charts_of(text)["specs"]["table_2-numbers-2"]
    arrows = [layer for layer in chart["layer"] if str(layer["mark"].get("shape", "")).startswith("triangle")]
    assert [arrow["transform"] for arrow in arrows] == [[{"filter": "isValid(datum.beyond)"}]]
    middles = {row["cell"]: row for row in chart["datasets"]["middles"]}
    assert (middles[never]["never_reached"], "beyond" in middles[never]) == (3, False)
    assert (middles[once]["never_reached"], middles[once]["beyond"]) == (1, 1234.0)
    print_report(collect([folder]), Console(file=(printed := io.StringIO()), width=200))
    assert "never" in printed.getvalue()


def charts_of(text: str) -> dict[str, Any]:
    """The document of a page's charts."""
    (found,) = (script for script in Page(text).scripts if script.startswith('{"config"'))
    return json.loads(found)


def test_cells_are_ordered_by_the_numbers_in_their_names() -> None:
    found = cell_order(["weight_decay_0.5", "weight_decay_0", "weight_decay_0.001", "weight_decay_5"])
    assert found is not None
    assert (found[0], [*found[1].values()]) == ("weight decay", ["0", "0.001", "0.5", "5"])
    sizes = cell_order(["data_5B", "data_2.5B", "data_500M"])
    assert sizes is not None
    assert [*sizes[1]] == ["data_500M", "data_2.5B", "data_5B"]
    windows = cell_order(["softmax", "window_64", "window_32", "window_128"])
    assert windows is not None
    assert [*windows[1]] == ["softmax", "window_32", "window_64", "window_128"]


@pytest.mark.parametrize(
    "cells", [["softmax", "sigmoid"], ["lr_1_2k", "lr_2_4k", "lr_2_8k"], ["a_1", "a_2", "b_3"], []]
)
def test_cells_whose_names_give_no_order_are_not_ordered(cells: list[str]) -> None:
    assert cell_order(cells) is None


def test_the_leaderboard_has_every_mitigation_with_its_loss_at_the_best_learning_rate(sweep_folder: Path) -> None:
    board = leaderboard(collect([sweep_folder]).sweeps[0])
    assert board is not None
    assert set(board.scores) == set(EXPERIMENTS["mitigations"].cells)
    by_cell = {
        cell: dict(zip([one.title for one in board.columns], scores, strict=True))
        for cell, scores in board.scores.items()
    }
    softmax, sigmoid = by_cell["softmax"], by_cell["sigmoid"]
    assert softmax["Retuned"] is not None
    assert softmax["Retuned"].median == pytest.approx(2.81, abs=0.05)
    assert softmax["Retuned"].note == "at 1.6e-2"
    assert by_cell["k_biases"]["Retuned"] is not None
    assert by_cell["k_biases"]["Retuned"].note == "at 8.0e-3"  # the base's, from the recipe on the disk
    assert sigmoid["Retuned"] is None
    assert softmax["Speed"] is not None
    assert len(softmax["Speed"].seeds) == 3
    assert by_cell["elu1_normalised"]["Valid. loss"] is None
    assert list(board.scores)[-1] == "elu1_normalised"


def test_cells_are_shown_beside_the_papers_results_including_failed_training(sweep_folder: Path) -> None:
    summary = collect([sweep_folder]).sweeps[0].summary
    columns, rows = table_texts(experiment_table(summary.experiments["table_6"], summary.cells_of("table_6")))
    cells = {row[0]: dict(zip([title for title, _ in columns], row, strict=True)) for row in rows}
    assert cells["elu1_normalised"]["Seeds"] == "0 of 3 (3 failed)"
    assert cells["elu1_normalised"]["Paper"] == "training failed"
    assert "18.18" in rows[[row[0] for row in rows].index("softmax")]
    assert cells["softmax"]["Seeds"] == "3"


def test_runs_of_several_experiments_are_not_listed_a_second_time(sweep_folder: Path) -> None:
    data = collect([sweep_folder])
    assert data.runs == []
    assert data.cells == []
    assert len(data.sweeps[0].summary.runs) < sum(cell.seeds for cell in CELLS.values())  # a run of two cells is one


def test_the_runs_of_a_single_experiment_have_their_curves_and_their_section(tmp_path: Path) -> None:
    top = make_sweep(tmp_path / "tiny", {"table_2": EXPERIMENTS["table_2"]})
    data = collect([top])
    assert data.cells == EXPERIMENTS["table_2"].cells
    assert {run.cell for run in data.runs} == set(EXPERIMENTS["table_2"].cells)
    text = Page(write_report([top]).read_text(encoding="utf-8")).text
    for said in ("Sink rate during training", "Effect of weight decay", "Claims, decision rule and provenance"):
        assert said in text


def test_names_that_are_markup_are_shown_as_text(tmp_path: Path) -> None:
    experiment = EXPERIMENTS["table_4"].model_copy(update={"title": HOSTILE, "cells": [HOSTILE, "k_biases"]})
    cell = MadeCell((18.0, None, 6.2, 2.84), {HOSTILE: HOSTILE})
    experiments: dict[str, ExperimentSummary] = {HOSTILE: experiment, "mitigations": experiment}
    top = make_sweep(tmp_path / "tiny", experiments, {**CELLS, HOSTILE: cell})
    text = write_report([top]).read_text(encoding="utf-8")
    page = Page(text)
    assert "img" not in {tag for tag, _ in page.elements}
    assert "<img" not in text.replace(page.scripts[page.scripts.index(max(page.scripts, key=len))], "")
    assert HOSTILE in page.text
    links = [str(a["href"]) for tag, a in page.elements if tag == "a"]
    assert all(re.fullmatch(r"[#\w.%/-]+", link) for link in links)


@pytest.mark.parametrize("version", [4, 2, "3"])
def test_a_summary_of_another_schema_is_refused_with_what_to_do(tmp_path: Path, version: object) -> None:
    top = make_sweep(tmp_path / "tiny", {"table_2": EXPERIMENTS["table_2"]})
    document = json.loads((top / "summary.json").read_text(encoding="utf-8"))
    (top / "summary.json").write_text(json.dumps({**document, "schema": version}), encoding="utf-8")
    with pytest.raises(
        InputError,
        match=rf"summary\.json cannot be read \(schema version {version!r}; this version of sinklab reads 3\): delete",
    ):
        collect([top])


def test_a_warning_names_the_replicate_of_its_experiment(tmp_path: Path) -> None:
    table = EXPERIMENTS["table_4"].model_copy(update={"replicate": "draw"})
    console = Console(file=io.StringIO(), width=220)
    print_report(collect([make_sweep(tmp_path / "tiny", {"table_4": table})]), console)
    assert isinstance(console.file, io.StringIO)
    assert "k_biases, draw 1: edited since it ended" in console.file.getvalue()


def test_the_terminal_shows_our_numbers_the_papers_and_the_verdicts(sweep_folder: Path) -> None:
    console = Console(file=io.StringIO(), width=220)
    print_report(collect([sweep_folder]), console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for said in (
        "table_4 at tiny",
        "74.12",
        "2 of 3",
        "training failed",
        "contradicted at",
        "edited since it ended",
    ):
        assert said in text
    assert re.search(r"softmax +3 +1\d\.\d \[\d+\.\d, \d+\.\d\]", text)
