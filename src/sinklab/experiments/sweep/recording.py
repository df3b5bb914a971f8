"""record.json of a run that has ended: what its other files do not say, and their checksums."""

import gzip
import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from sinklab.errors import SinklabError
from sinklab.experiments.documents import RunRecord
from sinklab.measuring.batches import process_peak_mb
from sinklab.train.directory.history import Evaluation, read_history, seconds_spent
from sinklab.train.finite import DivergedError
from sinklab.train.loop import Trainer

CHECKED = ("recipe.yaml", "metrics.jsonl", "measurement.json")
COMPRESSED = ".gz"


class PeakMemory:
    """The memory that a run needs, as far as this process has trained it.

    On a card it is read after every update: a measurement in between begins to count anew.

    Args:
        device: of this process.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._largest, self._updated = device, 0, False

    def updated(self) -> None:
        """An update has been made."""
        self._updated = True
        if self._device.type == "cuda":
            self._largest = max(self._largest, torch.cuda.max_memory_allocated(self._device))

    def mb(self) -> float | None:
        """Of the card, or of the whole process (MB = 2**20); None where this process has made no update."""
        if not self._updated:
            return None
        return self._largest / 2**20 if self._device.type == "cuda" else process_peak_mb()


def record_end(trainer: Trainer, diverged: DivergedError | None, memory: PeakMemory) -> None:
    """Write record.json into the directory of a run that is done or has diverged; the trainer still holds it.

    Args:
        trainer: all processes that train together call this with their own.

    Raises:
        StoppedError: the trainer was asked to stop meanwhile; a later call writes it.
        SinklabError: the disk is full.
    """
    run, recipe = trainer.run, trainer.recipe
    peak_memory_mb = memory.mb()  # before more is measured than in training
    kurtosis = None if diverged else _kurtosis(trainer)

    def write() -> None:
        history = read_history(run.metrics)
        RunRecord(
            hash=run.hash,
            name=recipe.name,
            seed=recipe.seed,
            status="failed" if diverged else "done",
            message=str(diverged or ""),
            step=trainer.state.step,
            steps=recipe.train.steps,
            triples=recipe.metric.sequences * len(recipe.model.attention_layers) * recipe.model.heads,
            seconds=seconds_spent(history),
            tokens_per_second=_tokens_per_second(history),
            peak_memory_mb=peak_memory_mb,
            kurtosis=kurtosis,
            files=checksums(run.directory),
        ).save(run.directory)

    trainer.world.only_first(write)


def record_without_model(directory: Path, run_hash: str, name: str, seed: int) -> None:
    """Write record.json for a finished run whose checkpoints are gone, with what its files say.

    Raises:
        SinklabError: they cannot be read, or the disk is full.
    """
    from sinklab.measuring.measurement import Measurement

    measured, history = Measurement.load(directory), read_history(directory / "metrics.jsonl")
    if measured.planned_steps is None:
        raise SinklabError(f"{directory / 'measurement.json'} does not say of which step it is")
    RunRecord(
        hash=run_hash,
        name=name,
        seed=seed,
        status="done",
        step=measured.planned_steps,
        steps=measured.planned_steps,
        triples=measured.sequences * measured.layers * measured.heads,
        seconds=seconds_spent(history),
        tokens_per_second=_tokens_per_second(history),
        files=checksums(directory),
    ).save(directory)


def checksums(directory: Path) -> dict[str, str]:
    """SHA-256 of the files of a run that say what it found, those that are there, compressed or not."""
    contents = {name: _content(directory / name) for name in CHECKED}
    return {name: hashlib.sha256(text).hexdigest() for name, text in contents.items() if text is not None}


def edited(directory: Path, record: RunRecord) -> list[str]:
    """The files that are no longer what they were when the run ended."""
    now = checksums(directory)
    return [name for name, before in record.files.items() if now.get(name) != before]


def _content(path: Path) -> bytes | None:
    """Of a file, or of its compressed copy; None where there is neither that could be read."""
    try:
        return path.read_bytes() if path.exists() else gzip.decompress(Path(f"{path}{COMPRESSED}").read_bytes())
    except (OSError, EOFError):
        return None


def _kurtosis(trainer: Trainer) -> float | None:
    """Of the finished model, in the block where it is largest, on the sequences of its own measurement."""
    details = trainer.evaluator.measure(details=True).details
    by_block = details.by_layer.get("kurtosis_by_block") if details else None
    return max(by_block) if by_block else None


def _tokens_per_second(history: Sequence[Evaluation]) -> float | None:
    """Of all updates whose speed is known: their tokens over their seconds."""
    tokens, before = 0.0, 0.0
    for one in history:
        reached = before if one.tokens is None else one.tokens
        tokens += reached - before if one.tokens_per_second else 0.0
        before = reached
    seconds = seconds_spent(history)
    return tokens / seconds if seconds else None
