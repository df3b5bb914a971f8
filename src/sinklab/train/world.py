"""Distributed processes of a training run, compilation, activation checkpointing and data parallelism.

torchrun sets the ranks in the environment. gloo transfers Python objects and CPU tensors, NCCL CUDA tensors.
Every method that communicates is a collective: all processes must call it, in the same order.

Compilation (`train.compile`): a block is compiled in two parts, before and after its attention core (before and after
the delta rule in a linear layer). Blocks of the same kind share the compiled code. The whole model is not compiled: the
cores have their own kernels (FlexAttention is compiled separately), and compiling 22 layers at once takes minutes.
`loss` compiles the whole training loss, which is faster for small models on a CPU. The compiled loss is used only for
updates, because compiled code ignores hooks silently.

Activation checkpointing (`train.recompute`, 1604.06174): a block stores only its inputs and repeats its forward pass in
the backward pass. The results are bit-identical, because training draws no random numbers. Activation memory is the
input of every block plus the activations of one block. The cost is about a third more compute. Hooks of a block,
including FSDP's, enclose the checkpointed forward pass; hooks inside a block also run in the repeated forward pass.
PyTorch's `apply_activation_checkpointing` is not used, because it renames the parameters of the modules that it wraps.

Data parallelism (`train.parallel`): the model is replicated (DDP) or sharded (FSDP2). Every process has the same number
of rows of the global batch, so averaging losses and gradients over processes gives the means over the global batch.
"""

import functools
import os
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from sinklab.device import can_compile, compiled, pick_device
from sinklab.errors import InputError, SinklabError, is_out_of_memory
from sinklab.model.loss import AddedLosses
from sinklab.model.transformer import Transformer
from sinklab.train.recipe import Compile, Parallel, Recompute

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

    def max_on_device(self, numbers: Tensor) -> Tensor:
        """Return the elementwise maximum of a tensor over all processes; `numbers` may be overwritten."""
        if self.size > 1:
            dist.all_reduce(numbers, dist.ReduceOp.MAX)
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

    def limit_waiting(self, timeout: timedelta) -> None:
        """Set the timeout of later collectives, once all processes have called this."""
        if self.size > 1:
            self.any(False)  # barrier: no process may still be compiling when others wait for less time
            dist.distributed_c10d._set_pg_timeout(timeout)

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
PATIENCE, STEP_PATIENCE = timedelta(hours=2), timedelta(minutes=10)
"""Timeouts of collectives until a run's first update, long enough for another process to prepare text or compile, and
after it, when only a process that hangs keeps the others waiting. gloo and torchrun detect a terminated process before
the timeout."""


@contextmanager
def joined_world() -> Iterator[World]:
    """Initialise the process group of torchrun and yield its `World`; with a single process, yield `ALONE`.

    If CUDA and NCCL are available, NCCL is initialised too, for the GPU `own_card`; otherwise every process would
    allocate memory on the first GPU. A process that waits longer than `PATIENCE` in a collective fails (`STEP_PATIENCE`
    after the first update, see `Trainer`).

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
            raise  # reported by `commands/app.py`
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


def recompute_blocks(model: Transformer, choice: Recompute) -> None:
    """Enable activation checkpointing of every block in place if `choice` is "blocks", else change nothing.

    Parameters, their names and hooks do not change. Call before `share`, because FSDP's hooks must enclose both
    forward passes of a block.
    """
    if choice == "blocks":
        for block in model.blocks:
            block.forward = functools.partial(_recomputed, block.forward)  # type: ignore[method-assign]


def _recomputed(forward: Callable[..., Any], x_BLE: Tensor, inputs: Any, past: Any = None) -> Any:
    if past is not None:  # a second pass would extend the KV cache again
        return forward(x_BLE, inputs, past)
    if not torch.is_grad_enabled():
        return forward(x_BLE, inputs)
    return checkpoint(forward, x_BLE, inputs, use_reentrant=False, preserve_rng_state=False)


def compile_blocks(model: Transformer, choice: Compile, device: torch.device) -> None:
    """Compile the two parts of every block in place, at their first call.

    "auto" and "loss" do so only on CUDA; "off" changes nothing. In post-norm blocks only the first part is compiled.
    Parameters, their names and hooks do not change.
    """
    if choice == "off" or (choice != "on" and device.type != "cuda"):
        return
    blocks: Any = model.blocks
    for block in blocks:
        for name in block.compiled_parts:
            if block.placement == "post" and name.startswith("after_"):
                continue  # evaluations hook the input of its norms (models/hooks.py)
            setattr(block, name, compiled(getattr(block, name), dynamic=False))


def compiles_loss(choice: Compile, device: torch.device, world: World) -> bool:
    """Return True if the whole training loss is compiled.

    This requires `choice` "loss", a single process on a CPU, and a working torch.compile (`can_compile`).
    """
    return choice == "loss" and device.type == "cpu" and world.size == 1 and can_compile()


class _Loss(nn.Module):
    """Module whose forward pass returns `Transformer.losses`; DDP hooks the forward pass of a module."""

    def __init__(self, model: Transformer, added: AddedLosses) -> None:
        super().__init__()
        self.model, self.added = model, added

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.model.losses(tokens_BT, self.added)


def share(
    model: Transformer, added: AddedLosses, how: Parallel, world: World
) -> tuple[Callable[[Tensor], Tensor], Callable[[], AbstractContextManager[Any]]]:
    """Replicate (DDP) or shard (FSDP) `model` over the processes of `world`; with one process it is unchanged.

    The model must be on its device, with the same weights on every process. FSDP replaces the parameters by shards, so
    the optimiser must be built afterwards, and gathers the full parameters only for forward and backward passes.

    Returns:
        The loss function, and a function that returns the context manager for all micro-batches but the last, in which
        gradients are accumulated without averaging over processes. The loss function maps tokens (B, context + 1) to
        the mean cross-entropy and the weighted auxiliary losses of these B rows, (1 + number of auxiliary losses,). The
        backward pass of their sum averages the gradients over processes.
    """
    if world.size == 1:
        return functools.partial(model.losses, added=added), nullcontext
    if how == "fsdp":
        mesh = init_device_mesh(next(model.parameters()).device.type, (world.size,))
        for part in [*model.blocks, model]:
            fully_shard(part, mesh=mesh, reshard_after_forward=True)
        register_fsdp_forward_method(model, "losses")
        with torch.no_grad():  # the first call makes the called module the FSDP root
            device = next(model.parameters()).device
            model.losses(torch.zeros(1, model.config.context + 1, dtype=torch.long, device=device), added)
        return functools.partial(model.losses, added=added), lambda: _keeping_gradients(model)
    # Dynamo would split compiled code at DDP's gradient buckets. Block parts are compiled separately anyway, and older
    # PyTorch cannot split graphs with custom autograd functions, such as RoPE, or with FlexAttention.
    torch._dynamo.config.optimize_ddp = False
    replica = DistributedDataParallel(_Loss(model, added), gradient_as_bucket_view=True)
    return replica, replica.no_sync


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Gather the full weights of a sharded model on all processes for the `with` block; other models are unchanged."""
    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for part in parts:
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.reshard()


@contextmanager
def _keeping_gradients(model: nn.Module) -> Iterator[None]:
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def local(tensor: Tensor) -> Tensor:
    """Return this process's shard of a tensor; an unsharded tensor is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor, gathered from the shards of all processes; an unsharded tensor is returned unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
