"""Distributed processes of a training run: rank, size, collectives.

torchrun sets the ranks in the environment. gloo transfers Python objects and CPU tensors, NCCL CUDA tensors.
Every method that communicates is a collective: all processes must call it, in the same order.
"""

import functools
import os
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sinklab.device import pick_device
from sinklab.errors import InputError, SinklabError, is_out_of_memory

T = TypeVar("T")
E = TypeVar("E", bound=SinklabError)


@dataclass(frozen=True)
class World:
    """Processes of a training run: `size` processes, this one with global `rank` and `local_rank` on its machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_first(self) -> bool:
        """True on rank 0, which reports progress and writes all files except checkpoint shards of other ranks."""
        return self.rank == 0

    @property
    def local_size(self) -> int:
        """Number of processes on this machine; `size` if LOCAL_WORLD_SIZE is not set."""
        local = os.environ.get("LOCAL_WORLD_SIZE", "")
        return int(local) if local.isdecimal() and int(local) else self.size

    def device(self, name: str) -> torch.device:
        """Return this process's device; with several processes, "auto" and "cuda" choose the GPU of the local rank.

        Raises:
            InputError: if this machine has no such device, or several processes would share one GPU ("cuda:0").
        """
        if self.size > 1 and name in ("auto", "cuda") and torch.cuda.is_available():
            return pick_device(f"cuda:{self.local_rank}")  # "cuda" would allocate memory on the first GPU
        device = pick_device(name)
        if self.size > 1 and device.type == "cuda":
            raise InputError(
                f"train.device {name} is a single GPU, but there are {self.size} processes: use cuda or auto"
            )
        return device

    def use(self, name: str) -> None:
        """With several processes, make this one's GPU the current CUDA device. Raises the same errors as `device`."""
        device = self.device(name)
        if device.type == "cuda" and self.size > 1:
            torch.cuda.set_device(device)

    def rows(self, batch_size: int) -> slice:
        """Return the slice of this process's rows in the global batch.

        Raises:
            InputError: if the batch size is not a multiple of the number of processes.
        """
        if batch_size % self.size:
            raise InputError(
                f"train.batch_size {batch_size} is not a multiple of the number of processes, {self.size}: "
                "change either of them"
            )
        share = batch_size // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def sum_on_device(self, numbers: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes, by all-reduce on its device; `numbers` may be overwritten."""
        if self.size > 1:
            dist.all_reduce(numbers)
        return numbers

    def any(self, flag: bool) -> bool:
        """Return True if `flag` is True on any process."""
        return flag if self.size == 1 else bool(self.sum_on_device(torch.tensor(int(flag))))

    def from_first(self, make: Callable[[], T]) -> T:
        """Call `make` on rank 0 and return its result, which must be picklable, on all processes.

        Raises the same errors as `on_all_ranks`.

        Args:
            make: function without collectives.
        """
        answer: list[Any] = [self.on_all_ranks(make if self.is_first else lambda: None)]
        if self.size > 1:
            dist.broadcast_object_list(answer)
        return answer[0]

    def shared_error(self, error: E) -> E:
        """Mark an error that every process raises, so that only rank 0 prints it, and return it."""
        error.printed_elsewhere = not self.is_first
        return error

    def on_all_ranks(self, work: Callable[[], T]) -> T:
        """Call `work` on every process and return the local result; an exception of any process is raised on all.

        Args:
            work: function without collectives.

        Raises:
            Exception: the exception of `work`, on the lowest rank where it failed.
            SinklabError: on all other ranks, with the same message; an InputError if the exception is one.
        """
        if self.size == 1:
            return work()
        made: list[T] = []
        error, failure = None, None
        try:
            made.append(work())
        except Exception as caught:
            error, failure = caught, (InputError if isinstance(caught, InputError) else SinklabError, str(caught))
        failures: list[Any] = [None] * self.size
        dist.all_gather_object(failures, failure)
        failed = [rank for rank, failure in enumerate(failures) if failure]
        if not failed:
            return made[0]
        if error is None or failed[0] != self.rank:
            kind, message = failures[failed[0]]
            error = kind(message)
        raise self.shared_error(error) if isinstance(error, SinklabError) else error

    def only_first(self, work: Callable[[], object]) -> None:
        """Call `work` on rank 0 only. Raises the same errors as `on_all_ranks`."""
        self.on_all_ranks(work if self.is_first else lambda: None)


ALONE = World()
PATIENCE = timedelta(hours=2)
"""Timeout of collectives, long enough for another process to prepare text or compile. PyTorch's defaults are 30 minutes
(gloo) and 10 minutes (NCCL). gloo and torchrun detect a terminated process before the timeout."""


@contextmanager
def joined_world() -> Iterator[World]:
    """Initialise the process group of torchrun and yield its `World`; with a single process, yield `ALONE`.

    If CUDA and NCCL are available, NCCL is initialised too, for the GPU `own_card`; otherwise every process would
    allocate memory on the first GPU. A process that waits longer than `PATIENCE` in a collective fails.

    The process must exit by `os._exit`: destroying gloo can deadlock if a DDP model outlives its process group.

    Raises:
        InputError: if the ranks or the address of rank 0 in the environment are invalid.
        SinklabError: if the processes cannot connect, another process is lost, or this one fails unexpectedly.
        Exception: the exception of the `with` block, if this process is out of memory.
    """
    world = _world_of_environment()
    if world.size == 1:
        yield ALONE
        return
    try:
        _join(world)
        yield world
        world.any(False)  # barrier: no process exits before all are done
    except SinklabError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise  # reported by `commands/ending.py`
        # gloo reports a broken connection as a RuntimeError that names gloo's source file
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            traceback.print_exc()
        raise SinklabError(
            f"rank {world.rank} of {world.size} failed or lost its connection to another process ({error}). "
            "Run the same command again to resume from the newest checkpoint."
        ) from error


def _join(world: World) -> None:
    cuda = torch.cuda.is_available() and dist.is_nccl_available()
    backend, card = ("cpu:gloo,cuda:nccl", own_card(world)) if cuda else ("gloo", None)
    join = functools.partial(dist.init_process_group, backend, timeout=PATIENCE, device_id=card)
    try:
        # In a thread: the main thread can handle signals while it waits in Python, but not in C++.
        ThreadPoolExecutor(1).submit(join).result()
    except ValueError as error:
        raise InputError(
            f"WORLD_SIZE is {world.size}, but MASTER_ADDR or MASTER_PORT is missing or invalid in the environment "
            f"({error}): start the processes with torchrun, or unset WORLD_SIZE"
        ) from error


def own_card(world: World) -> torch.device | None:
    """Return the GPU of this process's local rank; None if the machine has fewer GPUs than processes."""
    return torch.device("cuda", world.local_rank) if world.local_size <= torch.cuda.device_count() else None


def _world_of_environment() -> World:
    if "WORLD_SIZE" not in os.environ:
        return ALONE
    size = os.environ["WORLD_SIZE"]
    rank, local_rank = os.environ.get("RANK", "0" if size == "1" else ""), os.environ.get("LOCAL_RANK", "0")
    if not all(value.isdecimal() for value in (rank, size, local_rank)) or int(rank) >= int(size):
        raise InputError(
            f"RANK {rank!r}, WORLD_SIZE {size!r} and LOCAL_RANK {local_rank!r} in the environment are not valid "
            "ranks: start the processes with torchrun, or unset all three"
        )
    return World(int(rank), int(size), int(local_rank))
