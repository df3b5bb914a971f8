"""The attention primitive attend(matrix, v) -> (out, lse), and its backends.

Operations with an elementwise similarity are computed from the output `out` and the log-normaliser `lse`, the log of
the row sum (operations/base.py).

Backends: `eager`, explicit matrices; `sdpa`, PyTorch's fused kernel, for plain softmax; `chunked`, blocks of queries on
any device; `flex`, FlexAttention on CUDA. `auto` selects a backend for each call.

B batch, H query heads, G KV heads, T queries, S keys, D key dimension, V value dimension.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from sinklab.attention.chunked import chunked_attend
from sinklab.attention.flex import flex_attend, flex_serves
from sinklab.attention.masks import Mask
from sinklab.attention.query_blocks import Block, ScoreMatrix, accumulate_dtype, check_shapes, indices
from sinklab.attention.scores import Score

Backend = Literal["auto", "eager", "sdpa", "chunked", "flex"]


def attend(matrix: ScoreMatrix, v_BGSV: Tensor, backend: Backend = "auto") -> tuple[Tensor, Tensor]:
    """Compute the attention output and log-normaliser of every query; `chunked` and `flex` store no T x S matrix.

    out_t = sum_s exp(l_ts) v_s / Z_t,  lse_t = log Z_t,  Z_t = sum_s exp(l_ts),  l_ts = score(q_t.k_s * scale).
    The sums are over the keys s that query t sees.

    Args:
        matrix: queries, keys, score function and mask. H must be a multiple of G (grouped-query attention); keys are
            not repeated in memory.
        v_BGSV: values; V may differ from D.
        backend: backend to use. `auto` is `flex` on CUDA if it supports the call, else `chunked`, which supports every
            call.

    Returns:
        out_BHTV in the dtype of the values; lse_BHT in nats, float32 (float64 for float64). A query that sees no key
        has out 0 and lse -inf.

    Raises:
        ValueError: if the shapes do not match or the backend does not support the call.
    """
    q_BHTD, k_BGSD = matrix.q_BHTD, matrix.k_BGSD
    check_shapes(q_BHTD, k_BGSD)
    if backend == "sdpa":
        return _fused(matrix, v_BGSV), log_normaliser(matrix)
    given = (q_BHTD, k_BGSD, v_BGSV, matrix.score, matrix.mask, matrix.factor)
    if backend == "eager":
        return eager_attend(*given)
    if backend == "flex" or (backend == "auto" and flex_serves(q_BHTD, v_BGSV)):
        return flex_attend(*given)
    return chunked_attend(*given)


def attend_output(matrix: ScoreMatrix, v_BGSV: Tensor, backend: Backend = "auto") -> Tensor:
    """Compute the output of `attend` without lse, for which `auto` may use PyTorch's fused kernel.

    `auto` uses the fused kernel for plain causal softmax with T = S, except for short sequences in bfloat16 on a CPU,
    where the kernel is slower. In other cases it selects a backend as `attend` does.

    Raises:
        ValueError: see `attend`.
    """
    q_BHTD = matrix.q_BHTD
    large = q_BHTD.is_cuda or q_BHTD.dtype != torch.bfloat16 or q_BHTD.shape[2] > FUSED_FROM
    if backend == "sdpa" or (backend == "auto" and matrix.score is None and _is_causal(matrix) and large):
        check_shapes(q_BHTD, matrix.k_BGSD)
        return _fused(matrix, v_BGSV)
    return attend(matrix, v_BGSV, backend)[0]


FUSED_FROM = 128  # up to this length the fused CPU kernel is slower in bfloat16 than chunked (benchmarks/attention.py)


def log_normaliser(matrix: ScoreMatrix, backend: Backend = "auto") -> Tensor:
    """Compute lse_BHT of `attend` without the output. `chunked` replaces `sdpa`, which does not return lse.

    Raises:
        ValueError: see `attend`.
    """
    return attend(matrix, matrix.k_BGSD[..., :0], "chunked" if backend == "sdpa" else backend)[1]


def _is_causal(matrix: ScoreMatrix) -> bool:
    return matrix.mask.plain and matrix.offset == 0


def _fused(matrix: ScoreMatrix, v_BGSV: Tensor) -> Tensor:
    if matrix.score is not None:
        raise ValueError(
            "the sdpa backend supports plain softmax attention only, and this call changes the scores (softcap, "
            "position bias, forget gates or another operation): use backend auto, chunked or eager"
        )
    q_BHTD, k_BGSD, mask, plain = matrix.q_BHTD, matrix.k_BGSD, matrix.mask, _is_causal(matrix)
    allowed = None
    if not plain:
        T, S = q_BHTD.shape[2], k_BGSD.shape[2]
        allowed = mask.block(S - T, S, 0, S, q_BHTD.device).expand(*mask.sizes, T, S)
    return F.scaled_dot_product_attention(
        q_BHTD,
        k_BGSD,
        v_BGSV,
        attn_mask=allowed,
        is_causal=plain,
        scale=matrix.factor,
        enable_gqa=q_BHTD.shape[1] != k_BGSD.shape[1],
    )


def eager_logits(q_BHTD: Tensor, k_BGSD: Tensor, score: Score | None, mask: Mask, scale: float) -> Tensor:
    """Compute all logits score(q.k * scale), -inf at masked keys: (B, H, T, S)."""
    T, S = q_BHTD.shape[2], k_BGSD.shape[2]
    k_BHSD = k_BGSD.repeat_interleave(q_BHTD.shape[1] // k_BGSD.shape[1], dim=1)
    z_BHTS = (q_BHTD @ k_BHSD.transpose(-1, -2)).to(accumulate_dtype(q_BHTD.dtype)) * scale
    where = indices(z_BHTS, Block(0, T, 0, S), S - T)
    logits_BHTS = z_BHTS if score is None else score(z_BHTS, *where)
    return logits_BHTS.masked_fill(~mask.allowed(*where), -math.inf)


def eager_attend(
    q_BHTD: Tensor, k_BGSD: Tensor, v_BGSV: Tensor, score: Score | None, mask: Mask, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute (out_BHTV, lse_BHT) of `attend` with explicit matrices.

    out_t = sum_s exp(logit_ts) v_s / Z_t,  lse_t = log Z_t,  Z_t = sum_s exp(logit_ts). A query that sees no key has
    out 0 and lse -inf.
    """
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
