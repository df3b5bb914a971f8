"""Plan a sweep: the recipe and hash of every run, and the order of training. A run is a cell trained with one seed."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sinklab.data.loader import TokenDataset
from sinklab.errors import InputError
from sinklab.experiments.claims import Diverges, parts_of
from sinklab.experiments.definition import Experiment
from sinklab.experiments.sweep.engine import PlannedRun
from sinklab.interventions import VARIANTS
from sinklab.schema import leaves
from sinklab.train.directory.run import Run, resolve
from sinklab.train.recipe import DATA_ORIGIN, KINDS, Recipe, build_recipe, recipe_values
from sinklab.train.start import with_checkpoint_values


@dataclass(frozen=True)
class SweepCell:
    """A trained cell that one or more experiments of a sweep use.

    Attributes:
        recipe: recipe of the cell, with seed 0.
        change: recipe keys (dotted) that differ from the base, with their values.
        seeds: union of the seeds of all experiments that use the cell.
        may_diverge: True if a claim states that training diverges, or a variant that it may diverge; a diverged run is
            then not a failure of the sweep.
    """

    recipe: Recipe
    change: Mapping[str, object]
    seeds: Sequence[int]
    may_diverge: bool


@dataclass(frozen=True)
class SweepPlan:
    """Distinct cells of several experiments by name, and the order of training.

    Attributes:
        order: (cell name, seed) pairs, sorted by rank of the experiment, then by seed.
        runs: distinct runs in the order of training, after `placed`; cells with the same recipe share their runs.
        hashes: hash of the run by (cell name, seed), after `placed`.
    """

    cells: Mapping[str, SweepCell]
    order: Sequence[tuple[str, int]]
    runs: Sequence[PlannedRun] = ()
    hashes: Mapping[tuple[str, int], str] = field(default_factory=dict)

    def only(self, names: Collection[str]) -> "SweepPlan":
        """Return the plan of the named cells alone; the whole plan if none are named.

        Raises:
            InputError: if the plan has no cell of that name.
        """
        if unknown := [name for name in names if name not in self.cells]:
            raise InputError(f"--cell {unknown[0]}: there is no such cell; choose from: {', '.join(self.cells)}")
        cells = {name: cell for name, cell in self.cells.items() if not names or name in names}
        return SweepPlan(cells, [(name, seed) for name, seed in self.order if name in cells])

    def placed(self, data: Mapping[str, TokenDataset], out: Path, found: Mapping[str, Path]) -> "SweepPlan":
        """Return the plan with its runs: in their existing directories (`found`, by hash), or in `out`.

        Args:
            data: prepared data by `data_key`, which decides the hashes.

        Raises:
            InputError: if a recipe does not fit its data (`resolve`), or the validation text is too short.
        """
        runs: dict[str, PlannedRun] = {}
        hashes: dict[tuple[str, int], str] = {}
        several = any(len(cell.seeds) > 1 for cell in self.cells.values())
        for name, seed in self.order:
            cell = self.cells[name]
            dataset = data[data_key(cell.recipe)]
            recipe = resolve(cell.recipe.model_copy(update={"seed": seed}), dataset)
            run_hash = hashes[name, seed] = recipe.content_hash(dataset.fingerprint)
            if run_hash not in runs:
                directory = found.get(run_hash) or out / f"{name}-{run_hash}"
                Run(directory, recipe, dataset, run_hash).loader("valid")  # refuses a validation text that is too short
                label = f"{name} seed {seed}" if several else name
                runs[run_hash] = PlannedRun(label, recipe.to_yaml(), directory, run_hash)
        return replace(self, runs=tuple(runs.values()), hashes=hashes)


def plan_sweep(
    experiments: Sequence[Experiment], scale: str, seeds: int | None, overlay: Mapping[str, Any]
) -> SweepPlan:
    """Return the cells of several experiments with their recipes, and the order of training; needs no data.

    Args:
        seeds: number of seeds of each experiment; default: the experiment's.
        overlay: recipe overlay for all cells, applied after those of the cell, except for `data`: a cell with its own
            data, such as a synthetic task, keeps it.

    Raises:
        InputError: if an experiment does not have the scale, a base recipe is missing or not YAML, a recipe is invalid
            with its overlays, an initial checkpoint is unusable or does not fit the recipe's model, or two experiments
            have cells of the same name with different recipes.
        SinklabError: if the initial checkpoint is a run that has no valid checkpoint.
    """
    cells: dict[str, SweepCell] = {}
    order: dict[tuple[str, int], None] = {}
    first: dict[str, str] = {}
    for experiment in sorted(experiments, key=lambda one: one.rank):
        own = cells_of(experiment, scale, seeds, overlay)
        for name, cell in own.items():
            known = cells.get(name, cell)
            if known.recipe != cell.recipe:
                before, after = (leaves(recipe.model_dump(mode="json")) for recipe in (known.recipe, cell.recipe))
                key = next(key for key in {**before, **after} if before.get(key) != after.get(key))
                raise InputError(
                    f"cell {name} of {experiment.id} has a different recipe from that of {first[name]} ({key} is "
                    f"{before.get(key)} there and {after.get(key)} here): run them in different directories (--out), "
                    "or rename the cell"
                )
            first.setdefault(name, experiment.id)
            both, may_diverge = sorted({*cell.seeds, *known.seeds}), cell.may_diverge or known.may_diverge
            cells[name] = SweepCell(known.recipe, known.change, both, may_diverge)
        order |= dict.fromkeys((name, seed) for seed in next(iter(own.values())).seeds for name in own)
    return SweepPlan(cells, tuple(order))


def cells_of(experiment: Experiment, scale: str, seeds: int | None, overlay: Mapping[str, Any]) -> dict[str, SweepCell]:
    """Return the cells of an experiment by name; arguments and errors as in `plan_sweep`."""
    if scale not in experiment.base:
        raise InputError(f"{experiment.id} has no scale {scale!r}; it has: {', '.join(experiment.base)}")
    checks = [check for claim in experiment.claims_at(scale) if claim.check for check in parts_of(claim.check)]
    diverging = {check.cell for check in checks if isinstance(check, Diverges) and check.kind == "diverges"}
    values = recipe_values(experiment.base[scale])
    base = build_recipe(values, overlay, origin=experiment.base[scale])
    text = {key: value for key, value in overlay.items() if key == "data"}
    rest = {key: value for key, value in overlay.items() if key != "data"}
    found = {}
    for name, overlays in experiment.cells_at(scale).items():
        top = {"name": name, "seed": 0}
        recipe = with_checkpoint_values(
            build_recipe(values, text, *overlays, rest, top, origin=f"cell {name} of {experiment.id}")
        )
        may_diverge = name in diverging or any(
            variant.may_diverge and variant.overlay in overlays for variant in VARIANTS.values()
        )
        found[name] = SweepCell(
            recipe, change_of(recipe, base, overlays), experiment.seeds_of(scale, seeds), may_diverge
        )
    return found


def change_of(recipe: Recipe, base: Recipe, overlays: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """Return the recipe keys (dotted) that overlays have changed from the base, with their values in `recipe`.

    If an overlay sets a key to the name of a kind, as in `bias: sink_logit`, the value is that name. Defaults of the
    new kind are listed only for keys that the base also has, such as `optim.weight_decay`. If an overlay sets a section
    to {}, as in `losses: {tweo: {}}`, all changed keys of the section are listed.
    """
    before, after = (leaves(one.model_dump(mode="json")) for one in (base, recipe))
    given = {key: value for overlay in overlays for key, value in leaves(overlay, empty=True).items()}
    opened = tuple(f"{key}." for key, value in given.items() if value == {})
    kinds = {key for key in after if key.rpartition(".")[2] in KINDS}
    replaced = tuple(f"{key.rpartition('.')[0]}." for key in kinds & before.keys() if before[key] != after[key])
    shown = {*given, *(key for key in after if key.startswith(opened))}
    shown |= {key for key in before.keys() & after.keys() - kinds if key.startswith(replaced)}
    changed: dict[str, object] = {}
    for key in sorted(shown):
        full = next((name for name in (key, *(f"{key}.{kind}" for kind in KINDS)) if name in after), None)
        if full is not None and (full not in before or before[full] != after[full]):
            changed[key] = after[full]
    return changed


def data_key(recipe: Recipe) -> str:
    """Return a string that identifies a recipe's prepared data: its `DATA_ORIGIN` settings as JSON."""
    return recipe.data.model_dump_json(include=DATA_ORIGIN)
