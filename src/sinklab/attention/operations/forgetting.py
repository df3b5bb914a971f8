"""Forgetting attention (FoX, 2503.02130): a key is weighted by the product of the forget gates after it."""

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
    """log f_1 + .. + log f_t of every query head, f_t = sigmoid(w.x_t + b).

    The core needs only differences of the running sum; a continued sequence stores the sum.

    Args:
        width: width of x.
        heads: number of query heads.
        start: initial b.
    """

    def __init__(self, width: int, heads: int, start: float) -> None:
        super().__init__(width, heads)
        self.initial = {"bias": (start, 0.0)}

    def forward(self, input: Tensor) -> Tensor:
        """Map x (B, L, E), the input of attention, to float32 (float64 for float64) sums (B, L, H)."""
        gate_BLH = super().forward(input)
        return F.logsigmoid(gate_BLH.to(accumulate_dtype(gate_BLH.dtype))).cumsum(1)


class Forgetting(LogSimilarity):
    """A = softmax(z_ts + sum over s < l <= t of log f_l), f_l = sigmoid(w_h.x_l + b_h) for every head (2503.02130).

    x is the attention input, the layer's input after its norm. The gates, one per query head, belong to the model
    (`ForgetGate`); the core receives their running sums. The sum is added after softcap and position, to the keys of
    the sequence only: it does not apply to a bias key, a sink logit, or a key later than its query (prefix mask). w is
    initialised like any linear map, b at `start`: 0 in the authors' code, f = 1/2
    (github.com/zhixuan-lin/forgetting-transformer, `ForgettingAttentionLayer`, where the gate is `full`). The authors
    use no rotary embedding; here `model.position` decides. Their "pro" block (output gate and norm, shifted keys and
    values, qk_norm) is not implemented.
    """

    kind: Literal["forgetting"] = "forgetting"
    start: float = Field(default=0.0, description="initial b in f = sigmoid(w.x + b); a large b means no forgetting")
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
