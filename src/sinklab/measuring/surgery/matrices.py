"""Attention matrices of short sequences, kept whole: for checks, never for measuring.

Models that dispatch their attention, and ours, are asked through their own code for the output on values that are the
identity: that output is the matrix. The others return their matrices themselves.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from sinklab.attention.layer_call import LayerCall
from sinklab.measuring.surgery.places import residual_blocks
from sinklab.model.transformer import Transformer
from sinklab.models.adapter import Adapter, adapt
from sinklab.models.hooks import evaluating, hidden_states, hooked
from sinklab.models.intercept import intercept

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
    found, adapter = Matrices([], [], []), adapt(model)
    options = {} if isinstance(model, Transformer) else {"use_cache": False}
    options |= {} if adapter.dispatches else {"output_attentions": True}
    with evaluating(model), _keeping(adapter, found), _kept_hidden(residual_blocks(model), found.hidden):
        output = model(tokens_BT.to(adapter.device), **options)
    if not found.attention:
        found.attention.extend(output.attentions)
    return found


@contextmanager
def _kept_hidden(blocks: list[nn.Module], hidden: list[Tensor]) -> Iterator[None]:
    def leaving(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        hidden.append(hidden_states(output))

    with hooked(block.register_forward_hook(leaving) for block in blocks):
        yield


def _keeping(adapter: Adapter, found: Matrices) -> AbstractContextManager[Any]:
    """Every attention call leaves its matrix; or the model makes its own, in its output."""
    if not adapter.dispatches:
        from sinklab.measuring.huggingface.matrix_records import eager_attention

        return eager_attention(cast("PreTrainedModel", adapter.module))

    def keep(layer: LayerCall) -> Tensor:
        layer = layer if layer.library is None else layer.changed(backend="chunked")
        call = layer.call
        found.attention.append(replace(layer, value_BGSV=_identity(call.k_BGTD)).output())
        scale = call.q_BHTD.shape[-1] ** -0.5 if call.scale is None else call.scale
        found.logit_bounds.append(_largest_product(call.q_BHTD, call.k_BGTD, scale))
        return layer.output()

    return intercept(adapter, observe=keep)


def _identity(key_BGTD: Tensor) -> Tensor:
    B, G, T, _ = key_BGTD.shape
    return torch.eye(T, dtype=key_BGTD.dtype, device=key_BGTD.device).expand(B, G, T, T)


def _largest_product(q_BHTD: Tensor, k_BGTD: Tensor, scale: float) -> Tensor:
    q_BH, k_BG = (x.double().norm(dim=-1).amax(-1) for x in (q_BHTD, k_BGTD))
    return q_BH * k_BG.repeat_interleave(q_BH.shape[1] // k_BG.shape[1], 1) * abs(scale)
