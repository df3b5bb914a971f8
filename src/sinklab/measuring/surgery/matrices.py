"""Attention matrices of short sequences, kept whole: for checks, never for measuring.

Models that dispatch their attention, and ours, are asked through their own code for the output on values that are the
identity: that output is the matrix. The others return their matrices themselves.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sinklab.attention.core import AttentionCore
from sinklab.measuring.native import attention_cores
from sinklab.measuring.surgery.places import residual_blocks
from sinklab.model.transformer import Transformer
from sinklab.models.hooks import evaluating, hidden_states, hooked
from sinklab.models.huggingface.anatomy import input_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Matrices:
    """What one forward pass showed.

    Attributes:
        attention: A (B, H, T, T) of every attention layer.
        logit_bounds: the largest |q_t| |k_j| times the scale, (B, H) per layer, which no logit exceeds in size; empty
            where queries cannot be read.
        hidden: the residual stream (B, T, C) after every block.
    """

    attention: list[Tensor]
    logit_bounds: list[Tensor]
    hidden: list[Tensor]


def attention_matrices(model: "PreTrainedModel | Transformer", tokens_BT: Tensor) -> Matrices:
    """Read short sequences and keep everything: memory grows with T * T; the model is left as it was found.

    Raises:
        SinklabError: the blocks of the model could not be found.
    """
    found = Matrices([], [], [])
    if isinstance(model, Transformer):
        keeping, options = _kept_by_cores(model, found), {}
    else:
        keeping, options = _kept_through_transformers(model, found)
    with evaluating(model), keeping, _kept_hidden(residual_blocks(model), found.hidden):
        output = model(tokens_BT.to(input_device(model)), **options)
    if not found.attention:
        found.attention.extend(output.attentions)
    return found


@contextmanager
def _kept_hidden(blocks: list[nn.Module], hidden: list[Tensor]) -> Iterator[None]:
    def leaving(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        hidden.append(hidden_states(output))

    with hooked(block.register_forward_hook(leaving) for block in blocks):
        yield


@contextmanager
def _kept_by_cores(model: Transformer, found: Matrices) -> Iterator[None]:
    def seen(core: AttentionCore, args: tuple[Any, ...], _: Any) -> None:
        q_BHTD, k_BGTD, _, *beside = args
        found.attention.append(core.forward(q_BHTD, k_BGTD, _identity(k_BGTD), *beside))
        found.logit_bounds.append(_largest_product(q_BHTD, k_BGTD, q_BHTD.shape[-1] ** -0.5))

    with hooked(core.register_forward_hook(seen) for core in attention_cores(model)):
        yield


def _kept_through_transformers(
    model: "PreTrainedModel", found: Matrices
) -> tuple[AbstractContextManager[None], dict[str, bool]]:
    """Each matrix as its call of the interface shows it, or else in the output of the model; and how to call it."""
    from sinklab.measuring.huggingface.eager import eager_attention
    from sinklab.measuring.huggingface.interface import attention_function
    from sinklab.measuring.huggingface.probe import dispatches

    if dispatches(model):
        return attention_function(model, _keeping(found)), {"use_cache": False}
    return eager_attention(model), {"use_cache": False, "output_attentions": True}


def _keeping(found: Matrices) -> Callable[..., tuple[Tensor, None]]:
    """An attention function for transformers' interface that keeps the matrix of every call."""
    from sinklab.models.huggingface.call import read_call

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **extras: Any,
    ) -> tuple[Tensor, None]:
        call = read_call(module, query, key, value, attention_mask, scaling, extras)
        matrix_BTHT = replace(call, value_BGSV=_identity(key)).output()
        found.attention.append(matrix_BTHT.transpose(1, 2))
        found.logit_bounds.append(_largest_product(query, key, call.scale))
        return call.output(), None

    return attention


def _identity(key_BGTD: Tensor) -> Tensor:
    B, G, T, _ = key_BGTD.shape
    return torch.eye(T, dtype=key_BGTD.dtype, device=key_BGTD.device).expand(B, G, T, T)


def _largest_product(q_BHTD: Tensor, k_BGTD: Tensor, scale: float) -> Tensor:
    q_BH, k_BG = (x.double().norm(dim=-1).amax(-1) for x in (q_BHTD, k_BGTD))
    return q_BH * k_BG.repeat_interleave(q_BH.shape[1] // k_BG.shape[1], 1) * abs(scale)
