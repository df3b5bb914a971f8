"""Gates around attention, by which a head can be a no-op without a sink.

Two gates read the layer's input x (after its norm) and scale the attention output o_t of every head (2505.06708); one
reads the values themselves and scales the contribution of the token at s before attention averages (2510.09017).
"""

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from sinklab.schema import Part


class NoGate(Part):
    """No gate."""

    kind: Literal["none"] = "none"


class HeadGate(Part):
    """o_th sigmoid(x_t w_h): one number per head and query."""

    kind: Literal["head"] = "head"


class ElementGate(Part):
    """o_th * sigmoid(x_t W_h), elementwise: one number per dimension of each head and query."""

    kind: Literal["element"] = "element"


class ValueGate(Part):
    """v_sg sigmoid(v_sg w_g + b_g): one number per key head and key, from the value itself."""

    kind: Literal["value"] = "value"


Gate = Annotated[NoGate | HeadGate | ElementGate | ValueGate, Field(discriminator="kind")]


class OutputGating(nn.Module):
    """Attention output times the sigmoid of a linear map of the layer's input."""

    def __init__(self, width: int, heads: int, head_width: int) -> None:
        super().__init__()
        self.heads = heads
        self.linear = nn.Linear(width, heads * head_width, bias=False)

    def gates(self, x_BLE: Tensor) -> Tensor:
        """In (0, 1): (B, H, L, D), or (B, H, L, 1) of one per head."""
        B, L, _ = x_BLE.shape
        return torch.sigmoid(self.linear(x_BLE).view(B, L, self.heads, -1).transpose(1, 2))

    def forward(self, out_BHLD: Tensor, x_BLE: Tensor) -> Tensor:
        return out_BHLD * self.gates(x_BLE)


class ValueGating(nn.Module):
    """Every value times a sigmoid of its own projection."""

    def __init__(self, key_heads: int, head_width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(key_heads, head_width))
        self.bias = nn.Parameter(torch.empty(key_heads))

    def gates(self, v_BGLD: Tensor) -> Tensor:
        """In (0, 1): (B, G, L, 1)."""
        gate_BGL = torch.einsum("bgld,gd->bgl", v_BGLD, self.weight.to(v_BGLD.dtype)) + self.bias[:, None]
        return torch.sigmoid(gate_BGL)[..., None]

    def forward(self, v_BGLD: Tensor) -> Tensor:
        return v_BGLD * self.gates(v_BGLD).to(v_BGLD.dtype)
