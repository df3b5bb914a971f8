"""Experiments: files of cells and claims, shipped and of the user, and the commands that run them."""

import json
import re
from pathlib import Path

import pytest
from conftest import Run
from sweeps import EXPERIMENT, write_experiment

from sinklab.errors import InputError
from sinklab.experiments.definition import Experiment
from sinklab.experiments.shipped import experiment_ids, load_experiment
from sinklab.experiments.sweep.store import cells_of, plan_sweep
from sinklab.train.recipe import build_recipe, load_recipe


@pytest.fixture
def run(run: Run) -> Run:
    """`sinklab ARGS` in a folder with an experiment and a text."""
    write_experiment(Path())
    return run


def own() -> Experiment:
    """The experiment in mine.yaml."""
    return load_experiment("mine.yaml")


def test_a_cell_is_a_variant_of_the_catalogue_a_change_or_both(run: Run) -> None:
    cells = cells_of(own(), "tiny", 1, {})
    sigmoid = build_recipe(load_recipe("small.yaml").model_dump(), {"model": {"attention": {"operation": "sigmoid"}}})
    assert cells["sigmoid"].recipe.model == sigmoid.model
    assert cells["decayed"].recipe.model.attention.bias.kind == "k"
    assert cells["decayed"].recipe.optim.weight_decay == 0.5


def test_changes_of_a_cell_are_listed_as_in_its_overlays(run: Run) -> None:
    cells = cells_of(own(), "tiny", 1, {"train": {"steps": 9}})
    changes = {name: dict(cell.change) for name, cell in cells.items()}
    assert changes["softmax"] == {}
    assert changes["decayed"] == {"model.attention.bias.kind": "k", "optim.weight_decay": 0.5}
    lossy = own().model_copy(update={"cells": {"tweo": [{"losses": {"tweo": {}}}]}})
    (cell,) = cells_of(lossy, "tiny", 1, {}).values()
    assert cell.change == {"losses.tweo.weight": 0.01, "losses.tweo.tau": 3.0, "losses.tweo.p": 4.0}


def test_changes_of_a_cell_include_settings_that_another_optimiser_replaces() -> None:
    overlays = {"short": {"optim": "muon"}, "long": {"optim": {"name": "muon"}}}
    values = {"id": "muon", "title": "Muon", "base": "tiny", "cells": overlays}
    cells = cells_of(Experiment.model_validate(values), "tiny", 1, {})
    replaced = {"optim.lr": 4e-4, "optim.weight_decay": 0.1}
    assert cells["short"].change == {"optim": "muon", **replaced}
    assert cells["long"].change == {"optim.name": "muon", **replaced}


def test_runs_are_ordered_by_the_rank_of_experiments_and_then_by_seed(run: Run) -> None:
    second = own()
    first = second.model_copy(update={"id": "first", "rank": 1, "cells": {"softmax": [], "gate": [{"seed": 0}]}})
    first = first.model_copy(update={"seeds": 1})
    plan = plan_sweep([second, first], "tiny", None, {})
    assert plan.order == (
        ("softmax", 0), ("gate", 0),  # of the first
        ("sigmoid", 0), ("decayed", 0), ("softmax", 1), ("sigmoid", 1), ("decayed", 1),
    )  # fmt: skip


