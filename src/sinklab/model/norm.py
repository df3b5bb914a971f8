"""Norms: formula, placement, a gate after the norm, and norms per head.

Head-wise RMSNorm of the attention output (2605.06611) normalises the output of each head before the output projection.
It is implemented from the abstract and citations; it is unknown whether the paper's norm has a weight. Here it has one
weight vector for all heads of a layer, like qk_norm, or one per head (`per_head`). The latter is used in the code of
forgetting attention (2503.02130), which has GroupNorm over heads for queries, keys and outputs. The output projection
is linear, with separate weights for each head. A norm weight per head therefore changes only the parametrisation,
unless `head_outputs` is sum.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from sinklab.schema import Part

OfHeads = bool | Literal["per_head"]
"""Norm per head: False for none, True with one weight vector for all heads, "per_head" with one per head."""


class NormConfig(Part):
    """Norms of the residual stream (kind and placement) and of attention heads."""

    kind: Literal["rmsnorm", "rmsnorm_single", "layernorm", "dynamic_tanh"] = Field(
        default="rmsnorm",
        description="rmsnorm: w x / rms(x); rmsnorm_single: rmsnorm with scalar w; layernorm: w (x - mean) / std + b; "
        "dynamic_tanh: w tanh(alpha x) + b",
    )
    placement: Literal["pre", "post", "sandwich"] = Field(
        default="pre",
        description="pre: x + f(norm(x)); post: norm(x + f(x)), no final norm; sandwich: x + norm(f(norm(x)))",
    )
    eps: float = Field(
        default=1e-5,
        gt=0,
        description="eps of all norms, including those of heads, latents and linear attention; unused by dynamic_tanh",
    )
    alpha: float = Field(default=0.5, gt=0, description="initial slope of dynamic_tanh")
    qk_norm: OfHeads = Field(
        default=False,
        description="RMSNorm of every query and key, before RoPE; true: one weight vector for all queries and one for "
        "all keys; per_head: one per head",
    )
    head_norm: OfHeads = Field(
        default=False,
        description="RMSNorm of each head's attention output; true: one weight vector for all heads; per_head: one per "
        "head",
    )
    gate_rank: int | None = Field(
        default=None,
        ge=1,
        description="rank of the gate y sigmoid(W_up swish(W_down y)) on the output y of every residual-stream norm; "
        "null: no gate",
    )


class DynamicTanh(nn.Module):
    """Dynamic tanh, w * tanh(alpha * x) + b, elementwise, with one learned alpha (2503.10622)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))
        self.alpha = nn.Parameter(torch.empty(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * torch.tanh(self.alpha * x) + self.bias


class RmsNorm(nn.RMSNorm):
    """RMSNorm; `_RmsNorm` computes it on a CPU, if it is not compiled and input and weight have the same dtype."""

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu" or x.dtype != self.weight.dtype or torch.compiler.is_compiling():
            return super().forward(x)
        return _RmsNorm.apply(x, x, self.weight, self.eps)  # type: ignore[return-value]


class _RmsNorm(torch.autograd.Function):
    """w x / r with r = sqrt(mean(x ** 2) + eps): bitwise equal to autograd of this formula, in half the time.

    The input is passed twice, for the numerator and for r, so that autograd adds the two gradients in its usual order.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, again: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = torch.rsqrt(again.pow(2).mean(-1, keepdim=True) + eps)
        unit = x * inverse
        ctx.save_for_backward(x, weight, inverse, unit)
        return unit * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        x, weight, inverse, unit = ctx.saved_tensors
        dweight = (gradient * unit).sum(tuple(range(x.ndim - 1)))
        dunit = gradient * weight
        dinverse = (dunit * x).sum(-1, keepdim=True)
        dmean = -0.5 * dinverse * inverse.pow(3) / x.shape[-1]
        return dunit * inverse, x * (2 * dmean), dweight, None


class SingleGainNorm(nn.Module):
    """RMSNorm with a scalar weight, w x / sqrt(mean(x^2) + eps): SSNorm of 2506.19697."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(1))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=self.eps) * self.weight


class HeadNorm(nn.RMSNorm):
    """RMSNorm of heads or latents over the last axis, computed in the weight's dtype, returned in the input's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class OwnHeadNorm(nn.Module):
    """RMSNorm over the head dimension with a separate weight vector per head, and with the dtypes of `HeadNorm`.

    Args:
        heads: number of heads H. The input is (B, H, L, parts, D), or (B, H, L, D) with one part.
        parts: number of vectors of dimension D per head, each with a separate weight.
        width: dimension D of each vector.
    """

    def __init__(self, heads: int, parts: int, width: int, eps: float) -> None:
        super().__init__()
        self.heads, self.eps = heads, eps
        self.weight = nn.Parameter(torch.empty(heads * parts * width))

    def forward(self, x: Tensor) -> Tensor:
        unit = F.rms_norm(x.to(self.weight.dtype), x.shape[-1:], eps=self.eps)
        return (unit * self.weight.view(self.heads, 1, *x.shape[3:])).to(x.dtype)


def norm_of_heads(wanted: OfHeads, heads: int, width: int, eps: float, parts: int = 1) -> nn.Module:
    """Build the norm of the `parts` vectors, of dimension `width`, of each head; the identity if `wanted` is False."""
    if wanted == "per_head":
        return OwnHeadNorm(heads, parts, width, eps)
    return HeadNorm(width, eps=eps) if wanted else nn.Identity()


class LowRankGate(nn.Module):
    """Gate y * sigmoid(W_up swish(W_down y)) on the output y of a norm: GatedNorm (2601.22966, section 3.4)."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, y_BLE: Tensor) -> Tensor:
        return y_BLE * torch.sigmoid(self.up(F.silu(self.down(y_BLE))))


class _Gated(nn.Module):
    """Mixin: a norm followed by a low-rank gate."""

    gate: LowRankGate

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(super().forward(x))


class GatedRmsNorm(_Gated, RmsNorm):
    """RMSNorm followed by a low-rank gate: GatedNorm."""


class GatedSingleGainNorm(_Gated, SingleGainNorm):
    """RMSNorm with a scalar weight, followed by a low-rank gate."""


class GatedLayerNorm(_Gated, nn.LayerNorm):  # type: ignore[override]  # which names x input
    """LayerNorm followed by a low-rank gate."""


class GatedDynamicTanh(_Gated, DynamicTanh):
    """Dynamic tanh followed by a low-rank gate: GatedDyT of 2601.22966."""


def build_norm(config: NormConfig, width: int) -> nn.Module:
    """Build a norm of the residual stream, followed by a gate if `config.gate_rank` is set."""
    gated = config.gate_rank is not None
    if config.kind == "dynamic_tanh":
        norm = (GatedDynamicTanh if gated else DynamicTanh)(width)
    elif config.kind == "layernorm":
        norm = (GatedLayerNorm if gated else nn.LayerNorm)(width, eps=config.eps)
    elif config.kind == "rmsnorm_single":
        norm = (GatedSingleGainNorm if gated else SingleGainNorm)(config.eps)
    else:
        norm = (GatedRmsNorm if gated else RmsNorm)(width, eps=config.eps)
    if config.gate_rank is not None:
        norm.gate = LowRankGate(width, config.gate_rank)
    return norm
