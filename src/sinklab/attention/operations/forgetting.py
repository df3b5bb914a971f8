"""Forgetting attention (FoX, 2503.02130): a key fades by the product of the forget gates after it."""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from sinklab.attention.operations.base import LogSimilarity, Weighing
from sinklab.attention.operations.call import Call
from sinklab.attention.reference import Explicit
from sinklab.schema import Example


class Forgetting(LogSimilarity):
    """A = softmax(z_ts + sum over s < l <= t of log f_l), f_l = sigmoid(w_h.x_l + b_h) for every head (2503.02130).

    x is what attention reads, the layer's input after its norm; the gates are those of query heads and belong to the
    model (`model/forget.py`), the core is given their running sums. The sum is added behind softcap and position, to
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

    @property
    def sums_to_one(self) -> bool:
        return True

    def weigh(self, call: Call) -> Weighing:
        return Weighing()

    def reference(self, given: Explicit) -> Tensor:
        return torch.softmax(given.logits(), -1)
