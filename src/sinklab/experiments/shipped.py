"""Load shipped experiments (YAML files in `shipped/`) and experiment files, and estimate their cost."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sinklab.errors import InputError
from sinklab.experiments.claims import Claim
from sinklab.experiments.definition import Experiment, Scale
from sinklab.experiments.paper import paper_coverage
from sinklab.experiments.sweep.preview import Pace, operations, pace_here
from sinklab.files import parse_yaml
from sinklab.train.recipe import build_recipe, recipe_values

FILE = ".yaml"


def experiment_ids() -> list[str]:
    """Return the ids of the shipped experiments, sorted by `Experiment.rank`."""
    return [one.id for one in sorted((load_experiment(name) for name in _shipped()), key=lambda one: one.rank)]


def load_experiment(name: str) -> Experiment:
    """Load a shipped experiment by its id, or an experiment file by its path, which ends with .yaml.

    Claims with `same_as` get the check of the referenced claim. The path of a base recipe (.yaml) in an experiment file
    is relative to the directory of this file or, if there is no such recipe, to the working directory.

    Raises:
        InputError: if there is no such experiment or file, it is unreadable or invalid, or `same_as` names a claim that
            does not exist or that is a reference itself.
    """
    file = Path(name) if name.endswith(FILE) else _shipped().get(name)
    if file is None or not file.is_file():
        near = difflib.get_close_matches(name, _shipped(), n=3, cutoff=0.5)
        meant = f": did you mean {', '.join(near)}?" if near else "."
        raise InputError(
            f"no experiment {name!r}{meant} Pass an id listed by `sinklab experiments`, or the path of a {FILE} file."
        )
    try:
        experiment = Experiment.model_validate(parse_yaml(file.read_text(encoding="utf-8")))
        claims = tuple(_looked_up(claim, experiment) if claim.same_as else claim for claim in experiment.claims)
    except ValidationError as error:
        raise InputError("\n".join([f"{name} is not a valid experiment:", *_explain(error)])) from error
    except (OSError, TypeError, ValueError) as error:  # TypeError: a key of `tune` that is not text
        raise InputError(f"{name} cannot be loaded: {error}") from error
    experiment = experiment.model_copy(update={"claims": claims})
    if not isinstance(file, Path):
        return experiment
    beside = {scale: file.parent / base for scale, base in experiment.base.items() if base.endswith(FILE)}
    found = {scale: str(path) for scale, path in beside.items() if path.is_file()}
    return experiment.model_copy(update={"base": {**experiment.base, **found}})


def counterparts(name: str, scale: str) -> list[str]:
    """Return the experiments at a scale that encode statements of the same tables and figures as experiment `name`.

    The result is empty if experiment `name` has the scale itself, or encodes none of the paper's tables and figures.
    """
    parts = [
        {claim.partition(".")[0] for claim in part.claims}
        for key, part in paper_coverage().items()
        if key.startswith(("table_", "figure_"))
    ]
    others = {other for part in parts if name in part for other in part}
    found = {other for other in others if scale in load_experiment(other).base}
    return [] if name in found else sorted(found, key=lambda other: load_experiment(other).rank)


def _explain(error: ValidationError) -> list[str]:
    """Return a line for each distinct reason why an experiment is invalid, with the keys to which it applies."""
    places: dict[str, list[str]] = {}
    for one in error.errors():
        reason, where = one["msg"].removeprefix("Value error, "), one["loc"]
        if one["type"] == "missing":
            reason = "required"
        elif one["type"] == "extra_forbidden":
            known = f"; allowed here: {', '.join(Experiment.model_fields)}" if len(where) == 1 else ""
            reason = f"unknown key{known}"
        elif one["type"] == "union_tag_invalid" and "ctx" in one:
            kinds = one["ctx"]["expected_tags"].replace("'", "")
            reason = f"`is` cannot be {one['ctx']['tag']!r}; choose from: {kinds}"
        elif one["type"] == "union_tag_not_found":
            reason = "its key `is` is missing"
        places.setdefault(reason, []).append(".".join(map(str, where)) or "experiment")
    return [f"  {', '.join(where)}: {reason}" for reason, where in places.items()]


def _looked_up(claim: Claim, experiment: Experiment) -> Claim:
    """Return a copy of a claim with `same_as` that has the check of the referenced claim; else raise ValueError.

    If the claim does not set `scales` or a precondition, the copy also has that of the referenced claim,
    without scales that `experiment` lacks.
    """
    name, _, wanted = (claim.same_as or "").rpartition(".")
    files = _shipped()
    if name != experiment.id and name not in files:
        raise ValueError(f"claim {claim.id} refers to {claim.same_as}, but there is no shipped experiment {name!r}")
    own = name == experiment.id
    other = experiment if own else Experiment.model_validate(parse_yaml(files[name].read_text("utf-8")))
    found = next((one for one in other.claims if one.id == wanted), None)
    if found is None or found.check is None:
        why = "there is no such claim" if found is None else f"this is a reference to {found.same_as} itself"
        raise ValueError(f"claim {claim.id} refers to {claim.same_as}, but {why}")
    scales = claim.scales or (found.scales and tuple(scale for scale in found.scales if scale in experiment.base))
    condition, required = other.precondition(found), {}
    for name, own, needs in (
        ("requires_massive", claim.requires_massive, "massive"),
        ("requires_sink", claim.requires_sink, "sink"),
    ):
        of_found = condition.cell if condition and condition.needs == needs else False
        required[name] = of_found if own is None else own
    return claim.model_copy(update={"check": found.check, "scales": scales, **required})


def _shipped() -> dict[str, Traversable]:
    """Return the YAML files of the shipped experiments by id."""
    top = resources.files("sinklab") / "experiments" / "shipped"
    folders = [path for path in top.iterdir() if path.is_dir()]
    files = [path for folder in folders for path in folder.iterdir() if path.name.endswith(FILE)]
    return {path.name.removesuffix(FILE): path for path in sorted(files, key=lambda path: path.name)}


@dataclass(frozen=True)
class ScaleCost:
    """Numbers of cells and claims of an experiment at one scale, and its cost.

    Attributes:
        hours: estimated hours to train all cells with all default seeds sequentially, on one CPU core or one GPU.
        estimated: phrase on how the hours were estimated (`Pace.estimated`).
    """

    cells: int
    claims: int
    hours: float
    estimated: str


ListedExperiment = tuple[Experiment, Mapping[Scale, ScaleCost]]
"""An experiment with its size and cost by scale; there are no scales for experiments on existing models."""


def listing(one: Experiment, scales: Mapping[Scale, ScaleCost]) -> dict[str, Any]:
    """Return an entry of the list as a JSON-serializable dict.

    Cells that `adapted` adds at a scale are left out; claims are those of all scales. `seeds` is 0 for experiments on
    existing models.
    """
    return {
        **one.model_dump(include={"id", "title", "question", "source"}),
        "cells": len(one.cells),
        "claims": len(one.claims),
        "seeds": one.seeds if one.base else 0,
        "scales": {scale: asdict(cost) for scale, cost in scales.items()},
        "cell_names": list(one.cells),
        "claim_texts": [claim.text for claim in one.claims],
        "claim_dates": [str(claim.stated or one.stated or "") for claim in one.claims],
    }


def list_experiments(names: Sequence[str] = ()) -> list[ListedExperiment]:
    """Return experiments, given by id or file, with size and cost; default: all shipped experiments, sorted by rank.

    The cost is estimated with the base recipe's FLOPs per token for every cell.

    Raises:
        InputError: if an experiment or recipe is missing or invalid, or names a device that this machine lacks.
    """
    paces: dict[str, Pace] = {}
    found: list[ListedExperiment] = []
    for experiment in (load_experiment(name) for name in names or experiment_ids()):
        scales: dict[Scale, ScaleCost] = {}
        for scale, name in experiment.base.items():
            values = recipe_values(name)
            base = build_recipe(values, origin=name)
            pace = paces[name] = paces.get(name) or pace_here(base, threads=1)
            cells = experiment.cells_at(scale)
            recipes = [build_recipe(values, *overlays, origin=cell) for cell, overlays in cells.items()]
            total = sum(operations(recipe, like=base) for recipe in recipes) * len(experiment.seeds_of(scale))
            hours = total / pace.operations_per_second / 3600
            scales[scale] = ScaleCost(len(cells), len(experiment.claims_at(scale)), hours, pace.estimated)
        found.append((experiment, scales))
    return found
