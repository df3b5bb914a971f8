"""The data of a report: runs, claims, sweeps, assessments and suites (several measurements made by one command).

Runs whose recipes differ only in the seed are grouped into a cell. This module does not read results (`collect` does)
and does not draw charts.

The run table has the numbers of runs as one tidy frame, with a row per cell, seed, step and metric. Tables, training
curves and headlines are made of this frame: `over_seeds` averages its values over the runs of a cell.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from sinklab.assessing.assess_model import Assessment
from sinklab.errors import InputError
from sinklab.experiments.documents import CellSummary
from sinklab.measuring.registry import Evaluation
from sinklab.report.sweeps import Sweep, value_text
from sinklab.schema import leaves
from sinklab.survey.measure import without_hash
from sinklab.survey.suites import SavedCheckpoint, SuiteDocument, Survey
from sinklab.train.recipe import KINDS, UNHASHED_TRAIN_KEYS, load_recipe
from sinklab.train.run import seconds_spent

if TYPE_CHECKING:
    import numpy as np

    from sinklab.measuring.measurement import Measurement
    from sinklab.measuring.statistics.details import Details

MOST_CHANGES = 4
"""Maximum number of changes listed in the name of a cell."""

MEASURED = ("sink_rate", "sink_rate_visible", "sink_rate_bias", "hidden_norm_ratio")
"""Fields of an evaluation that `ReportedRun.latest` replaces by those of the run's measurement."""


@dataclass(frozen=True)
class ReportedRun:
    """A training run or a measured model. A measured model has no recipe and no history.

    Attributes:
        path: directory of the run or measurement; a placeholder for an unsaved measurement.
        cell: name shared by runs that differ only in the seed (see `assign_cells`).
        seed: seed in the recipe, else the number of a folder named `seed_N`; None if there is neither.
        recipe: content of recipe.yaml, possibly in the format of another version of sinklab.
        env: content of env.json; empty if there is no such file.
        history: evaluations of the run, ordered by step.
        failed: whether training failed.
    """

    path: Path
    cell: str
    seed: int | None = None
    recipe: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, object] = field(default_factory=dict)
    history: Sequence[Evaluation] = ()
    measurement: "Measurement | None" = None
    failed: bool = False

    @classmethod
    def of(cls, measurement: "Measurement") -> "ReportedRun":
        """Create a reported run from an unsaved measurement; its cell is named after the model."""
        return cls(Path(), model_name(measurement.model) if measurement.model else "model", measurement=measurement)

    @property
    def trained(self) -> bool:
        """Whether this is a training run (it has a recipe) rather than a measurement of an existing model."""
        return bool(self.recipe)

    def setting(self, key: str) -> Any:
        """Return the value of a dotted key of the recipe; None if it is missing."""
        return leaves(self.recipe).get(key)

    @property
    def planned_steps(self) -> int | None:
        """Number of training steps in the recipe; None if unknown."""
        return self.setting("train.steps")

    @property
    def steps_done(self) -> int | None:
        """Step of the run's last evaluation; None if there are no evaluations."""
        return self.history[-1].step if self.history else None

    @property
    def seconds(self) -> float | None:
        """Duration of the training, or of the measurement of a model, in seconds; None if unknown.

        Evaluations without a recorded speed are skipped; their tokens are counted at the speed of the next evaluation.
        """
        if self.trained:
            known = [one for one in self.history if one.tokens is not None and one.tokens_per_second]
            return seconds_spent(known) or None
        return self.measurement.seconds if self.measurement else None

    @property
    def unfinished(self) -> str:
        """Text such as `step 500 of 2000`; empty if the last step was reached, or if the steps are unknown.

        The step is that of the last evaluation for a training run that has not reached its last step (`failed at step
        300 of 2000` if it has failed), and that of the measured checkpoint otherwise.
        """
        if self.trained and (self.steps_done or 0) < (self.planned_steps or 0):
            return f"{'failed at ' if self.failed else ''}step {self.steps_done or 0} of {self.planned_steps}"
        step, planned = (self.measurement.step, self.measurement.planned_steps) if self.measurement else (None, None)
        return f"step {step:,} of {planned:,}" if step is not None and planned and step < planned else ""

    @property
    def eps(self) -> float:
        """Threshold ε of the sink rate: from the measurement, else from the recipe, else the paper's 0.3."""
        return self.measurement.eps if self.measurement else float(self.setting("metric.eps") or 0.3)

    @property
    def latest(self) -> Evaluation:
        """The last evaluation, updated with the run's measurement.

        Sink rates and norm ratios that are not None in the measurement replace those of the evaluation. The loss of
        the measurement is used if the evaluation has no `valid_loss`. Without evaluations, an empty evaluation at step
        0 is updated.
        """
        last = self.history[-1] if self.history else Evaluation(step=0)
        if self.measurement is None:
            return last
        newer = {name: value for name in MEASURED if (value := getattr(self.measurement, name)) is not None}
        if "valid_loss" not in last.model_fields_set:
            newer["valid_loss"] = self.measurement.loss
        return last.model_copy(update=newer)


