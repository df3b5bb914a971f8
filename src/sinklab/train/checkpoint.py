"""Checkpoints: one folder per step, written under a temporary name, checksummed, and renamed when complete.

    shard-*.safetensors    weights and optimiser state, one file per process, readable by any number of processes
    state.json             `TrainState`, the run hash, and the shape of every tensor
    SHA256SUMS             checksums of the other files in the format of `sha256sum --check`; written last

`find_checkpoint` returns the newest valid checkpoint. Invalid ones (disk error, incomplete copy, additional shard,
another run or model) are skipped with a warning.

Reading and writing of a checkpoint's tensors as safetensors files, with torch.distributed.checkpoint.

Each process writes its own shards; the file header stores each shard's offset in the full tensor. Any number of
processes can read the files. Nothing is pickled.

Stored names of tensors: `model/WEIGHT` and `optimizer/WEIGHT/KEY`.

torch.distributed.checkpoint is imported lazily, because its import takes half as long as that of torch, and many
commands only list checkpoints.
"""

import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from sinklab.errors import SinklabError
from sinklab.files import is_full, sha256_of
from sinklab.train.world import ALONE, World

STATE, SUMS = "state.json", "SHA256SUMS"
log = logging.getLogger(__name__)


@dataclass
class TrainState:
    """Training state other than weights and optimiser state.

    Attributes:
        step: number of completed updates; also the index of the next batch.
        loss_sum, loss_count: sum and number of the training losses (cross-entropy, nats per token) since the last
            evaluation at a multiple of `eval_every`.
        grad_norm: gradient norm of the last update, before clipping.
    """

    step: int = 0
    loss_sum: float = 0.0
    loss_count: int = 0
    grad_norm: float = 0.0


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
    """Write `folder/step_N`, then remove all checkpoints but it and the newest `keep` - 1 valid earlier ones.

    All processes must call this function.

    Args:
        keep: number of checkpoints to keep, including the new one.
        previous: newest valid checkpoint before the new one; those between them are invalid and are removed. None:
            unknown, so all earlier checkpoints count as valid.

    Returns:
        The folder of the new checkpoint.

    Raises:
        SinklabError: if the disk is full, or the folder is not writable or not shared by all processes. Earlier
            checkpoints are kept.
    """
    target = folder / f"step_{state.step:08d}"
    aside = folder / f".{target.name}.new"
    tensors = model_tensors(model) | optimizer_tensors(model, optimizer)
    document = {
        "schema": 2,
        "run_hash": run_hash,
        "state": asdict(state),
        "tensors": {name: list(tensor.shape) for name, tensor in tensors.items()},
    }
    try:
        world.only_first(lambda: shutil.rmtree(aside, ignore_errors=True))
        world.only_first(lambda: aside.mkdir(parents=True))
        write_tensors(aside, tensors, distributed=world.size > 1)
        world.only_first(lambda: _complete(aside, target, document))
    except (OSError, SinklabError) as error:
        if world.is_first:
            shutil.rmtree(aside, ignore_errors=True)
        failed = SinklabError(
            f"cannot save the checkpoint of step {state.step} in {folder}: {error}. Earlier checkpoints are unchanged. "
            f"{'Free disk space' if is_full(error) else 'Make the folder writable for all processes'}, then run the "
            "same command again to resume from the newest checkpoint."
        )
        # `on_all_ranks` raises the OSError of one process as a SinklabError on the others.
        raise (world.shared_error(failed) if isinstance(error, SinklabError) else failed) from error
    if world.is_first:
        checkpoints = _checkpoints(folder)
        valid = [path for path in checkpoints if path < target and (previous is None or path <= previous)]
        for path in set(checkpoints) - set([*valid, target][-keep:]):
            _remove(path)
    return target


def remove_earlier(checkpoint: Path, keep: int) -> None:
    """Remove checkpoints before a valid one beyond `keep`, which a killed process had not removed yet."""
    for path in [path for path in _checkpoints(checkpoint.parent) if path <= checkpoint][:-keep]:
        _remove(path)


def remove_leftovers(folder: Path) -> None:
    """Remove partial checkpoints, which a killed process was writing or deleting. The caller must hold the lock."""
    for leftover in folder.glob(".step_*"):
        shutil.rmtree(leftover, ignore_errors=True)


