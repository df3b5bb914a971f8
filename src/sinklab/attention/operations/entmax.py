"""1.5-entmax (1905.05702; in language models 2506.16640): rows sum to one, and attention weights can be exactly zero.

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

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from sinklab.attention import query_blocks as bl
from sinklab.attention.operations.base import LogSimilarity, Normalisation
from sinklab.attention.operations.call import Call
from sinklab.attention.scores import Score, log_of, per_query
from sinklab.schema import Example


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
        tau, slope = _rooted(logits.sub_(peak).div_(2))
        tau_BHT[:, :, rows], slope_BHT[:, :, rows] = (tau + peak / 2).squeeze(-1), slope.squeeze(-1)
    return tau_BHT, slope_BHT


def _rooted(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute tau and the slope (see `thresholds`) of rows x = z / 2 with maximum 0."""
    tau, limits = torch.full_like(x[..., :1], -1.0), torch.finfo(x.dtype)
    for _ in range(NEWTON_STEPS):
        above = F.relu(x - tau)
        norm = torch.linalg.vector_norm(above, dim=-1, keepdim=True)
        step = ((norm - 1) * norm / above.sum(-1, keepdim=True).clamp(min=limits.tiny)).clamp(min=0)
        tau = tau + step
        if not x.is_cuda and not torch.any(step > 2 * limits.eps):
            break  # not on CUDA, where the check would synchronise
    total = F.relu(x - tau).sum(-1, keepdim=True)
    return tau, (2 * total).masked_fill(total == 0, 1)
