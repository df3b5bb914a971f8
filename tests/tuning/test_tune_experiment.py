"""An experiment that tunes its runs, with trl: tuned once, preempted and resumed, judged, packed and verified."""

import importlib.util
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from chats import sheep_chats
from conftest import Run, on_one_line
from sweeps import RECIPE, write_experiment

from sinklab.commands import reproducing
from sinklab.experiments.sweep.packed import verify_packed
from sinklab.jobs import JobEvent, Observer
from sinklab.signals import CALL_AGAIN
from sinklab.tuning.tune import TuneEnd, tune
from sinklab.tuning.tuned_directory import load_tuning

if importlib.util.find_spec("trl") is None:
    pytest.skip("trl is not installed (extra sft)", allow_module_level=True)

TUNED = """
id: tuned
title: "Tuning both"
base: long.yaml
cells:
  softmax: {}
  sigmoid: sigmoid
tune: {lr: 0.01, steps: 4, batch_size: 8, sink_length: 8}
columns: [sft_loss_fall, sft_largest_grad_norm, sft_sink_change]
claims:
  - {id: alike, text: "alike", check: {is: equal, value: sft_loss_fall, cell: sigmoid, to: softmax, margin: 5.0}}
seeds: 2
"""
OPTIONS = ("--text", "text.jsonl", "--jobs", 1)
TUNE = (*OPTIONS, "--data", "chats.jsonl")


@pytest.fixture
def folder(run: Run) -> Run:
    write_experiment(
        Path(),
        tuned=TUNED,
        long=RECIPE.replace("context: 16", "context: 48").replace('300"', '300", valid_fraction: 0.3'),
    )
    sheep_chats(Path("chats.jsonl"))
    return on_one_line(run)


def tunings() -> dict[Path, int]:
    """Modification time of each sft.json in ns."""
    return {path: os.stat(path).st_mtime_ns for path in Path("runs/tiny").glob("*-sft/sft.json")}


def test_every_run_is_tuned_once_judged_packed_and_verified(folder: Run) -> None:
    status, out, err = folder("reproduce", "tuned.yaml", *TUNE, "--json")
    assert status == 0, err
    assert "was not tuned" not in err
    summary, found = json.loads(out), tunings()
    assert len(found) == 4  # two cells, two seeds
    assert [(claim["verdict"], claim["seeds"]) for claim in summary["claims"]] == [("no verdict", 2)]
    for run in (one for cell in summary["cells"].values() for one in cell["runs"]):
        tuning = load_tuning(Path("runs/tiny") / f"{run['directory']}-sft" / "sft.json")
        assert tuning.base is not None
        assert tuning.chat is not None
        assert run["values"]["sft_loss_fall"] == tuning.base.valid_loss - tuning.chat.valid_loss > 0
        assert run["values"]["sft_largest_grad_norm"] == tuning.grad_norm_max
    assert folder("reproduce", "tuned.yaml", *TUNE)[0] == 0
    assert tunings() == found
    assert folder("report", "runs/tiny", "--pack", "packed")[0] == 0
    assert [problem for check in verify_packed(Path("packed")) for problem in check.problems] == []
    status, out, err = folder("reproduce", "tuned.yaml", *TUNE, "--packed", "packed", "--out", "again", "--json")
    assert status == 0, err  # the packed runs have no weights, and need none
    assert json.loads(out)["claims"] == summary["claims"]


def test_a_preempted_tuning_is_resumed_by_the_same_call(folder: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def preempted_tune(*args: Any, observe: Observer, **options: Any) -> TuneEnd:
        def observed(event: JobEvent) -> None:
            observe(event)
            if event.kind == "advanced" and event.done == 2:
                os.kill(os.getpid(), signal.SIGTERM)

        return tune(*args, observe=observed, **options)

    with monkeypatch.context() as patch:
        patch.setattr(reproducing, "tune", preempted_tune)
        assert folder("reproduce", "tuned.yaml", *TUNE, "--seeds", 1)[0] == CALL_AGAIN
    (begun,) = tunings()
    assert load_tuning(begun).chat is None
    status, _, err = folder("reproduce", "tuned.yaml", *TUNE, "--seeds", 1)
    assert status == 0
    assert "resumes after 3 of 4 updates" in err
    assert all(load_tuning(path).chat is not None for path in tunings())
    assert len(tunings()) == 2


def test_runs_that_cannot_be_tuned_are_named_and_tunings_with_other_settings_are_refused(folder: Run) -> None:
    assert folder("reproduce", "tuned.yaml", *TUNE, "--seeds", 1)[0] == 0
    first, second = sorted(tunings())
    shutil.rmtree(first.parent)
    shutil.rmtree(first.parent.with_name(first.parent.name.removesuffix("-sft")) / "checkpoints")
    status, _, err = folder("reproduce", "tuned.yaml", *TUNE, "--seeds", 1)
    assert status == 0
    assert f"{first.parent.name.partition('-')[0]} seed 0 was not tuned: " in err
    Path("tuned.yaml").write_text(TUNED.replace("0.01", "0.02"))
    before = tunings()
    status, out, err = folder("reproduce", "tuned.yaml", *TUNE, "--seeds", 1)
    assert (status, out) == (2, "")
    assert "lr is 0.01, requested 0.02" in err
    assert tunings() == before
    assert second in before
