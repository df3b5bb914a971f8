"""From directories to what a report is made of: runs, measurements, claims and suites, as found on disk.

A run in progress is read up to its last complete evaluation; the last line of `metrics.jsonl` may be incomplete.
"""

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from sinklab.assessing.assessment import ASSESSMENT, load_assessment
from sinklab.errors import InputError
from sinklab.experiments.documents import CellSummary, JudgedClaim, Summary
from sinklab.experiments.sweep.packed import is_packed
from sinklab.files import parse_json, parse_yaml
from sinklab.report.data import Assessed, ReportData, ReportedRun, Suite, WrittenRecipe, model_name
from sinklab.report.experiments.sweeps import Sweep, read_sweep
from sinklab.report.grouping import grouped
from sinklab.survey.suites import CheckpointsDocument, ComparisonDocument, DomainsDocument, FamiliesDocument
from sinklab.train.directory.history import finite, read_history

if TYPE_CHECKING:
    from sinklab.measuring.measurement import Measurement

SEED_FOLDER = re.compile(r"seed_(\d+)")
LOOKED_FOR = "recipe.yaml (a run), measurement.json (a measurement), assessment.json or summary.json (a lab)"
READ_SCHEMA = Summary.model_fields["schema_version"].default
"""Of summary.json; one without a version is from before there were any, and is read, too."""

SUITES = {
    "domains.json": DomainsDocument,
    "comparison.json": ComparisonDocument,
    "families.json": FamiliesDocument,
    "checkpoints.json": CheckpointsDocument,
}


def collect(dirs: list[Path]) -> ReportData:
    """Read all runs, measurements and summaries in and below `dirs`.

    Raises:
        InputError: a directory is missing, holds nothing to report on, or a file in it is damaged.
    """
    if not dirs:
        raise InputError("no directory was given to report on: name a run, a measurement or a lab directory.")
    runs: list[ReportedRun] = []
    claims: list[JudgedClaim] = []
    cells: dict[str, CellSummary] = {}
    sweeps: list[Sweep] = []
    for top in dirs:
        summary = _read_summary(_checked(top) / "summary.json")
        sweep = read_sweep(top, summary) if summary.experiments else None
        sweeps += [sweep] if sweep else []
        found, summary = _collect_one(top, summary)
        taken = {run.cell for run in runs} | set(cells)
        if taken & ({run.cell for run in found} | set(summary.cells)):
            found, summary = _prefixed(top, found, summary)
        runs += found
        claims += summary.claims
        cells |= summary.cells
    suites = [suite for top in dirs for suite in _read_suites(top)]
    place = {suite.top / name: number for suite in suites for number, name in enumerate(suite.document.measured)}
    runs = sorted(grouped(runs, cells), key=lambda run: place.get(run.path, -1))
    swept = {sweep.files / run.directory for sweep in sweeps for run in sweep.runs if run.directory}
    assessed = [one for top in dirs for one in _read_assessments(top, swept)]
    data = ReportData(dirs, runs, claims, cells, suites, sweeps, assessed)
    order = {cell: index for index, cell in enumerate(data.cells)}
    runs.sort(key=lambda run: (order[run.cell], run.seed or 0, str(run.path)))
    return data


def _checked(top: Path) -> Path:
    if not top.is_dir():
        raise InputError(f"{top} is not a directory: expected a folder with {LOOKED_FOR}.")
    return top


def _collect_one(top: Path, summary: Summary) -> tuple[list[ReportedRun], Summary]:
    """The runs that are shown each, and what the summary says of these.

    Runs of several experiments are shown by the sections of those alone: hundreds would make no table. So are packed
    ones.
    """
    several = len(summary.experiments) > 1 or is_packed(top)
    cell_of = {top / run.directory: name for name, cell in summary.cells.items() for run in cell.runs if run.directory}
    paths = [path for path in folders_with(top, _is_run_or_measurement) if not (several and path in cell_of)]
    if not paths and not summary.cells and not any(top.rglob(ASSESSMENT)):
        raise InputError(f"nothing to report in {top}: looked there and in the folders below it for {LOOKED_FOR}.")
    cells = {} if several else summary.cells
    claims = [claim for claim in summary.claims if claim.experiment not in summary.experiments]
    return [_read_run(path, top, cells, cell_of.get(path)) for path in paths], Summary(cells=cells, claims=claims)


def _is_run_or_measurement(folder: Path) -> bool:
    return (folder / "recipe.yaml").is_file() or (folder / "measurement.json").is_file()