@dataclass(frozen=True)
class Suite:
    """The result document of several measurements made by one command, and the directory that contains all of them."""

    top: Path
    document: SuiteDocument

    def runs(self, data: "ReportData") -> list[tuple[str, "ReportedRun"]]:
        """Return (name in the document, run) for each measurement of the suite in `data`, in the document's order."""
        by_path = {run.path: run for run in data.runs}
        return [(name, by_path[self.top / name]) for name in self.document.measured if self.top / name in by_path]


@dataclass(frozen=True)
class ReportData:
    """The content of a report.

    Attributes:
        dirs: directories of the results.
        runs: training runs and measurements, ordered by cell (as in `cells`), then by seed. Runs of packed sweeps and
            of sweeps of several experiments are only in `sweeps`.
        summary_cells: cells of the summaries by name, without those of packed sweeps and of sweeps of several
            experiments. If an earlier directory already uses one of a directory's names, all of its cells and runs are
            named `DIRECTORY/CELL`.
        suites: result documents of several measurements.
        sweeps: directories whose summary lists experiments; each experiment has a section on the page.
        assessed: assessments, except those of the runs of a sweep.
    """

    dirs: list[Path]
    runs: list[ReportedRun]
    summary_cells: dict[str, CellSummary] = field(default_factory=dict)
    suites: list[Suite] = field(default_factory=list)
    sweeps: list[Sweep] = field(default_factory=list)
    assessed: list[Assessment] = field(default_factory=list)

    @classmethod
    def of_survey(cls, survey: Survey) -> "ReportData":
        """Create the data of a report on an unsaved survey."""
        document = SuiteDocument.model_validate({**survey.document(), "failed": {}})
        runs = [ReportedRun(Path(name), name, measurement=one) for name, one in survey.outcome.measured.items()]
        return cls([Path()], runs, suites=[Suite(Path(), document)])

    @property
    def cells(self) -> list[str]:
        """Distinct names of the cells: those of summaries, then those of runs, each in order of appearance."""
        return list(dict.fromkeys([*self.summary_cells, *(run.cell for run in self.runs)]))

    def runs_of(self, cell: str) -> list[ReportedRun]:
        """Return the runs of one cell, in the order of `runs`."""
        return [run for run in self.runs if run.cell == cell]

    def label(self, run: ReportedRun) -> str:
        """Return the name of a run: `CELL`, or `CELL, seed N` if the cell has several runs and the seed is known."""
        alone = len(self.runs_of(run.cell)) == 1
        return run.cell if alone or run.seed is None else f"{run.cell}, seed {run.seed}"

    def of_model(self, one: Assessment) -> str:
        """Return the suffix `: MODEL` for titles about an assessment; empty if the report has only one assessment."""
        return f": {model_label(one.model)}" if len(self.assessed) > 1 else ""

    @property
    def eps(self) -> str:
        """Threshold ε of the runs' sink rates as text; if the runs differ, all thresholds, such as `0.2 or 0.3`.

        There must be at least one run.
        """
        *others, last = [f"{eps:g}" for eps in sorted({run.eps for run in self.runs})]
        return f"{', '.join(others)} or {last}" if others else last

    @property
    def only_suite(self) -> SuiteDocument | None:
        """The document of the only suite, if all runs belong to it; else None."""
        if len(self.suites) != 1 or len(self.suites[0].runs(self)) != len(self.runs):
            return None
        return self.suites[0].document

    @property
    def checkpoints(self) -> dict[str, SavedCheckpoint]:
        """Checkpoints of the suites for the measurements in `runs`, by cell."""
        found = [(run, suite.document.checkpoints, name) for suite in self.suites for name, run in suite.runs(self)]
        return {run.cell: checkpoints[name] for run, checkpoints, name in found if checkpoints}

    @property
    def notes(self) -> list[tuple[str, str]]:
        """Pairs of name and text: first tokens and notes of each measured run, and why a measurement failed."""
        failed = [(name, why) for suite in self.suites for name, why in suite.document.failed.items()]
        return [
            *((self.label(run), one.fed.line()) for run, one in self.measured if one.fed is not None),
            *((self.label(run), note) for run, one in self.measured for note in one.notes),
            *((name, f"not measured: {why}") for name, why in failed),
        ]

    @property
    def measured(self) -> "list[tuple[ReportedRun, Measurement]]":
        """The measured runs, with their measurements."""
        return [(run, run.measurement) for run in self.runs if run.measurement is not None]

    @property
    def detailed(self) -> "list[tuple[ReportedRun, Measurement, Details]]":
        """The runs measured with --details or --map, with measurement and details."""
        return [(run, one, one.details) for run, one in self.measured if one.details is not None]

    @property
    def has_visible(self) -> bool:
        """Whether a measurement has the importance averaged over the queries that can see the key."""
        return any(one.importance_visible is not None for _, one in self.measured)

    def arrays(self, of: "Callable[[Measurement], np.ndarray | None]") -> "list[tuple[str, np.ndarray]]":
        """Return (label, array) for each measured run; `of` returns the array of a measurement.

        Runs whose array is None or empty are left out.
        """
        found = [(self.label(run), of(one)) for run, one in self.measured]
        return [(label, array) for label, array in found if array is not None and array.size]


