"""Checkpoints: a folder per step, written aside, checksummed and renamed, so that no partial one has a valid name.

    shard-*.safetensors    weights and optimiser, a file per process, readable by any number of processes
                           (tensor_store.py)
    state.json             everything else
    SHA256SUMS             checksums of the other files, as `sha256sum --check` reads them; written last

`find_checkpoint` names a checkpoint that was damaged later (a bad disk, a half copy, a stray file; checkpoint_state.py)
and takes the one before it.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import nn

from sinklab.errors import SinklabError
from sinklab.files import is_full, sha256_of
from sinklab.train.directory import tensor_store
from sinklab.train.directory.checkpoint_state import STATE, SUMS, Hashes, TrainState, defect, read_state, step_of
from sinklab.train.world import ALONE, World

T = TypeVar("T")
log = logging.getLogger(__name__)


def save_checkpoint(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: TrainState,
    run_hash: str,
    keep: int,
    world: World = ALONE,
    previous: Path | None = None,
) -> Path:
    """Write `folder/step_N`, all processes together, and then remove all but the newest `keep` checkpoints.

    Args:
        previous: the newest valid one so far, where that is known; what lies between the two is damaged, and goes.

    Raises:
        SinklabError: the disk is full or not writable, or not the same for all processes; earlier checkpoints are
            untouched.
    """
    target = folder / f"step_{state.step:08d}"
    aside = folder / f".{target.name}.new"
    tensors = tensor_store.model_tensors(model) | tensor_store.optimizer_tensors(model, optimizer)
    document = {
        "schema": 2,
        "run_hash": run_hash,
        "state": asdict(state),
        "tensors": {name: list(tensor.shape) for name, tensor in tensors.items()},
    }
    try:
        world.from_first(lambda: _make_empty(aside))
        tensor_store.write_tensors(aside, tensors, together=world.size > 1)
        world.from_first(lambda: _make_valid(aside, target, document))
    except (OSError, SinklabError) as error:
        if world.is_first:
            shutil.rmtree(aside, ignore_errors=True)
        failed = SinklabError(
            f"cannot save the checkpoint of step {state.step} in {folder}: {error}. Earlier checkpoints are untouched; "
            f"{'free some space' if is_full(error) else 'make it writable'}, then run the same command again to "
            "continue from the newest."
        )
        # The others learn as a SinklabError what one has met as an OSError.
        raise (world.shared_error(failed) if isinstance(error, SinklabError) else failed) from error
    if world.is_first:
        _remove_old(folder, target, keep, previous)
    return target


def remove_leftovers(folder: Path) -> None:
    """Remove what a save that was killed has left. Only who holds the run's lock may do so."""
    for leftover in folder.glob(".step_*"):
        shutil.rmtree(leftover, ignore_errors=True)


def find_checkpoint(
    folder: Path, model: nn.Module, run_hash: Hashes | None = None, at_most: int | None = None
) -> Path | None:
    """The newest valid checkpoint for `model`, None where there has never been one; damaged ones are logged by name.

    Args:
        run_hash: whose it must be, or one of whose; anybody's unless given.
        at_most: of this step or an earlier one.

    Raises:
        SinklabError: there are checkpoints, and none of them is valid.
    """
    damaged = []
    for checkpoint in reversed(_checkpoints(folder)):
        if at_most is not None and step_of(checkpoint) > at_most:
            continue
        reason = defect(checkpoint, model, run_hash)
        if reason is None:
            return checkpoint
        if not checkpoint.is_dir():  # the run is in progress: it has saved a newer one and removed this
            return find_checkpoint(folder, model, run_hash, at_most)
        damaged.append(f"{checkpoint} {reason}")
        log.warning("checkpoint %s: it is skipped", damaged[-1])
    if damaged:
        raise SinklabError(
            f"no valid checkpoint is left in {folder}: {'; '.join(damaged)}. "
            "Restore one of them, or delete that folder to train from step 0."
        )
    return None


