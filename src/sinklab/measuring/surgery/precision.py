"""A model in float32 for the length of a `with` block: for checks that its own precision cannot decide."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sinklab.model.transformer import Transformer
from sinklab.models.huggingface.anatomy import input_device, quantisation
from sinklab.models.memory import FLOAT, SHARE, free_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def is_coarse(dtype: torch.dtype) -> bool:
    """Whether a floating dtype rounds more than float32."""
    return torch.finfo(dtype).eps > torch.finfo(torch.float32).eps


@contextmanager
def in_float32(model: "PreTrainedModel | Transformer") -> Iterator[None]:
    """Weights and buffers that are coarser than float32 are in float32; afterwards they are the tensors they were.

    A model stays as it is where that cannot be had: quantised, with weights left on disk, or where half of the free
    memory does not hold the copies. The dtype of its hidden states tells.
    """
    weights = [(weight, weight.data) for weight in model.parameters() if _is_coarse(weight)]
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if _is_coarse(buffer)
    ]
    copied = sum(tensor.numel() for *_, tensor in (*weights, *buffers)) * FLOAT
    if not _can_be_copied(model, copied):
        yield
        return
    try:
        for weight, before in weights:
            weight.data = before.float()
        for module, name, before in buffers:
            setattr(module, name, before.float())
        yield
    finally:
        for weight, before in weights:
            weight.data = before
        for module, name, before in buffers:
            setattr(module, name, before)


def _is_coarse(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and is_coarse(tensor.dtype)


def _can_be_copied(model: "PreTrainedModel | Transformer", size: int) -> bool:
    plain = all(type(weight.data) is Tensor and not weight.is_meta for weight in model.parameters())
    if not plain or (not isinstance(model, Transformer) and quantisation(model.config)):
        return False
    free = free_bytes(input_device(model))
    return free is None or size <= SHARE * free