def rates_by_eps(measurement: "Measurement") -> Mapping[str, Sequence[float]]:
    """Return a measurement's sink rates by position, in percent, for each threshold ε (as text, such as `0.3`)."""
    return measurement.sink_rates or {f"{measurement.eps:g}": measurement.sink_rate}


def model_name(model: str) -> str:
    """Return the name of a model's cell: the last component of a path; a Hub id or other path `a/b` is kept whole."""
    return model if model.count("/") == 1 and not model.startswith((".", "/", "~")) else Path(model).name or model


def model_label(model: str) -> str:
    """Return the last component of a model's path or Hub id, for titles and sentences; `.` is returned unchanged.

    The hash at the end of a run directory's name is left out.
    """
    return without_hash(Path(model).name) or model


def assign_cells(runs: list[ReportedRun], named: Collection[str]) -> list[ReportedRun]:
    """Assign runs whose recipes differ only in the seed to the same cell, and return copies of all runs.

    The recipes may also differ in the name and in `UNHASHED_TRAIN_KEYS`, which change the result by rounding at most.
    If two runs of a group have the same seed, they are not replicates, and all runs of the group keep their cells.

    A cell is named after its changes to the shipped recipe of the same name (`model.attention.bias=k`), or after that
    recipe if there are no changes. If no such recipe is shipped or the name is taken, the cell is named after the
    folder of its first run.

    Args:
        named: names of cells in a summary. Runs in these cells, and runs without a recipe, keep their cells.
    """
    by_recipe: dict[str, list[ReportedRun]] = {}
    for run in runs:
        if run.recipe and run.cell not in named:
            by_recipe.setdefault(json.dumps(effective(run.recipe), sort_keys=True, default=str), []).append(run)
    groups = [group for group in by_recipe.values() if len({run.seed for run in group}) == len(group)]
    bases = [str(group[0].recipe.get("name")) for group in groups]
    found = [recipe_changes(group[0].recipe) for group in groups]
    lists = [set(changes) for changes in found if changes is not None]
    common = set.intersection(*lists) if len(lists) > 1 else set[str]()
    several = len(set(bases)) > 1
    names = [_cell_name(base, changes, common, several) for base, changes in zip(bases, found, strict=True)]
    inside = {id(run) for group in groups for run in group}
    taken = {*named, *(run.cell for run in runs if id(run) not in inside)}
    cells: dict[int, str] = {}
    for group, name, base in sorted(zip(groups, names, bases, strict=True), key=lambda one: bool(one[1])):
        first = group[0]  # folder names are assigned first; the folder NAME-HASH of `sinklab train` is shown as NAME
        plain = base if re.fullmatch(rf"{re.escape(base)}-[0-9a-f]{{16}}", first.cell) else first.cell
        cell = next(one for one in (name, plain, first.cell, str(first.path)) if one and one not in taken)
        taken.add(cell)
        cells |= {id(run): cell for run in group}
    return [replace(run, cell=cells.get(id(run), run.cell)) for run in runs]


def effective(recipe: Mapping[str, object]) -> dict[str, object]:
    """Return a recipe's settings by dotted key, without name, seed and the settings `UNHASHED_TRAIN_KEYS`."""
    aside = {"seed", "name", *(f"train.{key}" for key in UNHASHED_TRAIN_KEYS)}
    return {key: value for key, value in leaves(recipe).items() if ".".join(key.split(".")[:2]) not in aside}


def _cell_name(base: str, changes: list[str] | None, common: Collection[str], several: bool) -> str:
    """Return a cell's name with at most `MOST_CHANGES` changes to the shipped recipe; empty if there is no such recipe.

    Args:
        base: name of the recipe; part of the cell's name if `several` cells differ in it, or without changes.
        common: changes that all cells share; they are the first to be omitted.
    """
    if changes is None:
        return ""
    shown, more = changes, len(changes) - MOST_CHANGES
    if more > 0:
        shown = [*sorted(changes, key=lambda change: change in common)[:MOST_CHANGES], f"and {more} more"]
    return ", ".join([*([base] if several or not changes else []), *shown])


