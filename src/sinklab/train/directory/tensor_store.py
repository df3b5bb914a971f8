"""Reading and writing of a checkpoint's tensors as safetensors files, with torch.distributed.checkpoint.

Each process writes its own shards; the file header stores each shard's offset in the full tensor. Any number of
processes can read the files. Nothing is pickled.

Stored names of tensors: `model/WEIGHT` and `optimizer/WEIGHT/KEY`.

torch.distributed.checkpoint is imported lazily, because its import takes half as long as that of torch, and many
commands only list checkpoints.
"""

import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from sinklab.errors import SinklabError

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
