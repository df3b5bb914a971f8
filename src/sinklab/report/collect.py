"""Reading of result directories: the data of a report, and the list of `sinklab runs`.

A run in progress is read up to its last complete evaluation; the last line of `metrics.jsonl` may be incomplete.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from sinklab.assessing.assessment import ASSESSMENT, load_assessment
from sinklab.errors import InputError, SinklabError
from sinklab.experiments.documents import SUMMARY, CellSummary, JudgedClaim, Summary
from sinklab.experiments.sweep.packed import is_packed
from sinklab.files import parse_json, parse_yaml
from sinklab.measuring.statistics.highest import elsewhere_text
from sinklab.report.data import (
    Assessed,
    ReportData,
    ReportedRun,
    Suite,
    WrittenRecipe,
    grouped,
    model_name,
    recipe_changes,
)
from sinklab.report.sweeps import Sweep, read_sweep
from sinklab.schema import leaves
from sinklab.survey.suites import CheckpointsDocument, ComparisonDocument, DomainsDocument, FamiliesDocument
from sinklab.train.directory.checkpoint import steps_saved
from sinklab.train.directory.history import Evaluation, finite, read_history
from sinklab.train.directory.lock import is_held

SEED_FOLDER = re.compile(r"seed_(\d+)")
LOOKED_FOR = "recipe.yaml (a run), measurement.json, assessment.json or summary.json with cells (experiments)"
READ_SCHEMA = Summary.model_fields["schema_version"].default
"""The only schema version of summary.json that is read; a file without a version is accepted."""

SUITES = {
    "domains.json": DomainsDocument,
    "comparison.json": ComparisonDocument,
    "families.json": FamiliesDocument,
    "checkpoints.json": CheckpointsDocument,
}


def collect(dirs: list[Path]) -> ReportData:
    """Read the runs, measurements and assessments in and below `dirs`.

    Summaries of experiments and result documents of several measurements are read from `dirs` only, not from
    subfolders.

    Raises:
        InputError: if `dirs` is empty, a directory is missing, unreadable or has nothing to report on, or a file in it
            is damaged or of another version.
        SinklabError: if packed runs cannot be unpacked into a temporary folder.
    """
    if not dirs:
        raise InputError("no directory to report on: pass the directory of a run, measurement, assessment or sweep.")
    runs: list[ReportedRun] = []
    claims: list[JudgedClaim] = []
    cells: dict[str, CellSummary] = {}
    sweeps: list[Sweep] = []
    for top in dirs:
        if not top.is_dir():
            raise InputError(f"{top} is not a directory: expected a folder with {LOOKED_FOR}.")
    dirs = list({top.resolve(): top for top in dirs}.values())
    for top in dirs:
        summary = _read_summary(top / SUMMARY)
        if summary.experiments:
            sweeps.append(read_sweep(top, summary))
        found, known = _runs_of(top, summary)
        prefix = _free_prefix(top, {*known, *(run.cell for run in found)}, {*cells, *(run.cell for run in runs)})
        runs += [replace(run, cell=prefix + run.cell) for run in found]
        claims += [claim for claim in summary.claims if claim.experiment not in summary.experiments]
        cells |= {prefix + name: cell for name, cell in known.items()}
    suites = [suite for top in dirs for suite in _read_suites(top)]
    place = {suite.top / name: number for suite in suites for number, name in enumerate(suite.document.measured)}
    runs = sorted(grouped(runs, cells), key=lambda run: place.get(run.path, -1))
    swept = {sweep.files / run.directory for sweep in sweeps for run in sweep.summary.runs if run.directory}
    assessed = [
        Assessed(Path(document.model).name or document.model, document)
        for top in dirs
        for path in sorted(top.rglob(ASSESSMENT))
        if not any(path.is_relative_to(run) for run in swept)
        for document in [load_assessment(path)]
    ]
    data = ReportData(dirs, runs, claims, cells, suites, sweeps, assessed)
    order = {cell: index for index, cell in enumerate(data.cells)}
    runs.sort(key=lambda run: (order[run.cell], run.seed or 0, str(run.path)))
    return data


def _free_prefix(top: Path, names: Collection[str], taken: Collection[str]) -> str:
    """Return as few last parts of a directory's path as make all names free with this prefix; empty if all are."""
    parts = top.resolve().parts
    prefixes = ("".join(f"{part}/" for part in parts[len(parts) - count :]) for count in range(len(parts) + 1))
    return next(prefix for prefix in prefixes if not any(prefix + name in taken for name in names))


