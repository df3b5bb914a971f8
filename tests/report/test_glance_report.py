"""The page of a sweep begins with the paper at a glance, states the origin of its runs, and folds experiments."""

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from sweep_fixtures import EXPERIMENTS, judge_the_paper, make_sweep
from test_report_html import Page
from test_sweep_report import charts_of

from sinklab.commands.results import print_report
from sinklab.experiments.paper import statements
from sinklab.experiments.verdicts import RULE
from sinklab.report.collect import collect
from sinklab.report.packing import pack_sweep, readme
from sinklab.report.page import write_report
from sinklab.report.sections import SeedScore, experiment_groups, experiment_sections, glance, leaderboard
from sinklab.report.sweeps import origins


@pytest.fixture(scope="module")
def sweep_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return judge_the_paper(make_sweep(tmp_path_factory.mktemp("glance") / "tiny"))


@pytest.fixture(scope="module")
def html(sweep_folder: Path) -> str:
    return write_report([sweep_folder]).read_text(encoding="utf-8")


def line(sweep_folder: Path, says: str) -> Any:
    (found,) = (one for one in glance(collect([sweep_folder]).sweeps) if one.statement.says == says)
    return found


def test_the_twenty_statements_come_first_with_what_the_paper_says(html: str) -> None:
    text = Page(html).text
    stated = {place: one for place, one in enumerate(statements(), 1) if f"{place} {one.says} {one.paper}" in text}
    assert [*stated] == [7, 8, 15, 19]
    places = [text.index(f"{place} {one.says}") for place, one in stated.items()]
    assert places == sorted(places)
    picture = text.index("verdicts do not depend on this value")
    later = [text.rindex(said) for said in ("Show only cells whose name", "Not run:")]
    assert [picture, *places, *later] == sorted([picture, *places, *later])


def test_a_line_has_every_seed_of_the_cells_of_its_claims_and_their_verdicts(sweep_folder: Path, html: str) -> None:
    taken, freed = line(sweep_folder, "K biases attract the sink").parts
    cells = collect([sweep_folder]).sweeps[0].summary.cells
    values = [run.values["sink_bias"] for run in cells["k_biases"].runs]
    assert taken.ours == [("k_biases", ", ".join(f"{value:.1f}" for value in values) + " %")]
    assert [cell for cell, _ in freed.ours] == ["k_biases", "softmax"]
    assert (taken.claim.verdict, freed.claim.verdict) == ("reproduced", "contradicted")
    assert f"k_biases {taken.ours[0][1]} reproduced at tiny confirmatory table_4" in Page(html).text


def test_a_line_says_what_is_not_run_and_which_claims_are_exploratory(html: str) -> None:
    text = Page(html).text
    assert "Statements without a claim in these results: " in text
    assert "3 Batch size has little effect on the sink;" in text
    assert "sigmoid has no run not run at tiny confirmatory table_6" in text
    assert "reproduced at tiny exploratory table_2" in text


@pytest.mark.parametrize(("by_importance", "shown"), [("reproduced", True), ("contradicted", False), ("", False)])
def test_the_verdict_by_mean_importance_is_shown_if_it_differs(
    by_importance: str, shown: bool, sweep_folder: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(sweep_folder, tmp_path / "tiny"))
    summary = json.loads((folder / "summary.json").read_text())
    claim = line(folder, "K biases attract the sink").parts[1].claim
    (one,) = (one for one in summary["claims"] if one["id"] == claim.id and one["experiment"] == claim.experiment)
    one["by_importance"] = by_importance
    (folder / "summary.json").write_text(json.dumps(summary))
    text = Page(write_report([folder]).read_text(encoding="utf-8")).text
    assert (f"table_4 by mean importance: {by_importance}" in text) is shown
    assert (f"by mean importance: {by_importance})" in readme(collect([folder]).sweeps[0].summary, [], "tiny")) is shown


def test_claims_are_counted_by_subject_on_the_page_and_in_the_terminal_but_not_in_a_packed_readme(
    sweep_folder: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(sweep_folder, tmp_path / "tiny"))
    summary = json.loads((folder / "summary.json").read_text())
    summary["claims"][0]["quantity"], summary["claims"][1]["quantity"] = "valid_loss", "norm_growth_last"
    (folder / "summary.json").write_text(json.dumps(summary))
    said = (
        "Of the 4 confirmatory claims, 2 are about sinks (2 not run), 1 about norms and kurtosis (1 contradicted) and "
        "1 about loss and divergence (1 reproduced)."
    )
    assert said in Page(write_report([folder]).read_text(encoding="utf-8")).text
    print_report(collect([folder]), Console(file=(printed := io.StringIO()), width=500))
    assert said in printed.getvalue()
    assert "Of the 4" not in readme(collect([folder]).sweeps[0].summary, [], "tiny")


def test_numbers_on_which_the_verdict_does_not_rest_are_not_shown_as_ours(sweep_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sweep_folder, tmp_path / "tiny"))
    summary = json.loads((folder / "summary.json").read_text())
    summary["claims"][0]["evidence"] = "up to step 75 k_biases 0.0, 0.0, 0.0 %"
    (folder / "summary.json").write_text(json.dumps(summary))
    assert line(folder, "K biases attract the sink").parts[0].ours == []
    assert "up to step 75 k_biases" in Page(write_report([folder]).read_text(encoding="utf-8")).text


