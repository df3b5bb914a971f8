"""An experiment from its definition to its summary: recipes for every cell and seed, data once, runs, verdicts."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from sinklab.data.prepare import prepared
from sinklab.data.text_tokenizer import StageProgress
from sinklab.errors import SinklabError
from sinklab.experiments.definition import Experiment
from sinklab.experiments.pool import Cell, Event, run_cells
from sinklab.experiments.summary import read_result, summarise
from sinklab.files import write_json
from sinklab.train.recipe import build_recipe, recipe_text


def cells_of(experiment: Experiment, out: Path, seeds: int, overlay: Mapping[str, Any]) -> list[Cell]:
    """Every cell with every seed, in directories `out/CELL/seed_N`; `overlay` is laid over every recipe.

    Raises:
        InputError: an overlay that makes an invalid recipe; the message names the field.
    """
    base = yaml.safe_load(recipe_text(experiment.base))
    cells = []
    for name, delta in experiment.cells.items():
        for seed in range(seeds):
            label = name if seeds == 1 else f"{name} seed {seed}"
            top = {"name": name, "seed": seed}
            recipe = build_recipe(base, delta, overlay, top, origin=f"cell {name} of {experiment.id}")
            cells.append(Cell(label, recipe, out / name / f"seed_{seed}"))
    return cells


def prepare_data(cells: list[Cell], progress: StageProgress | None = None) -> None:
    """Prepare the data of all cells in the cache, each kind once.

    Raises:
        InputError: text that cannot be used.
    """
    for recipe in {cell.recipe.data.model_dump_json(): cell.recipe for cell in cells}.values():
        prepared(recipe.data, progress=progress)


def train_cells(
    experiment: Experiment, cells: list[Cell], out: Path, jobs: int, watch: Callable[[Event], None]
) -> dict[str, Any]:
    """Train what is not finished yet and write `out/summary.json`; returns the summary.

    Raises:
        SinklabError: some runs failed; the others are finished and summarised.
        KeyboardInterrupt: Ctrl-C; everything is saved and the same call continues.
    """
    ended = run_cells(cells, jobs, watch)
    finished = {name for name, event in ended.items() if event.kind == "done"}
    summary = summarise_finished(experiment, cells, finished)
    write_json(out / "summary.json", summary)
    failed = {name: event.message for name, event in ended.items() if event.kind == "failed"}
    if failed:
        raise SinklabError("\n".join(f"{name}: {message}" for name, message in failed.items()))
    return summary


def summarise_finished(experiment: Experiment, cells: list[Cell], finished: set[str]) -> dict[str, Any]:
    """The summary of the finished cells."""
    results: dict[str, list[Any]] = {}
    for cell in cells:
        if cell.name in finished:
            results.setdefault(cell.recipe.name, []).append(read_result(cell.directory))
    return summarise(experiment, results)
