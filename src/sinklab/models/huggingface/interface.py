"""transformers' attention interface: register a function as a model's attention, and parse its calls.

The function is selected by name in the model's configs. The same name is registered for masks with `sdpa_mask`;
otherwise transformers silently drops padding and sliding windows. Rejected alternatives: `output_attentions` (forces
eager attention, stores every T x T matrix), and patching modules by class name (one patch per architecture).

Models that dispatch through `AttentionInterface` call f(module, q, k, v, mask, scaling=..., **extras). Keys and values
have G KV heads and are not repeated for the H query heads. These extras concern the scores:

    softcap         z -> softcap * tanh(z / softcap)                        (Gemma 2)
    s_aux           sink logit per head, part of the softmax                (gpt-oss)
    position_bias   added to the scores                                     (relative positions)
    sliding_window  ignored, because the mask from `sdpa_mask` contains it
    indices         (B, T, K) keys selected by an indexer for each query (DeepSeek-V3.2); the attention function has to
                    apply the selection
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from sinklab.attention import masks
from sinklab.attention.flex import flex_serves
from sinklab.attention.layer_call import LayerCall, LibraryKernel
from sinklab.attention.operations.call import Call
from sinklab.attention.operations.similarity import Softmax
from sinklab.attention.scores import Score, broadcast_index, compose, softcap
from sinklab.errors import SinklabError
from sinklab.models.families import SELECTED, UNREADABLE_EXTRAS
from sinklab.models.huggingface.anatomy import attention_implementation

SOFTMAX = Softmax()
_numbers = itertools.count()


def read_call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **extras: Any,
) -> LayerCall:
    """Convert the arguments of a call of transformers' attention interface to a `LayerCall`.

    Args:
        query: queries (B, H, T, D), at the last T of the S positions.
        key, value: keys (B, G, S, D) and values (B, G, S, V).
        attention_mask: (B, 1 or H, T, S), boolean (True: visible) or added to the scores; None means causal.
        scaling: factor of q.k; None means 1 / sqrt(D).
        extras: see the module docstring.

    Raises:
        SinklabError: if there is no mask and the attention is not causal, or an argument of UNREADABLE_EXTRAS is given.
    """
    for name in UNREADABLE_EXTRAS:
        if extras.get(name) is not None:
            raise SinklabError(
                f"the attention of {type(module).__name__} cannot be measured: sinklab does not support the argument "
                f"`{name}` of its attention function"
            )
    if (chosen_BTK := extras.pop(SELECTED, None)) is not None:
        attention_mask = _selected(attention_mask, chosen_BTK, key.shape[2])
    cap, sinks, bias = (extras.get(name) for name in ("softcap", "s_aux", "position_bias"))
    score = compose(softcap(cap) if cap is not None else None, _additive(bias))
    if attention_mask is None:
        is_causal = extras.get("is_causal")
        if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
            raise SinklabError(
                f"{type(module).__name__} attends to later tokens: sinks are measured only in causal language models"
            )
        allowed = masks.CAUSAL
    elif attention_mask.dtype == torch.bool:
        cached = key.shape[2] - query.shape[2]
        allowed = masks.Dense(attention_mask, later=bool(attention_mask.triu(1 + cached).any()))
    else:  # additive mask: about the dtype's minimum at hidden keys
        score = compose(score, _additive(attention_mask))
        allowed = masks.Dense(attention_mask > torch.finfo(attention_mask.dtype).min / 2, later=True)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = Call(query, key, allowed, position=score, logit_H=sinks, scale=scale)

    def fused() -> Tensor:
        kernel = AttentionInterface._global_mapping["sdpa"]
        return kernel(module, query, key, value, attention_mask, scaling=scaling, **extras)[0].transpose(1, 2)

    def by_sinklab() -> Tensor:
        out_BHTV, lse_BHT = call.attend(value)
        if sinks is not None:
            out_BHTV = out_BHTV * torch.sigmoid(lse_BHT - sinks[None, :, None])[..., None].to(out_BHTV.dtype)
        return out_BHTV

    if cap is None and sinks is None:
        library = LibraryKernel("sdpa", fused)
    else:
        library = LibraryKernel("flex" if flex_serves(query, key, value) else "chunked", by_sinklab)
    return LayerCall(SOFTMAX, call, value, library=library)


def _selected(mask: Tensor | None, chosen_BTK: Tensor, keys: int) -> Tensor:
    """Restrict a boolean or additive mask (B, 1, T, S) to the selected keys.

    If the mask is None, the causal mask is applied, because a query with few visible keys also selects later ones.
    """
    (B, T, _), device = chosen_BTK.shape, chosen_BTK.device
    chosen_BTS = torch.zeros(B, T, keys, dtype=torch.bool, device=device).scatter(-1, chosen_BTK.long(), True)
    if mask is None:
        return chosen_BTS.tril(keys - T)[:, None]
    if mask.dtype == torch.bool:
        return mask & chosen_BTS[:, None]
    return mask.masked_fill(~chosen_BTS[:, None], torch.finfo(mask.dtype).min)


def _additive(bias: Tensor | None) -> Score | None:
    """Return the score function z + bias[b, h, q, k]; None if there is no bias.

    Batch and head axes of the bias are broadcast; the queries are at the last positions of the keys.
    """
    if bias is None:
        return None
    rows, heads, queries, keys = bias.shape

    def add(z: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, bias_BHTS: Tensor) -> Tensor:
        return z + bias_BHTS[broadcast_index(b, rows), broadcast_index(h, heads), q - (keys - queries), k]

    return Score(add, (bias,))


@contextmanager
def attention_computed_by(model: PreTrainedModel, compute: Callable[[nn.Module, LayerCall], Tensor]) -> Iterator[None]:
    """Compute attention calls by `compute` in the `with` block, with boolean masks; passes raise as `read_call`.

    Args:
        compute: function (attention module, call) -> output (B, H, T, V).
    """

    def function(module: nn.Module, *args: Any, **options: Any) -> tuple[Tensor, None]:
        layer = read_call(module, *args, **options)
        return compute(module, layer).to(layer.value_BGSV.dtype).transpose(1, 2).contiguous(), None

    name = f"sinklab-{next(_numbers)}"
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, sdpa_mask)
    try:
        with attention_implementation(model, name):
            yield
    finally:
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)
