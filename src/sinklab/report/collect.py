"""What a report is drawn from: runs, measurements and claims, as found on disk.

Nothing here knows about charts or models: directories go in, plain values come out. A run that is still being
trained is read as far as it has come; its last line of `metrics.jsonl` may be half-written.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sinklab.errors import InputError
from sinklab.files import parse_json, parse_yaml
from sinklab.report.grouping import grouped
from sinklab.report.suites import Suite, in_order, read_suites

if TYPE_CHECKING:
    from sinklab.measuring.measurement import Measurement

SEED_FOLDER = re.compile(r"seed_(\d+)")
NUMBERS = {"tokens", "train_loss", "valid_loss", "sink_rate_bias", "lr", "grad_norm", "tokens_per_second"}
LISTS = {"sink_rate", "hidden_norm_ratio"}
LOOKED_FOR = "recipe.yaml (a run), measurement.json (a measurement) or summary.json (a lab)"


@dataclass(frozen=True)
class Run:
    """One trained run, or one measured model (then `recipe` and `history` are empty).

    Attributes:
        cell: the name shared by the runs that differ only in their seed (see `grouping`).
        history: one record per evaluation, ordered by step, as written in `metrics.jsonl`.
        measurement: the document `measurement.json`, empty where the run has not been measured yet.
        arrays: what `measurement.npz` holds, by name; empty likewise.
    """

    path: Path
    cell: str
    seed: int | None = None
    recipe: dict[str, Any] = field(default_factory=dict)
    env: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    measurement: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def trained(self) -> bool:
        """Whether this is a training run rather than a measurement of a finished model."""
        return bool(self.recipe)

    @property
    def planned_steps(self) -> int | None:
        """The number of steps the recipe asks for."""
        return self.recipe.get("train", {}).get("steps")

    @property
    def steps_done(self) -> int | None:
        """The step of the last evaluation."""
        return self.history[-1]["step"] if self.history else None

    @property
    def in_progress(self) -> bool:
        """Whether the run has not reached the last step of its recipe."""
        return self.trained and (self.steps_done or 0) < (self.planned_steps or 0)

    @property
    def measured_early(self) -> str | None:
        """At which step an unfinished run was measured; None for whole runs and other models."""
        step, planned = (self.measurement.get(key) for key in ("step", "planned_steps"))
        return f"step {step:,} of {planned:,}" if step is not None and planned and step < planned else None

    @property
    def eps(self) -> float:
        """The threshold of the sink rate: the measurement's, else the recipe's, else the paper's 0.3."""
        return float(self.measurement.get("eps") or self.recipe.get("metric", {}).get("eps") or 0.3)

    @property
    def latest(self) -> dict[str, Any]:
        """The newest numbers of this run: its last evaluation, overridden by the final measurement."""
        last = self.history[-1] if self.history else {}
        measured = {key: value for key, value in self.measurement.items() if value is not None}
        return {**last, **measured}

    @property
    def notes(self) -> list[str]:
        """What the reader of the measurement must know, in its own words."""
        return [str(note) for note in self.measurement.get("notes") or ()]


@dataclass(frozen=True)
class ReportData:
    """Everything one report shows.

    Attributes:
        runs: ordered by cell (in order of appearance), then by seed.
        claims: `{id, text, verdict, evidence}` as in `summary.json`.
        summary_cells: the cells of `summary.json`, by name.
        suites: what commands that measure many say of their measurements.
    """

    dirs: list[Path]
    runs: list[Run]
    claims: list[dict[str, Any]] = field(default_factory=list)
    summary_cells: dict[str, dict[str, Any]] = field(default_factory=dict)
    suites: list[Suite] = field(default_factory=list)

    @property
    def cells(self) -> list[str]:
        """The names of the cells, each once, in order of appearance; those of the summary come first."""
        return list(dict.fromkeys([*self.summary_cells, *(run.cell for run in self.runs)]))

    def runs_of(self, cell: str) -> list[Run]:
        """The runs of one cell, ordered by seed."""
        return [run for run in self.runs if run.cell == cell]

    def label(self, run: Run) -> str:
        """The name of a run: its cell's, with the seed where the cell has several runs."""
        alone = len(self.runs_of(run.cell)) == 1
        return run.cell if alone or run.seed is None else f"{run.cell}, seed {run.seed}"


def collect(dirs: list[Path]) -> ReportData:
    """Read all runs, measurements and summaries in and below `dirs`.

    Raises:
        InputError: a directory is missing, holds nothing to report on, or a file in it is damaged.
    """
    if not dirs:
        raise InputError("no directory was given to report on: name a run, a measurement or a lab directory.")
    runs: list[Run] = []
    claims: list[dict[str, Any]] = []
    summary_cells: dict[str, dict[str, Any]] = {}
    for top in dirs:
        found, summary = _collect_one(top)
        taken = {run.cell for run in runs} | set(summary_cells)
        if taken & ({run.cell for run in found} | set(summary.get("cells", {}))):
            found, summary = _prefixed(top, found, summary)
        runs += found
        claims += summary.get("claims", [])
        summary_cells |= summary.get("cells", {})
    suites = [suite for top in dirs for suite in read_suites(top)]
    runs = in_order(grouped(runs, summary_cells), suites)
    data = ReportData(dirs, runs, claims, summary_cells, suites)
    order = {cell: index for index, cell in enumerate(data.cells)}
    runs.sort(key=lambda run: (order[run.cell], run.seed or 0, str(run.path)))
    return data


