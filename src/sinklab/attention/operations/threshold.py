"""Threshold rectified attention and threshold differential attention (2601.12145).

B batch, H query heads, T queries, V value dimension.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import normalize

from sinklab.attention.importance import Rows
from sinklab.attention.operations.base import LogSimilarity, Normalisation
from sinklab.attention.operations.call import Call
from sinklab.attention.operations.differential import Difference, halves
from sinklab.attention.scores import Score, log_of, per_query
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
