"""Plan and directory of a sweep: the order of its runs, manifests (asked/ID.json), results, and runs to assess or tune.

A manifest records an experiment and the hashes of its runs. Runs are found by hash in and below the directory.

A run is a cell trained with one seed.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import Field

from sinklab.assessing.assess_model import ASSESSMENT, load_assessment
from sinklab.assessing.parts import PartName
from sinklab.data.loader import TokenDataset
from sinklab.errors import InputError
from sinklab.experiments.claims import Diverges, Scale, parts_of
from sinklab.experiments.definition import ONLY_MEASURED, Experiment
from sinklab.experiments.documents import RECORD, CellRun, CellSummary, Summary, edited, record_of
from sinklab.experiments.summary import NO_METRICS, NoMetricsError, at_scale, named_values, read_numbers, summarise
from sinklab.experiments.sweep.engine import PlannedRun
from sinklab.files import folders_with, read_document, write_json
from sinklab.interventions import VARIANTS
from sinklab.measuring.registry import OTHERS, STORED
from sinklab.schema import ReadDocument, VersionedDocument, leaves
from sinklab.train.recipe import DATA_ORIGIN, KINDS, Recipe, build_recipe, recipe_values
from sinklab.train.run import ENVIRONMENT, Run, recorded_hash, resolve
from sinklab.train.start import with_checkpoint_values
from sinklab.tuning.settings import TuneOptions
from sinklab.tuning.tuned_directory import SFT, load_tuning, tuned_beside


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


MANIFESTS = "asked"

OF_MEASURED: Any = {"each": True, "scatter": True, "published": {"model"}, "claims": {"__all__": ONLY_MEASURED}}
"""Fields of experiments that apply only to existing models and are not written to manifests (pydantic's `exclude`)."""


class ManifestCell(ReadDocument):
    """A cell in a manifest.

    Attributes:
        change: recipe keys (dotted) that differ from the base, with their values.
        hashes: run hash by seed.
    """

    change: dict[str, object] = Field(default_factory=dict)
    hashes: dict[int, str] = Field(default_factory=dict)


class SweepManifest(VersionedDocument):
    """asked/ID.json: an experiment as it was requested, and the hashes of its runs.

    Attributes:
        overlay: recipe overlay for all cells, with the values of --steps and --text; empty if neither is passed.
        cells: changed recipe keys and run hashes, by name of the cell.
    """

    experiment: Experiment
    scale: Scale
    overlay: dict[str, Any] = Field(default_factory=dict)
    cells: dict[str, ManifestCell] = Field(default_factory=dict)

    @property
    def seeds(self) -> list[int]:
        """Seeds of the experiment's runs, sorted."""
        return sorted({seed for _, seed, _ in self.runs()})

    @property
    def first_seed(self) -> int:
        """First seed of the experiment at its scale."""
        return self.experiment.seeds_of(self.scale).start

    def runs(self) -> Iterator[tuple[str, int, str]]:
        """Yield (cell name, seed, run hash) for every cell and seed; cells with the same recipe share hashes."""
        for name, cell in self.cells.items():
            for seed, run_hash in cell.hashes.items():
                yield name, seed, run_hash

    def save(self, out: Path) -> None:
        """Write asked/ID.json in the directory of the sweep."""
        path = out / MANIFESTS / f"{self.experiment.id}.json"
        document = self.model_dump(mode="json", by_alias=True, exclude={"experiment"})
        experiment = self.experiment.model_dump(mode="json", by_alias=True, exclude=OF_MEASURED)
        write_json(path, {**document, "experiment": experiment})


def manifest_of(
    experiment: Experiment, scale: Scale, seeds: int | None, overlay: Mapping[str, Any], plan: SweepPlan
) -> SweepManifest:
    """Return the manifest of one experiment of a placed plan; arguments as in `plan_sweep`."""
    own = experiment.seeds_of(scale, seeds)
    cells = {
        name: ManifestCell(change=dict(plan.cells[name].change), hashes={seed: plan.hashes[name, seed] for seed in own})
        for name in experiment.cells_at(scale)
    }
    return SweepManifest(experiment=experiment, scale=scale, overlay=dict(overlay), cells=cells)


def read_manifests(out: Path) -> dict[str, SweepManifest]:
    """Return the manifests in the directory of a sweep, by experiment id.

    Raises:
        InputError: if a manifest cannot be read or is damaged, has a different schema version, or contains an
            experiment that is invalid in this version of sinklab.
    """
    remedy = (
        "if it is damaged or of another version of sinklab, remove it and run that experiment again, or use another "
        "folder"
    )
    found = [read_document(SweepManifest, path, remedy) for path in sorted((out / MANIFESTS).glob("*.json"))]
    return {manifest.experiment.id: manifest for manifest in found}


def merged_manifests(before: Mapping[str, SweepManifest], now: Mapping[str, SweepManifest]) -> dict[str, SweepManifest]:
    """Add the experiments and seeds of earlier manifests to the new manifests (at least one); return them by rank.

    Earlier manifests with another scale or overlay are left out. Earlier seeds of an experiment are added to the cells
    whose runs have the same hashes as before, provided that the experiment's first seed has not changed.

    Raises:
        InputError: if an earlier manifest of another experiment has a different run for the same cell and seed.
    """
    first = next(iter(now.values()))
    kept = {name: one for name, one in before.items() if (one.scale, one.overlay) == (first.scale, first.overlay)}
    known = {(name, seed): (run_hash, one.experiment.id) for one in now.values() for name, seed, run_hash in one.runs()}
    merged = {name: one for name, one in kept.items() if name not in now}
    for one in merged.values():
        for name, seed, run_hash in one.runs():
            mine = known.get((name, seed), (run_hash, ""))
            if mine[0] != run_hash:
                raise InputError(
                    f"cell {name}, seed {seed}, has a different recipe, text or initial weights in {mine[1]} than in "
                    f"{one.experiment.id}, which was run in this directory before: choose another --out, or remove "
                    f"{MANIFESTS}/{one.experiment.id}.json there"
                )
    merged |= {name: _with_earlier_seeds(one, kept.get(name)) for name, one in now.items()}
    return dict(sorted(merged.items(), key=lambda item: item[1].experiment.rank))


def _with_earlier_seeds(now: SweepManifest, before: SweepManifest | None) -> SweepManifest:
    """Add the seeds of an earlier manifest with the same first seed to the cells whose runs have the same hashes."""
    if before is None or before.first_seed != now.first_seed:
        return now
    cells = {}
    for name, cell in now.cells.items():
        old = before.cells.get(name, ManifestCell()).hashes
        same = all(old.get(seed, run_hash) == run_hash for seed, run_hash in cell.hashes.items())
        hashes = {**old, **cell.hashes} if same else cell.hashes
        cells[name] = ManifestCell(change=cell.change, hashes=dict(sorted(hashes.items())))
    return now.model_copy(update={"cells": cells})


def found_runs(out: Path) -> dict[str, Path]:
    """Return the run directories in and below a folder, by hash.

    Of several with the same hash, one with record.json is preferred, then one with measurement.json, then the one with
    the largest metrics.jsonl. Hidden folders and folders within run directories are not searched.

    Raises:
        SinklabError: if an env.json cannot be read or is damaged.
    """
    found: dict[str, Path] = {}
    for directory in folders_with(out, lambda names: ENVIRONMENT in names):
        run_hash = recorded_hash(directory)
        if run_hash is not None and (run_hash not in found or _progress(directory) > _progress(found[run_hash])):
            found[run_hash] = directory
    return found


def _progress(directory: Path) -> tuple[bool, bool, int]:
    metrics = directory / "metrics.jsonl"
    size = metrics.stat().st_size if metrics.is_file() else 0
    return (directory / RECORD).is_file(), (directory / "measurement.json").is_file(), size


def results_of(manifests: Mapping[str, SweepManifest], out: Path) -> dict[str, CellSummary]:
    """Return the results of all cells of the manifests by name, from the runs in and below a directory.

    A finished run without metrics is listed as unfinished, with a message.

    Raises:
        InputError: if a file of a run cannot be read or is damaged.
        SinklabError: if an env.json is damaged.
    """
    runs = found_runs(out)
    wanted = dict.fromkeys(STORED)
    for experiment in (one.experiment for one in manifests.values()):
        named = (name for claim in experiment.claims if claim.check for name in claim.check.quantities)
        # The highest rate of other positions follows from the rates of a cell.
        wanted |= dict.fromkeys([*experiment.columns, *(name for name in named if not name.startswith(OTHERS))])
    hashes: dict[str, dict[int, str]] = {}
    changes: dict[str, Mapping[str, object]] = {}
    for one in manifests.values():
        for name, cell in one.cells.items():
            hashes.setdefault(name, {}).update(cell.hashes)
            changes.setdefault(name, cell.change)
    return {
        name: CellSummary(
            change=dict(changes[name]),
            runs=[_read(runs.get(run_hash), out, seed, run_hash, wanted) for seed, run_hash in sorted(by_seed.items())],
        )
        for name, by_seed in hashes.items()
    }


def summary_of(manifests: Mapping[str, SweepManifest], out: Path) -> Summary:
    """Return the summary of the manifests' experiments, from the runs in and below a directory.

    Raises:
        InputError, SinklabError: if a file of a run cannot be read or is damaged.
    """
    experiments = [at_scale(one.experiment, one.scale, one.seeds) for one in manifests.values()]
    altered = any(one.overlay for one in manifests.values())
    return summarise(experiments, results_of(manifests, out), altered)


def _read(directory: Path | None, out: Path, seed: int, run_hash: str, wanted: Iterable[str]) -> CellRun:
    where = directory.relative_to(out).as_posix() if directory else ""
    run = CellRun(seed=seed, hash=run_hash, directory=where, status="unfinished")
    if directory is None or (record := record_of(directory, run_hash)) is None:
        return run
    known = record.model_dump(include={"status", "message", "seconds", "tokens_per_second", "peak_memory_mb"})
    run = run.model_copy(update={**known, "edited": edited(directory, record)})
    if record.status == "failed":
        return run
    try:
        numbers = read_numbers(directory)
    except NoMetricsError:
        return run.model_copy(update={"status": "unfinished", "message": NO_METRICS})
    values, never = named_values(numbers, wanted)
    return run.model_copy(update={"values": values, "never": never, "numbers": numbers})


@dataclass(frozen=True)
class FollowUp:
    """A finished run that its experiments want assessed (`assess`) or fine-tuned (`tune`).

    Attributes:
        name: display name, from cell and seed.
        document: path of the run's assessment.json, or of the fine-tuning's sft.json.
        parts: names of all parts of the assessment; empty for a fine-tuning.
        tune: settings of the fine-tuning; None for an assessment.
    """

    name: str
    directory: Path
    document: Path
    parts: tuple[PartName, ...] = ()
    tune: TuneOptions | None = None

    @property
    def is_finished(self) -> bool:
        """True if the document has all parts or the evaluation of the tuned model; InputError if it is damaged."""
        if not self.document.is_file():
            return False
        if self.tune is not None:
            return load_tuning(self.document).chat is not None
        found = load_assessment(self.document)
        return found.on_held_out and all(part in found.results or part in found.skipped for part in self.parts)


def follow_ups(manifests: Iterable[SweepManifest], out: Path) -> list[FollowUp]:
    """Return the assessments and fine-tunings of the finished runs in and below a directory, finished or not.

    Raises:
        InputError: if a record cannot be read or is damaged.
        SinklabError: if an env.json is damaged.
    """
    wanted = [one for one in manifests if one.experiment.assess or one.experiment.tune is not None]
    runs, found = found_runs(out) if wanted else {}, dict[Path, FollowUp]()
    for one in wanted:
        for cell, seed, run_hash in one.runs():
            record = record_of(runs[run_hash], run_hash) if run_hash in runs else None
            if record is None or record.status != "done":
                continue
            name, directory = f"{cell} seed {seed}", runs[run_hash]
            if one.experiment.assess:
                path = directory / ASSESSMENT
                before = found.get(path, FollowUp(name, directory, path))
                parts = tuple(dict.fromkeys([*before.parts, *one.experiment.assess]))
                found[path] = replace(before, parts=parts)
            if one.experiment.tune is not None:
                path = tuned_beside(directory) / SFT
                found.setdefault(path, FollowUp(name, directory, path, tune=one.experiment.tune))
    return sorted(found.values(), key=lambda one: one.tune is not None)