def _collect_one(top: Path) -> tuple[list[Run], dict[str, Any]]:
    if not top.is_dir():
        raise InputError(f"{top} is not a directory: expected one that holds {LOOKED_FOR}.")
    summary = _read_summary(top / "summary.json")
    runs = [_read_run(path, top, summary.get("cells", {})) for path in folders_with(top, _is_run_or_measurement)]
    if not runs and not summary.get("cells"):
        raise InputError(f"nothing to report in {top}: looked there and in the folders below it for {LOOKED_FOR}.")
    return runs, summary


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


def _prefixed(top: Path, runs: list[Run], summary: dict[str, Any]) -> tuple[list[Run], dict[str, Any]]:
    """The same, with the directory in front of each cell's name: two directories use the same names."""
    renamed = [Run(**{**vars(run), "cell": f"{_name_of(top)}/{run.cell}"}) for run in runs]
    cells = {f"{_name_of(top)}/{name}": value for name, value in summary.get("cells", {}).items()}
    return renamed, {**summary, "cells": cells}


def _read_run(path: Path, top: Path, named: Mapping[str, Any]) -> Run:
    recipe = _read_recipe(path / "recipe.yaml")
    measurement, arrays = _read_measurement(path)
    return Run(
        path=path,
        cell=recipe["name"] if recipe.get("name") in named else _cell_name(path, top, recipe, measurement),
        seed=_seed(path, recipe),
        recipe=recipe,
        env=_read_mapping(path / "env.json"),
        history=read_history(path / "metrics.jsonl"),
        measurement=measurement,
        arrays=arrays,
    )


def _cell_name(path: Path, top: Path, recipe: dict[str, Any], measurement: dict[str, Any]) -> str:
    parts = list(path.relative_to(top).parts)
    if parts and SEED_FOLDER.fullmatch(parts[-1]):
        parts.pop()
    if parts:
        return "/".join(parts)
    own_name = recipe.get("name") or (measurement.get("model") if not recipe else None)
    if own_name:
        return str(own_name) if recipe else _model_name(str(own_name))
    return _name_of(path.parent if SEED_FOLDER.fullmatch(path.name) else path)


def _model_name(model: str) -> str:
    """A hub id as it is; of a path only its last folder."""
    return model if model.count("/") == 1 and not model.startswith((".", "/", "~")) else Path(model).name or model


def _name_of(path: Path) -> str:
    return path.resolve().name or str(path)


def _seed(path: Path, recipe: dict[str, Any]) -> int | None:
    folder = SEED_FOLDER.fullmatch(path.name)
    seed = recipe.get("seed", int(folder[1]) if folder else None)
    return seed if isinstance(seed, int) else None


def _read_recipe(path: Path) -> dict[str, Any]:
    """As it is written, of whatever version; what is counted or compared here is of its kind."""
    recipe = _read_mapping(path)
    train, metric = recipe.get("train", {}), recipe.get("metric", {})
    sound = (
        isinstance(recipe.get("name", ""), str)
        and isinstance(train, dict)
        and isinstance(train.get("steps"), int | None)
        and isinstance(metric, dict)
        and isinstance(metric.get("eps"), int | float | None)
    )
    if not sound:
        raise InputError(f"{path} is not the recipe of a run. Repair it or leave its folder out.")
    return recipe


def _read_mapping(path: Path) -> dict[str, Any]:
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


def _read_summary(path: Path) -> dict[str, Any]:
    summary = _read_mapping(path)
    claims, cells = summary.get("claims", []), summary.get("cells", {})
    sound = isinstance(cells, dict) and all(isinstance(cell, dict) for cell in cells.values())
    if not sound or not isinstance(claims, list) or not all(isinstance(claim, dict) for claim in claims):
        raise InputError(f"{path} should hold `cells` (a mapping) and `claims` (a list). Write it again.")
    return finite(summary)


def read_history(path: Path) -> list[dict[str, Any]]:
    """The evaluations by step; where a continued run repeats a step, the later line counts.

    Raises:
        InputError: the file cannot be read, or a line is no evaluation.
    """
    if not path.is_file():
        return []
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}. Make it readable, or leave its folder out.") from error
    lines = text.split("\n")  # what follows the last end of line is torn
    by_step: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = finite(parse_json(line))
            by_step[_step(record)] = record
        except ValueError as error:
            if number == len(lines) and line.startswith("{"):
                break
            raise InputError(f"{path}, line {number}, is damaged: expected an object with a step.") from error
    return [by_step[step] for step in sorted(by_step)]


def _step(record: Any) -> int:
    """The step of an evaluation, whose numbers are numbers."""
    step = record.get("step") if isinstance(record, dict) else None
    if not isinstance(step, int) or step < 0:
        raise ValueError("no step")
    for key in NUMBERS & record.keys():
        if not isinstance(record[key], int | float | None):
            raise ValueError(f"{key} is no number")
    for key in LISTS & record.keys():
        if not isinstance(record[key], list) or not all(isinstance(one, int | float | None) for one in record[key]):
            raise ValueError(f"{key} is no list of numbers")
    return step


def _read_measurement(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    if not (folder / "measurement.json").is_file():
        return {}, {}
    from sinklab.measuring.measurement import Measurement

    measured = Measurement.load(folder)
    return measured.document(), _arrays(measured)


def run_of(measurement: "Measurement") -> Run:
    """A measurement that is in memory, as one that was read."""
    name = _model_name(measurement.model) if measurement.model else "model"
    return Run(Path(), name, measurement=measurement.document(), arrays=_arrays(measurement))


def _arrays(measured: "Measurement") -> dict[str, np.ndarray]:
    from sinklab.measuring.measurement import ARRAYS

    arrays = {name: getattr(measured, name) for name in ARRAYS}
    if measured.details is not None:
        arrays |= measured.details.arrays()
    return {name: array for name, array in arrays.items() if array is not None}


def finite(value: Any) -> Any:
    """The same document with NaN and infinities as None: JSON has no word for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return value
