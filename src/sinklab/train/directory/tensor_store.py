"""Tensors of a checkpoint: safetensors files written and read through torch.distributed.checkpoint.

Each process writes its own shards, with their place in the whole tensor in the file's header; any number of processes
reads them again, each its own part. Nothing is pickled.

Names: `model/WEIGHT` and `optimizer/WEIGHT/KEY`.

torch.distributed.checkpoint is imported where files are written or read: it takes half as long to load as all of torch,
and many commands only list checkpoints.
"""

import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sinklab.errors import SinklabError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.api import CheckpointException

MODEL, OPTIMIZER = "model/", "optimizer/"
SUFFIX = ".safetensors"
"""Every file with this suffix in a folder is read."""


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The weights by their stored names; writing into them writes into the model."""
    return {MODEL + name: tensor.detach() for name, tensor in model.state_dict().items()}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state by stored names; writing into it writes into the optimiser."""
    return {
        f"{OPTIMIZER}{name}/{key}": value.detach()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], together: bool) -> None:
    """Write the tensors into an existing folder.

    Args:
        together: all processes of the world call this; otherwise this one writes alone.

    Raises:
        SinklabError: a process could not write.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        with _without_warning():
            save(dict(tensors), storage_writer=writer, no_dist=not together)
    except CheckpointException as error:  # derives from BaseException
        raise SinklabError(_reasons(error)) from error


def read_tensors(folder: Path, into: Mapping[str, Tensor], together: bool) -> None:
    """Read these tensors, or this process's shards of them, in place.

    Raises:
        SinklabError: a process could not read.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(folder))
    try:
        with _without_warning():
            load(dict(into), storage_reader=reader, no_dist=not together)
    except CheckpointException as error:
        raise SinklabError(_reasons(error)) from error


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every stored tensor, all shards together.

    Raises:
        ValueError: shards do not make up their tensor.
        OSError, safetensors.SafetensorError: a file cannot be read.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    shapes = {}
    for name, entry in HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        if sum(chunk.sizes.numel() for chunk in entry.chunks) != entry.size.numel():
            raise ValueError(f"the shards of {name} do not make up a tensor of shape {tuple(entry.size)}")
        shapes[name] = tuple(entry.size)
    return shapes


def create_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, stored: Collection[str]) -> None:
    """Have a new optimiser create its stored tensors, by an update with rate and gradients of zero.

    The optimiser itself chooses their dtypes, devices and shards; the weights do not change.
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
def _without_warning() -> Iterator[None]:
    """torch warns where one process saves by itself, even with no_dist."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _reasons(error: "CheckpointException") -> str:
    return "; ".join(f"process {rank}: {failure[0]}" for rank, failure in sorted(error.failures.items()))
