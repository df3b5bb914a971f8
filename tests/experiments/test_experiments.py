"""Experiments: files of cells and claims, those that come along and one's own, and the commands that run them."""

import json
import os
from pathlib import Path

import pytest
from conftest import Run

from sinklab.errors import InputError
from sinklab.experiments.definition import experiment_ids, load_experiment
from sinklab.experiments.running import runs_of
from sinklab.train.recipe import build_recipe, load_recipe

SMALL = """
name: small
model: {layers: 1, width: 16, heads: 2, ffn_width: 16, context: 16}
train: {steps: 2, batch_size: 2, eval_every: 1, eval_sequences: 4, precision: fp32}
metric: {sequences: 4, length: 16}
data: {tokenizer: "train:300"}
"""
OWN = """
id: mine
title: "Three ways"
base: small.yaml
cells:
  softmax: {}
  sigmoid: sigmoid
  decayed: [k_biases, {optim: {weight_decay: 0.5}}]
claims:
  - {id: sinks, text: "no sink yet", check: {cell: sigmoid, value: sink_1, at_most: 100.0}}
"""


@pytest.fixture
def run(run: Run) -> Run:
    """`sinklab ARGS` in a folder with an experiment and a text."""
    Path("small.yaml").write_text(SMALL)
    Path("mine.yaml").write_text(OWN)
    rows = ({"text": " ".join(f"w{(i * j) % 37} and {(i + j) % 11}" for j in range(30))} for i in range(60))
    Path("text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def test_an_experiment_of_ones_own_is_run_by_its_file(run: Run) -> None:
    status, out, err = run("reproduce", "mine.yaml", "--text", "text.jsonl", "--jobs", 1, "--json")
    assert status == 0, err
    summary = json.loads(out)
    assert list(summary["cells"]) == ["softmax", "sigmoid", "decayed"]
    assert [claim["verdict"] for claim in summary["claims"]] == ["reproduced"]
    assert json.loads(Path("runs/mine/summary.json").read_text()) == summary
    assert Path("runs/mine/report.html").is_file()
    made = {path: os.stat(path).st_mtime_ns for path in Path("runs/mine").rglob("state.json")}
    assert len(made) == 3  # a checkpoint each
    status, out, _ = run("reproduce", "mine.yaml", "--text", "text.jsonl", "--jobs", 1)
    assert status == 0
    assert "no sink yet" in out
    assert made == {path: os.stat(path).st_mtime_ns for path in made}  # trained once


def test_a_cell_is_a_variant_of_the_catalogue_what_changes_or_both(run: Run) -> None:
    recipes = {one.name: one.recipe for one in runs_of(load_experiment("mine.yaml"), Path("out"), 1, {})}
    sigmoid = build_recipe(load_recipe("small.yaml").model_dump(), {"model": {"attention": {"operation": "sigmoid"}}})
    assert recipes["sigmoid"].model == sigmoid.model
    assert recipes["decayed"].model.attention.bias.kind == "k"
    assert recipes["decayed"].optim.weight_decay == 0.5


def test_all_experiments_that_come_along_are_listed_and_have_valid_recipes(run: Run) -> None:
    status, out, _ = run("experiments")
    assert status == 0
    status, document, _ = run("experiments", "--json")
    assert status == 0
    for name, listed in zip(experiment_ids(), json.loads(document), strict=True):
        experiment = load_experiment(name)
        assert listed["id"] == experiment.id == name
        assert name in out
        recipes = {one.recipe.model_dump_json(exclude={"name"}) for one in runs_of(experiment, Path("x"), 1, {})}
        assert len(recipes) == len(experiment.cells)  # no two cells are the same


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("sigmoid: sigmoid", "sigmoid: sigmod"), "cells.sigmoid: Value error, there is no variant 'sigmod'"),
        (("{cell: sigmoid", "{cell: other"), "claim sinks is about cell 'other', which is not there"),
        (("sigmoid: sigmoid", "a/b: sigmoid"), "the name is that of a folder"),
        (("title:", "titel:"), "titel"),
        (('"Three ways"', "[3"), "cannot be read"),
        (("weight_decay: 0.5", "weight_decay: much"), "cell decayed of mine is not a valid recipe: optim.weight_decay"),
    ],
)
def test_a_file_that_says_something_impossible_is_refused(run: Run, change: tuple[str, str], said: str) -> None:
    Path("mine.yaml").write_text(OWN.replace(*change))
    status, out, err = run("reproduce", "mine.yaml", "--text", "text.jsonl")
    assert (status, out) == (2, "")
    assert said in " ".join(err.split())
    assert not Path("runs").exists()


def test_an_unknown_experiment_is_refused_with_those_there_are() -> None:
    with pytest.raises(InputError, match=r"no experiment 'table_99'; there are: .*table_4.*\.yaml file"):
        load_experiment("table_99")
