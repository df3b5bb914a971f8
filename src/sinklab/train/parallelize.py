"""Placement and memory of a model in training: compiled blocks, recomputed activations, and several processes.

Compilation (`train.compile`): a block is compiled in two parts, before and after its core (in a linear layer: its
rule), once for all blocks of a kind. Not the whole model: the cores have kernels of their own (FlexAttention compiles
itself), a probe that is attached to a compiled module is silently ignored, and compiling 22 layers as one takes
minutes.

Activation checkpointing (`train.recompute`, 1604.06174): a recomputed block keeps its inputs only, and runs forward
once more when its gradient is due, to the same bits: training draws no random numbers. Memory is then one residual
stream per block and the activations of one block, for about a third more work. Hooks of a block, FSDP's among them,
run around both passes; those inside a block see the second one, too. Rejected: PyTorch's
`apply_activation_checkpointing`, which renames the parameters of the modules that it wraps.

Processes (`train.parallel`): the model is replicated (DDP) or sharded (FSDP2). Every process has the same number of
rows of the global batch, so that the mean over processes of the mean loss over a process's rows is the global mean; the
gradients are averaged in the same way.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from sinklab.compiling import compiled
from sinklab.model.loss import AddedLosses
from sinklab.model.transformer import Transformer
from sinklab.train.config import Parallel, Recompute
from sinklab.train.world import World


def recompute_blocks(model: Transformer, choice: Recompute) -> None:
    """Have the blocks recompute their activations, in place; weights, their names and all hooks stay as they are.

    To be called before the model is shared between processes: FSDP's hooks belong around both passes.
    """
    if choice == "blocks":
        for block in model.blocks:
            block.forward = functools.partial(_recomputed, block.forward)  # type: ignore[method-assign]


def _recomputed(forward: Callable[..., Any], x_BLE: Tensor, places: Any, past: Any = None) -> Any:
    if past is not None:  # the second pass would extend it once more
        return forward(x_BLE, places, past)
    if not torch.is_grad_enabled():
        return forward(x_BLE, places)
    return checkpoint(forward, x_BLE, places, use_reentrant=False, preserve_rng_state=False)


Compile = Literal["auto", "on", "off"]


def compile_blocks(model: Transformer, choice: Compile, device: torch.device) -> None:
    """Compile the parts of every block in place, at their first call; `auto` does so on CUDA only.

    Weights, their names and all hooks stay as they are.
    """
    if choice == "off" or (choice == "auto" and device.type != "cuda"):
        return
    for block in model.blocks:
        for name in block.compiled_parts:  # type: ignore[union-attr]
            if block.placement == "post" and name.startswith("after_"):
                continue  # evaluations observe the input of its norms (models/hooks.py)
            setattr(block, name, compiled(getattr(block, name), dynamic=False))


@dataclass(frozen=True)
class SharedLoss:
    """The losses of a model that several processes train.

    Attributes:
        losses: tokens_BT -> the means over this process's rows of the cross-entropy and of the losses added to it
            (`Transformer.losses`); the backward of their sum averages gradients over the processes.
        apart: a context in which a backward pass keeps its gradients on its process; the next one outside of it
            averages them. For all micro-batches but the last.
    """

    losses: Callable[[Tensor], Tensor]
    apart: Callable[[], AbstractContextManager[Any]] = nullcontext


class _Loss(nn.Module):
    """The losses as a forward pass, as DDP needs it."""

    def __init__(self, model: Transformer, added: AddedLosses) -> None:
        super().__init__()
        self.model, self.added = model, added

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.model.losses(tokens_BT, self.added)


def share(model: Transformer, added: AddedLosses, how: Parallel, world: World) -> SharedLoss:
    """Replicate or shard `model`, on its device and with the same weights everywhere, over the processes of `world`.

    FSDP replaces the model's parameters by sharded ones: the optimiser is built afterwards. They are gathered in every
    forward and backward pass, so that between passes a parameter is always its shard.
    """
    if world.size == 1:
        return SharedLoss(functools.partial(model.losses, added=added))
    if how == "fsdp":
        mesh = init_device_mesh(next(model.parameters()).device.type, (world.size,))
        for part in [*model.blocks, model]:
            fully_shard(part, mesh=mesh, reshard_after_forward=True)
        register_fsdp_forward_method(model, "losses")
        with torch.no_grad():  # FSDP takes the first module that is called for the root
            device = next(model.parameters()).device
            model.losses(torch.zeros(1, model.config.context + 1, dtype=torch.long, device=device), added)
        return SharedLoss(functools.partial(model.losses, added=added), lambda: _keeping_gradients(model))
    # Dynamo would cut compiled code into buckets of gradients. Here every part of a block is compiled by itself, and
    # older PyTorch cannot cut functions with a backward of their own, such as rotations and FlexAttention.
    torch._dynamo.config.optimize_ddp = False
    replica = DistributedDataParallel(_Loss(model, added), gradient_as_bucket_view=True)
    return SharedLoss(replica, replica.no_sync)


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Within it the weights of a sharded model are whole on every process, for callers of its parts."""
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
    """This process's shard of a tensor; an unsharded tensor is returned as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """A tensor of the shards of all processes; an unsharded tensor is returned as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
