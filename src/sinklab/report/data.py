"""The data of a report: runs with their numbers, claims with their evidence, and suites of measurements; the cells of
runs that differ in their seed only.

This module reads no files (`collect` does) and draws no charts.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from sinklab.assessing.assessment import Assessment
from sinklab.errors import InputError
from sinklab.experiments.documents import CellSummary, JudgedClaim
from sinklab.report.sweeps import Sweep
from sinklab.schema import leaves
from sinklab.survey.suites import (
    CheckpointsDocument,
    FamiliesDocument,
    FamilyMember,
    MeasuredCheckpoint,
    SuiteDocument,
)
from sinklab.train.directory.history import Evaluation
from sinklab.train.recipe import KINDS, MANNER, load_recipe

if TYPE_CHECKING:
    import numpy as np

    from sinklab.measuring.measurement import Measurement
    from sinklab.measuring.statistics.details import Details

T = TypeVar("T")
HASHED_NAME = re.compile(r"(.+)-[0-9a-f]{16}")
MOST_CHANGES = 4
"""Maximum number of changes in the name of a cell."""

MEASURED = ("sink_rate", "sink_rate_visible", "sink_rate_bias", "hidden_norm_ratio")
"""Fields of both an evaluation and a measurement."""


@dataclass(frozen=True)
class WrittenRecipe:
    """The recipe of a run as written by any version of sinklab; values of an unexpected type read as None.

    Attributes:
        values: nested mapping of the recipe's keys.
    """

    values: Mapping[str, object]

    @property
    def name(self) -> str | None:
        """Name of the recipe that the run changes, or of the run's cell."""
        return self._value("name", str)

    @property
    def seed(self) -> int | None:
        """Random seed of weights and data."""
        return self._value("seed", int)

    @property
    def steps(self) -> int | None:
        """Planned number of updates."""
        return self._value("train.steps", int)

    @property
    def eps(self) -> float | None:
        """Threshold ε of the sink rate."""
        return self._value("metric.eps", int, float)

    def _value(self, key: str, *kinds: type[T]) -> T | None:
        value: object = self.values
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value if isinstance(value, kinds) else None


@dataclass(frozen=True)
class ReportedRun:
    """A training run, or a measured model, which has no recipe and no history.

    Attributes:
        cell: name shared by runs that differ only in the seed (see `grouped`).
        env: content of env.json.
        history: evaluations of the run, ordered by step.
        measurement: measurement of the run; None if it was not measured.
    """

    path: Path
    cell: str
    seed: int | None = None
    recipe: WrittenRecipe | None = None
    env: Mapping[str, object] = field(default_factory=dict)
    history: Sequence[Evaluation] = ()
    measurement: "Measurement | None" = None

    @classmethod
    def of(cls, measurement: "Measurement") -> "ReportedRun":
        """Build a reported run from a measurement in memory, without a directory."""
        return cls(Path(), model_name(measurement.model) if measurement.model else "model", measurement=measurement)

    @property
    def trained(self) -> bool:
        """Whether this is a training run rather than a measurement of a finished model."""
        return self.recipe is not None

    @property
    def planned_steps(self) -> int | None:
        """Number of training steps in the recipe."""
        return self.recipe.steps if self.recipe else None

    @property
    def steps_done(self) -> int | None:
        """Step of the run's last evaluation."""
        return self.history[-1].step if self.history else None

    @property
    def in_progress(self) -> bool:
        """Whether the run has not reached the last step of its recipe."""
        return self.trained and (self.steps_done or 0) < (self.planned_steps or 0)

    @property
    def unfinished(self) -> str:
        """Text with the step that an unfinished run has reached, or at which it was measured; empty for other runs."""
        if self.in_progress:
            return f"step {self.steps_done or 0} of {self.planned_steps}"
        step, planned = (self.measurement.step, self.measurement.planned_steps) if self.measurement else (None, None)
        return f"step {step:,} of {planned:,}" if step is not None and planned and step < planned else ""

    @property
    def eps(self) -> float:
        """Threshold ε of the sink rate: from the measurement, else from the recipe, else the paper's 0.3."""
        if self.measurement:
            return self.measurement.eps
        return float((self.recipe and self.recipe.eps) or 0.3)

    @property
    def latest(self) -> Evaluation:
        """The last evaluation, updated with the measurement's values (its loss only if no validation loss is known)."""
        last = self.history[-1] if self.history else Evaluation(step=0)
        if self.measurement is None:
            return last
        newer = {name: value for name in MEASURED if (value := getattr(self.measurement, name)) is not None}
        if "valid_loss" not in last.model_fields_set:
            newer["valid_loss"] = self.measurement.loss
        return last.model_copy(update=newer)