def folders_with(folder: Path, holds: Callable[[Path], bool]) -> Iterator[Path]:
    """The folders in and below a folder of which `holds` is true; what lies inside of those is not searched.

    Raises:
        InputError: one of them cannot be read.
    """
    try:
        found = holds(folder)
        children = [] if found else [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    except OSError as error:
        raise InputError(f"cannot read {folder}: {error.strerror}. Make it readable, or name others only.") from error
    if found:
        yield folder
    for child in sorted(path for path in children if not path.name.startswith(".")):
        yield from folders_with(child, holds)


def _prefixed(top: Path, runs: list[ReportedRun], summary: Summary) -> tuple[list[ReportedRun], Summary]:
    """The same, with the directory in front of each cell's name: two directories use the same names."""
    renamed = [replace(run, cell=f"{_name_of(top)}/{run.cell}") for run in runs]
    cells = {f"{_name_of(top)}/{name}": cell for name, cell in summary.cells.items()}
    return renamed, Summary(cells=cells, claims=summary.claims)


def _read_run(path: Path, top: Path, named: Collection[str], cell: str | None = None) -> ReportedRun:
    recipe, measurement = _read_recipe(path / "recipe.yaml"), _read_measurement(path)
    own_name = recipe.name if recipe else None
    folder = SEED_FOLDER.fullmatch(path.name)
    return ReportedRun(
        path=path,
        cell=cell or (own_name if own_name and own_name in named else _cell_name(path, top, recipe, measurement)),
        seed=recipe.seed if recipe and "seed" in recipe.values else int(folder[1]) if folder else None,
        recipe=recipe,
        env=read_mapping(path / "env.json"),
        history=read_history(path / "metrics.jsonl"),
        measurement=measurement,
    )


def _cell_name(path: Path, top: Path, recipe: WrittenRecipe | None, measurement: "Measurement | None") -> str:
    parts = list(path.relative_to(top).parts)
    if parts and SEED_FOLDER.fullmatch(parts[-1]):
        parts.pop()
    if parts:
        return "/".join(parts)
    if recipe and recipe.name:
        return recipe.name
    if not recipe and measurement and measurement.model:
        return model_name(measurement.model)
    return _name_of(path.parent if SEED_FOLDER.fullmatch(path.name) else path)


def _name_of(path: Path) -> str:
    return path.resolve().name or str(path)


def _read_recipe(path: Path) -> WrittenRecipe | None:
    """The recipe of any version; the values that a report counts or compares are checked."""
    values = read_mapping(path)
    train, metric = values.get("train", {}), values.get("metric", {})
    sound = (
        isinstance(values.get("name", ""), str)
        and isinstance(train, dict)
        and isinstance(train.get("steps"), int | None)
        and isinstance(metric, dict)
        and isinstance(metric.get("eps"), int | float | None)
    )
    if not sound:
        raise InputError(f"{path} is not the recipe of a run. Repair it or leave its folder out.")
    return WrittenRecipe(values) if values else None


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a YAML or JSON file, empty without the file.

    Raises:
        InputError: it cannot be read, or holds something else than a mapping.
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
        raise InputError(f"{path} should hold a mapping of keys to values. Repair it or leave its folder out.")
    return document


def _read_summary(path: Path) -> Summary:
    document = finite(read_mapping(path))
    if (version := document.get("schema", READ_SCHEMA)) != READ_SCHEMA:
        raise InputError(
            f"{path} is of schema {version}, and this version of sinklab reads {READ_SCHEMA}: call `sinklab reproduce` "
            "with its experiments again, which writes it from the runs without training any, or use the version of "
            "sinklab that wrote it."
        )
    try:
        return Summary.model_validate(document)
    except ValidationError as error:
        raise InputError(f"{path} should hold `cells` (a mapping) and `claims` (a list). Write it again.") from error


def _read_measurement(folder: Path) -> "Measurement | None":
    if not (folder / "measurement.json").is_file():
        return None
    from sinklab.measuring.measurement import Measurement

    return Measurement.load(folder)


def _read_suites(top: Path) -> Iterator[Suite]:
    for name, kind in SUITES.items():
        path = top / name
        if not path.is_file():
            continue
        try:
            document = kind.model_validate(parse_json(path.read_text(encoding="utf-8")))
        except ValueError as error:
            raise InputError(
                f"{path} is damaged: run the command that wrote it again, or take the file out."
            ) from error
        yield Suite(top, document)


def _read_assessments(top: Path, without: Collection[Path]) -> list[Assessed]:
    """Those in and below a folder, except below some others."""
    found = []
    for path in sorted(top.rglob(ASSESSMENT)):
        if any(path.is_relative_to(other) for other in without):
            continue
        document = load_assessment(path)
        found.append(Assessed(Path(document.model).name or document.model, path.parent, document))
    return found
