"""Read result directories for reports and for `sinklab runs`.

A run in progress is read up to its last complete evaluation; the last line of `metrics.jsonl` may be incomplete.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from sinklab.assessing.assess_model import ASSESSMENT, load_assessment
from sinklab.errors import InputError, SinklabError
from sinklab.experiments.documents import SUMMARY, CellSummary, RunRecord, Summary, read_record
from sinklab.experiments.sweep.packed import is_packed
from sinklab.files import folders_with, if_present, parse_json, read_document, read_mapping
from sinklab.report.data import ReportData, ReportedRun, Suite, assign_cells, effective, model_name, recipe_changes
from sinklab.report.sweeps import Sweep, read_sweep, value_text
from sinklab.schema import leaves
from sinklab.survey.suites import FILES, SuiteDocument
from sinklab.tables import later_sink_text
from sinklab.train.checkpoint import steps_saved
from sinklab.train.lock import is_held
from sinklab.train.run import Evaluation, read_history

SEED_FOLDER = re.compile(r"seed_(\d+)")
LOOKED_FOR = "recipe.yaml (a run), measurement.json, assessment.json or summary.json with cells (experiments)"
REPAIR = "repair it or leave its folder out"
REWRITE = (
    "delete it and run `sinklab reproduce` again, which keeps finished runs, use the version of sinklab that wrote it, "
    "or leave its folder out"
)


CHECKED = {"name": str, "seed": int, "train": dict, "train.steps": int, "metric": dict, "metric.eps": (int, float)}
"""Types of the recipe keys that reports use; recipes of other versions, with other keys, are accepted."""


def collect(dirs: list[Path]) -> ReportData:
    """Read the runs, measurements and assessments in and below `dirs`.

    Summaries of experiments and documents of suites are read from `dirs` only, not from their subfolders. Duplicate
    directories are read once. Packed runs are unpacked into a temporary folder.

    Raises:
        InputError: if `dirs` is empty; if a directory is missing, unreadable or has no results; if one directory
            contains another, so that runs would be counted twice; or if a file cannot be read, is damaged or has an
            unsupported schema version.
        SinklabError: if packed runs cannot be unpacked into a temporary folder.
    """
    if not dirs:
        raise InputError("no directory given: pass the directory of a run, measurement, assessment or sweep.")
    runs: list[ReportedRun] = []
    cells: dict[str, CellSummary] = {}
    sweeps: list[Sweep] = []
    _check_folders(dirs, f"a folder with {LOOKED_FOR}")
    dirs = list({top.resolve(): top for top in dirs}.values())
    for top in dirs:
        summary = read_document(Summary, top / SUMMARY, REWRITE) if (top / SUMMARY).is_file() else Summary()
        if summary.experiments:
            sweeps.append(read_sweep(top, summary))
        found, known = _runs_of(top, summary)
        for inner in (one.resolve() for one in dirs if one is not top):
            if inner.is_relative_to(top.resolve()) and any(run.path.resolve().is_relative_to(inner) for run in found):
                raise InputError(f"{top} contains {inner}, whose runs would be counted twice: leave one of them out")
        names, taken = {*known, *(run.cell for run in found)}, {*cells, *(run.cell for run in runs)}
        parts = top.resolve().parts  # as few of the last ones as make the names of the cells distinct
        prefixes = ("".join(f"{part}/" for part in parts[len(parts) - count :]) for count in range(len(parts) + 1))
        prefix = next(one for one in prefixes if not any(one + name in taken for name in names))
        runs += [replace(run, cell=prefix + run.cell) for run in found]
        cells |= {prefix + name: cell for name, cell in known.items()}
    suites = [
        Suite(top, read_document(SuiteDocument, top / name, "rerun the command that wrote it, or remove the file"))
        for top in dirs
        for name in FILES.values()
        if (top / name).is_file()
    ]
    place = {suite.top / name: number for suite in suites for number, name in enumerate(suite.document.measured)}
    runs = sorted(assign_cells(runs, cells), key=lambda run: place.get(run.path, -1))
    swept = {sweep.files / run.directory for sweep in sweeps for run in sweep.summary.runs if run.directory}
    assessments = {path.resolve(): path for top in dirs for path in sorted(top.rglob(ASSESSMENT))}
    assessed = [
        load_assessment(path) for path in assessments.values() if not any(path.is_relative_to(run) for run in swept)
    ]
    data = ReportData(dirs, runs, cells, suites, sweeps, assessed)
    order = {cell: index for index, cell in enumerate(data.cells)}
    runs.sort(key=lambda run: (order[run.cell], run.seed or 0, str(run.path)))
    return data


def _runs_of(top: Path, summary: Summary) -> tuple[list[ReportedRun], Mapping[str, CellSummary]]:
    """Return the runs of a directory that a report lists individually, and the cells of its summary.

    For a packed sweep, or a sweep of several experiments (hundreds of runs), the sweep's runs and the summary's cells
    are omitted, because they appear in the sections of the experiments. A directory that several cells share, such as a
    measurement at several eps and lengths, is assigned to none of these cells, whose values are taken from the summary.
    """
    several = len(summary.experiments) > 1 or is_packed(top)
    cells_at = [
        (top / run.directory, name) for name, cell in summary.cells.items() for run in cell.runs if run.directory
    ]
    uses = Counter(path for path, _ in cells_at)
    cell_of = {path: name for path, name in cells_at if uses[path] == 1}
    found = folders_with(top, lambda names: "recipe.yaml" in names or "measurement.json" in names, _refuse)
    paths = [path for path in found if not (several and path in uses)]
    if not paths and not summary.cells and not any(top.rglob(ASSESSMENT)):
        raise InputError(f"nothing to report in {top}: neither it nor a folder below it has {LOOKED_FOR}.")
    cells = {} if several else summary.cells
    runs = [_read_run(path, top, cells, cell_of.get(path)) for path in paths]
    # A measurement that several cells share is named after its inputs, which may also be the name of a cell.
    clash = [not run.trained and uses[run.path] > 1 and run.cell in cells for run in runs]
    return [replace(run, cell=f"pass {run.cell}") if one else run for run, one in zip(runs, clash, strict=True)], cells


def _check_folders(folders: Sequence[Path], expected: str) -> None:
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"{folder} is not a directory: expected {expected}")


def _refuse(error: OSError) -> None:
    raise InputError(f"cannot read {error.filename}: {error.strerror}. Make it readable, or leave it out.") from error


def _read_run(path: Path, top: Path, named: Collection[str], cell: str | None) -> ReportedRun:
    recipe, measurement = _read_recipe(path / "recipe.yaml"), None
    if (path / "measurement.json").is_file():
        from sinklab.measuring.measurement import Measurement

        measurement = Measurement.load(path)
    folder = SEED_FOLDER.fullmatch(path.name)
    if cell is None:
        parts = path.relative_to(top).parts
        if parts and folder:
            parts = parts[:-1]
        name: str = recipe.get("name", "")
        if name and (name in named or not parts):
            cell = name
        elif parts:
            cell = "/".join(parts)
        elif not recipe and measurement and measurement.model:
            cell = model_name(measurement.model)
        else:
            place = path.parent if folder else path
            cell = place.resolve().name or str(place)
    seed = recipe["seed"] if "seed" in recipe else int(folder[1]) if folder else None
    history = read_history(path / "metrics.jsonl")
    failed = bool(_error_of(path, read_record(path)))
    env = if_present(lambda: read_mapping(path / "env.json", REPAIR)) or {}
    return ReportedRun(path, cell, seed, recipe, env, history, measurement, failed)


def _read_recipe(path: Path) -> dict[str, Any]:
    """Read a recipe of any version, and check the types of the values used in reports; {} if there is no file."""
    values = if_present(lambda: read_mapping(path, REPAIR)) or {}
    known = leaves(values)
    for key, kind in CHECKED.items():
        if known.get(key) is not None and (not isinstance(known[key], kind) or isinstance(known[key], bool)):
            raise InputError(f"{path} is not the recipe of a run ({key} is {known[key]!r}): {REPAIR}")
    return values


State = Literal["running", "done", "stopped", "failed", "not begun", "damaged"]


@dataclass(frozen=True)
class ListedRun:
    """A run directory in the list of `sinklab runs`.

    Attributes:
        directory: path of the run directory.
        state: the first that applies: damaged (the recipe or the metrics cannot be read, or the recipe has no number of
            steps), running (a process holds the lock of the directory), done (measured, and evaluated at the last
            step), failed (failed.json or record.json has the error), stopped (it has a checkpoint, from which the same
            command resumes), or not begun (no checkpoint).
        name, seed: name and seed in the recipe.
        step: last step that was evaluated or has a checkpoint; 0 if there is none, or if the run is damaged.
        steps: number of steps in the recipe; None if unknown.
        sink_rate, sink_rate_bias: sink rate of the first position, and that of a bias, sink logit, sink token or
            registers, at the last evaluation, percent; None if unknown.
        valid_loss: validation loss at the last evaluation, nats per token; None if unknown.
        differs: settings (KEY=VALUE) that differ from the shipped recipe of the same name or, if there is no such
            recipe, from the recipe of another listed run.
        why: error message of a failed or damaged run; empty for other runs.
        sink_elsewhere: rate and position of the highest sink at the last evaluation, as text; empty if the highest sink
            is at the first token, is below 1 % or is unknown.
    """

    directory: str
    state: State
    name: str = ""
    seed: int | None = None
    step: int = 0
    steps: int | None = None
    sink_rate: float | None = None
    sink_rate_bias: float | None = None
    valid_loss: float | None = None
    differs: tuple[str, ...] = ()
    why: str = ""
    sink_elsewhere: str = ""


def list_runs(folders: Sequence[Path]) -> list[ListedRun]:
    """List the runs in and below `folders`, sorted by path within each folder.

    A run is a directory with recipe.yaml and env.json. A run in several of the folders is listed once.

    Raises:
        InputError: if a path is not a directory, a folder cannot be read, or there is no run.
    """
    _check_folders(folders, "a run or a directory with runs below it")
    found: dict[Path, Path] = {}
    for top in folders:
        for path in folders_with(top, lambda names: "recipe.yaml" in names and "env.json" in names, _refuse):
            found.setdefault(path.resolve(), path)
    recipes: dict[Path, Mapping[str, Any]] = {}
    for path in found.values():
        try:
            recipes[path] = _read_recipe(path / "recipe.yaml")
        except InputError:
            recipes[path] = {}
    if not recipes:
        raise InputError(f"no run in or below {', '.join(map(str, folders))}: a run has a recipe.yaml and an env.json")
    return [_listed(path, recipes) for path in recipes]


def _listed(path: Path, recipes: Mapping[Path, Mapping[str, Any]]) -> ListedRun:
    recipe = recipes[path]
    steps, seed, name = leaves(recipe).get("train.steps"), recipe.get("seed"), recipe.get("name", "")
    if not isinstance(steps, int):
        return ListedRun(str(path), "damaged", why=f"{path / 'recipe.yaml'} cannot be read, or has no train.steps")
    try:
        history, record = read_history(path / "metrics.jsonl"), read_record(path)
    except SinklabError as error:
        return ListedRun(str(path), "damaged", name, seed, steps=steps, why=str(error))
    last = history[-1] if history else Evaluation(step=0)
    saved, why = steps_saved(path / "checkpoints"), ""
    if is_held(path):
        state = "running"
    elif last.step >= steps and ((path / "measurement.json").is_file() or (record and record.status == "done")):
        state = "done"
    elif why := _error_of(path, record):
        state = "failed"
    else:
        state = "stopped" if saved else "not begun"
    if (changes := recipe_changes(recipe)) is None:
        others = [effective(other) for other in recipes.values() if other.get("name", "") == name]
        own = effective(recipe).items()
        different = [(key, value) for key, value in own if any(other.get(key) != value for other in others)]
        changes = [f"{key}={value_text(value)}" for key, value in different]
    return ListedRun(
        directory=str(path),
        state=state,
        name=name,
        seed=seed,
        step=max([last.step, *saved]),
        steps=steps,
        sink_rate=next(iter(last.sink_rate), None),
        sink_rate_bias=last.sink_rate_bias,
        valid_loss=last.valid_loss,
        differs=tuple(changes),
        why=why,
        sink_elsewhere=later_sink_text(last.sink_rate),
    )


def _error_of(path: Path, record: RunRecord | None) -> str:
    """Return the error that ended a run's training, from failed.json or else its record; empty if there is none."""
    try:
        return str(parse_json((path / "failed.json").read_text(encoding="utf-8"))["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return (record.message or "training failed") if record is not None and record.status == "failed" else ""
