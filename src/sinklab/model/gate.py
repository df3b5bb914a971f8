"""Gates on the attention output or the values, which let a head output nearly zero without an attention sink.

Output gates are computed from the layer's input x (after the pre-norm, if any) and scale the attention output o_t of
every head (2505.06708). Value gates are computed from the value v_s and scale it before attention. One value gate is a
sigmoid (2510.09017). The other, V-scale (2603.17771), is a function of the value's norm:

    phi(r) = r / (r + C_g),   C_g = V d_in sigma^2 exp(theta_g),   r = |v_s|^2

V is the value dimension, d_in the input dimension of the value projection, and sigma the initial std of its weights.
At initialisation theta is 0 and C is the mean of r for inputs of unit mean square, so values are scaled by about 1/2.
The derivative of phi(r) v with respect to v is r / (r + C) orthogonal to v, and (r^2 + 3 C r) / (r + C)^2 along v.

B batch, L positions, E hidden size, H query heads, G KV heads, D (or V) value dimension; indices h and g of heads.
"""

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from sinklab.attention.query_blocks import accumulate_dtype
from sinklab.schema import Part


class NoGate(Part):
    """No gate."""

    kind: Literal["none"] = "none"


class HeadGate(Part):
    """Scalar output gate o_th sigmoid(x_t w_h): one number per head and query."""

    kind: Literal["head"] = "head"


class ElementGate(Part):
    """Elementwise output gate o_th * sigmoid(x_t W_h): one number per channel of each head and query."""

    kind: Literal["element"] = "element"


class ValueGate(Part):
    """Value gate v_sg sigmoid(v_sg w_g + b_g): one number per KV head and key, computed from the value."""

    kind: Literal["value"] = "value"


class VScaleGate(Part):
    """V-scale gate v_sg r / (r + C_g), r = |v_sg|^2; C is learned per KV head, initially the mean of r (2603.17771)."""

    kind: Literal["v_scale"] = "v_scale"


Gate = Annotated[NoGate | HeadGate | ElementGate | ValueGate | VScaleGate, Field(discriminator="kind")]


class OutputGating(nn.Module):
    """Multiplies the attention output by the sigmoid of a linear projection of the layer's input.

    Args:
        head_width: number of gates per head: the value dimension, or 1.
    """

    def __init__(self, width: int, heads: int, head_width: int) -> None:
        super().__init__()
        self.heads = heads
        self.linear = nn.Linear(width, heads * head_width, bias=False)

    def gates(self, x_BLE: Tensor) -> Tensor:
        """Compute the gates, between 0 and 1: shape (B, H, L, D), or (B, H, L, 1) with one gate per head."""
        B, L, _ = x_BLE.shape
        return torch.sigmoid(self.linear(x_BLE).view(B, L, self.heads, -1).transpose(1, 2))

    def forward(self, out_BHLD: Tensor, x_BLE: Tensor) -> Tensor:
        return out_BHLD * self.gates(x_BLE)


class ValueGating(nn.Module):
    """Multiplies every value by the sigmoid of a linear function of the value."""

    def __init__(self, key_heads: int, head_width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(key_heads, head_width))
        self.bias = nn.Parameter(torch.empty(key_heads))

    def gates(self, v_BGLD: Tensor) -> Tensor:
        """Compute the gates, shape (B, G, L, 1), between 0 and 1."""
        gate_BGL = torch.einsum("bgld,gd->bgl", v_BGLD, self.weight.to(v_BGLD.dtype)) + self.bias[:, None]
        return torch.sigmoid(gate_BGL)[..., None]

    def forward(self, v_BGLD: Tensor) -> Tensor:
        return v_BGLD * self.gates(v_BGLD).to(v_BGLD.dtype)


class ValueScaling(nn.Module):
    """V-scale: multiplies every value v by r / (r + C), r = |v|^2, C = `start` exp(theta).

    Args:
        key_heads: number of KV heads G, each with a separate theta.
        start: initial C.
    """

    def __init__(self, key_heads: int, start: float) -> None:
        super().__init__()
        self.start = start
        self.theta = nn.Parameter(torch.empty(key_heads))
        self.initial = {"theta": (0.0, 0.0)}

    def gates(self, v_BGLD: Tensor) -> Tensor:
        """Compute the gates, shape (B, G, L, 1), at least 0 and below 1, in float32 (float64 for float64)."""
        square_BGL1 = v_BGLD.to(accumulate_dtype(v_BGLD.dtype)).square().sum(-1, keepdim=True)
        constant_G11 = (self.start * torch.exp(self.theta))[:, None, None]
        return square_BGL1 / (square_BGL1 + constant_G11)

    def forward(self, v_BGLD: Tensor) -> Tensor:
        return v_BGLD * self.gates(v_BGLD).to(v_BGLD.dtype)