def take_newest(
    folder: Path,
    model: nn.Module,
    load: Callable[[Path], T],
    run_hash: Hashes | None = None,
    at_most: int | None = None,
) -> tuple[Path, T] | None:
    """The checkpoint that `find_checkpoint` finds and what `load` makes of it; None where there has never been one.

    For readers without the run's lock: one that the run removes meanwhile, having saved a newer one, is passed over.

    Raises:
        SinklabError, OSError: as `find_checkpoint` and `load`.
    """
    while (checkpoint := find_checkpoint(folder, model, run_hash, at_most)) is not None:
        try:
            return checkpoint, load(checkpoint)
        except (OSError, SinklabError):
            if checkpoint.is_dir():
                raise
    return None


def load_weights(checkpoint: Path, model: nn.Module, world: World = ALONE) -> TrainState:
    """Load the weights of a checkpoint that `find_checkpoint` has found; all processes together.

    Raises:
        SinklabError: a file cannot be read.
    """
    tensor_store.read_tensors(checkpoint, tensor_store.model_tensors(model), together=world.size > 1)
    return TrainState(**read_state(checkpoint)["state"])


def load_checkpoint(
    checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer, world: World = ALONE
) -> TrainState:
    """Load weights and the state of a new optimiser, bit for bit as they were saved; all processes together.

    Raises:
        SinklabError: a file cannot be read.
    """
    stored = [name for name in read_state(checkpoint)["tensors"] if name.startswith(tensor_store.OPTIMIZER)]
    if stored:
        tensor_store.create_optimizer_state(model, optimizer, stored)
        tensor_store.read_tensors(checkpoint, tensor_store.optimizer_tensors(model, optimizer), together=world.size > 1)
    return load_weights(checkpoint, model, world)


def _make_empty(aside: Path) -> None:
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)


def _make_valid(aside: Path, target: Path, document: dict[str, Any]) -> None:
    try:
        stored = tensor_store.stored_shapes(aside)
    except (ValueError, SafetensorError) as error:
        raise SinklabError(f"{error}: all processes must see the same folder") from error
    if stored != {name: tuple(shape) for name, shape in document["tensors"].items()}:
        raise SinklabError("it lacks what other processes have written: all must see the same folder")
    (aside / STATE).write_text(json.dumps(document, indent=1), encoding="utf-8")
    sums = "".join(f"{sha256_of(path)}  {path.name}\n" for path in sorted(aside.iterdir()))
    (aside / SUMS).write_text(sums, encoding="utf-8")
    for path in [*aside.iterdir(), aside]:
        _flush(path)
    if target.exists():
        _remove(target)
    aside.replace(target)
    _flush(target.parent)


def _remove_old(folder: Path, newest: Path, keep: int, previous: Path | None) -> None:
    """Keep `newest` and valid ones before it: those after `previous`, or after `newest`, have been passed over."""
    checkpoints = _checkpoints(folder)
    sound = [path for path in checkpoints if path < newest and (previous is None or path <= previous)]
    kept = [*sound, newest][-keep:]
    for path in checkpoints:
        if path not in kept:
            _remove(path)


def _remove(checkpoint: Path) -> None:
    """Take the name away first, so that a kill does not leave half a checkpoint under it."""
    aside = checkpoint.with_name(f".{checkpoint.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    checkpoint.replace(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _checkpoints(folder: Path) -> list[Path]:
    """Everything with a checkpoint's name, oldest first."""
    for _ in range(3):  # while one comes and one goes, a folder may be read without either
        if found := sorted(path for path in folder.glob("step_*") if path.is_dir() and path.name[5:].isdigit()):
            return found
    return []


def steps_saved(folder: Path) -> list[int]:
    """The steps of all checkpoints there are, valid or not, oldest first."""
    return [step_of(checkpoint) for checkpoint in _checkpoints(folder)]


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
