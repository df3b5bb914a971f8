"""The specification of the primitive: the explicit matrix, readable against the papers' formulas."""

import math

import torch
from torch import Tensor

from sinklab.attention.blocks import Block, accumulate_dtype, indices
from sinklab.attention.scores import Score
from sinklab.attention.visible import Mask


def eager_logits(q_BHTD: Tensor, k_BGSD: Tensor, score: Score | None, mask: Mask, scale: float) -> Tensor:
    """Every logit score(q.k * scale), -inf where the mask forbids: (B, H, T, S)."""
    T, S = q_BHTD.shape[2], k_BGSD.shape[2]
    k_BHSD = k_BGSD.repeat_interleave(q_BHTD.shape[1] // k_BGSD.shape[1], dim=1)
    z_BHTS = (q_BHTD @ k_BHSD.transpose(-1, -2)).to(accumulate_dtype(q_BHTD.dtype)) * scale
    where = indices(z_BHTS, Block(0, T, 0, S), S - T)
    logits_BHTS = z_BHTS if score is None else score(z_BHTS, *where)
    return logits_BHTS.masked_fill(~mask.allowed(*where), -math.inf)


def eager_attend(
    q_BHTD: Tensor, k_BGSD: Tensor, v_BGSV: Tensor, score: Score | None, mask: Mask, scale: float
) -> tuple[Tensor, Tensor]:
    """out = sum_s exp(logit_ts) v_s / Z_t and lse = log Z_t, Z_t = sum_s exp(logit_ts); an empty row gives 0, -inf."""
    logits_BHTS = eager_logits(q_BHTD, k_BGSD, score, mask, scale)
    v_BHSV = v_BGSV.repeat_interleave(q_BHTD.shape[1] // v_BGSV.shape[1], dim=1)
    peak = logits_BHTS.detach().amax(-1, keepdim=True)
    peak = peak.masked_fill(peak == -math.inf, 0)
    weights_BHTS = torch.exp(logits_BHTS - peak)
    total = weights_BHTS.sum(-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1)
    lse_BHT = (total.log() + peak).masked_fill(empty, -math.inf).squeeze(-1)
    return (weights_BHTS / total).to(v_BHSV.dtype) @ v_BHSV, lse_BHT
