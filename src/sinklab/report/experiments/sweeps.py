"""A sweep on disk: its summary, the files of its runs, and with what these were trained."""

import shutil
import tempfile
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sinklab.assessing.assessment import ASSESSMENT, Assessment, load_assessment
from sinklab.experiments.documents import (
    CellRun,
    CellSummary,
    ExperimentSummary,
    JudgedClaim,
    Summary,
    edited,
    read_record,
)
from sinklab.experiments.sweep.packed import RECIPES, RUNS, is_packed, read_packed, unpack
from sinklab.files import parse_yaml
from sinklab.tables import counted
from sinklab.train.directory.environment import read_environment
from sinklab.train.directory.history import Evaluation, read_history

PROVENANCE = ("recipe.yaml", "measurement.json")


@dataclass(frozen=True)
class Sweep:
    """A directory whose summary names experiments.

    Attributes:
        top: the directory of summary.json.
        summary: as it was written, but for `edited`, which is as the files are now.
        files: to which the directories of runs are relative: top, or a temporary folder where runs are packed.
        packed: by directory of a packed run, the folder of the experiment that it lies with.
    """

    top: Path
    summary: Summary
    files: Path
    packed: Mapping[str, Path] = field(default_factory=dict)

    @property
    def experiments(self) -> Mapping[str, ExperimentSummary]:
        """By id, in the order of the summary."""
        return self.summary.experiments

    @property
    def runs(self) -> list[CellRun]:
        """The runs of all cells, without duplicates."""
        found = {run.hash: run for cell in self.summary.cells.values() for run in cell.runs}
        return list(found.values())

    def cells_of(self, experiment: ExperimentSummary) -> dict[str, CellSummary]:
        """Its cells by name, with its own seeds; one that the summary lacks is empty."""
        return cells_of(self.summary, experiment)

    def claims_of(self, name: str) -> list[JudgedClaim]:
        """The claims of an experiment."""
        return [claim for claim in self.summary.claims if claim.experiment == name]

    def folder(self, run: CellRun) -> Path | None:
        """The directory of a run, None where it has none yet."""
        return self.files / run.directory if run.directory else None

    def provenance(self, run: CellRun) -> Path | None:
        """The file that says how a run came about: its recipe, or the measurement of a model; None without one."""
        if run.directory in self.packed:
            return self.packed[run.directory] / RECIPES
        folder = self.folder(run)
        return next((folder / name for name in PROVENANCE if (folder / name).is_file()), None) if folder else None

    def history(self, run: CellRun) -> Sequence[Evaluation]:
        """Its evaluations so far.

        Raises:
            InputError: metrics.jsonl is damaged.
        """
        folder = self.folder(run)
        return read_history(folder / "metrics.jsonl") if folder else ()

    def assessment(self, run: CellRun) -> Assessment | None:
        """The result of `sinklab assess RUN --out RUN`, None without one.

        Raises:
            InputError: assessment.json is damaged.
        """
        folder = self.folder(run)
        return load_assessment(folder / ASSESSMENT) if folder and (folder / ASSESSMENT).is_file() else None

    def learning_rate(self, run: CellRun) -> float | None:
        """Of its recipe, None where that is not on the disk."""
        folder = self.folder(run)
        if folder is None:
            return None
        try:
            return float(parse_yaml((folder / "recipe.yaml").read_text(encoding="utf-8"))["optim"]["lr"])
        except (OSError, ValueError, KeyError, TypeError):
            return None


def cells_of(summary: Summary, experiment: ExperimentSummary) -> dict[str, CellSummary]:
    """The cells of an experiment by name, with its own seeds; one that the summary lacks is empty."""
    found = {name: summary.cells.get(name, CellSummary(seeds=0)) for name in experiment.cells}
    return {name: cell.of_seeds(experiment.seeds) for name, cell in found.items()} if experiment.seeds else found


def run_warnings(run: CellRun) -> list[str]:
    """Files of a run that were edited since it ended, and the message it failed with."""
    return [*([f"edited since it ended: {', '.join(run.edited)}"] if run.edited else []), *filter(None, [run.message])]


