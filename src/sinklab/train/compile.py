"""`train.compile`: what stands around the attention cores, compiled.

A block is compiled in two parts, before and after its core (in a linear layer: its rule), and once for all blocks of a
kind. Not the whole model: the cores bring kernels of their own (FlexAttention compiles itself), a probe that is
attached to a compiled module is silently ignored, and compiling 22 layers as one takes minutes.
"""

from typing import Literal

import torch

from sinklab.compiling import compiled
from sinklab.model.transformer import Transformer

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
