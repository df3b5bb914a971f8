"""One call of an attention function, as transformers makes it, in the terms of our primitive.

Models that dispatch through `AttentionInterface` call f(module, q, k, v, mask, scaling=..., **extras) with keys and
values not repeated over their groups (H query heads, G key heads). What the extras mean for the scores:

    softcap         z -> softcap * tanh(z / softcap)                        (Gemma 2)
    s_aux           a sink logit per head that takes part in the softmax    (gpt-oss)
    position_bias   added to the scores                                     (relative positions)
    sliding_window  already in the mask, because `sdpa_mask` builds it
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sinklab.attention import masks
from sinklab.attention.blocks import accumulate_dtype
from sinklab.attention.importance import ColumnSums, Rows, column_sums, score_rows
from sinklab.attention.one_pass import Scores, attend_and_sum
from sinklab.attention.primitive import attend
from sinklab.attention.scores import Score, broadcast_index, compose, softcap
from sinklab.attention.visible import visible_queries
from sinklab.errors import SinklabError

NOT_UNDERSTOOD = ("sinks", "block_indices")  # extras that change the scores in ways not implemented here


@dataclass(frozen=True)
class AttentionCall:
    """What a layer asked for: `plain` where PyTorch's fused attention computes the same, `additive` where the mask
    was a number to add to each score; `mask` then hides nothing."""

    query_BHTD: Tensor
    key_BGSD: Tensor
    value_BGSV: Tensor
    mask: masks.Mask
    score: Score | None
    scale: float
    sink_logits_H: Tensor | None
    plain: bool
    additive: Tensor | None = None

    def visible_queries(self, counted_BT: Tensor | None) -> Tensor:
        """How many of the counted queries may see each key: (B or 1, H or 1, S)."""
        T, S = self.query_BHTD.shape[2], self.key_BGSD.shape[2]
        mask = self.mask
        if self.additive is not None:  # what is added to a hidden score is the lowest number there is, or near it
            mask = masks.Dense(self.additive > torch.finfo(self.additive.dtype).min / 2, later=True)
        return visible_queries(mask, T, S, self.query_BHTD.device, counted_BT)

    def column_sums(self, counted_BT: Tensor | None) -> ColumnSums:
        """Column sums of the attention matrix over the counted queries, in float32 whatever the model's dtype."""
        return column_sums(*self._exact(), counted_BT=counted_BT, **self._scoring())

    def rows(self) -> Iterator[Rows]:
        """The rows of the attention matrix a block of queries at a time, in float32 whatever the model's dtype."""
        return score_rows(*self._exact(), **self._scoring())

    def _exact(self) -> tuple[Tensor, Tensor]:
        dtype = accumulate_dtype(self.query_BHTD.dtype)
        return self.query_BHTD.detach().to(dtype), self.key_BGSD.detach().to(dtype)

    def _scoring(self) -> dict[str, Any]:
        sinks = self.sink_logits_H
        return {
            "mask": self.mask,
            "score": self.score,
            "scale": self.scale,
            "bias_logits_BHT": None if sinks is None else sinks.detach()[None, :, None],
        }

    def one_pass(self, counted_BT: Tensor | None, ends: Sequence[int]) -> tuple[Tensor, ColumnSums, Tensor]:
        """The attention output (B, T, H, V), as transformers expects it, and the column sums; no gradients.

        The last are those over the queries before each of `ends` only (B, H, E, S).
        """
        scores = Scores(self.mask, self.score, self.scale, self.sink_logits_H)
        out_BHTV, sums, prefixes_BHES = attend_and_sum(
            self.query_BHTD, self.key_BGSD, self.value_BGSV, scores, counted_BT, ends
        )
        return out_BHTV.transpose(1, 2).contiguous(), sums, prefixes_BHES

    def output(self) -> Tensor:
        """The attention output for calls that are not `plain`, with gradients: (B, T, H, V)."""
        out_BHTV, lse_BHT = attend(
            self.query_BHTD, self.key_BGSD, self.value_BGSV, score=self.score, mask=self.mask, scale=self.scale
        )
        if self.sink_logits_H is not None:
            share_BHT = torch.sigmoid(lse_BHT - self.sink_logits_H[None, :, None])
            out_BHTV = out_BHTV * share_BHT[..., None].to(out_BHTV.dtype)
        return out_BHTV.transpose(1, 2).contiguous()


def read_call(
    module: nn.Module,
    query_BHTD: Tensor,
    key_BGSD: Tensor,
    value_BGSV: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    extras: dict[str, Any],
) -> AttentionCall:
    """Read the arguments of one call.

    Raises:
        SinklabError: the attention is not causal, or an extra is not understood.
    """
    T, S = query_BHTD.shape[2], key_BGSD.shape[2]
    for name in NOT_UNDERSTOOD:
        if extras.get(name) is not None:
            raise SinklabError(f"{type(module).__name__} passes `{name}`, which sinklab cannot measure yet")
    cap, sinks, bias = (extras.get(name) for name in ("softcap", "s_aux", "position_bias"))
    score = compose(softcap(cap) if cap is not None else None, _additive(bias))
    additive = None if mask is None or mask.dtype == torch.bool else mask
    if additive is not None:
        score, allowed = compose(score, _additive(additive)), masks.Prefix(S)
    else:
        allowed = _allowed(module, mask, extras, S - T)
    return AttentionCall(
        query_BHTD=query_BHTD,
        key_BGSD=key_BGSD,
        value_BGSV=value_BGSV,
        mask=allowed,
        score=score,
        scale=query_BHTD.shape[-1] ** -0.5 if scaling is None else scaling,
        sink_logits_H=sinks,
        plain=cap is None and sinks is None,
        additive=additive,
    )


def _allowed(module: nn.Module, mask: Tensor | None, extras: dict[str, Any], cached: int) -> masks.Mask:
    if mask is not None:
        return masks.Dense(mask, later=bool(mask.triu(1 + cached).any()))
    is_causal = extras.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise SinklabError(
            f"{type(module).__name__} attends to later tokens as well: sinks are measured on causal language models"
        )
    return masks.CAUSAL


def _additive(bias: Tensor | None) -> Score | None:
    """z + bias[b, h, q, k], batch and head of the bias broadcasting; its queries are the last of the positions."""
    if bias is None:
        return None
    rows, heads, queries, keys = bias.shape

    def add(z: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, bias_BHTS: Tensor) -> Tensor:
        return z + bias_BHTS[broadcast_index(b, rows), broadcast_index(h, heads), q - (keys - queries), k]

    return Score(add, (bias,))
