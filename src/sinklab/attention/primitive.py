"""The attention primitive attend(matrix, v) -> (out, lse), and its backends.

Operations with an elementwise similarity are computed from the output `out` and the log-normaliser `lse`, the log of
the row sum (operations/base.py).

Backends: `eager`, explicit matrices; `sdpa`, PyTorch's fused kernel, for plain softmax; `chunked`, blocks of queries on
any device; `flex`, FlexAttention on CUDA. `auto` selects a backend for each call.

B batch, H query heads, G KV heads, T queries, S keys, D key dimension, V value dimension.

The `flex` backend: PyTorch's FlexAttention, a fused kernel for CUDA.

Score functions and masks are those of the other backends, compiled into the kernel. Terms and factors common to all
scores of a row can be applied outside the kernel (`scores.FlexScore`). On a CPU there is only an uncompiled forward
pass, which is sufficient for tests but not for training.

The `chunked` backend: attention in blocks of queries, with the scores of only one block in memory at a time.

The forward pass stores only its inputs, the output out and the log row sum lse. The backward pass recomputes the scores
of each block. Let dout and dlse be the gradients with respect to out and lse. The gradient with respect to a logit is
P * (dout.v - dout.out + dlse), P = exp(logit - lse). Autograd propagates it through the score function to
z = q.k * scale. The gradients with respect to q, k and v are computed explicitly.

If the score function has a `similarity`, and row sums Z = exp(lse) are in range (`LARGEST_LOG_SUM`), similarities are
not converted to logits. The gradient with respect to a similarity is then (dout.v - dout.out + dlse) / Z.

Rejected alternative: `torch.utils.checkpoint` around each block. It doubles the memory traffic of key and value
gradients, because autograd allocates a full gradient for every slice.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import flex_attention as flex

from sinklab.attention import query_blocks as bl
from sinklab.attention.masks import Mask
from sinklab.attention.query_blocks import Block, ScoreMatrix, accumulate_dtype, check_shapes, indices
from sinklab.attention.scores import Score, for_flex
from sinklab.device import compiled

LARGEST_LOG_SUM = 60.0  # with row sums between exp(-60) and exp(60), products stay in the range of float32


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, score: Score | None, mask: Mask, scale: float, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        matrix = bl.ScoreMatrix(q, k, mask, score, scale)
        out = q.new_empty(*q.shape[:3], v.shape[3])
        lse = q.new_empty(q.shape[:3], dtype=bl.accumulate_dtype(q.dtype))
        for block in matrix.blocks():
            weights, total, peak = _weights(matrix, block)
            lse[:, :, block.rows] = (total.log() + peak).squeeze(-1)
            product = bl.grouped_product(weights.to(v.dtype), v[:, :, block.keys])
            out[:, :, block.rows] = product / total.masked_fill(total == 0, 1).to(v.dtype)
        ctx.save_for_backward(q, k, v, out, lse, *tensors)
        ctx.score, ctx.mask, ctx.scale = score, mask, scale
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        score: Score | None = ctx.score
        matrix, groups = bl.ScoreMatrix(q, k, ctx.mask, score, ctx.scale), k.shape[1]
        dout = dout.to(q.dtype)
        # dout.out - dlse, which is subtracted from dout.v for every logit of a row.
        row = (dout * out).sum(-1, dtype=lse.dtype).sub_(dlse)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        dtensors: list[Tensor | None] = [None] * len(tensors)
        for block in matrix.blocks():
            rows, keys = block.rows, block.keys
            dout_rows, row_rows, lse_rows = dout[:, :, rows], row[:, :, rows, None], lse[:, :, rows, None]
            direct = score is not None and score.similarity is not None and _in_range(lse_rows, score)
            z, taken, wanted = with_graph(matrix, block, tensors, direct)
            if direct:
                total = lse_rows.exp()
                total = total.masked_fill_(total == 0, 1)
                dout_rows, row_rows = (dout_rows / total).to(q.dtype), row_rows / total
                weights = taken.detach().clone()
            else:
                weights = exponentials_(taken.detach() - finite_normaliser(lse_rows), score)
            weights = matrix.hide_(weights, block, 0.0)  # masked late: exp of -inf is slow
            dv[:, :, keys] += bl.grouped_transpose_product(weights.to(v.dtype), dout_rows, groups)
            dtaken = bl.grouped_product(dout_rows, v[:, :, keys].transpose(-1, -2)).to(lse.dtype).sub_(row_rows)
            dtaken = matrix.hide_(dtaken, block, 0.0) if direct else dtaken.mul_(weights)
            if score is not None:
                dtaken, *dwanted = torch.autograd.grad(taken, (z, *wanted), dtaken)
                add_gradients(dtensors, tensors, dwanted)
            dz = dtaken.mul_(ctx.scale).to(q.dtype)
            dq[:, :, rows] = bl.grouped_product(dz, k[:, :, keys])
            dk[:, :, keys] += bl.grouped_transpose_product(dz, q[:, :, rows], groups)
        return dq, dk, dv, None, None, None, *dtensors


def finite_normaliser(lse: Tensor) -> Tensor:
    """Return lse with -inf (no visible key) replaced by +inf, so that exp(logit - lse) is 0 instead of NaN."""
    return lse.masked_fill(lse == -math.inf, math.inf)


def exponentials_(exponents: Tensor, score: Score | None) -> Tensor:
    """Compute exp(exponents) in place. If `score.deep`, no result is zero, so masked entries must be masked again."""
    return bl.floored_exp_(exponents) if score is not None and score.deep else exponents.exp_()


def _weights(matrix: bl.ScoreMatrix, block: bl.Block) -> tuple[Tensor, Tensor, Tensor | float]:
    """Return exp(logit - peak) of a block, its row sums, and `peak`: the row maxima, or 0 if no shift is needed."""
    z, score = matrix.raw(block), matrix.score
    if score is not None and score.similarity is not None:
        where = bl.indices(z, block, matrix.offset)
        weights = matrix.hide_(score.similarity(z, *where, *score.tensors), block, 0.0)
        total = weights.sum(-1, keepdim=True)
        if _in_range(total.log(), score):
            return weights, total, 0.0
    logits = matrix.hide_(matrix.scored(z, block), block)
    peak = logits.amax(-1, keepdim=True)
    weights = exponentials_(logits.sub_(peak.masked_fill(peak == -math.inf, 0)), score)
    if score is not None and score.deep:
        weights = matrix.hide_(weights, block, 0.0)
    return weights, weights.sum(-1, keepdim=True), peak


def _fits(lse: Tensor, score: Score) -> bool:
    """Return True if all row sums exp(lse) are in range; row sums of 0 are allowed if `score.vanishes`."""
    fits = lse.abs() < LARGEST_LOG_SUM
    return bool((fits | (lse == -math.inf) if score.vanishes else fits).all())


# Dynamo's graph break at `bool` would print a long warning; at a disabled function it is silent.
_in_range: Callable[[Tensor, Score], bool] = torch.compiler.disable(_fits)  # type: ignore[assignment]


def with_graph(
    matrix: bl.ScoreMatrix, block: bl.Block, tensors: list[Tensor], direct: bool = False
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Compute a block's unmasked logits with an autograd graph from its raw scores z and the score function's tensors.

    Args:
        tensors: tensors of the score function.
        direct: compute the similarities instead of the logits, if the score has a similarity.

    Returns:
        z; the logits or similarities computed from z; and detached copies of those tensors that require gradients. z
        and the copies are leaves of the graph. Without a score function, the logits are z and there is no graph.
    """
    z, score = matrix.raw(block), matrix.score
    if score is None:
        return z, z, []
    function = score.similarity if direct and score.similarity is not None else score.function
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
        z = z.detach().requires_grad_()
        taken = function(z, *bl.indices(z, block, matrix.offset), *leaves)
    return z, taken, [t for t in leaves if t.requires_grad]