@dataclass(frozen=True)
class Suite:
    """The result document of several measurements (a suite), with its directory.

    Attributes:
        top: directory of the document; the measurements are in its subdirectories.
    """

    top: Path
    document: SuiteDocument

    def runs(self, data: "ReportData") -> list[tuple[str, "ReportedRun"]]:
        """Return the suite's measurements with their names, in the order of the document."""
        by_path = {run.path: run for run in data.runs}
        return [(name, by_path[self.top / name]) for name in self.document.measured if self.top / name in by_path]


@dataclass(frozen=True)
class Assessed:
    """The content of an assessment.json.

    Attributes:
        name: label of the model.
        folder: folder of the file.
    """

    name: str
    folder: Path
    document: Assessment


@dataclass(frozen=True)
class ReportData:
    """The content of a report.

    Attributes:
        runs: runs, ordered by cell (in order of appearance), then by seed.
        claims: claims of summaries that list no experiments.
        summary_cells: cells of the summaries that these runs belong to, by name.
        suites: result documents of several measurements.
        sweeps: sweeps, with a section per experiment. The runs of a sweep of several experiments are not in `runs`.
        assessed: assessments, except those of the runs of a sweep.
    """

    dirs: list[Path]
    runs: list[ReportedRun]
    claims: list[JudgedClaim] = field(default_factory=list)
    summary_cells: dict[str, CellSummary] = field(default_factory=dict)
    suites: list[Suite] = field(default_factory=list)
    sweeps: list[Sweep] = field(default_factory=list)
    assessed: list[Assessed] = field(default_factory=list)

    @classmethod
    def of_suite(cls, document: SuiteDocument, measured: "Mapping[str, Measurement]") -> "ReportData":
        """Return the data of a report on measurements in memory, given by their names in the suite's document."""
        runs = [ReportedRun(Path(name), name, measurement=one) for name, one in measured.items()]
        return cls([Path()], runs, suites=[Suite(Path(), document)])

    @property
    def cells(self) -> list[str]:
        """Distinct names of the cells in order of appearance, cells of the summary first."""
        return list(dict.fromkeys([*self.summary_cells, *(run.cell for run in self.runs)]))

    def runs_of(self, cell: str) -> list[ReportedRun]:
        """Return the runs of one cell, ordered by seed."""
        return [run for run in self.runs if run.cell == cell]

    def label(self, run: ReportedRun) -> str:
        """Return the name of a run: its cell, with the seed if the cell has several runs."""
        alone = len(self.runs_of(run.cell)) == 1
        return run.cell if alone or run.seed is None else f"{run.cell}, seed {run.seed}"

    @property
    def only_suite(self) -> SuiteDocument | None:
        """The document of the only suite, if all runs belong to it; else None."""
        if len(self.suites) != 1 or len(self.suites[0].runs(self)) != len(self.runs):
            return None
        return self.suites[0].document

    @property
    def failures(self) -> list[tuple[str, str]]:
        """Names of the failed measurements, with the reason of each failure."""
        return [(name, f"not measured: {why}") for suite in self.suites for name, why in suite.document.failed.items()]

    @overload
    def suite_rows(self, kind: type[FamiliesDocument]) -> dict[str, FamilyMember]: ...

    @overload
    def suite_rows(self, kind: type[CheckpointsDocument]) -> dict[str, MeasuredCheckpoint]: ...

    def suite_rows(self, kind: Any) -> Any:
        """Return the entries of all suite documents of one kind, by cell."""
        return {
            run.cell: suite.document.measured[name]
            for suite in self.suites
            if isinstance(suite.document, kind)
            for name, run in suite.runs(self)
        }

    @property
    def notes(self) -> list[tuple[str, str]]:
        """Pairs of name and text: the notes of each measured run, and the failed measurements with the reason."""
        return [*((self.label(run), note) for run, one in self.measured for note in one.notes), *self.failures]

    @property
    def measured(self) -> "list[tuple[ReportedRun, Measurement]]":
        """The measured runs, with their measurements."""
        return [(run, run.measurement) for run in self.runs if run.measurement is not None]

    @property
    def detailed(self) -> "list[tuple[ReportedRun, Measurement, Details]]":
        """The runs measured with --details, with measurement and details."""
        return [(run, one, one.details) for run, one in self.measured if one.details is not None]

    def arrays(self, of: "Callable[[Measurement], np.ndarray | None]") -> "list[tuple[str, np.ndarray]]":
        """Return the label of each measured run with the array `of` its measurement, if any."""
        found = [(self.label(run), of(one)) for run, one in self.measured]
        return [(label, array) for label, array in found if array is not None and array.size]