def find_checkpoint(
    folder: Path, model: nn.Module, hashes: tuple[str, ...] | None = None, at_most: int | None = None
) -> Path | None:
    """Return the folder of the newest valid checkpoint for `model`, or None if there are no checkpoints.

    Invalid checkpoints are skipped with a warning.

    Args:
        hashes: accepted run hashes, that of the current run first; default: any run.
        at_most: highest step to consider; default: no limit.

    Raises:
        SinklabError: if there are checkpoints up to `at_most` but none is valid.
    """
    damaged = []
    for checkpoint in reversed(_checkpoints(folder)):
        if at_most is not None and step_of(checkpoint) > at_most:
            continue
        try:
            reason = _defect(checkpoint, model, hashes)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            reason = f"is not readable ({error or type(error).__name__})"
        if reason is None:
            return checkpoint
        if not checkpoint.is_dir():  # the training process has removed it after a newer save
            return find_checkpoint(folder, model, hashes, at_most)
        damaged.append(f"{checkpoint} {reason}")
        log.warning("checkpoint %s: skipping it", damaged[-1])
    if damaged:
        raise SinklabError(
            f"none of the checkpoints in {folder} is valid: {'; '.join(damaged)}. "
            "Restore a checkpoint, or delete all of them to start at step 0."
        )
    return None


def take_newest(
    folder: Path,
    model: nn.Module,
    load: Callable[[Path], TrainState],
    hashes: tuple[str, ...] | None,
    at_most: int | None,
) -> tuple[Path, TrainState] | None:
    """Find the newest valid checkpoint and load it with `load`. Arguments as in `find_checkpoint`.

    This is for callers without the run's lock: the search is repeated if training removes the checkpoint before it is
    loaded.

    Returns:
        The checkpoint's folder and the result of `load`; None if there is no checkpoint.

    Raises:
        SinklabError, OSError: as `find_checkpoint` and `load`, unless the checkpoint has been removed.
    """
    while (checkpoint := find_checkpoint(folder, model, hashes, at_most)) is not None:
        try:
            return checkpoint, load(checkpoint)
        except (OSError, SinklabError):
            if checkpoint.is_dir():
                raise
    return None


def load_weights(checkpoint: Path, model: nn.Module, world: World = ALONE) -> TrainState:
    """Load the weights of a valid checkpoint into `model` and return its training state; all processes must call it.

    Raises:
        SinklabError: if a tensor cannot be read.
        OSError: if state.json cannot be read.
    """
    read_tensors(checkpoint, model_tensors(model), distributed=world.size > 1)
    return TrainState(**read_state(checkpoint)["state"])


def load_checkpoint(
    checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer, world: World = ALONE
) -> TrainState:
    """Restore weights and optimiser state exactly, and return the training state.

    All processes must call this function. `optimizer` must not have any state.

    Raises:
        SinklabError: if a tensor cannot be read.
        OSError: if state.json cannot be read.
    """
    stored = [name for name in read_state(checkpoint)["tensors"] if name.startswith(OPTIMIZER)]
    if stored:
        create_optimizer_state(model, optimizer, stored)
        tensors = optimizer_tensors(model, optimizer)
        read_tensors(checkpoint, tensors, distributed=world.size > 1)
    return load_weights(checkpoint, model, world)


def _complete(aside: Path, target: Path, document: dict[str, Any]) -> None:
    """Write state.json and SHA256SUMS into the temporary folder `aside`, then rename the folder to `target`."""
    try:
        stored = stored_shapes(aside)
    except (ValueError, SafetensorError) as error:
        raise SinklabError(f"{error}: a file is corrupt, or the processes see different folders") from error
    if stored != {name: tuple(shape) for name, shape in document["tensors"].items()}:
        raise SinklabError("tensors of other processes are missing: the processes see different folders")
    (aside / STATE).write_text(json.dumps(document, indent=1), encoding="utf-8")
    sums = "".join(f"{sha256_of(path)}  {path.name}\n" for path in sorted(aside.iterdir()))
    (aside / SUMS).write_text(sums, encoding="utf-8")
    for path in [*aside.iterdir(), aside]:
        _flush(path)
    if target.exists():
        _remove(target)
    aside.replace(target)
    _flush(target.parent)


