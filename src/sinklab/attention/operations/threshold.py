"""Threshold rectified attention and threshold differential attention (2601.12145).

B batch, H query heads, T queries, V value dimension.

1.5-entmax (1905.05702; in language models 2506.16640): rows sum to one, and attention weights can be exactly zero.

A_ts = relu(z_ts / 2 - tau_t)^2, with tau_t such that the row sums to one. tau is computed in blocks of queries, without
gradients, by Newton's method for h(tau) = 1, where h, the 2-norm of relu(z / 2 - tau) over the row, is convex and
decreasing. The start is max z / 2 - 1, where h is at least one; from there every step stays left of the root, and the
support only shrinks.

One more Newton step, on the row sum h^2 from the log-normaliser of `attend`, provides the gradient of tau: with the
slope -2 sum relu(z / 2 - tau) held fixed, the derivative of this step is the implicit derivative of tau. The output is
computed with `attend`, on any backend.

Rejected alternatives: sorting every row (the closed form of the paper), because a sort costs more than Newton's method,
which needs at most six steps for rows of 2,048 keys; and iterating the closed form from a support that is too large,
because it loses keys of the true support.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import normalize

from sinklab.attention import query_blocks as bl
from sinklab.attention.importance import ColumnSums, Rows
from sinklab.attention.operations.base import Call, LogSimilarity, Normalisation
from sinklab.attention.operations.differential import Difference, halves
from sinklab.attention.scores import Score, log_of, per_query
from sinklab.device import compiled
from sinklab.schema import Example, Kind


class Threshold(Kind):
    """Fields of both operations: the threshold of a row and the exponent."""

    beta: float = Field(
        default=1.0,
        ge=0,
        description="factor of the threshold beta sqrt(2 log n / d), n keys in the row, d key width",
    )
    power: float = Field(default=2.0, ge=1, description="exponent of what exceeds the threshold")

    def exceedance(self, call: Call) -> Score:
        """Return the score function z -> log relu(z - tau_t) ** power, tau_t the threshold of the query's row."""
        log_keys_BHT = call.keys_per_row().clamp(min=1).log()  # a row without visible keys has no weights
        tau_BHT = self.beta * (2 * log_keys_BHT / call.q_BHTD.shape[-1]).sqrt()
        power = self.power
        return log_of(per_query(lambda z, tau: torch.relu(z - tau) ** power, call.first), (tau_BHT,))


class ThresholdRectified(Threshold, LogSimilarity):
    """Threshold rectified attention: A_ts = relu(cos(q_t, k_s) - tau_t) ** power, without a divisor (2601.12145).

    The threshold tau_t = beta sqrt(2 log n_t / d) grows with the number n_t of keys that the query sees, including a
    bias key; d is the head width. The cosine takes the place of q.k / sqrt(d): softcap and position bias are applied to
    it, and a bias key is normalised like any other. The exponent and beta are fixed numbers, as in the authors' code
    (github.com/snap-research/TDA); their paper calls beta learnable. The paper normalises the output of every head with
    RMSNorm, for which `model.norm.head_norm` is set to true.
    """

    kind: Literal["threshold_rectified"] = "threshold_rectified"
    examples: ClassVar = {"threshold_rectified": Example()}

    @property
    def divides(self) -> bool:
        return False

    def normalisation(self, call: Call) -> Normalisation:
        return Normalisation(self.exceedance(call), 0.0)

    def output(self, call: Call, v_BGTV: Tensor) -> Tensor:
        return super().output(of_unit_vectors(call), v_BGTV)

    def rows(self, call: Call) -> Iterator[Rows]:
        return super().rows(of_unit_vectors(call))

    def column_sums(self, call: Call, counted_BT: Tensor | None = None) -> ColumnSums:
        return super().column_sums(of_unit_vectors(call), counted_BT)

    def row_sums(self, call: Call) -> Tensor:
        return super().row_sums(of_unit_vectors(call))


class Inhibition(nn.Module):
    """Weight of the second half of threshold differential attention, and RMSNorm of the output.

    Calling the module returns the weight, a scalar.

    Attributes:
        weight: learned scalar, which is clipped to [0, 1].
        norm: RMSNorm over the width of each head's output.
    """

    def __init__(self, value_width: int, start: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(start))
        self.initial = {"weight": (start, 0.0)}
        self.norm = nn.RMSNorm(value_width, eps=1e-5)

    def forward(self) -> Tensor:
        return self.weight.clamp(0, 1)