def recipe_changes(recipe: Mapping[str, object]) -> list[str] | None:
    """List the settings (KEY=VALUE) in which a resolved recipe differs from the shipped recipe of the same name.

    Changes of a part's kind (`model.attention.operation=sigmoid`) are listed first. The settings of the new kind are
    compared with its defaults; if the kind has required settings, all of its settings are listed. Name, seed, the
    settings `UNHASHED_TRAIN_KEYS`, and values resolved by the run, such as the vocabulary size, are omitted. None if no
    recipe of that name is shipped.
    """
    ours = effective(recipe)
    shipped = str(resources.files("sinklab") / "recipes" / f"{recipe.get('name')}.yaml")
    try:
        theirs = leaves(load_recipe(shipped).model_dump(mode="json"))
    except InputError:
        return None
    kinds = {
        key.rpartition(".")[0]: value
        for key, value in ours.items()
        if "." in key and key.rpartition(".")[2] in KINDS and theirs.get(key) != value
    }
    changes = [f"{key}={value}" for key, value in kinds.items()]
    try:
        theirs = leaves(load_recipe(shipped, changes).model_dump(mode="json"))
    except InputError:  # a kind with required settings: all of its settings are listed
        theirs = {key: value for key, value in theirs.items() if not key.startswith(tuple(f"{k}." for k in kinds))}
        theirs |= {f"{key}.{tag}": value for key, value in kinds.items() for tag in KINDS}
    resolved = {"model.vocab_size": None, "train.precision": "auto"}
    resolved |= {"model.attention.mask.eos_id": None, "model.pattern.mask.eos_id": None}
    for key, value in ours.items():
        if theirs.get(key) != value and not (key in resolved and theirs.get(key) == resolved[key]):
            changes.append(f"{key}={value_text(value)}")
    return changes


SCHEMA = {
    "cell": pl.String,
    "seed": pl.Int64,
    "run": pl.String,
    "step": pl.Int64,
    "metric": pl.String,
    "value": pl.Float64,
}


def run_table(
    runs: Iterable[ReportedRun],
    final: Mapping[str, Callable[[ReportedRun], float | None]],
    by_step: Mapping[str, Callable[[Evaluation], float | None]] | None = None,
) -> pl.DataFrame:
    """Return the numbers of runs as a frame with the columns of `SCHEMA`; unknown numbers have no row.

    Args:
        final: functions from a run to its number, by metric; their rows have no step.
        by_step: functions from an evaluation to its number, by metric.
    """
    rows = []
    for run in runs:
        about = (run.cell, run.seed, str(run.path))
        rows += [(*about, None, metric, read(run)) for metric, read in final.items()]
        rows += [
            (*about, one.step, metric, read(one)) for one in run.history for metric, read in (by_step or {}).items()
        ]
    return pl.DataFrame(rows, SCHEMA, orient="row").drop_nulls("value")


DEVIATION = pl.when(pl.col("value").is_finite().all()).then(pl.col("value").std())
"""Sample standard deviation of the values of a group; None for a single value and for infinite ones."""


def over_seeds(table: pl.DataFrame, *by: str, **more: pl.Expr) -> list[dict[str, Any]]:
    """Group a frame by columns and summarise `value` over the runs, in order of appearance.

    Returns:
        A row per group: the columns, mean (`value`), minimum (`low`), maximum (`high`) and number (`runs`) of the
        values, and the numbers of `more`.
    """
    value = pl.col("value")
    found = table.group_by(by, maintain_order=True)
    return found.agg(value.mean(), low=value.min(), high=value.max(), runs=pl.len(), **more).to_dicts()


def averaged(fields: Sequence[str], values: Iterable[Sequence[Any]]) -> list[dict[str, Any]]:
    """Summarise numbers by key, as `over_seeds`; `values` are tuples of the values of `fields`, and a number."""
    rows = [*values]
    table = pl.DataFrame(rows, [*fields, "value"], orient="row", infer_schema_length=None)
    return over_seeds(table.drop_nulls("value"), *fields) if rows else []


def by_layer(arrays: Iterable[tuple[str, str, Iterable[float]]], first: int = 0) -> list[dict[str, Any]]:
    """Average values by layer over runs, as `averaged`, with the keys `cell`, `where` and `layer`.

    Args:
        arrays: triples of cell, name of the series, and values by layer or block; infinite values are left out.
        first: number of the first layer or block.
    """
    return averaged(
        ("cell", "where", "layer"),
        (
            (cell, where, layer, float(value))
            for cell, where, array in arrays
            for layer, value in enumerate(array, first)
            if math.isfinite(value)
        ),
    )