def _runs_of(top: Path, summary: Summary) -> tuple[list[ReportedRun], Mapping[str, CellSummary]]:
    """Read the runs that are listed individually, and the cells of the summary.

    In a packed sweep, or a sweep of several experiments (hundreds of runs), the runs of the summary appear only in the
    experiments' sections: they and the cells are left out here. A directory of several cells, such as a measurement at
    several eps and lengths, is in none of them: their values are those of the summary.
    """
    several = len(summary.experiments) > 1 or is_packed(top)
    cells_at = [
        (top / run.directory, name) for name, cell in summary.cells.items() for run in cell.runs if run.directory
    ]
    uses = Counter(path for path, _ in cells_at)
    cell_of = {path: name for path, name in cells_at if uses[path] == 1}
    found = folders_with(top, lambda folder: _has(folder, "recipe.yaml") or _has(folder, "measurement.json"))
    paths = [path for path in found if not (several and path in uses)]
    if not paths and not summary.cells and not any(top.rglob(ASSESSMENT)):
        raise InputError(f"nothing to report in {top}: looked there and in the folders below it for {LOOKED_FOR}.")
    cells = {} if several else summary.cells
    runs = [_read_run(path, top, cells, cell_of.get(path)) for path in paths]
    # The pass of several cells is named after its inputs, as may be a cell with another eps or length.
    clash = [not run.trained and uses[run.path] > 1 and run.cell in cells for run in runs]
    return [replace(run, cell=f"pass {run.cell}") if one else run for run, one in zip(runs, clash, strict=True)], cells


def _has(folder: Path, name: str) -> bool:
    return (folder / name).is_file()


