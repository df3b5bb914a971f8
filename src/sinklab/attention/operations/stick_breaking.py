"""Stick-breaking attention (2410.17980).

Going backwards from the newest key, key s receives the fraction beta_s = sigmoid(l_s) of the attention left by the
later keys, A_s = beta_s prod over j > s of (1 - beta_j); the remaining attention is called the rest. With u =
softplus(l), log A_s = l_s - sum over j >= s of u_j and log rest = -(sum of all u_j): one softplus, one cumulative sum
and one exponential per score. In the backward pass, g_s = A_s dA_s is the gradient of log A_s, and that of a logit is

    dl_s = g_s - beta_s (g_s + sum of g over the keys before s + rest drest),

another cumulative sum. Blocks of queries are recomputed in the backward pass, with O(T * block) memory. The score
function is differentiated by autograd, block by block, as in `chunked.py`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sinklab.attention import query_blocks as bl
from sinklab.attention.chunked import add_gradients, with_graph
from sinklab.attention.importance import Rows
from sinklab.attention.masks import Mask, WrappedMask
from sinklab.attention.operations.base import OperationPart
from sinklab.attention.operations.call import Call
from sinklab.attention.primitive import eager_logits
from sinklab.attention.reference import Explicit
from sinklab.attention.scores import Score
from sinklab.schema import Example


class StickRest(nn.Module):
    """Learned value vector of the rest (the remaining attention) per head: (H, V)."""

    def __init__(self, heads: int, value_width: int) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(heads, value_width))
        self.initial = {"value": (0.0, 0.0)}


class StickBreaking(OperationPart):
    """Stick-breaking attention: A_ts = sigmoid(z_ts) prod over s < j < t of (1 - sigmoid(z_tj)) (2410.17980).

    The query's own key is excluded. The rest, 1 - sum of A, is an implicit sink and is reported like the attention to a
    bias. Its value is zero, as in the paper's formula; the query's own value, as in the released model
    (`sb_remainder` in github.com/IBM/dolomite-engine, `sb_dolomite`); or a learned vector per head, initially zero, as
    in the later code (`head_bias`, followed there by a norm per head, which is not implemented). Biases that add keys
    or logits are not supported.
    """

    kind: Literal["stick_breaking"] = "stick_breaking"
    rest: Literal["dropped", "own", "learned"] = Field(
        default="dropped",
        description="value of the remaining attention: zero, the query's own value, or a learned vector per head",
    )
    sequential: ClassVar[bool] = True
    examples: ClassVar = {
        "stick_breaking": Example(),
        "stick_breaking_rest_own": Example({"rest": "own"}),
        "stick_breaking_rest_learned": Example({"rest": "learned"}),
    }

    @property
    def sums_to_one(self) -> bool:
        return True

    @property
    def only_values(self) -> bool:
        return self.rest != "learned"

    def parameters(
        self, heads: int, head_width: int, value_width: int, layer: int, context: int | None
    ) -> nn.Module | None:
        return StickRest(heads, value_width) if self.rest == "learned" else None

    def output(self, call: Call, v_BGTV: Tensor) -> Tensor:
        mask, eager = OtherKeys(call.mask), call.backend == "eager"
        out, rest_BHT = break_sticks(call.q_BHTD, call.k_BGTD, v_BGTV, call.score(), mask, eager=eager)
        if self.rest == "dropped":
            return out
        if isinstance(call.learned, StickRest):
            carried = call.learned.value[:, None].to(out.dtype)
        else:
            carried = v_BGTV[:, :, call.first :].repeat_interleave(out.shape[1] // v_BGTV.shape[1], 1)
        return out + rest_BHT[..., None].to(out.dtype) * carried

    @torch.no_grad()
    def rows(self, call: Call) -> Iterator[Rows]:
        mask = OtherKeys(call.mask)
        for block in bl.blocks(call.q_BHTD, call.k_BGTD, mask):
            yield Rows(block, *block_rows(call.q_BHTD, call.k_BGTD, block, call.score(), mask))

    def row_sums(self, call: Call) -> Tensor:
        return call.q_BHTD.new_ones(call.q_BHTD.shape[:3])

    def reference(self, given: Explicit) -> Tensor:
        z = given.logits()
        own = torch.eye(z.shape[-1], dtype=torch.bool, device=z.device)
        left, shares = torch.ones_like(z[..., 0]), []
        for s in reversed(range(z.shape[-1])):
            shares.append(torch.where(own[:, s], 0, left * torch.sigmoid(z[..., s])))
            left = torch.where(own[:, s], left, left * torch.sigmoid(-z[..., s]))
        return torch.stack([left, *reversed(shares)], dim=-1)

    def reference_output(self, given: Explicit, out_BHTV: Tensor) -> Tensor:
        rest = self.reference(given)[..., :1]
        if self.rest == "own":
            return out_BHTV + rest * given.v_BHTV
        if isinstance(given.learned, StickRest):
            return out_BHTV + rest * given.learned.value[:, None]
        return out_BHTV


EXACT_TO = 40.0  # softplus threshold: the error is 4e-18, instead of 2e-9 with the default of 20


@dataclass(frozen=True)
class OtherKeys(WrappedMask):
    """Mask that hides each query's own key."""

    @property
    def may_be_empty(self) -> bool:
        return True

    def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.rest.allowed(b, h, q, k) & (k != q)

    def key_range(self, first: int, end: int, keys: int) -> tuple[int, int]:
        return self.rest.key_range(first, end, keys)

    def full_range(self, first: int, end: int, keys: int) -> tuple[int, int]:
        low, high = self.rest.full_range(first, end, keys)
        return low, max(low, min(high, first))


