"""`sinklab reproduce` of experiments on existing models: its files, refused options, failed domains and resumption."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import Command
from conftest import Run, on_one_line
from tiny_models import text_file, tiny_model

OWN = """
id: mine
title: "<b>Mine</b>"
cells:
  natural: {inputs: natural, sequences: 4, length: 16}
  repeat: {inputs: repeat, sequences: 4, length: 16}
columns: [sink_1, norm_ratio]
claims:
  - {id: some, text: "Text has some", check: {is: within, value: sink_1, cell: natural, at_least: 0.0}}
"""


@pytest.fixture
def run(run: Run) -> Run:
    """`sinklab ARGS` in a folder with two models, a text and an experiment."""
    tiny_model(Path("gpt2"))
    tiny_model(Path("neox"), "gptneox")
    text_file(Path("text.jsonl"))
    Path("mine.yaml").write_text(OWN)
    return run


def without_cost(summary: dict[str, Any]) -> dict[str, Any]:
    for cell in summary["cells"].values():
        for one in (cell, *cell["runs"]):
            one["seconds"] = None
    return summary


def test_reproduce_writes_measurements_a_summary_and_a_page_and_prints_the_summary(run: Run) -> None:
    status, out, err = run("reproduce", "mine.yaml", "--model", "gpt2", "--text", "text.jsonl", "--seeds", 2, "--json")
    assert status == 0, err
    top = Path("runs/models/gpt2/mine")
    summary = json.loads(out)
    assert summary == json.loads((top / "summary.json").read_text())
    assert summary["schema"] == 3
    assert [summary["cells"][name]["seeds"] for name in ("natural", "repeat")] == [2, 2]
    assert all((top / one["directory"] / "measurement.json").is_file() for one in summary["cells"]["natural"]["runs"])
    assert [(claim["id"], claim["scale"]) for claim in summary["claims"]] == [("some", "gpt2")]
    page = (top / "report.html").read_text(encoding="utf-8")
    assert "Text has some" in page
    assert "<b>Mine</b>" not in page
    assert "Measured on gpt2." in page
    assert "Run at scale" not in page
    again = ("reproduce", "mine.yaml", "--model", "gpt2", "--text", "text.jsonl", "--seeds", 2)
    status, out, err = run(*again)
    assert status == 0, err
    assert err.count("(kept)") == 4
    assert "mine in gpt2: <b>Mine</b>" in out
    assert "Text has some" in " ".join(out.split())
    assert len(out.splitlines()) <= 15
    status, out, err = run(*again, "--full")
    assert status == 0, err
    assert "2 draws of 4 sequences" in " ".join(out.split())


def test_the_papers_models_are_separate_rows_on_the_page_and_in_the_terminal(run: Run) -> None:
    Path("mine.yaml").write_text(OWN + "published: {table: table_1}\n")
    call = ("reproduce", "mine.yaml", "--model", "gpt2", "--text", "text.jsonl", "--seeds", 1, "--full")
    status, out, err = run(*call)
    assert status == 0, err
    page = Path("runs/models/gpt2/mine/report.html").read_text(encoding="utf-8")
    assert "The paper’s values by model" in page
    for shown in (out, page):
        assert "LLaMA3-8B Base" in shown
        assert "99.02" in shown
        assert "98.85" not in shown  # of a chat model, for which the experiment has no cell


def test_the_command_shown_for_an_experiment_prints_its_plan(run: Run) -> None:
    given = {"MODEL": "gpt2", "FILE": "text.jsonl", "FOLDER": "texts"}
    text_file(Path("texts/one.jsonl"))
    status, out, err = run("experiments", "polypythias", "smollm2_checkpoints", "table_1", "figure_9", "mine.yaml")
    assert status == 0, err
    shown = re.findall(r"sinklab (reproduce .+ --dry-run)", out)
    assert [line.split()[1:-2] for line in shown if "--model" not in line] == [
        ["polypythias", "--text"],
        ["smollm2_checkpoints", "--text"],
    ]
    assert len(shown) == 5
    for line in shown:
        status, out, err = run(*(given.get(word, word) for word in line.split()))
        assert status == 0, err
        assert "tokens are read" in out


def test_several_experiments_are_measured_into_separate_folders(run: Run) -> None:
    Path("other.yaml").write_text(OWN.replace("id: mine", "id: other"))
    measured = ("--model", "gpt2", "--text", "text.jsonl", "--seeds", 1)
    status, out, err = run("reproduce", "mine.yaml", "other.yaml", *measured, "--out", "both", "--json")
    assert status == 0, err
    assert [one["id"] for one in json.loads(out)] == ["mine", "other"]
    assert sorted(path.parent.name for path in Path("both").glob("*/report.html")) == ["mine", "other"]


def test_a_dry_run_measures_nothing(run: Run) -> None:
    status, out, err = run("reproduce", "mine.yaml", "--model", "gpt2", "--text", "text.jsonl", "--dry-run", "--json")
    assert status == 0, err
    asked = json.loads(out)
    assert [one["replicates"] for one in asked["experiments"]["mine"].values()] == [5, 5]
    assert {name: one["inputs"] for name, one in asked["experiments"]["mine"].items()} == {
        "natural": "natural",
        "repeat": "repeat",
    }
    assert run("reproduce", "mine.yaml", "--model", "gpt2", "--text", "text.jsonl", "--dry-run")[0] == 0
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("table_1",), "table_1 measures an existing model: pass --model MODEL"),
        (("table_1", "--model", "gpt2"), "table_1 measures on natural text: pass --text FILE"),
        (("figure_9", "--model", "gpt2", "--text", "text.jsonl"), "figure_9 needs --text FOLDER"),
        (("figure_2", "--model", "gpt2", "--model", "neox", "--text", "text.jsonl"), "figure_2 takes one model"),
        (("table_8", "--model", "gpt2", "--model", "gpt2", "--text", "text.jsonl"), "gpt2 is repeated"),
        (("table_7", "--model", "neox"), "no learned positional embeddings to change"),
        (("table_1", "--model", "nowhere/at/all", "--text", "text.jsonl"), "nowhere/at/all"),
        (("table_1", "--model", "gpt2", "--text", "none.jsonl"), "none.jsonl"),
        (("mine.yaml", "--model", "gpt2", "--text", "text.jsonl", "--steps", 5), "--steps applies to training"),
        (("mine.yaml", "--model", "gpt2", "--text", "text.jsonl", "--scale", "60m"), "--scale 60m applies to training"),
        (("mine.yaml", "table_4", "--model", "gpt2"), "and table_4 trains its own: run them in separate commands"),
        (("table_4", "--model", "gpt2"), "remove --model"),
    ],
)
def test_invalid_options_are_refused_with_a_correction_before_any_measurement(
    run: Run, args: tuple[Any, ...], said: str
) -> None:
    status, out, err = on_one_line(run)("reproduce", *args)
    assert (status, out) == (2, "")
    assert said in err
    assert not list(Path().rglob("measurement.json"))


def test_the_sequences_of_a_short_text_are_divided_among_five_draws(run: Run) -> None:
    text_file(Path("short.jsonl"), documents=6)
    Path("mine.yaml").write_text(OWN.replace("sequences: 4", "sequences: 60"))
    asked = ("mine.yaml", "--model", "gpt2", "--text", "short.jsonl", "--seeds", 2, "--out", "out", "--json")
    status, out, err = run("reproduce", *asked)
    assert status == 0, err
    drawn = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path("out").rglob("measurement.json"))]
    natural = [one for one in drawn if one["inputs"] == "natural"]
    pieces = natural[0]["sequences"]
    assert len(natural) == 2
    assert 0 < pieces < 60
    for one in natural:
        assert one["sequences"] == pieces
        assert f"{pieces} of 60 sequences: the pieces of the text are divided among 5 draws" in one["notes"]
    evidence = next(claim["evidence"] for claim in json.loads(out)["claims"] if claim["cells"] == ["natural"])
    assert f"2 draws of {pieces} sequences" in evidence


def test_the_refusal_of_a_text_that_is_too_short_names_no_options_of_other_commands(run: Run) -> None:
    Path("none.jsonl").write_text('{"text": "red"}\n', encoding="utf-8")
    status, _, err = on_one_line(run)("reproduce", "mine.yaml", "--model", "gpt2", "--text", "none.jsonl", "--out", "o")
    assert status == 1
    assert "none.jsonl gives no sequence: none of its 1 documents has 16 tokens of text; use a longer text" in err
    assert "--length" not in err
    assert "--sequences" not in err


def test_a_domain_that_cannot_be_measured_is_reported_and_the_others_are_measured(run: Run) -> None:
    text_file(Path("texts/long.jsonl"))
    text_file(Path("texts/other.jsonl"), seed=9)
    text_file(Path("texts/short.jsonl"), words=1)
    own = yaml.safe_load(OWN)
    cells = {"natural": own["cells"]["natural"]}
    Path("mine.yaml").write_text(yaml.safe_dump(own | {"each": "domain", "cells": cells, "claims": []}))
    args = ("reproduce", "mine.yaml", "--model", "gpt2", "--text", "texts", "--seeds", 2, "--out", "out")
    status, _, err = on_one_line(run)(*args)
    assert status == 1
    assert "short/natural/seed_0: texts/short.jsonl gives no sequence: none of its 12 documents has 16" in err
    summary = json.loads(Path("out/summary.json").read_text())
    assert {name: cell["seeds"] for name, cell in summary["cells"].items()} == {
        "long/natural": 2,
        "other/natural": 2,
        "short/natural": 0,
    }
    assert [one["status"] for one in summary["cells"]["short/natural"]["runs"]] == ["failed", "failed"]


@pytest.mark.slow
def test_reproduce_killed_after_any_measurement_and_run_again_gives_the_same_summary(run: Run, tmp_path: Path) -> None:
    def started(out: str, log: str) -> Command:
        measured = ["--model", "gpt2", "--text", "text.jsonl", "--seeds", "2", "--out", out]
        return Command(["reproduce", "mine.yaml", *measured], tmp_path / log)

    assert started("whole", "whole.log").wait() == 0
    expected = without_cost(json.loads(Path("whole/summary.json").read_text()))
    for done, last in enumerate(("natural/seed_0", "repeat/seed_0", "natural/seed_1")):
        killed = started(f"killed_{done}", "killed.log")
        while killed.process.is_alive() and not Path(f"killed_{done}", last, "measurement.json").is_file():
            pass
        killed.process.kill()
        killed.process.join()
        again = started(f"killed_{done}", "again.log")
        assert again.wait() == 0, again.printed()
        assert again.printed().count("(kept)") > done
        assert without_cost(json.loads(Path(f"killed_{done}", "summary.json").read_text())) == expected