def read_sweep(top: Path, summary: Summary) -> Sweep:
    """The sweep in a directory; which files of its runs were edited is looked up again.

    Packed runs are unpacked into a temporary folder, which is removed with the sweep.

    Raises:
        InputError: the record of a run is damaged, or packed runs are.
    """
    files, packed = top, {}
    if is_packed(top):
        files = Path(tempfile.mkdtemp(prefix="sinklab-"))
        unpack(top, files)
        packed = {run.directory: path.parent for path in top.glob(f"*/{RUNS}") for run in read_packed(path.parent)}
    cells = {
        name: cell.model_copy(update={"runs": [_with_edits(files, run) for run in cell.runs]})
        for name, cell in summary.cells.items()
    }
    sweep = Sweep(top, summary.model_copy(update={"cells": cells}), files, packed)
    if files != top:
        weakref.finalize(sweep, shutil.rmtree, files, ignore_errors=True)
    return sweep


def _with_edits(files: Path, run: CellRun) -> CellRun:
    record = read_record(files / run.directory) if run.directory else None
    if record is None or record.hash != run.hash:
        return run
    return run.model_copy(update={"edited": edited(files / run.directory, record)})


SHORT = 10
"""Digits of a commit that are shown."""


@dataclass(frozen=True)
class SweepOrigins:
    """env.json and record.json over the finished and failed runs of some sweeps.

    Attributes:
        runs: that have ended.
        core_hours: seconds of training times threads, of runs on processors, over 3600.
        card_hours: of runs on cards.
        facts: title and text of what env.json says, such as `PyTorch` and `2.13.0`.
    """

    runs: int
    core_hours: float
    card_hours: float
    facts: Sequence[tuple[str, str]]


def origins(sweeps: Sequence[Sweep]) -> SweepOrigins | None:
    """The same; None where no run has ended.

    Raises:
        SinklabError: env.json of a run is damaged.
    """
    runs = {run.hash: (sweep, run) for sweep in sweeps for run in sweep.runs if run.status != "unfinished"}
    found = [
        (read_environment(folder) if (folder := sweep.folder(run)) else {}, run.seconds or 0.0)
        for sweep, run in runs.values()
    ]
    if not found:
        return None
    cores = sum(seconds * int(said.get("threads") or 1) for said, seconds in found if not _on_card(said))
    cards = sum(seconds for said, seconds in found if _on_card(said))
    return SweepOrigins(len(found), cores / 3600, cards / 3600, _facts([said for said, _ in found]))


def _facts(said: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    begun = sorted(str(one["begun"])[:10] for one in said if one.get("begun"))
    changed = sum(bool(one.get("changed_files")) for one in said)
    days = f"{begun[0]} to {begun[-1]}" if begun and begun[0] != begun[-1] else "".join(begun[:1])
    facts = [
        ("Begun", days),
        ("Commit", _each(str(one["git"])[:SHORT] for one in said if one.get("git"))),
        ("Uncommitted changes", f"in {counted(changed, 'run')}" if changed else ""),
        ("sinklab", _each(one.get("sinklab") for one in said)),
        ("Python", _each(one.get("python") for one in said)),
        ("PyTorch", _each(one.get("torch") for one in said)),
        ("Processor", _each(one.get("processor") for one in said)),
        ("Device", _each(one.get("device") for one in said if _on_card(one))),
        ("Threads", _each(one.get("threads") for one in said)),
    ]
    silent = sum(not one.get("begun") for one in said)
    facts.append(("Not recorded", f"date and versions of {counted(silent, 'run')}" if silent else ""))
    return [(title, text) for title, text in facts if text]


def _each(values: Iterable[object]) -> str:
    """The different ones, in the order of their first run."""
    return ", ".join(dict.fromkeys(str(value) for value in values if value is not None))


def _on_card(said: Mapping[str, Any]) -> bool:
    return not str(said.get("device", "cpu")).startswith("cpu")
