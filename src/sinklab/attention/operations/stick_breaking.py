"""Stick-breaking attention (2410.17980).

Going backwards from the newest key, key s with logit l_s receives the fraction beta_s = sigmoid(l_s) of the attention
left by the later keys, A_s = beta_s prod over j > s of (1 - beta_j). The attention that remains after all keys is
called the rest. With u = softplus(l), log A_s = l_s - sum over j >= s of u_j, and log rest = -(sum of all u_j). This
takes one softplus, one cumulative sum and one exponential per score.

In the backward pass, the gradient with respect to log A_s is g_s = A_s dA_s, and with respect to a logit

    dl_s = g_s - beta_s (g_s + sum of g over the keys before s + rest drest),

which takes another cumulative sum. dA_s and drest are the gradients with respect to A_s and the rest. As in
query_blocks.py, the backward pass recomputes the scores of one block of queries at a time, and autograd differentiates
the score function.

B batch, H query heads, G KV heads, T queries, S keys, Q queries of a block, D key dimension, V value dimension.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sinklab.attention import query_blocks as bl
from sinklab.attention.importance import Rows
from sinklab.attention.masks import Mask, both
from sinklab.attention.operations import fla_kernels
from sinklab.attention.operations.base import Call, OperationPart
from sinklab.attention.primitive import add_gradients, eager_logits, with_graph
from sinklab.attention.scores import Score
from sinklab.schema import Example


class StickRest(nn.Module):
    """Learned value vector of the rest (the remaining attention) per head, (H, V), initially zero."""

    def __init__(self, heads: int, value_width: int) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(heads, value_width))
        self.initial = {"value": (0.0, 0.0)}


class StickBreaking(OperationPart):
    """Stick-breaking attention: A_ts = sigmoid(z_ts) prod over s < j < t of (1 - sigmoid(z_tj)) (2410.17980).

    The query's own key is excluded. The rest, 1 - sum_s A_ts, is an implicit sink and is reported like the attention to
    a bias. `rest` sets its value: zero, as in the paper's formula (`dropped`); the query's own value (`own`), as in the
    released model (`sb_remainder` in github.com/IBM/dolomite-engine, `sb_dolomite`); or a learned vector per head,
    initially zero (`learned`), as in the later code (`head_bias`; the norm per head that follows it there is not
    implemented). The biases k, kv, sink_logit and off_by_one are not supported.
    """

    kind: Literal["stick_breaking"] = "stick_breaking"
    rest: Literal["dropped", "own", "learned"] = Field(
        default="dropped",
        description="value vector of the remaining attention: zero (dropped), that of the query's own position (own), "
        "or a learned vector per head (learned)",
    )
    sequential: ClassVar[bool] = True
    normal: ClassVar[bool] = True
    examples: ClassVar = {
        "stick_breaking": Example(),
        "stick_breaking_rest_own": Example({"rest": "own"}),
        "stick_breaking_rest_learned": Example({"rest": "learned"}),
    }

    @property
    def only_values(self) -> bool:
        return self.rest != "learned"

    def parameters(
        self, heads: int, head_width: int, value_width: int, layer: int, context: int | None
    ) -> nn.Module | None:
        return StickRest(heads, value_width) if self.rest == "learned" else None

    def output(self, call: Call, v_BGTV: Tensor) -> Tensor:
        q_BHTD, k_BGTD, score, mask = call.q_BHTD, call.k_BGTD, call.score(), both(call.mask, OtherKeys())
        bl.check_shapes(q_BHTD, k_BGTD)
        if fla_kernels.serves_call(call, v_BGTV):
            out, rest_BHT = fla_kernels.stick_breaking(call, v_BGTV)
        elif call.backend == "eager":
            out, rest_BHT = _on_the_matrix(q_BHTD, k_BGTD, v_BGTV, score, mask)
        else:
            tensors = () if score is None else score.tensors
            out, rest_BHT = _Stick.apply(q_BHTD, k_BGTD, v_BGTV, score, mask, *tensors)  # type: ignore[misc]
        if self.rest == "dropped":
            return out
        if isinstance(call.learned, StickRest):
            carried = call.learned.value[:, None].to(out.dtype)
        else:
            carried = v_BGTV[:, :, call.first :].repeat_interleave(out.shape[1] // v_BGTV.shape[1], 1)
        return out + rest_BHT[..., None].to(out.dtype) * carried

    @torch.no_grad()
    def rows(self, call: Call) -> Iterator[Rows]:
        matrix = call.matrix(mask=both(call.mask, OtherKeys()))
        for block in matrix.blocks():
            yield Rows(block, *stick_weights(matrix, block, matrix.scored(matrix.raw(block), block)))

    def row_sums(self, call: Call) -> Tensor:
        return call.q_BHTD.new_ones(call.q_BHTD.shape[:3])


EXACT_TO = 40.0  # threshold of softplus, whose error above it is at most 4e-18; 2e-9 with the default of 20


@dataclass(frozen=True, eq=False)
class OtherKeys(Mask):
    """Mask that hides each query's own key."""

    @property
    def causal(self) -> bool:
        return False

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k != q

    def full_range(self, first: int, end: int, keys: int) -> tuple[int, int]:
        return 0, first