def test_a_sweep_without_claims_of_the_statements_has_no_glance(tmp_path: Path) -> None:
    top = make_sweep(tmp_path / "tiny")
    assert glance(collect([top]).sweeps) == []
    html = write_report([top]).read_text(encoding="utf-8")
    assert "at a glance" not in Page(html).text
    assert "forest-0" not in charts_of(html)["specs"]


def test_our_numbers_are_drawn_beside_the_papers_percentages(html: str) -> None:
    rows = charts_of(html)["specs"]["forest-0"]["datasets"]
    numbers = {f"{place} {one.says}": one.number for place, one in enumerate(statements(), 1) if one.number}
    assert {row["cell"]: row["value"] for row in rows["paper"]} == {said: one.paper for said, one in numbers.items()}
    assert {row["cell"] for row in rows["seeds"]} == {
        "7 Weight decay strengthens the sink",
        "8 Too much weight decay removes the sink",
        "15 K biases attract the sink",
        "19 Sigmoid has no sink at equal loss",
    }
    assert len([row for row in rows["seeds"] if row["cell"] == "15 K biases attract the sink"]) == 3
    assert "Exploratory statements: 7." in Page(html).text


def test_an_experiment_on_mitigations_without_cells_has_no_leaderboard(sweep_folder: Path) -> None:
    sweep = collect([sweep_folder]).sweeps[0]
    emptied = {
        name: one.model_copy(update={"cells": []} if name.startswith("mitigations") else {})
        for name, one in sweep.summary.experiments.items()
    }
    assert leaderboard(replace(sweep, summary=sweep.summary.model_copy(update={"experiments": emptied}))) is None


def test_the_mitigations_of_another_scale_have_a_leaderboard(sweep_folder: Path) -> None:
    sweep = collect([sweep_folder]).sweeps[0]
    named = {f"laptop_{name}": one for name, one in sweep.summary.experiments.items() if name == "mitigations"}
    board = leaderboard(replace(sweep, summary=sweep.summary.model_copy(update={"experiments": named})))
    assert board is not None
    assert {"softmax", "k_biases", "sink_token", "sigmoid"} < set(board.scores)
    board.scores["sigmoid"] = [SeedScore(3.0, (3.0,)), *board.scores["sigmoid"][1:]]
    assert "sigmoid (1 of 3 seeds)" in [row[0] for row in board.table("board").rows]


def test_the_leaderboard_is_drawn_with_softmax_at_no_change_of_loss(sweep_folder: Path) -> None:
    board = leaderboard(collect([sweep_folder]).sweeps[0])
    assert board is not None
    figure = board.figure("board")
    assert figure is not None
    (chart,) = figure.charts
    drawn = chart.to_dict()
    rows = {row["model"]: row for row in drawn.get("data", drawn["layer"][0].get("data"))["values"]}
    assert set(rows) == {"softmax", "k_biases", "sink_token", "sigmoid"}
    assert (rows["softmax"]["x"], rows["softmax"]["kind"], rows["softmax"]["named"]) == (0.0, "softmax", "softmax")
    loss = {cell: score.median for cell, score in board.column("Valid. loss").items()}
    assert rows["sigmoid"]["x"] == pytest.approx(loss["sigmoid"] - loss["softmax"])
    best = [
        row
        for row in rows.values()
        if all(one["x"] > row["x"] or one["y"] > row["y"] or one is row for one in rows.values())
    ]
    assert {row["model"] for row in best} | {"softmax"} == {row["named"] for row in rows.values() if row["named"]}


def test_experiments_are_grouped_as_confirmatory_exploratory_and_last_not_run(sweep_folder: Path) -> None:
    groups = experiment_groups(experiment_sections(collect([sweep_folder]).sweeps, sweep_folder))
    assert [(one.key, one.folded, [e.name for e in one.experiments]) for one in groups] == [
        ("confirmatory", False, ["table_4", "table_2"]),
        ("exploratory", False, ["mitigations", "mitigations_retuned"]),
        ("not-run", True, ["table_6"]),
    ]


def test_a_reference_to_a_confirmatory_claim_makes_no_experiment_confirmatory(
    sweep_folder: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(sweep_folder, tmp_path / "tiny"))
    summary = json.loads((folder / "summary.json").read_text())
    own, other = (
        dict(summary["claims"][2], experiment="mitigations"),
        dict(summary["claims"][0], experiment="mitigations"),
    )
    summary["claims"] += [own, {**other, "same_as": "table_4.k_biases_take_the_sink"}]
    (folder / "summary.json").write_text(json.dumps(summary))
    groups = {one.key: one for one in experiment_groups(experiment_sections(collect([folder]).sweeps, folder))}
    assert "mitigations" in [one.name for one in groups["exploratory"].experiments]


