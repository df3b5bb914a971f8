"""Compiled blocks (`train.compile`) and activation checkpointing of blocks (`train.recompute`, 1604.06174).

A block is compiled in two parts, before and after its core (in a linear layer: its rule), once for all blocks of a
kind. Not the whole model: the cores bring kernels of their own (FlexAttention compiles itself), a probe that is
attached to a compiled module is silently ignored, and compiling 22 layers as one takes minutes.

A recomputed block keeps its inputs only, and runs forward once more when its gradient is due, to the same bits:
training draws no random numbers. Memory is then one residual stream per block and the activations of one block, for
about a third more work. Hooks of a block, FSDP's among them, stay around both passes; those inside a block see the
second one, too. Rejected: PyTorch's `apply_activation_checkpointing`, which renames the parameters of what it wraps.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from sinklab.compiling import compiled
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
                continue  # every evaluation watches what enters its norms (models/hooks.py)
            setattr(block, name, compiled(getattr(block, name), dynamic=False))