def add_gradients(totals: list[Tensor | None], tensors: list[Tensor], parts: list[Tensor]) -> None:
    """Add a block's gradients `parts`, one per tensor that requires a gradient, to `totals` in place.

    `totals` has an entry for every tensor; None means zero.
    """
    waiting = iter(parts)
    for i, tensor in enumerate(tensors):
        if tensor.requires_grad:
            part, total = next(waiting), totals[i]
            totals[i] = part if total is None else total + part


def chunked_attend(
    q_BHTD: Tensor, k_BGSD: Tensor, v_BGSV: Tensor, score: Score | None, mask: Mask, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute (out_BHTV, lse_BHT) of `primitive.attend` in blocks, differentiable in q, k, v and `score.tensors`."""
    tensors = score.tensors if score is not None else ()
    return _Chunked.apply(q_BHTD, k_BGSD, v_BGSV, score, mask, scale, *tensors)  # type: ignore[return-value]


NARROWEST = 16  # smallest head dimension supported by the kernel
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def flex_serves(q_BHTD: Tensor, v_BGSV: Tensor) -> bool:
    """Return True if the kernel supports the call: CUDA, float32 or 16-bit queries, key and value dimensions >= 16.

    A value dimension of 0 is supported too (`flex_attend`).
    """
    narrow = min(q_BHTD.shape[-1], v_BGSV.shape[-1] or NARROWEST) < NARROWEST
    return q_BHTD.is_cuda and q_BHTD.dtype in DTYPES and not narrow


def flex_attend(
    q_BHTD: Tensor, k_BGSD: Tensor, v_BGSV: Tensor, score: Score | None, mask: Mask, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute (out_BHTV, lse_BHT) as `primitive.attend` does. The value dimension may be 0.

    Raises:
        ValueError: if gradients are required on a CPU, where FlexAttention has no backward pass.
    """
    (_, H, T, _), S = q_BHTD.shape, k_BGSD.shape[2]
    tensors = (q_BHTD, k_BGSD, v_BGSV, *(score.tensors if score else ()))
    trains = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if trains and not q_BHTD.is_cuda:
        raise ValueError("the flex backend trains on CUDA only: use backend auto, chunked or eager on a CPU")
    run = _compiled_flex() if q_BHTD.is_cuda else flex.flex_attention
    kernel = for_flex(score)
    pad = _needs_padding(T, S, trains and kernel.score is not None)
    values = v_BGSV if v_BGSV.shape[-1] else k_BGSD[..., :NARROWEST]  # not k itself: two inputs must not be one tensor
    out, aux = run(
        *(_padded(x, pad) for x in (kernel.query(q_BHTD), k_BGSD, values)),
        score_mod=None if kernel.score is None else score_mod(kernel.score, S - T, (T, S) if pad else None),
        block_mask=_block_mask(mask, T, S, str(q_BHTD.device), pad),
        scale=scale,
        enable_gqa=k_BGSD.shape[1] != H,
        return_aux=flex.AuxRequest(lse=True),
    )
    assert isinstance(aux.lse, Tensor)
    return out[:, :, :T, : v_BGSV.shape[-1]], kernel.normaliser(aux.lse[..., :T])


MULTIPLE = 128  # positions in a block of FlexAttention


def _needs_padding(queries: int, keys: int, trains_score: bool) -> bool:
    """Return True if the kernel's gradients may be NaN: a score function and part of a block (PyTorch issue 153799)."""
    return trains_score and bool(queries % MULTIPLE or keys % MULTIPLE)


def _padded(x_BHLD: Tensor, pad: bool) -> Tensor:
    return F.pad(x_BHLD, (0, 0, 0, -x_BHLD.shape[2] % MULTIPLE)) if pad else x_BHLD


def score_mod(score: Score, offset: int, lengths: tuple[int, int] | None = None) -> Any:
    """Return a score function as FlexAttention's `score_mod`.

    Args:
        offset: position of the first query among the keys.
        lengths: numbers of queries and keys if padding follows them, which the score function does not read.
    """
    function, tensors = score.function, score.tensors

    def modified(z: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if lengths is not None:
            q, k = q.clamp(max=lengths[0] - 1), k.clamp(max=lengths[1] - 1)
        return function(z, b, h, q + offset, k, *tensors)

    return modified


@functools.lru_cache(maxsize=16)
def _block_mask(mask: Mask, queries: int, keys: int, device: str, pad: bool = False) -> Any:
    T, S = queries, keys

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if not pad:
            return mask.allowed(b, h, q + S - T, k)
        return (q < T) & (k < S) & mask.allowed(b, h, q.clamp(max=T - 1) + S - T, k.clamp(max=S - 1))

    if pad:
        queries, keys = (length + -length % MULTIPLE for length in (T, S))
    rows, heads = (count if count > 1 else None for count in mask.sizes)
    compile = device.startswith("cuda")  # else the mask of every query and key is stored
    return flex.create_block_mask(mask_mod, rows, heads, queries, keys, device=device, _compile=compile)


@functools.cache
def _compiled_flex() -> Any:
    return compiled(flex.flex_attention, dynamic=False)


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
    """
    q_BHTD = matrix.q_BHTD
    large = q_BHTD.is_cuda or q_BHTD.dtype != torch.bfloat16 or q_BHTD.shape[2] > FUSED_FROM
    if backend == "sdpa" or (backend == "auto" and matrix.score is None and _is_causal(matrix) and large):
        check_shapes(q_BHTD, matrix.k_BGSD)
        return _fused(matrix, v_BGSV)
    return attend(matrix, v_BGSV, backend)[0]


FUSED_FROM = 128  # up to this length the fused CPU kernel is slower in bfloat16 than chunked (benchmarks/attention.py)


def log_normaliser(matrix: ScoreMatrix, backend: Backend = "auto") -> Tensor:
    """Compute lse_BHT of `attend` without the output. `chunked` replaces `sdpa`, which does not return lse."""
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
