"""Projections, values and outputs of an attention layer.

Projections to queries, keys and values, and changes of values and outputs: value residual, exclusive outputs, gates.

Value residual learning (2410.17897): every layer's values are mixed with those of the first layer.

    v_l' = lambda_1 v_1 + lambda_2 v_l        for layers l from 2; layer 1 is unchanged

v_1 and v_l are the attention values after a value gate, if any. The authors' code (Zcchill/Value-Residual-Learning,
`modeling_llama_resformer.py`) has fixed lambdas of 1/2: ResFormer. The learned form has two parameters per layer here,
initially 1/2; the full paper was not available. With lambdas 1 and 0, all layers use the first layer's values, as in
SVFormer, but the values of later layers are still computed.

B batch, G KV heads, L positions, D head dimension.

Exclusive self-attention (2603.09078): removes from a head's output its component along the token's own value.

    z_t = o_t - (o_t.v_t) v_t / |v_t|^2

This is computed from o_t - v_t instead of o_t, which is equivalent. For a token that sees only itself, o_t = v_t, and
the result is exactly 0 instead of rounding noise, which a following norm with eps 1e-5 would amplify up to 316 times.
For such a token, o_t may also be v_t times a factor other than 1: if a sink logit or a bias key without a value
receives attention, or if attention weights are not normalised. The result would be rounding noise again, and is set to
0 (`Attention.sees_one_key`).

o_t is the output of a query head at token t, and v_t the value of token t in its KV head. |v_t| is clamped to at least
1e-12. The formula is from the paper, whose code was not available; public implementations (submissions to
openai/parameter-golf, `_xsa_efficient`) compute the same with `F.normalize`.

B batch, H query heads, G KV heads, R = H / G, L positions, D head dimension.

Gates on the attention output or the values, which let a head output nearly zero without an attention sink.

Output gates are computed from the layer's input x (after the pre-norm, if any) and scale the attention output o_t of
every head (2505.06708). Value gates are computed from the value v_s and scale it before attention. One value gate is a
sigmoid (2510.09017). The other, V-scale (2603.17771), is a function of the value's norm:

    phi(r) = r / (r + C_g),   C_g = V d_in sigma^2 exp(theta_g),   r = |v_s|^2

V is the value dimension, d_in the input dimension of the value projection, and sigma the initial std of its weights.
At initialisation theta is 0 and C is the mean of r for inputs of unit mean square, so values are scaled by about 1/2.
The derivative of phi(r) v with respect to v is r / (r + C) orthogonal to v, and (r^2 + 3 C r) / (r + C)^2 along v.

B batch, L positions, E hidden size, H query heads, G KV heads, D (or V) value dimension; indices h and g of heads.

Projections to queries, keys and values: one matrix, or a latent of low rank (2405.04434).

Multi-head latent attention (MLA; DeepSeek-V2, section 2.1 and appendix C; V3, 2412.19437): keys and values of all heads
are linear in one low-dimensional latent c, so that a KV cache needs to store only c. This is incompatible with rotating
the keys computed from c. Each key therefore has a second part, which is computed directly from x and shared by all
heads. Only this part is rotated ("decoupled" RoPE).

    c_t = norm(x_t W_DKV)     k^C_th, v_th = c_t W_UKV    k^R_t = rotated(x_t W_KR)     k_th = [k^C_th; k^R_t]
    c'_t = norm(x_t W_DQ)     q^C_th, q^R_th = c'_t W_UQ  q_th = [q^C_th; rotated(q^R_th)]

x_t is the attention input, and [a; b] a concatenation. If queries are not compressed (V2-Lite), c'_t is x_t. The rows
of the matrices are ordered as in the published code: by head, the unrotated part before the rotated part, k before v.

B batch, L positions, E hidden size, H heads, N and P dimensions of the unrotated and the rotated part, V value
dimension, R rank of the latent.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from sinklab.attention.config import AttentionConfig
from sinklab.attention.query_blocks import accumulate_dtype
from sinklab.model.norm import HeadNorm
from sinklab.model.position import rotate
from sinklab.schema import LARGEST, Part

Width = Annotated[int | None, Field(ge=1, le=LARGEST)]


class NoValueResidual(Part):
    """No value residual."""

    kind: Literal["none"] = "none"


class FixedValueResidual(Part):
    """Value residual lambda_1 v_1 + lambda_2 v_l with fixed lambdas (ResFormer)."""

    kind: Literal["fixed"] = "fixed"
    first: float = Field(default=0.5, description="lambda_1, weight of the first layer's values")
    own: float = Field(default=0.5, description="lambda_2, weight of the layer's own values")


class LearnedValueResidual(Part):
    """Value residual lambda_1 v_1 + lambda_2 v_l with learned lambdas in every layer from the second on."""

    kind: Literal["learned"] = "learned"
    start_first: float = Field(default=0.5, description="initial lambda_1")
    start_own: float = Field(default=0.5, description="initial lambda_2")


ValueResidual = Annotated[NoValueResidual | FixedValueResidual | LearnedValueResidual, Field(discriminator="kind")]


class ValueMixing(nn.Module):
    """Value residual of one layer.

    Attributes:
        first, own: lambda_1 and lambda_2; parameters of shape (1,) if they are learned, else numbers.
        initial: mean and std of the initial values of learned lambdas, by name; empty if they are fixed.
    """

    def __init__(self, config: FixedValueResidual | LearnedValueResidual) -> None:
        super().__init__()
        self.first: nn.Parameter | float
        self.own: nn.Parameter | float
        self.initial: dict[str, tuple[float, float]] = {}
        if isinstance(config, LearnedValueResidual):
            self.first, self.own = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(1))
            self.initial = {"first": (config.start_first, 0.0), "own": (config.start_own, 0.0)}
        else:
            self.first, self.own = config.first, config.own

    def forward(self, v_BGLD: Tensor, first_BGLD: Tensor) -> Tensor:
        return (self.first * first_BGLD + self.own * v_BGLD).to(v_BGLD.dtype)


def without_own_value(out_BHLD: Tensor, v_BGLD: Tensor, one_key_BHL: Tensor | None = None) -> Tensor:
    """Remove from every head's output its component along the value at the same position, in float32 or float64.

    Args:
        out_BHLD: output of the attention core; the result has the same dtype.
        v_BGLD: values of the same positions, H a multiple of G.
        one_key_BHL: bool, (B or 1, H or 1, L), True where o_t is a multiple of v_t up to rounding; the result is 0
            there. None if there are no such positions, or if o_t is exactly v_t at all of them.
    """
    dtype = accumulate_dtype(out_BHLD.dtype)
    out_BGRLD = out_BHLD.to(dtype).unflatten(1, (v_BGLD.shape[1], -1))
    unit_BG1LD = F.normalize(v_BGLD.to(dtype), dim=-1)[:, :, None]
    of_others_BGRLD = out_BGRLD - v_BGLD.to(dtype)[:, :, None]  # exactly 0 where o_t is v_t
    along_BGRL1 = (of_others_BGRLD * unit_BG1LD).sum(-1, keepdim=True)
    left_BGRLD = of_others_BGRLD - along_BGRL1 * unit_BG1LD
    if one_key_BHL is not None:
        # Where o_t equals v_t, the difference is already 0. Not filling it keeps the gradient bit-identical.
        one_key_BGRL = one_key_BHL.expand(-1, out_BHLD.shape[1], -1).unflatten(1, of_others_BGRLD.shape[1:3])
        rounded_BGRL = one_key_BGRL & (of_others_BGRLD != 0).any(-1)
        left_BGRLD = left_BGRLD.masked_fill(rounded_BGRL[..., None], 0)
    return left_BGRLD.flatten(1, 2).to(out_BHLD.dtype)


def may_be_rounding(config: AttentionConfig) -> bool:
    """Return True if the output of a token that sees only itself may be its value times a factor other than 1."""
    bias = config.bias
    of_values_alone = config.operation.only_values and (bias.kind not in ("k", "kv", "v") or bias.without_value)
    return of_values_alone and (bias.without_value or not config.operation.plain)


class NoGate(Part):
    """No gate."""

    kind: Literal["none"] = "none"


class HeadGate(Part):
    """Scalar output gate o_th sigmoid(x_t w_h): one number per head and query."""

    kind: Literal["head"] = "head"
    channels: Width = Field(
        default=None, description="number of channels of x_t that the gate reads, the first ones; null: all"
    )


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
        width: number of channels of the input that are read, the first ones.
        head_width: number of gates per head: the value dimension, or 1.
    """

    def __init__(self, width: int, heads: int, head_width: int) -> None:
        super().__init__()
        self.heads = heads
        self.linear = nn.Linear(width, heads * head_width, bias=False)

    def gates(self, x_BLE: Tensor) -> Tensor:
        """Compute the gates, between 0 and 1: shape (B, H, L, D), or (B, H, L, 1) with one gate per head."""
        B, L, _ = x_BLE.shape
        gates_BLO = self.linear(x_BLE[..., : self.linear.in_features])
        return torch.sigmoid(gates_BLO.view(B, L, self.heads, -1).transpose(1, 2))

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


