"""The `chunked` backend: attention in blocks of queries, with the scores of only one block in memory at a time.

The forward pass stores only its inputs, the output out and the log row sum lse. The backward pass recomputes the scores
of each block. Let dout and dlse be the gradients with respect to out and lse. The gradient with respect to a logit is
P * (dout.v - dout.out + dlse), P = exp(logit - lse). Autograd propagates it through the score function to
z = q.k * scale. The gradients with respect to q, k and v are computed explicitly.

If the score function has a `similarity`, and row sums Z = exp(lse) are in range (`LARGEST_LOG_SUM`), similarities are
not converted to logits. The gradient with respect to a similarity is then (dout.v - dout.out + dlse) / Z.

Rejected alternative: `torch.utils.checkpoint` around each block. It doubles the memory traffic of key and value
gradients, because autograd allocates a full gradient for every slice.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sinklab.attention import query_blocks as bl
from sinklab.attention.masks import Mask
from sinklab.attention.scores import Score

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
