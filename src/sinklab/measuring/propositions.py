"""Numeric checks of the four propositions of 2410.10781 on a repeated token.

With equal tokens and no absolute positional embedding, all embeddings are equal, and so are all values of the first
layer. A weighted average of equal values does not depend on the weights, so hidden states stay equal through every
layer. With equal queries and keys, q.k is the same for every pair, except for the effect of the positional embedding:

    1  none             A[t, j] = 1 / t
    2  relative, t5     A[t, j] = exp(g(t - j)) / sum over i = 1..t of exp(g(t - i)), g the bias of a distance
    3  alibi            as 2, with g(d) = -m d, so that the last key has the largest share
    4  rotary           A[t, j] <= e^(2 xi) / (e^(2 xi) + t - 1), xi = |q| |k| / sqrt(d)

Proposition 4 holds because the logit of a rotated query and key lies in [-xi, xi]: the numerator is at most e^xi, and
each of the other t - 1 terms of the sum is at least e^-xi. Under a sliding window, t is the number of keys in it. So no
repeated token is a sink in these models, unless xi is large. Absolute positional embeddings, learned or not, make the
hidden states differ: a sink is possible, and the check against 1 / t fails.

Rounding errors grow with depth: in bfloat16, hidden states of a real model that should be equal differ by 42 percent.
A model is therefore checked in float32 if memory suffices (`in_float32`), and a deviation in lower precision is
inconclusive.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from sinklab.attention.layer_call import LayerCall
from sinklab.measuring.findings import Propositions
from sinklab.model.position import PositionKind
from sinklab.models.adapter import Adapter, residual_blocks
from sinklab.models.families import quantisation
from sinklab.models.hooks import evaluating, intercept, residual_stream
from sinklab.models.memory_budget import FLOAT, SHARE, free_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def attention_matrices(adapter: Adapter, tokens_BT: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Compute whole attention matrices of short sequences (memory O(T^2)); the model is restored afterwards.

    If attention calls can be intercepted, the matrix of a layer is its attention output with the identity matrix as
    values. Otherwise the model returns the matrices.

    Returns:
        Three lists: the attention matrix A (B, H, T, T) of every attention layer, without added keys or sink logits; an
        upper bound of |logit| per layer (B, H), the largest |q_t| times the largest |k_j| times the scale, empty if
        attention calls cannot be intercepted; and the residual stream (B, T, C) after every block.

    Raises:
        SinklabError: if the blocks of the model cannot be found, or another thread intercepts the model.
    """
    model, tokens_BT = adapter.module, tokens_BT.to(adapter.device)
    attention: list[Tensor] = []
    logit_bounds: list[Tensor] = []

    def observe(layer: LayerCall) -> Tensor:
        layer = layer if layer.library is None else layer.changed(backend="chunked")
        q_BHTD, k_BGTD = layer.call.q_BHTD, layer.call.k_BGTD
        (B, G, T, _), scale = k_BGTD.shape, layer.call.scale
        unit_BGTT = torch.eye(T, dtype=k_BGTD.dtype, device=k_BGTD.device).expand(B, G, T, T)
        attention.append(replace(layer, value_BGSV=unit_BGTT).output())
        q_BH, k_BG = (x.double().norm(dim=-1).amax(-1) for x in (q_BHTD, k_BGTD))
        products_BH = q_BH * k_BG.repeat_interleave(q_BH.shape[1] // G, 1)
        logit_bounds.append(products_BH * abs(k_BGTD.shape[-1] ** -0.5 if scale is None else scale))
        return layer.output()

    with evaluating(model), residual_stream(residual_blocks(adapter), lambda hidden_BTC: hidden_BTC) as hidden:
        if adapter.dispatches:
            with intercept(adapter, observe=observe):
                adapter.run(tokens_BT)
        else:
            from sinklab.measuring.pretrained_records import eager_attention

            with eager_attention(cast("PreTrainedModel", model)):
                attention.extend(model(tokens_BT, use_cache=False, output_attentions=True).attentions)
    return attention, logit_bounds, hidden[1:]


def is_coarse(dtype: torch.dtype) -> bool:
    """Return True if the dtype is floating-point with less precision than float32."""
    return dtype.is_floating_point and torch.finfo(dtype).eps > torch.finfo(torch.float32).eps


@contextmanager
def in_float32(adapter: Adapter) -> Iterator[None]:
    """Convert weights and buffers of lower precision to float32 within the `with` block, then restore them.

    The model is not converted if it is quantised or has offloaded weights, or if the copies would take more than half
    of the free memory. Its hidden states then keep their lower precision.
    """
    model = adapter.module
    tensors = (*model.parameters(), *model.buffers())
    coarse = [(tensor, tensor.data) for tensor in tensors if is_coarse(tensor.dtype)]
    copied = sum(before.numel() for _, before in coarse) * FLOAT
    plain = all(type(weight.data) is Tensor and not weight.is_meta for weight in model.parameters())
    free = free_bytes(adapter.device) if plain and not quantisation(cast(Any, model.config)) else 0
    if free is not None and copied > SHARE * free:
        yield
        return
    try:
        for tensor, before in coarse:
            tensor.data = before.float()
        yield
    finally:
        for tensor, before in coarse:
            tensor.data = before


LENGTH = 64  # maximum length of the check; whole matrices are stored
NUMBERS: dict[PositionKind, int] = {"none": 1, "relative": 2, "t5": 2, "alibi": 3, "rotary": 4}
STATEMENTS = {
    1: "on a repeated token, attention is 1/t on every key",
    2: "on a repeated token, attention is the softmax of the relative position biases",
    3: "on a repeated token, attention is the softmax of minus slope times distance, largest on the last key",
    4: "on a repeated token, attention is at most e^(2 xi) / (e^(2 xi) + t - 1), xi = |q| |k| / sqrt(d)",
    None: "absolute positional embeddings make the hidden states of a repeated token differ; no proposition applies",
}


def check_propositions(adapter: Adapter, tokens: Sequence[int], length: int) -> Propositions:
    """Compute the model's deviation from the proposition on its positional embedding, in float32 if possible.

    Args:
        tokens: token ids, each repeated in its own sequence.
        length: number of repetitions T, at least 2; T x T matrices are kept in memory.

    Raises:
        InputError: if it is not known which proposition covers the model (`Adapter.position_kind`).
    """
    kind = adapter.position_kind()
    with in_float32(adapter):
        tokens_BT = torch.tensor(tokens)[:, None].expand(-1, length)
        attention, logit_bounds, states = attention_matrices(adapter, tokens_BT)
    dtype = states[0].dtype
    tolerance = torch.finfo(dtype).eps ** 0.5
    hidden = 0.0
    for h_BTC in states:
        first_B1C, tiny = h_BTC[:, :1].double(), torch.finfo(h_BTC.dtype).tiny
        spread_BT = (h_BTC - first_B1C).norm(dim=-1) / first_B1C.norm(dim=-1).clamp(min=tiny)
        hidden = max(hidden, float(spread_BT.max()))
    deviation = slack = None
    if kind == "rotary":  # the minimum of (bound - attention weight), over queries that see more than one key
        slack = torch.inf
        for attention_BHTT, xi_BH in zip(attention, logit_bounds, strict=True):
            others_BHT = (attention_BHTT > 0).sum(-1) - 1
            bound_BHT = 1 / (1 + others_BHT * torch.exp(-2 * xi_BH)[..., None])
            slack = min(slack, float((bound_BHT - attention_BHTT.amax(-1))[others_BHT > 0].min()))
    else:
        expected_HTT = softmax_of_distances(adapter.distance_terms(length))
        deviation = max(float((A.double().cpu() - expected_HTT).abs().max()) for A in attention)
    number = NUMBERS.get(kind)
    within = max(hidden, deviation or 0.0, -(slack or 0.0)) <= tolerance
    return Propositions(
        position=kind,
        number=number,
        statement=STATEMENTS[number],
        tokens=len(tokens),
        length=length,
        hidden_deviation=hidden,
        attention_deviation=deviation,
        bound_slack=slack,
        tolerance=tolerance,
        dtype=str(dtype).removeprefix("torch."),
        holds=None if is_coarse(dtype) and not within else within,
    )


def softmax_of_distances(terms_HT: Tensor) -> Tensor:
    """Compute A[t, j] = exp(g(t - j)) / sum over i <= t of exp(g(t - i)), float64: (H, T, T).

    Args:
        terms_HT: bias g per head, for the distances 0 .. T - 1.
    """
    H, T = terms_HT.shape
    place_T = torch.arange(T)
    distance_TT = place_T[:, None] - place_T
    logits_HTT = terms_HT.double()[:, distance_TT.clamp(min=0)]
    return logits_HTT.masked_fill(distance_TT < 0, -torch.inf).softmax(-1)
