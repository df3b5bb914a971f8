"""Extension of a run: one with more `train.steps` continues a shorter one where the two agree so far.

The number of steps is part of what a run is, and so of its hash, because the learning rate may depend on it. Where the
rates of all steps so far are those of the longer run (a flat schedule; wsd before its decay; any during its warm-up),
the shorter run is the beginning of the longer one, bit for bit, and the directory becomes the longer run's. env.json
says so: `hash` is the longer run's, and `continues` lists the hash and the steps of those before.
"""

import json
from pathlib import Path
from typing import Any

from sinklab.errors import InputError
from sinklab.files import write_json, write_text
from sinklab.train.directory.checkpoint import steps_saved
from sinklab.train.directory.environment import ENVIRONMENT
from sinklab.train.optim import learning_rate
from sinklab.train.recipe import Recipe, load_recipe

MEASURED = ("measurement.json", "measurement.npz", "record.json")
"""What the shorter run ended with, and the longer one writes when it ends."""


def shorter_run(directory: Path, recipe: Recipe, data: str, found: str) -> int | None:
    """The steps of the run in a directory where `recipe` is the same run with more steps, else None.

    Args:
        recipe: resolved.
        data: fingerprint of its data.
        found: hash of the run that is there.

    Raises:
        InputError: the longer run has other learning rates at steps that were made.
    """
    steps = _steps(directory)
    if steps is None or steps >= recipe.train.steps or with_steps(recipe, steps).content_hash(data) != found:
        return None
    reached = max(steps_saved(directory / "checkpoints"), default=0)
    if (step := _first_other_rate(recipe, steps, reached)) is not None:
        raise InputError(
            f"{directory} holds a run of {steps} steps whose learning rate is another than that of "
            f"{recipe.train.steps} steps, from step {step + 1} on (schedule.shape {recipe.schedule.shape}), and it has "
            f"reached step {reached}: it cannot become the longer run. Choose another --out, or schedule.shape flat "
            "for runs that may go on"
        )
    return steps


def with_steps(recipe: Recipe, steps: int) -> Recipe:
    """The recipe with another number of steps."""
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": steps})})


def _first_other_rate(recipe: Recipe, steps: int, reached: int) -> int | None:
    """The first update up to and including that after `reached` in which the lengths differ (metrics have its rate)."""
    peak, schedule = recipe.optim.lr, recipe.schedule
    for step in range(min(reached + 1, steps)):
        if learning_rate(step, steps, peak, schedule) != learning_rate(step, recipe.train.steps, peak, schedule):
            return step
    return None


def become_longer(directory: Path, recipe: Recipe, run_hash: str) -> None:
    """Make the directory of a shorter run that of the longer one; what a kill within has left is done by the next call.

    Raises:
        SinklabError: it cannot be written.
    """
    environment: dict[str, Any] = json.loads((directory / ENVIRONMENT).read_text(encoding="utf-8"))
    steps = _steps(directory)
    if environment["hash"] != run_hash:
        earlier = [*environment.get("continues", ()), {"hash": environment["hash"], "steps": steps}]
        write_json(directory / ENVIRONMENT, {**environment, "hash": run_hash, "continues": earlier})
    if steps is not None and steps != recipe.train.steps:
        for name in MEASURED:
            (directory / name).unlink(missing_ok=True)
        write_text(directory / "recipe.yaml", recipe.to_yaml())


def _steps(directory: Path) -> int | None:
    """Of the recipe in a run directory, None where it cannot be read."""
    try:
        return load_recipe(str(directory / "recipe.yaml")).train.steps
    except InputError:
        return None
