"""Experiments that tune their runs: refused before any training, judged by the tunings beside the runs, and packed.

The tunings are those of results/sft; `tests/tuning/test_tune_experiment.py` makes its own, with trl.
"""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
from chats import sheep_chats
from conftest import Run, on_one_line
from sweeps import write_experiment

from sinklab.commands.options import ReproduceSettings
from sinklab.commands.reproduce import named_experiments
from sinklab.errors import InputError, install_command
from sinklab.experiments.shipped import load_experiment
from sinklab.experiments.sweep.packed import read_packed, unpack, verify_packed
from sinklab.tuning.settings import TuneOptions
from sinklab.tuning.tune import check_tuned
from sinklab.tuning.tuned_directory import load_tuning

COMMITTED = sorted((Path(__file__).parents[2] / "results" / "sft").glob("*/sft.json"))
TUNED = """
id: tuned
title: "Tuning both"
base: small.yaml
cells:
  softmax: {}
  sigmoid: sigmoid
columns: [sft_loss_fall, sft_largest_grad_norm, sft_sink_change]
claims:
  - {id: alike, text: "alike", check: {is: equal, value: sft_loss_fall, cell: sigmoid, to: softmax, margin: 0.1}}
seeds: 1
"""
OPTIONS = ("--text", "text.jsonl", "--jobs", 2)


@pytest.fixture
def folder(run: Run) -> Run:
    """`sinklab ARGS` in a folder with an experiment that tunes, one with other settings, and one without `tune`."""
    tune = "tune: {lr: 0.01, steps: 4}\n"
    others = {"slowly": TUNED.replace("id: tuned", "id: slowly") + tune.replace("0.01", "0.001")}
    write_experiment(Path(), tuned=TUNED + tune, untuned=TUNED, **others)
    sheep_chats(Path("chats.jsonl"))
    return on_one_line(run)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            ["tuned.yaml"],
            "tuned fine-tunes its models on conversations: pass them with --data, as a .jsonl file",
        ),
        (["figure_30"], "figure_30 fine-tunes its models on conversations"),
        (["tuned.yaml", "slowly.yaml", "--data", "chats.jsonl"], "tuned and slowly differ in `tune`"),
        (["untuned.yaml", "--data", "chats.jsonl"], "tuned has neither: remove it"),
        (
            ["tuned.yaml", "--data", "chats.jsonl"],
            f"instruction tuning needs the package trl, which is not installed: {install_command('sft')}",
        ),
    ],
)
def test_experiments_that_cannot_be_tuned_are_refused_before_any_training(
    folder: Run, monkeypatch: pytest.MonkeyPatch, args: list[str], said: str
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "trl" else find(name, *more))
    status, out, err = folder("reproduce", *args, *OPTIONS)
    assert (status, out) == (2, "")
    assert said in err
    assert not Path("runs").exists()


def test_a_setting_that_sft_does_not_have_is_refused(folder: Run) -> None:
    Path("tuned.yaml").write_text(TUNED + "tune: {rate: 0.01}\n")
    status, _, err = folder("reproduce", "tuned.yaml", *OPTIONS)
    assert status == 2
    assert "tune: rate 0.01" in err


def test_tunings_beside_the_runs_are_judged_packed_and_verified(folder: Run) -> None:
    assert folder("reproduce", "untuned.yaml", *OPTIONS)[0] == 0
    documents = {path.parent.name.split("-")[0]: path for path in COMMITTED}
    for record in Path("runs/tiny").glob("*/record.json"):
        beside = record.parent.with_name(f"{record.parent.name}-sft")
        beside.mkdir()
        shutil.copyfile(documents[record.parent.name.split("-")[0]], beside / "sft.json")
    status, out, _ = folder("reproduce", "untuned.yaml", *OPTIONS, "--json")
    assert status == 0
    summary = json.loads(out)
    for cell, path in documents.items():
        tuning = load_tuning(path)
        assert tuning.base is not None
        assert tuning.chat is not None
        assert (
            summary["cells"][cell]["runs"][0]["values"]
            | {
                "sft_loss_fall": tuning.base.valid_loss - tuning.chat.valid_loss,
                "sft_largest_grad_norm": tuning.grad_norm_max,
                "sft_sink_change": tuning.chat.sink_rate[0] - tuning.base.sink_rate[0],
            }
            == summary["cells"][cell]["runs"][0]["values"]
        )
    assert [(claim["quantity"], claim["seeds"]) for claim in summary["claims"]] == [("sft_loss_fall", 1)]
    assert folder("report", "runs/tiny", "--pack", "packed")[0] == 0
    assert [problem for check in verify_packed(Path("packed")) for problem in check.problems] == []
    for run in read_packed(Path("packed/tuned")):
        assert run.tuning is not None
        assert run.tuning["model"] == run.directory
    softmax = next(path.parent.name for path in Path("runs/tiny").glob("softmax-*/record.json"))
    other = Path("again") / f"{softmax}-sft" / "sft.json"
    other.parent.mkdir(parents=True)
    other.write_text("of this machine")
    assert len(unpack(Path("packed"), Path("again"))) == len(documents)
    assert other.read_text() == "of this machine"
    (Path("packed/tuned") / "tunings.jsonl.gz").unlink()
    problems = [problem for check in verify_packed(Path("packed")) for problem in check.problems]
    assert "tuned/tunings.jsonl.gz is missing" in problems
    assert "cells.softmax" in str(problems)


def test_an_earlier_tuning_with_other_settings_or_conversations_is_refused(tmp_path: Path, data_dir: Path) -> None:
    asked = load_experiment("figure_30").tune
    chats = data_dir / "chat" / "messages.jsonl"
    assert asked is not None
    check_tuned(COMMITTED[0], asked, chats)
    with pytest.raises(InputError, match=r"lr is 0\.0004, requested 0\.001"):
        check_tuned(COMMITTED[0], TuneOptions(lr=0.001, epochs=4), chats)
    with pytest.raises(InputError, match=r"steps is 52, requested 13"):
        check_tuned(COMMITTED[0], TuneOptions(lr=0.0004, eval_every=5, save_every=5), chats)
    with pytest.raises(InputError, match="data is "):
        check_tuned(COMMITTED[0], asked, sheep_chats(tmp_path / "chats.jsonl"))


def test_all_experiments_include_those_that_tune_only_with_conversations() -> None:
    without = {one.id for one in named_experiments(["all"], ReproduceSettings(scale="tiny"))}
    with_chats = {
        one.id for one in named_experiments(["all"], ReproduceSettings(scale="tiny", data=Path("chats.jsonl")))
    }
    assert with_chats - without == {"figure_30"}