def broken(logits_BHQS: Tensor, seen: Callable[[Tensor, float], Tensor]) -> tuple[Tensor, Tensor]:
    """Compute attention weights and remaining attention (A_BHQS, rest_BHQ) from a block's logits, keys in order.

    Args:
        logits_BHQS: logits of the block; not modified.
        seen: function that sets masked entries to a value in place (`query_blocks.mask_block_`).
    """
    taken = seen(F.softplus(logits_BHQS, threshold=EXACT_TO), 0.0)
    left = taken.flip(-1).cumsum(-1).flip(-1)
    shares = seen(bl.floored_exp_(logits_BHQS - left), 0.0)
    return shares, torch.exp(-taken.sum(-1))


def block_rows(
    q_BHTD: Tensor, k_BGSD: Tensor, block: bl.Block, score: Score | None, mask: Mask
) -> tuple[Tensor, Tensor]:
    """Compute attention weights and remaining attention of one block of queries (see `broken`)."""
    S = k_BGSD.shape[2]
    offset = S - q_BHTD.shape[2]
    z_BHQS = bl.raw_scores(q_BHTD, k_BGSD, block, bl.default_scale(q_BHTD))
    return broken(bl.score_block(z_BHQS, block, offset, score), _seen(block, offset, S, mask))


class _Stick(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, score: Score | None, mask: Mask, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        B, H, T, _ = q.shape
        out = q.new_empty(B, H, T, v.shape[3])
        rest = q.new_empty(B, H, T, dtype=bl.accumulate_dtype(q.dtype))
        for block in bl.blocks(q, k, mask):
            rows = slice(block.start, block.stop)
            shares, rest[:, :, rows] = block_rows(q, k, block, score, mask)
            out[:, :, rows] = bl.grouped_product(shares.to(v.dtype), v[:, :, block.low : block.high])
        ctx.save_for_backward(q, k, v, *tensors)
        ctx.score, ctx.mask = score, mask
        return out, rest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, drest: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, *tensors = ctx.saved_tensors
        score: Score | None = ctx.score
        T, S, groups, scale = q.shape[2], k.shape[2], k.shape[1], bl.default_scale(q)
        dout = dout.to(q.dtype)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        dtensors: list[Tensor | None] = [None] * len(tensors)
        for block in bl.blocks(q, k, ctx.mask):
            rows, keys = slice(block.start, block.stop), slice(block.low, block.high)
            z, logits, wanted = with_graph(bl.raw_scores(q, k, block, scale), block, S - T, score, tensors)
            seen = _seen(block, S - T, S, ctx.mask)
            shares, rest = broken(logits.detach(), seen)
            dv[:, :, keys] += bl.grouped_transpose_product(shares.to(v.dtype), dout[:, :, rows], groups)
            dshares = bl.grouped_product(dout[:, :, rows], v[:, :, keys].transpose(-1, -2))
            slopes = shares.mul_(dshares)
            stick = slopes.cumsum(-1).add_((rest * drest[:, :, rows])[..., None])
            dlogits = seen(slopes.sub_(stick.mul_(logits.detach().sigmoid())), 0.0)
            dz = dlogits
            if score is not None:
                dz, *parts = torch.autograd.grad(logits, (z, *wanted), dlogits)
                add_gradients(dtensors, tensors, parts)
            dz = (dz * scale).to(q.dtype)
            dq[:, :, rows] = bl.grouped_product(dz, k[:, :, keys])
            dk[:, :, keys] += bl.grouped_transpose_product(dz, q[:, :, rows], groups)
        return dq, dk, dv, None, None, *dtensors


def _seen(block: bl.Block, offset: int, keys: int, mask: Mask) -> Callable[[Tensor, float], Tensor]:
    return lambda scores_BHQS, value: bl.mask_block_(scores_BHQS, block, offset, keys, mask, value)


def break_sticks(
    q_BHTD: Tensor, k_BGSD: Tensor, v_BGSV: Tensor, score: Score | None, mask: Mask, *, eager: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute output and remaining attention (out_BHTV, rest_BHT) of stick-breaking attention.

    Args:
        q_BHTD: queries, the last T of S positions.
        k_BGSD, v_BGSV: keys and values; H a multiple of G.
        score: score function applied to q.k * scale; None is the identity.
        mask: mask of visible keys, without each query's own (`OtherKeys`).
        eager: whether to compute the explicit T x S matrix, differentiated by autograd.

    Returns:
        The output in the dtype of the values; the remaining attention in float32 (float64 for float64).

    Raises:
        ValueError: if the shapes of queries and keys do not match.
    """
    bl.check_shapes(q_BHTD, k_BGSD)
    if eager:
        return _on_the_matrix(q_BHTD, k_BGSD, v_BGSV, score, mask)
    tensors = () if score is None else score.tensors
    return _Stick.apply(q_BHTD, k_BGSD, v_BGSV, score, mask, *tensors)  # type: ignore


def _on_the_matrix(
    q_BHTD: Tensor, k_BGSD: Tensor, v_BGSV: Tensor, score: Score | None, mask: Mask
) -> tuple[Tensor, Tensor]:
    logits_BHTS = eager_logits(q_BHTD, k_BGSD, score, mask, bl.default_scale(q_BHTD))
    log_left = F.logsigmoid(-logits_BHTS)  # log of the fraction left by each key
    newer = log_left.flip(-1).cumsum(-1).flip(-1) - log_left
    shares_BHTS = torch.exp(F.logsigmoid(logits_BHTS) + newer)
    return bl.grouped_product(shares_BHTS.to(v_BGSV.dtype), v_BGSV), torch.exp(log_left.sum(-1))
