"""Forgetting attention (FoX, 2503.02130): attention decays by the product of the forget gates after each key."""

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from sinklab.attention.operations.base import LogSimilarity, Normalisation
from sinklab.attention.operations.call import Call
from sinklab.attention.query_blocks import accumulate_dtype
from sinklab.attention.reference import Explicit
from sinklab.schema import Example


class ForgetGate(nn.Linear):
    """Cumulative log forget gates log f_1 + .. + log f_t per query head, f_t = sigmoid(w.x_t + b).

    Args:
        width: hidden size, the dimension of x.
        heads: number of query heads.
        start: initial b.
    """

    def __init__(self, width: int, heads: int, start: float) -> None:
        super().__init__(width, heads)
        self.initial = {"bias": (start, 0.0)}

    def forward(self, input: Tensor) -> Tensor:
        """Compute the cumulative log gates (B, L, H), float32 (float64 for float64), from the input x (B, L, E)."""
        gate_BLH = super().forward(input)
        return F.logsigmoid(gate_BLH.to(accumulate_dtype(gate_BLH.dtype))).cumsum(1)


class Forgetting(LogSimilarity):
    """Forgetting attention: softmax(z_ts + sum over s < l <= t of log f_l), f_l = sigmoid(w_h.x_l + b_h) (2503.02130).

    x is the attention input after the norm; there is one gate per query head (`ForgetGate`). The sum is added after
    softcap and position bias; it does not apply to a bias key, a sink logit, or keys later than the query (prefix
    mask). w is initialised like other linear weights, b with `start`: 0 in the authors' code, so f = 1/2
    (github.com/zhixuan-lin/forgetting-transformer, `ForgettingAttentionLayer`, where the gate is `full`). The authors
    use no RoPE; here it depends on `model.position`. Their "pro" block (output gate and norm, shifted keys and values,
    qk_norm) is not implemented.
    """

    kind: Literal["forgetting"] = "forgetting"
    start: float = Field(
        default=0.0, description="initial bias b of the gate f = sigmoid(w.x + b); large b: no forgetting"
    )
    forgets: ClassVar[bool] = True
    examples: ClassVar = {"forgetting": Example()}

    def forget_gate(self, width: int, heads: int) -> nn.Module:
        return ForgetGate(width, heads, self.start)

    @property
    def sums_to_one(self) -> bool:
        return True

    def normalisation(self, call: Call) -> Normalisation:
        return Normalisation()

    def reference(self, given: Explicit) -> Tensor:
        return torch.softmax(given.logits(), -1)