def model_name(model: str) -> str:
    """Shorten a path to its last folder; a hub id is returned unchanged."""
    return model if model.count("/") == 1 and not model.startswith((".", "/", "~")) else Path(model).name or model


def grouped(runs: list[ReportedRun], named: Collection[str]) -> list[ReportedRun]:
    """Return the runs with one cell assigned to all runs whose recipes differ only in the seed.

    A cell is named by its changes to the shipped recipe of the runs' name (`model.attention.bias=k`), by that recipe if
    nothing was changed, and by its first run if there is no such recipe. Runs with the same seed are not replicates and
    get separate cells.

    Args:
        named: names of cells in a summary; runs with these names keep them.
    """
    by_recipe: dict[str, list[ReportedRun]] = {}
    for run in runs:
        if run.recipe and run.cell not in named:
            kept = {key: value for key, value in run.recipe.values.items() if key not in ("seed", "name")}
            if isinstance(train := kept.get("train"), dict):
                kept["train"] = {key: value for key, value in train.items() if key not in MANNER}
            by_recipe.setdefault(json.dumps(kept, sort_keys=True, default=str), []).append(run)
    groups = [group for group in by_recipe.values() if len({run.seed for run in group}) == len(group)]
    recipes = [group[0].recipe for group in groups if group[0].recipe]
    several = len({recipe.name for recipe in recipes}) > 1
    found = [recipe_changes(recipe) for recipe in recipes]
    lists = [set(changes) for changes in found if changes is not None]
    common = set.intersection(*lists) if len(lists) > 1 else set[str]()
    names = [_cell_name(str(one.name), changes, common, several) for one, changes in zip(recipes, found, strict=True)]
    inside = {id(run) for group in groups for run in group}
    taken = {*named, *(run.cell for run in runs if id(run) not in inside)}
    cells: dict[int, str] = {}
    for group, name in sorted(zip(groups, names, strict=True), key=lambda pair: bool(pair[1])):  # new names last
        first = group[0]
        hashed = HASHED_NAME.fullmatch(first.cell)  # the folder NAME-HASH of `sinklab train`
        plain = hashed[1] if hashed and first.recipe and first.recipe.name == hashed[1] else first.cell
        cell = next(one for one in (name, plain, first.cell, str(first.path)) if one and one not in taken)
        taken.add(cell)
        cells |= {id(run): cell for run in group}
    return [replace(run, cell=cells.get(id(run), run.cell)) for run in runs]


def _cell_name(base: str, changes: list[str] | None, common: Collection[str], several: bool) -> str:
    """Return a cell's name of at most `MOST_CHANGES` changes, those shared by all cells last; empty without a base."""
    if changes is None:
        return ""
    shown, more = changes, len(changes) - MOST_CHANGES
    if more > 0:
        shown = [*sorted(changes, key=lambda change: change in common)[:MOST_CHANGES], f"and {more} more"]
    return ", ".join([*([base] if several or not changes else []), *shown])


def recipe_changes(recipe: WrittenRecipe) -> list[str] | None:
    """List the settings (KEY=VALUE) in which a resolved recipe differs from the shipped recipe of the same name.

    A different kind is one change, followed by its values that are not defaults. Values that were unset and
    settings that do not affect the result are left out.

    Returns:
        None if no recipe of that name is shipped.
    """
    ours = {
        key: value
        for key, value in leaves(recipe.values).items()
        if key not in ("seed", "name") and not (key.startswith("train.") and key[6:] in MANNER)
    }
    try:
        theirs = leaves(load_recipe(str(recipe.name)).model_dump(mode="json"))
    except InputError:
        return None
    kinds = {
        key.rpartition(".")[0]: value
        for key, value in ours.items()
        if "." in key and key.rpartition(".")[2] in KINDS and theirs.get(key) != value
    }
    changes = [f"{key}={value}" for key, value in kinds.items()]
    try:
        theirs = leaves(load_recipe(str(recipe.name), changes).model_dump(mode="json"))
    except InputError:  # a kind with required values: all of its values are listed
        theirs = {key: value for key, value in theirs.items() if not key.startswith(tuple(f"{k}." for k in kinds))}
        theirs |= {f"{key}.{tag}": value for key, value in kinds.items() for tag in KINDS}
    resolved = {"model.vocab_size": None, "train.precision": "auto"}
    resolved |= {"model.attention.mask.eos_id": None, "model.pattern.mask.eos_id": None}
    for key, value in ours.items():
        if theirs.get(key) != value and not (key in resolved and theirs.get(key) == resolved[key]):
            text = f"{value:g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
            changes.append(f"{key}={text}")
    return changes
