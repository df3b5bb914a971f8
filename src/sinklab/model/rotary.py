"""Rotary positional embedding, in the half-split layout of Llama."""

from typing import Any

import torch
from torch import Tensor


def rotary_tables(
    length: int,
    width: int,
    theta: float,
    device: torch.device,
    first: int = 0,
    dtype: torch.dtype = torch.float32,
    padding_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """cos and sin of position * theta^(-2i / D) for `length` positions from `first` on, each (T, D / 2), in `dtype`.

    Args:
        padding_B: counted back by so many in each row, so that what is behind padding is where it would be without;
            the tables are then (B, 1, T, D / 2).
    """
    frequency = theta ** (-torch.arange(0, width, 2, device=device, dtype=dtype) / width)
    position = torch.arange(first, first + length, device=device, dtype=dtype)
    if padding_B is not None:
        position = (position - padding_B[:, None])[:, None]
    angle = position[..., None] * frequency
    return angle.cos(), angle.sin()


def rotate(x_BHTD: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
    """Turn the pair (x_i, x_{i + D/2}) of position t by the angle of (t, i); computed in float32 at least."""
    if torch.compiler.is_compiling():  # fused by it; and the Dynamo of PyTorch 2.11 takes a wrong gradient from below
        return _rotated(x_BHTD, cos_TC, sin_TC)
    return _Rotation.apply(x_BHTD, cos_TC, sin_TC)  # type: ignore[return-value]


class _Rotation(torch.autograd.Function):
    """Its gradient is the rotation back, rounded as autograd rounds it but in half as many passes over memory."""

    @staticmethod
    def forward(ctx: Any, x_BHTD: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
        ctx.save_for_backward(cos_TC, sin_TC)
        return _rotated(x_BHTD, cos_TC, sin_TC)

    @staticmethod
    def backward(ctx: Any, gradient_BHTD: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos_TC, sin_TC = ctx.saved_tensors
        kept, crossed = (x.to(gradient_BHTD.dtype) for x in _products(gradient_BHTD, cos_TC, -sin_TC))
        return kept.add_(crossed), None, None


def _rotated(x_BHTD: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
    kept, crossed = _products(x_BHTD, cos_TC, sin_TC)
    return kept.add_(crossed).to(x_BHTD.dtype)


def _products(x_BHTD: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> tuple[Tensor, Tensor]:
    """(x_i, x_{i + D/2}) times the cosine, and (-x_{i + D/2}, x_i) times the sine: their sum is the turned x."""
    first, second = x_BHTD.to(torch.promote_types(x_BHTD.dtype, cos_TC.dtype)).chunk(2, dim=-1)
    kept = torch.cat((first, second), dim=-1).mul_(torch.cat((cos_TC, cos_TC), dim=-1))
    crossed = torch.cat((second, first), dim=-1).mul_(torch.cat((-sin_TC, sin_TC), dim=-1))
    return kept, crossed
