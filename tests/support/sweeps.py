"""Small experiments and their runs, for tests of sweeps."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sinklab.data.prepare import prepared
from sinklab.experiments.sweep.engine import PlannedRun
from sinklab.train.recipe import build_recipe
from sinklab.train.run import open_run

RECIPE = """
name: small
model: {layers: 1, width: 16, heads: 2, ffn_width: 16, context: 16}
train: {steps: 4, batch_size: 2, eval_every: 2, eval_sequences: 4, save_every: 2, precision: fp32}
metric: {sequences: 4, length: 16}
data: {tokenizer: "train:300"}
"""
EXPERIMENT = """
id: mine
title: "Three ways"
question: "Which of them has a sink?"
base: small.yaml
cells:
  softmax: {}
  sigmoid: sigmoid
  decayed: [k_biases, {optim: {weight_decay: 0.5}}]
seeds: 2
claims:
  - {id: learns, text: "it has learnt", check: {is: within, cell: sigmoid, value: valid_loss, at_most: 50.0}}
"""


def write_experiment(folder: Path, **others: str) -> None:
    """small.yaml, mine.yaml and text.jsonl; and further experiments by the names of their files."""
    (folder / "small.yaml").write_text(RECIPE)
    (folder / "mine.yaml").write_text(EXPERIMENT)
    for name, text in others.items():
        (folder / f"{name}.yaml").write_text(text)
    rows = ({"text": " ".join(f"w{(i * j) % 37} and {(i + j) % 11}" for j in range(30))} for i in range(60))
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def planned_run(name: str, folder: Path, overlay: Mapping[str, Any] | None = None) -> PlannedRun:
    """A run of four steps in `folder/name`; its data is prepared in the cache that the environment names."""
    text = folder / "text.jsonl"
    if not text.exists():
        write_experiment(folder)
    values = {
        "name": name,
        "model": {"layers": 1, "width": 16, "heads": 2, "ffn_width": 16, "context": 16},
        "train": {"steps": 4, "batch_size": 2, "eval_every": 2, "eval_sequences": 4, "save_every": 2},
        "metric": {"sequences": 4, "length": 16},
        "data": {"source": str(text), "tokenizer": "train:300"},
    }
    recipe = build_recipe(values, overlay or {})
    run = open_run(recipe, prepared(recipe.data), folder / name)
    return PlannedRun(name, run.recipe.to_yaml(), run.directory, run.hash)
