"""What the directory of a sweep holds: runs by their hash, wherever below it they lie, and what each has come to."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from sinklab.experiments.claims import Scale, quantities_of
from sinklab.experiments.definition import Experiment
from sinklab.experiments.documents import CellRun, RunRecord, Summary, read_record
from sinklab.experiments.quantities import RunNumbers
from sinklab.experiments.results import CellResults, named_values, read_numbers
from sinklab.experiments.summary import summarise
from sinklab.experiments.sweep.asked import AskedExperiment
from sinklab.experiments.sweep.recording import edited
from sinklab.train.directory.environment import ENVIRONMENT, recorded_hash

NUMBERS = (
    "sink_1", "sink_bias", "importance_first", "valid_loss", "train_loss", "norm_ratio", "norm_untrained",
    "norm_lowest", "norm_growth", "kurtosis", "emergence_step", "norm_step",
)  # fmt: skip
"""What is said of every run beside what its experiments ask about."""


def found_runs(out: Path) -> dict[str, Path]:
    """The run directories in and below a folder, by hash; of several with one hash, that which has got furthest.

    Raises:
        SinklabError: an env.json is damaged.
    """
    found: dict[str, Path] = {}
    for directory in _run_directories(out):
        run_hash = recorded_hash(directory)
        if run_hash is not None and (run_hash not in found or _reached(directory) > _reached(found[run_hash])):
            found[run_hash] = directory
    return found


def _run_directories(out: Path) -> Iterator[Path]:
    for name, folders, files in os.walk(out):
        folders[:] = sorted(folder for folder in folders if not folder.startswith("."))
        if ENVIRONMENT in files:
            folders.clear()  # checkpoints and what else a run keeps
            yield Path(name)


def _reached(directory: Path) -> tuple[bool, bool, int]:
    metrics = directory / "metrics.jsonl"
    size = metrics.stat().st_size if metrics.is_file() else 0
    return (directory / "record.json").is_file(), (directory / "measurement.json").is_file(), size


def record_of(directory: Path, run_hash: str) -> RunRecord | None:
    """How the run of that hash ended, None where it has not; that of a shorter run, which it goes on from, is not it.

    Raises:
        InputError: the record is damaged, or of another schema version.
    """
    record = read_record(directory)
    return record if record is not None and record.hash == run_hash else None


def results_of(asked: Mapping[str, AskedExperiment], out: Path) -> dict[str, CellResults]:
    """What the runs of all cells have come to, by cell.

    Raises:
        InputError: a file of a run is damaged.
    """
    found = found_runs(out)
    wanted = tuple(dict.fromkeys([*NUMBERS, *_quantities(one for one in asked.values())]))
    hashes: dict[str, dict[int, str]] = {}
    changes: dict[str, Mapping[str, object]] = {}
    for one in asked.values():
        for name, cell in one.cells.items():
            hashes.setdefault(name, {}).update(cell.hashes)
            changes.setdefault(name, cell.change)
    results = {}
    for name, by_seed in hashes.items():
        read = [_read(found.get(run_hash), out, seed, run_hash, wanted) for seed, run_hash in sorted(by_seed.items())]
        numbers = [found_numbers for _, found_numbers in read if found_numbers is not None]
        runs = [run for run, _ in read]
        failed = sum(run.status == "failed" for run in runs)
        results[name] = CellResults(changes[name], runs, numbers, failed)
    return results


def summary_of(asked: Mapping[str, AskedExperiment], out: Path) -> Summary:
    """The summary of these experiments by the runs below a directory.

    Raises:
        InputError: a file of a run is damaged.
    """
    own_seeds = {one.experiment.id: one.seeds for one in asked.values()}
    altered = any(one.overlay for one in asked.values())
    experiments: list[tuple[Experiment, Scale]] = [(one.experiment, one.scale) for one in asked.values()]
    return summarise(experiments, results_of(asked, out), own_seeds, altered)


def _quantities(asked: Iterable[AskedExperiment]) -> Iterator[str]:
    for one in asked:
        yield from one.experiment.columns
        yield from (name for claim in one.experiment.claims if claim.check for name in quantities_of(claim.check))


def _read(
    directory: Path | None, out: Path, seed: int, run_hash: str, wanted: Sequence[str]
) -> tuple[CellRun, RunNumbers | None]:
    if directory is None:
        return CellRun(seed=seed, hash=run_hash, directory="", status="unfinished"), None
    where = directory.relative_to(out).as_posix()
    record = record_of(directory, run_hash)
    if record is None:
        return CellRun(seed=seed, hash=run_hash, directory=where, status="unfinished"), None
    run = CellRun(
        seed=seed,
        hash=run_hash,
        directory=where,
        status=record.status,
        message=record.message,
        edited=edited(directory, record),
        seconds=record.seconds,
        tokens_per_second=record.tokens_per_second,
        peak_memory_mb=record.peak_memory_mb,
    )
    if record.status == "failed":
        return run, None
    numbers = read_numbers(directory)
    values, never = named_values(numbers, wanted)
    return run.model_copy(update={"values": values, "never": never}), numbers


def check_readable(out: Path, hashes: Iterable[str]) -> None:
    """Refuse a directory in which a record of one of these runs cannot be read, before anything is trained.

    Raises:
        InputError: with the file, and what to do about it.
    """
    found = found_runs(out)
    for run_hash in hashes:
        if run_hash in found:
            read_record(found[run_hash])
