"""Operations with two passes over the scores: the first computes a row sum, the second the output."""

import math
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from sinklab.attention.biases import SMALLEST_LOGIT
from sinklab.attention.operations.base import Call, LogSimilarity, Normalisation
from sinklab.attention.primitive import LARGEST_LOG_SUM
from sinklab.attention.scores import Score, log_of, per_query
from sinklab.schema import Example, NeutralExample


class ClippedSoftmax(LogSimilarity):
    """Clipped softmax: clip((zeta - gamma) softmax(z)_ts + gamma, 0, 1) (2306.12929).

    It equals softmax if zeta is 1 and gamma is 0.
    """

    kind: Literal["clipped_softmax"] = "clipped_softmax"
    zeta: float = Field(default=1.0, ge=1, description="upper end of the interval to which softmax is stretched")
    gamma: float = Field(
        default=-0.03,
        le=0,
        description="lower end of the interval to which softmax is stretched; if negative, scores can be exactly zero",
    )
    examples: ClassVar = {"clipped_softmax": Example()}
    neutral: ClassVar = {"gamma": NeutralExample("0, zeta 1", {"gamma": 0.0})}

    @property
    def plain(self) -> bool:
        return self.zeta == 1 and self.gamma == 0

    def normalisation(self, call: Call) -> Normalisation:
        if self.plain:
            return Normalisation()
        zeta, gamma = self.zeta, self.gamma

        def clipped(z: Tensor, lse: Tensor) -> Tensor:
            stretched = _share(z, lse) * (zeta - gamma) + gamma
            return stretched if zeta == 1 else stretched.clamp(max=1)

        return Normalisation(log_of(per_query(clipped, call.first), (call.normaliser(None),)), 0.0)


def _share(z: Tensor, lse: Tensor) -> Tensor:
    """Compute exp(z - lse), clamped to at most one, because z may be large at keys that are masked later."""
    return torch.exp(-torch.relu(lse - z))


class Softpick(LogSimilarity):
    """Softpick: A_ts = relu(exp(z_ts) - 1) / (sum_s |exp(z_ts) - 1| + eps) (2504.20966).

    The divisor is computed as sum_s relu(exp(z_ts) - 1) + sum_s relu(1 - exp(z_ts)) + eps, without overflow.
    """

    kind: Literal["softpick"] = "softpick"
    eps: float = Field(default=1e-6, gt=0, description="number added to the divisor")
    zero_at_zero: ClassVar[bool] = True
    examples: ClassVar = {"softpick": Example()}

    def normalisation(self, call: Call) -> Normalisation:
        deficit = call.normaliser(DEFICIT).clamp(min=SMALLEST_LOGIT)
        eps = torch.full_like(deficit, math.log(self.eps))
        return Normalisation(EXCESS, log_addend=torch.logaddexp(deficit, eps))


def _excess(z: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Compute relu(exp(z) - 1), clamped for large z, where `_log_excess` is used instead."""
    return torch.expm1(F.hardtanh(z, 0.0, LARGEST_LOG_SUM + 4))


def _log_excess(z: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    positive = torch.relu(z)
    return positive + (-torch.expm1(-positive)).log()


EXCESS = Score(_log_excess, similarity=_excess, vanishes=True)
DEFICIT = log_of(lambda z, b, h, q, k: -torch.expm1(-torch.relu(-z)))  # relu(1 - exp(z))


class Offset(nn.Module):
    """Learned offset tau per head (H,)."""

    def __init__(self, heads: int, start: float) -> None:
        super().__init__()
        self.tau = nn.Parameter(torch.full((heads,), start))
        self.initial = {"tau": (start, 0.0)}


class ElasticSoftmax(LogSimilarity):
    """Elastic softmax: relu(softmax(z)_ts + tau_h / i_t), with an offset tau learned per head (2601.00919).

    i_t is the number of keys that query t sees, including a bias key or sink logit. tau = 0 is softmax. Of the paper's
    method, only this normalisation is implemented.
    """

    kind: Literal["elastic_softmax"] = "elastic_softmax"
    start: float = Field(default=0.0, description="initial value of the offset tau")
    examples: ClassVar = {"elastic_softmax": Example({"start": -1.0})}

    def parameters(self, heads: int, head_width: int, value_width: int, layer: int, context: int | None) -> nn.Module:
        return Offset(heads, self.start)

    def normalisation(self, call: Call) -> Normalisation:
        lse_BHT = call.normaliser(None)
        offset_BHT = call.learned.tau.to(lse_BHT.dtype)[:, None] / call.keys_per_row()
        shifted = per_query(lambda z, lse, offset: _share(z, lse) + offset, call.first)
        return Normalisation(log_of(shifted, (lse_BHT, offset_BHT)), 0.0)
