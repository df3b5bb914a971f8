"""`train.recompute`: activation checkpointing of the blocks (1604.06174).

A block keeps what it is called with, and runs forward once more when its gradient is due, to the same bits: nothing in
training draws random numbers. What is kept is then one residual stream per block and the activations of one block,
for about a third more work. Hooks of a block, FSDP's among them, stand around both passes; those inside a block see the
second one, too.

Rejected: PyTorch's `apply_activation_checkpointing`, which renames the parameters of what it wraps.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from sinklab.model.transformer import Transformer
from sinklab.train.config import Recompute


def recompute_blocks(model: Transformer, choice: Recompute) -> None:
    """Let the blocks forget their activations in place; weights, their names and all hooks stay as they are.

    To be called before the model is shared between processes: FSDP's hooks belong around what is done twice.
    """
    if choice == "blocks":
        for block in model.blocks:
            block.forward = _forgetting(block)  # type: ignore[method-assign]


def _forgetting(block: nn.Module) -> Callable[..., Any]:
    forward = block.forward

    @functools.wraps(forward)
    def run(x_BLE: torch.Tensor, places: Any, past: Any = None) -> Any:
        if past is not None:  # the second pass would extend it once more
            return forward(x_BLE, places, past)
        if not torch.is_grad_enabled():
            return forward(x_BLE, places)
        return checkpoint(forward, x_BLE, places, use_reentrant=False, preserve_rng_state=False)

    return run