class ThresholdDifferential(Threshold, Difference):
    """Threshold differential attention: A = A1 - lambda A2, out = RMSNorm(A v) (2601.12145).

    A1 and A2 are the weights of threshold rectified attention for the two halves of q and k, with d half the head
    width. lambda is a learned scalar per layer, clipped to [0, 1] as in the authors' code. Halves, values and biases
    are those of `differential`. The norm is over the head width, with eps 1e-5 and one weight vector for all heads of a
    layer. No setting makes the operation equal to softmax. Of the paper, notes and code were read, which has neither
    projections nor an initial lambda: halves of a head, as in `differential`, are our choice.
    """

    kind: Literal["threshold_differential"] = "threshold_differential"
    start: float = Field(default=0.5, ge=0, le=1, description="initial lambda, the weight of the second half")
    keys_per_head: ClassVar[int] = 2
    examples: ClassVar = {"threshold_differential": Example()}

    @property
    def only_values(self) -> bool:
        return False  # because of the norm's weight

    @property
    def divides(self) -> bool:
        return False

    def parameters(self, heads: int, head_width: int, value_width: int, layer: int, context: int | None) -> nn.Module:
        return Inhibition(value_width, self.start)

    def strength(self, call: Call) -> Tensor:
        return call.learned()

    def parts(self, call: Call) -> tuple[Call, Call]:
        one, other = halves(call)
        return of_unit_vectors(one), of_unit_vectors(other)

    def similarity(self, part: Call) -> Score:
        return self.exceedance(part)

    def output(self, call: Call, v_BGTV: Tensor) -> Tensor:
        return call.learned.norm(self.difference(call, v_BGTV)).to(v_BGTV.dtype)


def of_unit_vectors(call: Call) -> Call:
    """Return the call with queries, keys and bias key divided by their l2 norms, so that q.k is their cosine."""
    key_HD = None if call.key_HD is None else normalize(call.key_HD, dim=-1)
    return replace(
        call, q_BHTD=normalize(call.q_BHTD, dim=-1), k_BGTD=normalize(call.k_BGTD, dim=-1), key_HD=key_HD, scale=1.0
    )


class Entmax15(LogSimilarity):
    """1.5-entmax: A_ts = relu(z_ts / 2 - tau_t)^2, with tau_t such that rows sum to one (1905.05702, 2506.16640).

    A key with a score 2 or more below the row's maximum has weight exactly zero. A bias key or sink logit is treated
    like any other key. Length-dependent scaling of queries (ASEntmax) is not implemented.
    """

    kind: Literal["entmax15"] = "entmax15"
    normal: ClassVar[bool] = True
    examples: ClassVar = {"entmax15": Example()}

    def normalisation(self, call: Call) -> Normalisation:
        tau_BHT, slope_BHT = thresholds(call)
        total_BHT = torch.exp(call.normaliser(_above(tau_BHT, call.first)))
        return Normalisation(_above(tau_BHT + (total_BHT - 1) / slope_BHT, call.first))


def _above(tau_BHT: Tensor, first: int) -> Score:
    return log_of(per_query(lambda z, tau: torch.relu(z / 2 - tau).square(), first), (tau_BHT,))


NEWTON_STEPS = 10  # at most eight were needed for tested rows of a million keys, in float64


@torch.no_grad()
def thresholds(call: Call) -> tuple[Tensor, Tensor]:
    """Compute the threshold tau and the slope of every row, (B, H, T) each.

    The slope, 2 sum relu(z / 2 - tau), is minus the derivative of the row sum with respect to tau. A bias key or sink
    logit is included. In a row without keys, tau is -1 and the slope is 1.
    """
    q = call.q_BHTD
    matrix, bias_BHT = call.matrix(), call.bias_logits()
    tau_BHT = q.new_empty(q.shape[:3], dtype=bl.accumulate_dtype(q.dtype))
    slope_BHT = torch.empty_like(tau_BHT)
    for block in matrix.blocks():
        logits, rows = matrix.logits(block), block.rows
        if bias_BHT is not None:
            logits = torch.cat([logits, bias_BHT[:, :, rows, None].to(logits.dtype)], -1)
        peak = logits.amax(-1, keepdim=True)
        peak = peak.masked_fill(peak == -torch.inf, 0)
        x = logits.sub_(peak).div_(2)
        tau, slope = _compiled_rooted()(x, False) if x.is_cuda else _rooted(x, True)
        tau_BHT[:, :, rows], slope_BHT[:, :, rows] = (tau + peak / 2).squeeze(-1), slope.squeeze(-1)
    return tau_BHT, slope_BHT


def _rooted(x: Tensor, stops: bool) -> tuple[Tensor, Tensor]:
    """Compute tau and the slope (see `thresholds`) of rows x = z / 2 with maximum 0.

    Args:
        stops: stop when no row changes any more. On CUDA this would wait for the device in each step.
    """
    tau, limits = torch.full_like(x[..., :1], -1.0), torch.finfo(x.dtype)
    for _ in range(NEWTON_STEPS):
        above = F.relu(x - tau)
        norm = torch.linalg.vector_norm(above, dim=-1, keepdim=True)
        step = ((norm - 1) * norm / above.sum(-1, keepdim=True).clamp(min=limits.tiny)).clamp(min=0)
        tau = tau + step
        if stops and not torch.any(step > 2 * limits.eps):
            break
    total = F.relu(x - tau).sum(-1, keepdim=True)
    return tau, (2 * total).masked_fill(total == 0, 1)


@functools.cache
def _compiled_rooted() -> Callable[[Tensor, bool], tuple[Tensor, Tensor]]:
    """Return `_rooted`, compiled to one pass over the scores per step; blocks of queries differ in shape."""
    return compiled(_rooted, dynamic=True)