def stick_weights(matrix: bl.ScoreMatrix, block: bl.Block, logits_BHQS: Tensor) -> tuple[Tensor, Tensor]:
    """Compute attention weights and rest (A_BHQS, rest_BHQ) from a block's unmasked logits."""
    taken = matrix.hide_(F.softplus(logits_BHQS, threshold=EXACT_TO), block, 0.0)
    left = taken.flip(-1).cumsum(-1).flip(-1)
    shares = matrix.hide_(bl.floored_exp_(logits_BHQS - left), block, 0.0)
    return shares, torch.exp(-taken.sum(-1))


class _Stick(torch.autograd.Function):
    """Computes output and rest (out_BHTV, rest_BHT) in blocks of queries. The queries are at the last T of S positions.

    The output has the dtype of the values; the rest is float32 (float64 for float64).
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, score: Score | None, mask: Mask, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        matrix = bl.ScoreMatrix(q, k, mask, score)
        out = q.new_empty(*q.shape[:3], v.shape[3])
        rest = q.new_empty(q.shape[:3], dtype=bl.accumulate_dtype(q.dtype))
        for block in matrix.blocks():
            shares, rest[:, :, block.rows] = stick_weights(matrix, block, matrix.scored(matrix.raw(block), block))
            out[:, :, block.rows] = bl.grouped_product(shares.to(v.dtype), v[:, :, block.keys])
        ctx.save_for_backward(q, k, v, *tensors)
        ctx.score, ctx.mask = score, mask
        return out, rest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, drest: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, *tensors = ctx.saved_tensors
        matrix, groups = bl.ScoreMatrix(q, k, ctx.mask, ctx.score), k.shape[1]
        dout = dout.to(q.dtype)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        dtensors: list[Tensor | None] = [None] * len(tensors)
        for block in matrix.blocks():
            rows, keys = block.rows, block.keys
            z, logits, wanted = with_graph(matrix, block, tensors)
            shares, rest = stick_weights(matrix, block, logits.detach())
            dv[:, :, keys] += bl.grouped_transpose_product(shares.to(v.dtype), dout[:, :, rows], groups)
            dshares = bl.grouped_product(dout[:, :, rows], v[:, :, keys].transpose(-1, -2))
            slopes = shares.mul_(dshares)
            stick = slopes.cumsum(-1).add_((rest * drest[:, :, rows])[..., None])
            dz = matrix.hide_(slopes.sub_(stick.mul_(logits.detach().sigmoid())), block, 0.0)
            if ctx.score is not None:
                dz, *parts = torch.autograd.grad(logits, (z, *wanted), dz)
                add_gradients(dtensors, tensors, parts)
            dz = (dz * matrix.factor).to(q.dtype)
            dq[:, :, rows] = bl.grouped_product(dz, k[:, :, keys])
            dk[:, :, keys] += bl.grouped_transpose_product(dz, q[:, :, rows], groups)
        return dq, dk, dv, None, None, *dtensors


def _on_the_matrix(
    q_BHTD: Tensor, k_BGSD: Tensor, v_BGSV: Tensor, score: Score | None, mask: Mask
) -> tuple[Tensor, Tensor]:
    logits_BHTS = eager_logits(q_BHTD, k_BGSD, score, mask, bl.default_scale(q_BHTD))
    log_left = F.logsigmoid(-logits_BHTS)  # log of the fraction left by each key
    newer = log_left.flip(-1).cumsum(-1).flip(-1) - log_left
    shares_BHTS = torch.exp(F.logsigmoid(logits_BHTS) + newer)
    return bl.grouped_product(shares_BHTS.to(v_BGSV.dtype), v_BGSV), torch.exp(log_left.sum(-1))