def folders_with(folder: Path, holds: Callable[[Path], bool]) -> Iterator[Path]:
    """Yield `folder`, or else the folders below it, for which `holds` is true, sorted.

    Subfolders of these folders, symbolic links and folders whose name starts with a dot are not searched.

    Raises:
        InputError: if a folder cannot be read.
    """
    try:
        found = holds(folder)
        children = [] if found else [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    except OSError as error:
        raise InputError(
            f"cannot read {folder}: {error.strerror}. Make it readable, or pass other directories only."
        ) from error
    if found:
        yield folder
    for child in sorted(path for path in children if not path.name.startswith(".")):
        yield from folders_with(child, holds)


def _read_run(path: Path, top: Path, named: Collection[str], cell: str | None) -> ReportedRun:
    recipe, measurement = _read_recipe(path / "recipe.yaml"), None
    if _has(path, "measurement.json"):
        from sinklab.measuring.measurement import Measurement

        measurement = Measurement.load(path)
    folder = SEED_FOLDER.fullmatch(path.name)
    if cell is None:
        parts = path.relative_to(top).parts
        if parts and SEED_FOLDER.fullmatch(parts[-1]):
            parts = parts[:-1]
        if recipe and recipe.name and (recipe.name in named or not parts):
            cell = recipe.name
        elif parts:
            cell = "/".join(parts)
        elif not recipe and measurement and measurement.model:
            cell = model_name(measurement.model)
        else:
            cell = _name_of(path.parent if folder else path)
    return ReportedRun(
        path=path,
        cell=cell,
        seed=recipe.seed if recipe and "seed" in recipe.values else int(folder[1]) if folder else None,
        recipe=recipe,
        env=_read_mapping(path / "env.json"),
        history=read_history(path / "metrics.jsonl"),
        measurement=measurement,
    )


def _name_of(path: Path) -> str:
    return path.resolve().name or str(path)


def _read_recipe(path: Path) -> WrittenRecipe | None:
    """Read a recipe of any version and check the types of values used in reports; None if missing or empty."""
    values = _read_mapping(path)
    train, metric = values.get("train", {}), values.get("metric", {})
    valid = (
        isinstance(values.get("name", ""), str)
        and isinstance(train, dict)
        and isinstance(train.get("steps"), int | None)
        and isinstance(metric, dict)
        and isinstance(metric.get("eps"), int | float | None)
    )
    if not valid:
        raise InputError(
            f"{path} is not the recipe of a run: `name` must be a text, `train` and `metric` mappings, train.steps a "
            "whole number and metric.eps a number. Repair it or leave its folder out."
        )
    return WrittenRecipe(values) if values else None


def _read_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML or JSON file; it is empty if there is no such file.

    Raises:
        InputError: if the file cannot be read or parsed, or contains something other than a mapping.
    """
    if not path.is_file():
        return {}
    try:
        text = path.read_text(encoding="utf-8")
        # YAML reads JSON, but takes 1e-05 for a string: each format has its own reader.
        document = parse_json(text) if path.suffix == ".json" else parse_yaml(text)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}. Repair it or leave its folder out.") from error
    if not isinstance(document, dict):
        raise InputError(f"{path} must contain a mapping of keys to values. Repair it or leave its folder out.")
    return document


def _read_summary(path: Path) -> Summary:
    document = finite(_read_mapping(path))
    if (version := document.get("schema", READ_SCHEMA)) != READ_SCHEMA:
        raise InputError(
            f"{path} is of schema {version}, and this version of sinklab reads {READ_SCHEMA}: repeat the call of "
            "`sinklab reproduce`, which writes it again and keeps finished runs, or use the version of sinklab that "
            "wrote it."
        )
    try:
        return Summary.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(
            f"{path} is not a summary of experiments: {'.'.join(map(str, first['loc']))}: {first['msg']}. Write it "
            "again with `sinklab reproduce`, or leave its folder out."
        ) from error


def _read_suites(top: Path) -> Iterator[Suite]:
    for name, kind in SUITES.items():
        path = top / name
        if not path.is_file():
            continue
        try:
            document = kind.model_validate(_read_mapping(path))
        except ValidationError as error:
            raise InputError(
                f"{path} cannot be read as the result of several measurements: repeat the command that wrote it, or "
                "remove the file."
            ) from error
        yield Suite(top, document)


State = Literal["running", "done", "stopped", "failed", "not begun", "damaged"]


@dataclass(frozen=True)
class ListedRun:
    """A run directory in the list of `sinklab runs`.

    Attributes:
        state: running (a process holds its lock), done (measured after its last step), stopped (it has a checkpoint,
            and the same command resumes it), failed (it ended with an error), not begun (it has no checkpoint) or
            damaged (its recipe or metrics cannot be read).
        step, steps: last step evaluated or saved, and number of steps in the recipe; `steps` is None if unknown.
        sink_rate, sink_rate_bias: sink rates of the first position and of a bias, sink logit or sink token at the last
            evaluation, percent; None if unknown.
        valid_loss: validation loss at the last evaluation, nats per token; None if unknown.
        differs: settings (KEY=VALUE) that differ from the shipped recipe of the same name; without such a recipe, from
            any other listed run.
        why: reason why the run failed or is damaged; empty for other runs.
        sink_elsewhere: text with rate and position of the highest sink at the last evaluation; empty if that is the
            first token, below 1 % or unknown.
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
    """List the runs in and below some directories: in the order of `folders`, and by path in each.

    Raises:
        InputError: if a path is not a directory, a folder cannot be read, or there is no run.
    """
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"{folder} is not a directory: expected one with runs in it or below it")
    runs = (
        path
        for folder in folders
        for path in folders_with(folder, lambda one: _has(one, "recipe.yaml") and _has(one, "env.json"))
    )
    recipes: dict[Path, WrittenRecipe] = {}
    for path in dict.fromkeys(runs):
        try:
            recipes[path] = WrittenRecipe(_read_mapping(path / "recipe.yaml"))
        except InputError:
            recipes[path] = WrittenRecipe({})
    if not recipes:
        raise InputError(f"no run in or below {', '.join(map(str, folders))}: a run has a recipe.yaml and an env.json")
    return [_listed(path, recipes) for path in recipes]


def _listed(path: Path, recipes: dict[Path, WrittenRecipe]) -> ListedRun:
    recipe = recipes[path]
    steps, seed = recipe.steps, recipe.seed
    if steps is None:
        return ListedRun(str(path), "damaged", why=f"{path / 'recipe.yaml'} cannot be read, or has no train.steps")
    name = str(recipe.values.get("name", ""))
    try:
        history = read_history(path / "metrics.jsonl")
    except SinklabError as error:
        return ListedRun(str(path), "damaged", name, seed, steps=steps, why=str(error))
    last = history[-1] if history else Evaluation(step=0)
    saved, why = steps_saved(path / "checkpoints"), ""
    if is_held(path):
        state = "running"
    elif (path / "measurement.json").is_file() and last.step >= steps:
        state = "done"
    elif why := _failure(path):
        state = "failed"
    else:
        state = "stopped" if saved else "not begun"
    changes = recipe_changes(recipe)
    if changes is None:
        others = [leaves(other.values) for other in recipes.values() if other.values]
        changes = [
            f"{key}={value}"
            for key, value in leaves(recipe.values).items()
            if key not in ("seed", "name") and any(other.get(key) != value for other in others)
        ]
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
        sink_elsewhere=elsewhere_text(last.sink_rate),
    )


def _failure(path: Path) -> str:
    """Return the error message in failed.json; empty if there is none."""
    try:
        return str(parse_json((path / "failed.json").read_text(encoding="utf-8"))["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
