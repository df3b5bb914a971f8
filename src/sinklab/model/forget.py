"""Forget gates: how much of every earlier key is left after a token, one number per head, made of what attention reads.

Under forgetting attention (2503.02130) a key has faded by the product of the gates after it. The attention core needs
differences of their running sum only, which is what is handed to it and kept while a sequence is continued.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from sinklab.attention.blocks import accumulate_dtype


class ForgetGating(nn.Linear):
    """f_t = sigmoid(W x_t + b) of every query head.

    Args:
        width: of x.
        heads: query heads.
        start: b before training.
    """

    def __init__(self, width: int, heads: int, start: float) -> None:
        super().__init__(width, heads)
        self.initial = {"bias": (start, 0.0)}

    def forward(self, input: Tensor) -> Tensor:
        """log f_1 + .. + log f_t of every position, float32 (float64 for float64): (B, L, H).

        Args:
            input: x (B, L, E), what attention reads.
        """
        gate_BLH = super().forward(input)
        return F.logsigmoid(gate_BLH.to(accumulate_dtype(gate_BLH.dtype))).cumsum(1)
