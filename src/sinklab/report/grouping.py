"""Cells of runs that differ in their seed alone, and their names: by the changed settings."""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import replace

from sinklab.errors import InputError
from sinklab.report.data import ReportedRun, WrittenRecipe
from sinklab.schema import leaves
from sinklab.train.recipe import KINDS, MANNER, load_recipe

HASHED = re.compile(r"(.+)-[0-9a-f]{16}")
SHOWN = 4  # changes that a name has room for


def grouped(runs: list[ReportedRun], named: Collection[str]) -> list[ReportedRun]:
    """The runs, those with the same recipe but for the seed in a cell of their own.

    A cell is named by its changes against the recipe that comes with sinklab and has the runs' name
    (`model.attention.bias=k`), by that recipe's name where nothing was changed, and as its first run was where there is
    no such recipe. The same seed twice is no spread: such runs stay apart.

    Args:
        named: cells that a summary has named, which stay as they are.
    """
    groups: dict[str, list[ReportedRun]] = {}
    for run in runs:
        if run.recipe and run.cell not in named:
            groups.setdefault(_without_seed(run.recipe), []).append(run)
    groups = {key: group for key, group in groups.items() if len({run.seed for run in group}) == len(group)}
    several = len({_base_name(group[0]) for group in groups.values()}) > 1
    found = {key: _changes(group[0]) for key, group in groups.items()}
    lists = [set(changes) for changes in found.values() if changes is not None]
    common = set.intersection(*lists) if len(lists) > 1 else set[str]()
    changed = {key: _name(_base_name(group[0]), found[key], common, several) for key, group in groups.items()}
    inside = {id(run): key for key, group in groups.items() for run in group}
    taken = {*named, *(run.cell for run in runs if id(run) not in inside)}
    cells: dict[str, str] = {}
    for key in sorted(groups, key=lambda key: bool(changed[key])):  # what keeps its name before what gets one
        first = groups[key][0]
        names = (changed[key], _without_hash(first), first.cell, str(first.path))
        cells[key] = next(name for name in names if name and name not in taken)
        taken.add(cells[key])
    return [replace(run, cell=cells[inside[id(run)]] if id(run) in inside else run.cell) for run in runs]


def _without_seed(recipe: WrittenRecipe) -> str:
    """The settings that decide the result, except the seed."""
    kept = {key: value for key, value in recipe.values.items() if key not in ("seed", "name")}
    if isinstance(train := kept.get("train"), dict):
        kept["train"] = {key: value for key, value in train.items() if key not in MANNER}
    return json.dumps(kept, sort_keys=True, default=str)


def _without_hash(run: ReportedRun) -> str:
    """The name of a run in a directory that `sinklab train` has named NAME-HASH, or its cell's."""
    named = HASHED.fullmatch(run.cell)
    return named[1] if named and run.recipe and run.recipe.name == named[1] else run.cell


def _base_name(run: ReportedRun) -> str:
    return str(run.recipe and run.recipe.name)


def _changes(run: ReportedRun) -> list[str] | None:
    """The changes of a run against the recipe of its name, None without such a recipe."""
    try:
        return changes(run.recipe.values, _base_name(run)) if run.recipe else None
    except InputError:
        return None


def _name(base: str, found: list[str] | None, common: Collection[str], several: bool) -> str:
    """Of a cell, by as many changes as there is room for: those that all cells have come last."""
    if found is None:
        return ""
    shown = found if len(found) <= SHOWN else sorted(found, key=lambda change: change in common)[:SHOWN]
    more = [f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
    return ", ".join([*([base] if several or not found else []), *shown, *more])


def changes(recipe: Mapping[str, object], base: str) -> list[str]:
    """The settings in which a resolved recipe differs from a recipe that comes with sinklab, as `--set` takes them.

    Another kind is one change, and then only those of its values that are not its defaults. What resolving fills in is
    none, nor is how the work is done.

    Raises:
        InputError: there is no recipe of that name.
    """
    ours = {key: value for key, value in leaves(recipe).items() if not _is_manner(key)}
    theirs = leaves(load_recipe(base).model_dump(mode="json"))
    kinds = {
        key.rpartition(".")[0]: value
        for key, value in ours.items()
        if "." in key and key.rpartition(".")[2] in KINDS and theirs.get(key) != value
    }
    said = [f"{key}={value}" for key, value in kinds.items()]
    try:
        theirs = leaves(load_recipe(base, said).model_dump(mode="json"))
    except InputError:  # a kind that cannot be without values of its own: all of them are shown
        theirs = {key: value for key, value in theirs.items() if not key.startswith(tuple(f"{k}." for k in kinds))}
        theirs |= {f"{key}.{tag}": value for key, value in kinds.items() for tag in KINDS}
    resolved = {"model.vocab_size": None, "train.precision": "auto", "model.attention.mask.eos_id": None}
    said += [
        f"{key}={_written(value)}"
        for key, value in ours.items()
        if theirs.get(key) != value and not (key in resolved and theirs.get(key) == resolved[key])
    ]
    return said


def _is_manner(key: str) -> bool:
    return key in ("seed", "name") or (key.startswith("train.") and key[6:] in MANNER)


def _written(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else json.dumps(value) if not isinstance(value, str) else value
