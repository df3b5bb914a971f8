"""What the experiments of a sweep want assessed of their runs, done where it is missing, one run after the other."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sinklab.assessing.assessment import ASSESSMENT, Assessment, load_assessment
from sinklab.assessing.plan import AssessOptions
from sinklab.assessing.running import AssessListener, assess
from sinklab.errors import InputError
from sinklab.experiments.sweep.asked import AskedExperiment
from sinklab.experiments.sweep.store import found_runs, record_of


@dataclass(frozen=True)
class Unassessed:
    """A finished run of which something is still to be assessed.

    Attributes:
        name: its cell, and the seed.
        parts: all that is wanted of it.
    """

    name: str
    directory: Path
    parts: Sequence[str]


def unassessed(asked: Iterable[AskedExperiment], out: Path) -> list[Unassessed]:
    """The finished runs of some experiments of which parts are missing that the experiments want.

    Raises:
        InputError: a record or an assessment is damaged.
    """
    found, wanted, names = found_runs(out), dict[str, dict[str, None]](), dict[str, str]()
    for one, name, seed, run_hash in _runs(asked):
        names.setdefault(run_hash, f"{name} seed {seed}")
        wanted.setdefault(run_hash, {}).update(dict.fromkeys(one.experiment.assess))
    return [
        Unassessed(names[run_hash], found[run_hash], tuple(parts))
        for run_hash, parts in wanted.items()
        if run_hash in found and _is_done(found[run_hash], run_hash) and _missing(found[run_hash], parts)
    ]


def assess_run(run: Unassessed, listener: AssessListener) -> Assessment:
    """Assess what is wanted of a run, on the text that it was validated on; what it cannot be given is skipped.

    Raises:
        InputError: it was assessed on another text before, or its text or weights are no longer there.
    """
    path = run.directory / ASSESSMENT
    if path.is_file() and not load_assessment(path).on_held_out:
        raise InputError(
            f"{path} is of another text than the run's own, and is kept: move it elsewhere and call this again to have "
            "the run assessed as its experiment wants"
        )
    options = AssessOptions(parts=tuple(run.parts), where_possible=True)
    return assess(str(run.directory), None, options, out=run.directory, listener=listener)


def _runs(asked: Iterable[AskedExperiment]) -> Iterator[tuple[AskedExperiment, str, int, str]]:
    for one in asked:
        if one.experiment.assess:
            for name, cell in one.cells.items():
                for seed, run_hash in cell.hashes.items():
                    yield one, name, seed, run_hash


def _is_done(directory: Path, run_hash: str) -> bool:
    record = record_of(directory, run_hash)
    return record is not None and record.status == "done"


def _missing(directory: Path, parts: Iterable[str]) -> bool:
    path = directory / ASSESSMENT
    if not path.is_file():
        return True
    found = load_assessment(path)
    return not found.on_held_out or any(part not in found.results and part not in found.skipped for part in parts)
