"""asked/ID.json in the directory of a sweep: which experiments its summary is about, and which runs are theirs."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from sinklab.errors import InputError
from sinklab.experiments.definition import Experiment, Scale
from sinklab.experiments.sweep.plan import PlannedSweep, Question
from sinklab.files import parse_json, write_json
from sinklab.schema import ReadDocument

FOLDER = "asked"


class AskedCell(ReadDocument):
    """A cell of an experiment that was asked for.

    Attributes:
        change: dotted keys of the recipe and their values, where they are not the base's.
        hashes: of its runs, by seed.
    """

    change: dict[str, object] = Field(default_factory=dict)
    hashes: dict[int, str] = Field(default_factory=dict)


class AskedExperiment(ReadDocument):
    """An experiment that was asked for.

    Attributes:
        experiment: as it was defined then.
        scale: at which.
        overlay: laid over every recipe (--steps, --text).
        cells: by name.
    """

    model_config = ConfigDict(populate_by_name=True)

    schema_version: Literal[1] = Field(default=1, alias="schema")
    experiment: Experiment
    scale: Scale
    overlay: dict[str, Any] = Field(default_factory=dict)
    cells: dict[str, AskedCell] = Field(default_factory=dict)

    def is_beside(self, other: "AskedExperiment") -> bool:
        """Whether both belong into one summary."""
        return self.scale == other.scale and self.overlay == other.overlay

    @property
    def seeds(self) -> list[int]:
        """Its own, that it was asked with."""
        return sorted({seed for cell in self.cells.values() for seed in cell.hashes})

    def save(self, out: Path) -> None:
        """Write asked/ID.json."""
        path = out / FOLDER / f"{self.experiment.id}.json"
        document = self.model_dump(mode="json", by_alias=True, exclude={"experiment"})
        write_json(path, {**document, "experiment": self.experiment.model_dump(mode="json", by_alias=True)})


def asked_for(question: Question, sweep: PlannedSweep, overlay: Mapping[str, Any]) -> AskedExperiment:
    """What is asked now, of one experiment of a sweep."""
    names = question.experiment.cells_at(question.scale)
    cells = {
        name: AskedCell(
            change=dict(sweep.plan.cells[name].change),
            hashes={seed: sweep.hashes[name, seed] for seed in question.own_seeds},
        )
        for name in names
    }
    return AskedExperiment(experiment=question.experiment, scale=question.scale, overlay=dict(overlay), cells=cells)


def read_asked(out: Path) -> dict[str, AskedExperiment]:
    """What has been asked before, by id.

    Raises:
        InputError: a file is damaged, or of another schema version.
    """
    return {one.experiment.id: one for one in _read(out)}


def _read(out: Path) -> Iterator[AskedExperiment]:
    for path in sorted((out / FOLDER).glob("*.json")):
        try:
            yield AskedExperiment.model_validate(parse_json(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, ValidationError) as error:
            first = str(error).splitlines()[0]
            raise InputError(
                f"{path} cannot be read ({first}): it is damaged or another version's. Remove it and ask for that "
                "experiment again, or choose another --out"
            ) from error


def joined(before: Mapping[str, AskedExperiment], now: Mapping[str, AskedExperiment]) -> dict[str, AskedExperiment]:
    """All that belongs into one summary with what is asked now: seeds and experiments asked for before stay.

    Raises:
        InputError: an experiment of before means another run by the same cell and seed.
    """
    first = next(iter(now.values()))
    kept = {name: one for name, one in before.items() if one.is_beside(first)}
    known = {(name, seed): (run_hash, one.experiment.id) for one in now.values() for name, seed, run_hash in _runs(one)}
    found = {name: one for name, one in kept.items() if name not in now}
    for one in found.values():
        for name, seed, run_hash in _runs(one):
            mine = known.get((name, seed), (run_hash, ""))
            if mine[0] != run_hash:
                raise InputError(
                    f"cell {name} of {mine[1]} is not what {one.experiment.id}, which was run here before, meant by "
                    f"it: choose another --out, or remove {FOLDER}/{one.experiment.id}.json there"
                )
    found |= {name: _with_seeds(one, kept.get(name)) for name, one in now.items()}
    return dict(sorted(found.items(), key=lambda item: item[1].experiment.rank))


def _runs(asked: AskedExperiment) -> Iterator[tuple[str, int, str]]:
    for name, cell in asked.cells.items():
        for seed, run_hash in cell.hashes.items():
            yield name, seed, run_hash


def _with_seeds(now: AskedExperiment, before: AskedExperiment | None) -> AskedExperiment:
    """The same with the seeds of before, of cells that are what they were, unless it has other seeds of its own now."""
    if before is None or before.experiment.first_seed != now.experiment.first_seed:
        return now
    cells = {}
    for name, cell in now.cells.items():
        old = before.cells.get(name, AskedCell()).hashes
        same = all(old.get(seed, run_hash) == run_hash for seed, run_hash in cell.hashes.items())
        hashes = {**old, **cell.hashes} if same else cell.hashes
        cells[name] = AskedCell(change=cell.change, hashes=dict(sorted(hashes.items())))
    return now.model_copy(update={"cells": cells})