def test_every_experiment_is_folded_under_its_counts_of_verdicts(html: str) -> None:
    page = Page(html)
    folded = [a for tag, a in page.elements if tag == "details" and a.get("class") == "experiment"]
    assert len(folded) == len(EXPERIMENTS)
    assert not any("open" in a for a in folded)
    assert "table_4 confirmatory 1 reproduced 1 contradicted" in page.text


def test_a_single_experiment_is_not_folded(tmp_path: Path) -> None:
    html = write_report([make_sweep(tmp_path / "tiny", {"table_2": EXPERIMENTS["table_2"]})]).read_text(
        encoding="utf-8"
    )
    opened = [a for tag, a in Page(html).elements if tag == "details" and a.get("class") == "experiment"]
    assert ["open" in a for a in opened] == [True]


def with_environments(top: Path, **changed: object) -> Path:
    said = {
        "begun": "2026-11-23T06:58:08+00:00", "sinklab": "0.1.0", "python": "3.11.7", "torch": "2.13.0+cpu",
        "processor": "AMD EPYC", "device": "cpu (x86_64)", "threads": 2, "git": "af2904885c6ae20b1fd9",
        "changed_files": False,
    }  # fmt: skip
    for number, path in enumerate(sorted(top.glob("*/env.json"))):
        there = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**there, **said, **(changed if number == 0 else {})}), encoding="utf-8")
    return top


def test_the_page_states_dates_versions_and_processors_of_its_runs(tmp_path: Path) -> None:
    changed = {"begun": "2026-11-24T01:00:00+00:00", "git": "0123456789abcdef", "changed_files": True}
    top = with_environments(make_sweep(tmp_path / "tiny", {"table_4": EXPERIMENTS["table_4"]}), **changed)
    done = [run for run in collect([top]).sweeps[0].summary.runs if run.status == "done"]
    hours = sum(run.seconds or 0 for run in done) * 2 / 3600
    text = Page(write_report([top]).read_text(encoding="utf-8")).text
    for said in (
        f"Runs {len(done)}, {hours:.1f} core-hours",
        "Start date 2026-11-23 to 2026-11-24",
        "Uncommitted changes in one run",
        "sinklab 0.1.0 Python 3.11.7 PyTorch 2.13.0+cpu Processor AMD EPYC Threads 2",
    ):
        assert said in text
    assert {"af2904885c", "0123456789"} == set(dict(origins(collect([top]).sweeps))["Commit"].split(", "))


def test_a_page_contains_the_decision_rule_to_which_it_links(html: str) -> None:
    assert '<a href="#rule">' in html
    assert '<ul class="notes" id="rule">' in html
    assert all(sentence in Page(html).text for sentence in RULE)


def test_hours_on_gpus_are_counted_apart_from_core_hours(tmp_path: Path) -> None:
    top = with_environments(make_sweep(tmp_path / "tiny", {"table_4": EXPERIMENTS["table_4"]}), device="NVIDIA H200")
    found = dict(origins(collect([top]).sweeps))
    assert found["Runs"] == "8, 0.7 core-hours, 0.1 GPU-hours"
    assert found["Device"] == "NVIDIA H200"


def test_runs_without_a_recorded_date_and_versions_are_counted(tmp_path: Path) -> None:
    found = origins(collect([make_sweep(tmp_path / "tiny", {"table_4": EXPERIMENTS["table_4"]})]).sweeps)
    assert dict(found[1:]) == {"Not recorded": "date and versions of eight runs"}


def test_packed_results_keep_the_origin_of_runs_and_their_readme_has_the_statements(tmp_path: Path) -> None:
    top = with_environments(judge_the_paper(make_sweep(tmp_path / "runs")))
    packed = pack_sweep(collect([top]), tmp_path / "tiny")
    assert origins(collect([packed]).sweeps) == origins(collect([top]).sweeps)
    text = (packed / "README.md").read_text(encoding="utf-8")
    assert "core-hours; Start date: 2026-11-23; Commit: af2904885c; sinklab: 0.1.0; Python: 3.11.7" in text
    lines = [row for row in text.split("## All claims")[0].splitlines() if row.startswith("| ") and row[2].isdigit()]
    said = [one.says for one in statements()]
    numbers = [int(row.split(" | ")[0].strip("| ")) for row in lines]
    assert [row.split(" | ")[1] for row in lines] == [said[number - 1] for number in numbers]
    assert 3 not in numbers  # no experiment here is about it
    assert (
        "reproduced at tiny (table\\_4.k\\_biases\\_take\\_the\\_sink)<br>contradicted at tiny"
        in lines[numbers.index(15)]
    )
    assert "exploratory" in lines[numbers.index(7)]
    assert (packed / "charts" / "forest.svg").is_file()
    assert (packed / "charts" / "leaderboard-scatter.svg").is_file()


def test_a_readme_without_claims_of_the_statements_has_no_glance(tmp_path: Path) -> None:
    packed = pack_sweep(
        collect([make_sweep(tmp_path / "runs", {"table_6": EXPERIMENTS["table_6"]})]), tmp_path / "tiny"
    )
    assert "at a glance" not in (packed / "README.md").read_text(encoding="utf-8")