def test_all_shipped_experiments_are_listed_with_their_cost(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("os.getloadavg", lambda: (64.0, 0.0, 0.0))
    status, out, _ = run("experiments")
    assert status == 0
    assert "this machine is busy" in out
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 2 * len(experiment_ids()) + 10
    assert not re.search(r"\d{4,} d", out)
    status, document, _ = run("experiments", "--json")
    assert status == 0
    listed = json.loads(document)
    assert [one["id"] for one in listed] == experiment_ids()
    for one in listed:
        experiment = load_experiment(one["id"])
        assert one["id"] in out
        assert one["question"]
        assert bool(one["scales"]) == bool(experiment.base)
        for scale, cost in one["scales"].items():
            assert cost["cells"] == len(experiment.cells_at(scale))
            assert cost["claims"] == len(experiment.claims_at(scale))
            assert cost["hours"] > 0


def test_an_experiment_that_is_named_is_listed_in_full(run: Run, tmp_path: Path) -> None:
    status, out, _ = run("experiments", "table_2", "table_1")
    assert status == 0
    for name in ("table_2", "table_1"):
        experiment = load_experiment(name)
        assert f"{name}: {experiment.title}" in out
        assert experiment.question in out
        assert ", ".join(experiment.cells) in out
        assert all(f"- {claim.text}" in out for claim in experiment.claims)
        assert f"claims, stated {experiment.stated}:" in out
    assert "table_4" not in out
    status, document, _ = run("experiments", "table_2", "--json")
    (listed,) = json.loads(document)
    assert listed["cell_names"] == list(load_experiment("table_2").cells)
    status, out, err = run("experiments", "tabel_2")
    assert (status, out) == (2, "")
    assert "did you mean table_2" in err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("sigmoid: sigmoid", "sigmoid: sigmod"), "cells.sigmoid: unknown variant 'sigmod'"),
        (("cell: sigmoid", "cell: other"), "claim learns refers to unknown cell 'other'"),
        (("sigmoid: sigmoid", "a/b: sigmoid"), "invalid name of a cell or value, 'a/b': it must not be empty"),
        (("title:", "titel:"), "titel: unknown key; allowed here: id, title, question"),
        (("title:", "titel:"), "title: required"),
        (("{is: ", "{iss: "), ".check: its key `is` is missing"),
        (("{is: within", "{is: inside"), ".check: `is` cannot be 'inside'; choose from: within, absent,"),
        (('"Three ways"', "[3"), "cannot be loaded"),
        (("weight_decay: 0.5", "weight_decay: much"), "cell decayed of mine is not a valid recipe: optim.weight_decay"),
        (("base: small.yaml", "base: nothing"), "recipe nothing not found"),
        (("base: small.yaml", "base: small.yaml\ntune: {1: 2}"), "cannot be loaded: keywords must be strings"),
    ],
)
def test_a_file_that_says_something_impossible_is_refused(run: Run, change: tuple[str, str], said: str) -> None:
    Path("mine.yaml").write_text(EXPERIMENT.replace(*change))
    status, out, err = run("reproduce", "mine.yaml", "--text", "text.jsonl")
    assert (status, out) == (2, "")
    assert said in " ".join(err.split())
    assert not Path("runs").exists()


def test_claims_are_listed_by_the_date_on_which_they_were_stated(run: Run) -> None:
    check = "check: {is: trains, cell: softmax}"
    claims = f"""  - {{id: learns, text: "First", stated: 2026-11-23, {check}}}
  - {{id: later, text: "Second", stated: 2026-11-25, {check}}}
  - {{id: too, text: "Third", stated: 2026-11-23, {check}}}
  - {{id: undated, text: "Fourth", {check}}}
"""
    Path("mine.yaml").write_text(EXPERIMENT.partition("claims:\n")[0] + f"claims:\n{claims}")
    status, out, err = run("experiments", "mine.yaml")
    assert status == 0, err
    listed = re.findall(r"\d claims?.*:$|(?<=^ - )\w+", out, re.MULTILINE)
    assert listed == [
        "2 claims, stated 2026-11-23:",
        "First",
        "Third",
        "1 claim, stated 2026-11-25:",
        "Second",
        "1 claim:",
        "Fourth",
    ]
    status, document, _ = run("experiments", "mine.yaml", "--json")
    assert json.loads(document)[0]["claim_dates"] == ["2026-11-23", "2026-11-25", "2026-11-23", ""]


def test_an_unknown_experiment_is_refused_and_the_nearest_are_offered() -> None:
    with pytest.raises(InputError, match=r"no experiment 'tabel_4': did you mean table_4"):
        load_experiment("tabel_4")
