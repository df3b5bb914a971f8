"""An experiment from its definition to its summary: recipes for every cell and seed, data once, runs, verdicts."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from sinklab.data.prepare import prepared
from sinklab.data.text_tokenizer import StageProgress
from sinklab.errors import SinklabError
from sinklab.experiments.definition import Experiment
from sinklab.experiments.documents import Summary
from sinklab.experiments.pool import Event, PlannedRun, train_side_by_side
from sinklab.experiments.summary import Result, read_result, summarise
from sinklab.train.recipe import build_recipe, recipe_text


def runs_of(experiment: Experiment, out: Path, seeds: int, overlay: Mapping[str, Any]) -> list[PlannedRun]:
    """Every cell with every seed, in directories `out/CELL/seed_N`; `overlay` is laid over every recipe.

    Raises:
        InputError: an overlay that makes an invalid recipe; the message names the field.
    """
    base = yaml.safe_load(recipe_text(experiment.base))
    runs = []
    for name, overlays in experiment.cells.items():
        for seed in range(seeds):
            label = name if seeds == 1 else f"{name} seed {seed}"
            top = {"name": name, "seed": seed}
            recipe = build_recipe(base, *overlays, overlay, top, origin=f"cell {name} of {experiment.id}")
            runs.append(PlannedRun(label, recipe, out / name / f"seed_{seed}"))
    return runs


def prepare_data(runs: list[PlannedRun], progress: StageProgress | None = None) -> None:
    """Prepare the data of all runs in the cache, each kind once.

    Raises:
        InputError: text that cannot be used.
    """
    for recipe in {run.recipe.data.model_dump_json(): run.recipe for run in runs}.values():
        prepared(recipe.data, progress=progress)


def train_runs(
    experiment: Experiment, runs: list[PlannedRun], out: Path, jobs: int, watch: Callable[[Event], None]
) -> Summary:
    """Train what is not finished yet and write `out/summary.json`; returns the summary.

    Raises:
        SinklabError: some runs failed; the others are finished and summarised.
        KeyboardInterrupt: Ctrl-C; everything is saved and the same call continues.
    """
    ended = train_side_by_side(runs, jobs, watch)
    finished = {name for name, event in ended.items() if event.kind == "done"}
    summary = summarise_finished(experiment, runs, finished)
    summary.save(out)
    failed = {name: event.message for name, event in ended.items() if event.kind == "failed"}
    if failed:
        raise SinklabError("\n".join(f"{name}: {message}" for name, message in failed.items()))
    return summary


def summarise_finished(experiment: Experiment, runs: list[PlannedRun], finished: set[str]) -> Summary:
    """The summary of the finished runs."""
    results: dict[str, list[Result]] = {}
    for run in runs:
        if run.name in finished:
            results.setdefault(run.recipe.name, []).append(read_result(run.directory))
    return summarise(experiment, results)
