"""Forgetting attention (FoX, 2503.02130): a key fades by the product of the forget gates after it."""

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

    The core needs differences of the running sum only; the sum is what a continued sequence keeps.

    Args:
        width: of x.
        heads: query heads.
        start: b before training.
    """

    def __init__(self, width: int, heads: int, start: float) -> None:
        super().__init__(width, heads)
        self.initial = {"bias": (start, 0.0)}

    def forward(self, input: Tensor) -> Tensor:
        """x (B, L, E), the input of attention, to float32 (float64 for float64) sums (B, L, H)."""
        gate_BLH = super().forward(input)
        return F.logsigmoid(gate_BLH.to(accumulate_dtype(gate_BLH.dtype))).cumsum(1)


class Forgetting(LogSimilarity):
    """A = softmax(z_ts + sum over s < l <= t of log f_l), f_l = sigmoid(w_h.x_l + b_h) for every head (2503.02130).

    x is the attention input, the layer's input after its norm; the gates are those of query heads and a module of the
    model (`ForgetGate`), the core receives their running sums. The sum is added behind softcap and position, to
    the keys of the sequence: a bias key or sink logit does not fade, and a key later than its query (prefix mask)
    neither. w starts as any linear map, b at `start`: 0 in the authors' code, f = 1/2
    (github.com/zhixuan-lin/forgetting-transformer, `ForgettingAttentionLayer`, where the gate is `full`). The authors
    leave rotary out; here `model.position` says. Their "pro" block (output gate and norm, shifted keys and values,
    qk_norm) is not part of this.
    """

    kind: Literal["forgetting"] = "forgetting"
    start: float = Field(default=0.0, description="b in f = sigmoid(w.x + b) before training; large: nothing fades")
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
