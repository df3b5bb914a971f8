"""Parameters and time per training step of the cells of results/laptop that change the model, against softmax.

    python -m benchmarks.cells [--width 256] [--length 512] [--rounds 9] [--save]

The models have the recipe `laptop` with another width and length. A round is one step (forward and backward pass, and
update) of each cell, uncompiled, on the same tokens in one process; the ratios are medians over rounds, of processor
time. docs/effects.md shows the saved results (`benchmarks.effects`).
"""

import argparse
import time
from collections.abc import Callable

import torch

from benchmarks.committed import ROOT, summary_in
from benchmarks.timing import RESULTS, environment, in_turn, median_interval, over_rounds, ratios
from sinklab.device import keep_freed_memory
from sinklab.files import write_json
from sinklab.model.loss import AddedLosses
from sinklab.model.transformer import Transformer
from sinklab.train.optim import build_optimizer
from sinklab.train.recipe import Recipe, load_recipe

SAVED = RESULTS / "cells.json"
SOFTMAX = "softmax"
VOCABULARY = 1024


def changed_models() -> dict[str, list[str]]:
    """Return the settings of the cells of results/laptop that change the model, and of softmax, by name."""
    cells = summary_in(ROOT / "results" / "laptop").cells
    models = {name: cell.change for name, cell in cells.items() if all(key.startswith("model.") for key in cell.change)}
    return {name: [f"{key}={value}" for key, value in change.items()] for name, change in models.items()}


def step_of(recipe: Recipe, tokens: torch.Tensor) -> Callable[[], None]:
    """Return a function that makes one training step of a new model of the recipe on the same tokens."""
    torch.manual_seed(0)
    model = Transformer(recipe.model)
    optimiser = build_optimizer(model, recipe.optim)

    def step() -> None:
        model.losses(tokens, AddedLosses()).sum().backward()
        optimiser.step()
        optimiser.zero_grad()

    return step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    keep_freed_memory()
    size = [f"model.width={given.width}", f"model.ffn_width={2 * given.width}", f"model.context={given.length}"]
    size.append(f"model.vocab_size={VOCABULARY}")
    tokens = torch.randint(VOCABULARY, (4, given.length + 1))
    cells = changed_models()
    laptop = {name: load_recipe("laptop", [f"model.vocab_size={VOCABULARY}", *cells[name]]) for name in cells}
    parameters = {name: sum(p.numel() for p in Transformer(one.model).parameters()) for name, one in laptop.items()}
    steps = {name: step_of(load_recipe("laptop", [*size, *cells[name]]), tokens) for name in cells}
    seconds = in_turn(steps, given.rounds, warm_up=2, clock=time.process_time)
    middle = ratios(seconds, SOFTMAX)
    found = {
        name: {
            "settings": cells[name],
            "parameters": parameters[name] / parameters[SOFTMAX] - 1,
            "step": middle[name],
            "interval": median_interval(over_rounds(seconds, name, SOFTMAX)),
        }
        for name in cells
    }
    for name, one in found.items():
        print(f"{name:20} parameters {one['parameters']:+.2%}  step {one['step']:.2f} {one['interval']}")
    if given.save:
        sizes = {"width": given.width, "length": given.length, "rounds": given.rounds}
        write_json(SAVED, {**sizes, "cells": found, "environment": environment()})


if __name__ == "__main__":
    main()
