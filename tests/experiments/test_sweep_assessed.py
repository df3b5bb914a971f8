"""Experiments that assess their runs: once, on their validation text, with claims about the numbers."""

import json
import os
from contextlib import ExitStack
from pathlib import Path

import pytest
from conftest import Run, on_one_line
from sweeps import write_experiment

from sinklab.assessing.assess_model import load_assessment
from sinklab.commands import reproducing
from sinklab.train.lock import one_writer

STREAMED = """
id: streamed
title: "What streaming costs"
base: small.yaml
cells:
  softmax: {}
  sigmoid: sigmoid
assess: [streaming]
columns: [streamed_loss_0, streamed_gap_0]
claims:
  - id: bounded
    text: "Streaming costs less than a hundred nats"
    check: {is: within, value: streamed_gap_0, cell: softmax, at_most: 100.0}
seeds: 2
"""
MORE = STREAMED.replace("id: streamed", "id: more").replace("[streaming]", "[streaming, heads]")
OPTIONS = ("--text", "text.jsonl", "--jobs", 2)


@pytest.fixture
def run(run: Run) -> Run:
    write_experiment(Path(), streamed=STREAMED, more=MORE)
    return run


def assessments() -> dict[Path, int]:
    """Modification time of each assessment in ns."""
    return {path: os.stat(path).st_mtime_ns for path in Path("runs").rglob("assessment.json")}


def test_every_run_is_assessed_once_and_its_numbers_are_judged(run: Run) -> None:
    status, out, err = run("reproduce", "streamed.yaml", *OPTIONS, "--json")
    assert status == 0, err
    summary = json.loads(out)
    found = assessments()
    assert len(found) == 4  # two cells, two seeds
    assert [(claim["verdict"], claim["seeds"]) for claim in summary["claims"]] == [("no verdict", 2)]
    for cell in summary["cells"].values():
        for one in cell["runs"]:
            numbers = load_assessment(Path("runs/tiny") / one["directory"] / "assessment.json").numbers()
            assert one["values"]["streamed_gap_0"] == numbers["streamed_gap_0"]
    assert run("reproduce", "streamed.yaml", *OPTIONS)[0] == 0
    assert assessments() == found
    assert run("reproduce", "more.yaml", *OPTIONS)[0] == 0  # adds a part to the assessments
    added = [load_assessment(path) for path in found]
    assert all(set(one.results) == {"heads", "streaming"} for one in added)


def test_a_run_assessed_on_another_text_keeps_its_assessment_with_a_warning(run: Run) -> None:
    assert run("reproduce", "streamed.yaml", *OPTIONS, "--seeds", 1)[0] == 0
    path = next(iter(assessments()))
    path.unlink()
    assert run("assess", path.parent, "--text", "text.jsonl", "--parts", "heads", "--out", path.parent)[0] == 0
    before = path.read_bytes()
    status, out, err = on_one_line(run)("reproduce", "streamed.yaml", *OPTIONS, "--seeds", 1, "--json")
    assert status == 0
    assert "was not assessed" in err
    assert "was computed on a text other than the run's" in err
    assert path.read_bytes() == before
    named = path.parent.name.split("-")[0]
    assert "streamed_gap_0" not in json.loads(out)["cells"][named]["runs"][0]["values"]


def test_an_assessment_by_another_process_is_awaited(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("reproduce", "streamed.yaml", *OPTIONS, "--seeds", 1)[0] == 0
    path = next(iter(assessments()))
    path.unlink()
    waited: list[float] = []
    with ExitStack() as other:
        other.enter_context(one_writer(path))

        def wait(seconds: float) -> None:
            if seconds == reproducing.LOOKS_EVERY_S:  # not the wait for a lock
                waited.append(seconds)
                other.close()

        monkeypatch.setattr(reproducing.time, "sleep", wait)
        status, _, err = run("reproduce", "streamed.yaml", *OPTIONS, "--seeds", 1)
    assert status == 0
    assert "was not assessed" not in err
    assert len(waited) == 1
    assert "streaming" in load_assessment(path).results


def test_assessing_a_run_whose_text_has_changed_is_refused(run: Run) -> None:
    assert run("reproduce", "streamed.yaml", *OPTIONS, "--seeds", 1)[0] == 0
    directory = next(iter(assessments())).parent
    with Path("text.jsonl").open("a") as file:
        file.write('{"text": "one document more"}\n')
    status, _, err = on_one_line(run)("assess", directory, "--parts", "heads")
    assert status == 2
    assert "or the recipe of the run has changed since it was trained with sinklab" in err
