"""Compilation, activation checkpointing and data parallelism of a model in training.

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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from sinklab.device import can_compile, compiled
from sinklab.model.loss import AddedLosses
from sinklab.model.transformer import Transformer
from sinklab.train.config import Compile, Parallel, Recompute
from sinklab.train.world import World


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
