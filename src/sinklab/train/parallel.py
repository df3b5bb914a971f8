"""One model over several processes: replicated (DDP) or sharded (FSDP2).

Every process has the same number of rows of the global batch, so that the mean over processes of the mean loss over a
process's rows is the global mean; the gradients are averaged in the same way.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from sinklab.model.transformer import Transformer
from sinklab.train.config import Parallel
from sinklab.train.world import World


@dataclass(frozen=True)
class SharedLoss:
    """The loss of a model that several processes train.

    Attributes:
        loss: tokens_BT -> mean loss over this process's rows; its backward averages gradients over the processes.
        apart: within this context a backward keeps its gradients on its process, to be averaged by the next one
            outside of it: for all micro-batches but the last.
    """

    loss: Callable[[Tensor], Tensor]
    apart: Callable[[], AbstractContextManager[Any]] = nullcontext


class _Loss(nn.Module):
    """The loss as a forward pass, which is what DDP watches."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.model.loss(tokens_BT)


def share(model: Transformer, how: Parallel, world: World) -> SharedLoss:
    """Spread `model`, on its device and with the same weights everywhere, over the processes of `world`.

    FSDP replaces the model's parameters, by sharded ones: the optimiser is built afterwards. They are gathered anew in
    every forward and backward pass, so that between passes a parameter is always its shard.
    """
    if world.size == 1:
        return SharedLoss(model.loss)
    if how == "fsdp":
        mesh = init_device_mesh(next(model.parameters()).device.type, (world.size,))
        for part in [*model.blocks, model]:
            fully_shard(part, mesh=mesh, reshard_after_forward=True)
        register_fsdp_forward_method(model, "loss")
        _name_the_root(model)
        return SharedLoss(model.loss, lambda: _keeping_gradients(model))
    # Dynamo would cut what is compiled into buckets of gradients. Here every part of a block is compiled by itself, and
    # older PyTorch cannot cut functions with a backward of their own, such as rotations and FlexAttention.
    torch._dynamo.config.optimize_ddp = False
    replica = DistributedDataParallel(_Loss(model), gradient_as_bucket_view=True)
    return SharedLoss(replica, replica.no_sync)


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Within it the weights of a sharded model are whole on every process, for those who call its parts themselves."""
    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for part in parts:
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.reshard()


@torch.no_grad()
def _name_the_root(model: Transformer) -> None:
    """FSDP takes the first module that is called for the whole model: so that is to be the model."""
    device = next(model.parameters()).device
    model.loss(torch.zeros(1, model.config.context + 1, dtype=torch.long, device=device))


@contextmanager
def _keeping_gradients(model: nn.Module) -> Iterator[None]:
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def local(tensor: Tensor) -> Tensor:
    """This process's shard of a tensor; a tensor that is not sharded as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """A tensor with the shards of all processes put together; a tensor that is not sharded as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