class FullProjection(Part):
    """Full-rank linear projections to queries, keys and values."""

    kind: Literal["full"] = "full"


@dataclass(frozen=True)
class LatentSizes:
    """Dimensions R (`rank`), N (`nope`), P (`rope`), V (`value`) of a latent projection; see the module docstring."""

    rank: int
    nope: int
    rope: int
    value: int


class LatentProjection(Part):
    """Multi-head latent attention: low-rank keys and values, and a rotated key part shared by all heads (2405.04434).

    The shared part is rotated only if `position` is rotary. Scores are scaled by 1 / sqrt(nope_width + rope_width).
    """

    kind: Literal["latent"] = "latent"
    kv_rank: Width = Field(default=None, description="rank of the latent of keys and values; null: 4 head widths")
    q_rank: Width = Field(default=None, description="rank of the latent of queries; null: not compressed")
    nope_width: Width = Field(
        default=None, description="width of the unrotated part of a query or key; null: the head width"
    )
    rope_width: Width = Field(
        default=None, description="width of the rotated part of a query or key; null: half the head width"
    )
    value_width: Width = Field(default=None, description="width of a head's values and output; null: the head width")

    def sizes(self, head_width: int) -> LatentSizes:
        """Return all dimensions of the projection. Unset ones have the paper's ratio to the head dimension."""
        return LatentSizes(
            rank=self.kv_rank or 4 * head_width,
            nope=self.nope_width or head_width,
            rope=self.rope_width or max(1, head_width // 2),
            value=self.value_width or head_width,
        )


Projection = Annotated[FullProjection | LatentProjection, Field(discriminator="kind")]


class LatentHeads(nn.Module):
    """MLA projections: x_BLE -> queries (B, H, L, N + P), keys (B, H, L, N + P) and values (B, H, L, V).

    The last P channels of queries and keys are rotated by `rotary` (cos, sin), unless it is None.
    """

    def __init__(self, projection: LatentProjection, width: int, heads: int, head_width: int, eps: float) -> None:
        super().__init__()
        self.heads, self.sizes = heads, projection.sizes(head_width)
        sizes, q_rank = self.sizes, projection.q_rank
        self.q_down = None if q_rank is None else nn.Linear(width, q_rank, bias=False)
        self.q_norm = None if q_rank is None else HeadNorm(q_rank, eps=eps)
        self.q_up = nn.Linear(q_rank or width, heads * (sizes.nope + sizes.rope), bias=False)
        self.kv_down = nn.Linear(width, sizes.rank + sizes.rope, bias=False)
        self.kv_norm = HeadNorm(sizes.rank, eps=eps)
        self.kv_up = nn.Linear(sizes.rank, heads * (sizes.nope + sizes.value), bias=False)

    def forward(self, x_BLE: Tensor, rotary: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        sizes = self.sizes
        read = x_BLE if self.q_down is None or self.q_norm is None else self.q_norm(self.q_down(x_BLE))
        q_BHLN, q_BHLP = self._of_heads(self.q_up(read)).split((sizes.nope, sizes.rope), dim=-1)
        latent_BLR, k_BLP = self.kv_down(x_BLE).split((sizes.rank, sizes.rope), dim=-1)
        k_BHLN, v_BHLV = self._of_heads(self.kv_up(self.kv_norm(latent_BLR))).split((sizes.nope, sizes.value), dim=-1)
        k_B1LP = k_BLP[:, None]
        if rotary is not None:
            q_BHLP, k_B1LP = rotate(q_BHLP, *rotary), rotate(k_B1LP, *rotary)
        k_BHLP = k_B1LP.expand(-1, self.heads, -1, -1)
        return torch.cat((q_BHLN, q_BHLP), dim=-1), torch.cat((k_BHLN, k_BHLP), dim=-1), v_BHLV

    def _of_heads(self, x_BLC: Tensor) -> Tensor:
        return x_BLC.unflatten(-1, (self.heads, -1)).transpose(1, 2)