def _remove(checkpoint: Path) -> None:
    """Rename a checkpoint to a hidden name, then delete it.

    A killed process leaves at most a hidden folder, which `remove_leftovers` deletes.
    """
    aside = checkpoint.with_name(f".{checkpoint.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    checkpoint.replace(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _checkpoints(folder: Path) -> list[Path]:
    """Return all folders with the name of a checkpoint (step_N), oldest first."""
    for _ in range(3):  # a listing during a rename may miss both the old and the new name
        if found := sorted(path for path in folder.glob("step_*") if path.is_dir() and path.name[5:].isdigit()):
            return found
    return []


def steps_saved(folder: Path) -> list[int]:
    """Return the steps of all checkpoints, valid or not, oldest first."""
    return [step_of(checkpoint) for checkpoint in _checkpoints(folder)]


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _defect(checkpoint: Path, model: nn.Module, hashes: tuple[str, ...] | None) -> str | None:
    """Return a description of the first defect of a checkpoint, such as "lacks state.json"; None if it is valid.

    Files that cannot be read or parsed raise the errors of their readers.
    """
    if not (checkpoint / SUMS).is_file():
        return f"has no {SUMS}"
    lines = (checkpoint / SUMS).read_text(encoding="utf-8").splitlines()
    sums = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    present = {path.name for path in checkpoint.iterdir()} - {SUMS}
    if STATE not in sums:
        return f"has no checksum of {STATE}"
    if missing := sorted(sums.keys() - present):
        return f"lacks {missing[0]}"
    if strange := sorted(name for name in present - sums.keys() if name.endswith(SUFFIX)):
        return f"has {strange[0]}, which has no checksum"
    if changed := [name for name, digest in sums.items() if sha256_of(checkpoint / name) != digest]:
        return f"has a corrupt {changed[0]} (checksum mismatch)"
    document = read_state(checkpoint)
    state = TrainState(**document["state"])
    if hashes is not None and document["run_hash"] not in hashes:
        return f"belongs to run {document['run_hash']}, not {hashes[0]}"
    if state.step != step_of(checkpoint):
        return f"contains the state of step {state.step}"
    found = stored_shapes(checkpoint)
    recorded = {name: tuple(shape) for name, shape in document["tensors"].items()}
    weights = {name: shape for name, shape in found.items() if name.startswith(MODEL)}
    wanted = {name: tuple(tensor.shape) for name, tensor in model_tensors(model).items()}
    for have, expected in ((found, recorded), (weights, wanted)):
        for name in sorted(have.keys() | expected.keys()):
            if name not in have:
                return f"lacks tensor {name}"
            if name not in expected:
                return f"has the unexpected tensor {name}"
            if have[name] != expected[name]:
                return f"has shape {have[name]} for tensor {name}, expected {expected[name]}"
    return None


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's state.json."""
    return json.loads((checkpoint / STATE).read_text(encoding="utf-8"))


def step_of(checkpoint: Path) -> int:
    """Return the step in a checkpoint's folder name."""
    return int(checkpoint.name.removeprefix("step_"))


MODEL, OPTIMIZER = "model/", "optimizer/"
SUFFIX = ".safetensors"
"""Suffix of tensor files; every file with this suffix is read."""


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the model's state dict (no copies) by their stored names."""
    return {MODEL + name: tensor.detach() for name, tensor in model.state_dict().items()}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimiser's state tensors (no copies) by their stored names."""
    return {
        f"{OPTIMIZER}{name}/{key}": value.detach()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], distributed: bool) -> None:
    """Write tensors, by stored name, as safetensors files into an existing folder.

    Args:
        distributed: True if all processes call this function, False if one process writes alone.

    Raises:
        SinklabError: if writing fails on any process.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with _reported():
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        save(dict(tensors), storage_writer=writer, no_dist=not distributed)


def read_tensors(folder: Path, into: Mapping[str, Tensor], distributed: bool) -> None:
    """Read stored tensors into the tensors of `into`, or into this process's shards of them.

    Args:
        into: tensors to overwrite, by stored name.
        distributed: True if all processes call this function, False if one process reads alone.

    Raises:
        SinklabError: if reading fails on any process.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    with _reported():
        load(dict(into), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=not distributed)


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the full (unsharded) shape of every tensor stored in a checkpoint, by name.

    Raises:
        ValueError: if the shards of a tensor are incomplete.
        OSError, safetensors.SafetensorError: if a file cannot be read.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    shapes = {}
    for name, entry in HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        if sum(chunk.sizes.numel() for chunk in entry.chunks) != entry.size.numel():
            raise ValueError(f"the shards of {name} do not cover its shape {tuple(entry.size)}")
        shapes[name] = tuple(entry.size)
    return shapes


def create_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, stored: Collection[str]) -> None:
    """Create the state tensors of a new optimiser by an update with learning rate 0 and zero gradients.

    The update gives the state the right dtype, device and sharding, and does not change the weights. The values of the
    state are placeholders, to be overwritten.

    Args:
        stored: stored names of the state tensors; state is created only for their parameters.
    """
    for name, parameter in model.named_parameters():
        kept = any(key.startswith(f"{OPTIMIZER}{name}/") for key in stored)
        parameter.grad = torch.zeros_like(parameter) if kept else None
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)


@contextmanager
def _reported() -> Iterator[None]:
    """Convert CheckpointException to SinklabError, and suppress the warning that torch.distributed is disabled."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:  # a BaseException
        reasons = (f"process {rank}: {failure[0]}" for rank, failure in sorted(error.failures.items()))
        raise SinklabError("; ".join(reasons)) from error
