"""Positional embeddings (2410.10781, table 3).

none                   no positional embedding (NoPE); only the causal mask depends on the position
absolute, learnable    a position vector is added to the token embedding
relative, t5, alibi    a bias that depends on the distance t - s is added to the logit of query t and key s
rotary                 RoPE in the half-split layout of Llama, on all or the first channels of queries and keys, or on
                       the rotated part of a latent projection

With n learned leading tokens (a sink token or registers), real tokens keep positions 0 .. T - 1. Leading tokens have
positions -n .. -1 in RoPE and in distances, and no position vector is added to them. For keys later than the query
(prefix mask), distances are negative. relative and t5 then use the bucket of distance 0, like T5's decoder, and alibi
uses the absolute distance.

B batch, H heads, T positions, D dimension of a head or of its rotated part, C = D / 2 pairs, E hidden size.
"""

import math
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from sinklab.attention.query_blocks import accumulate_dtype
from sinklab.attention.scores import FlexScore, Score
from sinklab.schema import LARGEST, Part

COPIES = 1024  # gradients of the T5 table that FlexAttention accumulates, each for the queries with one q % COPIES
PositionKind = Literal["none", "relative", "t5", "alibi", "rotary", "absolute", "learnable"]


class NoPosition(Part):
    """No positional embedding (NoPE)."""

    kind: Literal["none"] = "none"


class Absolute(Part):
    """Sinusoidal embeddings: embedding + P_t, P_t[2i] = sin(t theta^(-2i/E)), P_t[2i+1] = cos(t theta^(-2i/E))."""

    kind: Literal["absolute"] = "absolute"
    theta: float = Field(default=10000.0, gt=0, description="base of the wavelengths")


class Learnable(Part):
    """Learned positional embeddings: embedding + P_t with a learned table P of `context` rows."""

    kind: Literal["learnable"] = "learnable"


class _Buckets(Part):
    buckets: int = Field(
        default=32, ge=2, le=LARGEST, description="number of buckets, of which the first half contain one distance each"
    )
    max_distance: int = Field(
        default=128, ge=2, le=LARGEST, description="distances of at least this value share the last bucket"
    )

    @model_validator(mode="after")
    def _half_are_exact(self) -> Self:
        if self.max_distance <= self.buckets // 2:
            raise ValueError(
                f"max_distance {self.max_distance} must be above buckets / 2 = {self.buckets // 2}, the number of "
                "buckets with a single distance"
            )
        return self


class Relative(_Buckets):
    """Relative bias: logit + bucket(t - s), with the index of the T5 bucket (2410.10781, table 3, "relative")."""

    kind: Literal["relative"] = "relative"


class T5(_Buckets):
    """T5 bias: logit + b_h[bucket(t - s)], with b learned per bucket and head, and shared by all layers."""

    kind: Literal["t5"] = "t5"


class Alibi(Part):
    """ALiBi: logit - m_h |t - s| with fixed slopes; m_h = 2^(-8h/H) if H is a power of two (see `alibi_slopes`)."""

    kind: Literal["alibi"] = "alibi"


class Rotary(Part):
    """RoPE: pair i of the first D channels of queries and keys at position t is rotated by t theta^(-2i/D).

    D is `share` times the number of channels. With a latent projection, other channels are rotated (values.py).
    """

    kind: Literal["rotary"] = "rotary"
    theta: float = Field(default=10000.0, gt=0, description="base of the wavelengths")
    share: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="fraction of the channels of queries and keys that is rotated, starting at the first channel",
    )


Distance = Relative | T5 | Alibi
"""Positional embeddings that add a bias to the logits."""

Position = Annotated[NoPosition | Absolute | Learnable | Relative | T5 | Alibi | Rotary, Field(discriminator="kind")]


def frequencies(width: int, theta: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return theta^(-2i / width), the angle per position of each pair of channels i: shape (width / 2,)."""
    return theta ** (-torch.arange(0, width, 2, device=device, dtype=dtype) / width)


def sinusoid(length: int, width: int, theta: float, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return sinusoidal embeddings, (length, width), of positions from 0 on: sines in even columns, cosines in odd."""
    angle_TC = torch.arange(length, device=device, dtype=dtype)[:, None] * frequencies(width, theta, device, dtype)
    return torch.stack((angle_TC.sin(), angle_TC.cos()), dim=-1).flatten(1)


def bucket_numbers(buckets: int, max_distance: int) -> Tensor:
    """Return the T5 bucket of each distance 0 .. max_distance, int64, shape (max_distance + 1,).

    Distances below buckets / 2 have a bucket each; larger ones have buckets of logarithmic width (T5, unidirectional).
    """
    distance, exact = torch.arange(max_distance + 1), buckets // 2
    share = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = (exact + (share * (buckets - exact)).long()).clamp(max=buckets - 1)
    return torch.where(distance < exact, distance, far)


def alibi_slopes(heads: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return ALiBi slopes (H,): m_h = 2^(-8h/H), h = 1 .. H, if H is a power of two.

    Otherwise, as in ALiBi's code: the slopes for N heads, where N is the largest power of two below H, followed by
    every other slope for 2 N heads.
    """
    power = 2 ** (heads.bit_length() - 1)
    own = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    between = [2 ** (-4 * h / power) for h in range(1, 2 * (heads - power), 2)]
    return torch.tensor(own + between, dtype=dtype)


def alibi_terms(heads: int, length: int, exponent: float = 8) -> Tensor:
    """Return -m_h d for every head and distance d < `length`, (H, length), float64, with m_h = 2^(-exponent h / H).

    If H is not a power of two, the slopes of `alibi_slopes` are raised to the power exponent / 8.
    """
    return -(alibi_slopes(heads).double() ** (exponent / 8))[:, None] * torch.arange(length)


class DistanceTerm(nn.Module):
    """Relative position bias by head and distance, shared by all layers.

    Attributes:
        weight: learned table (buckets, heads) for t5, else None.
        fixed: ALiBi slopes (heads,), or the bucket of each distance from 0 to max_distance.
    """

    def __init__(self, position: Distance, heads: int) -> None:
        super().__init__()
        self.position, self.heads = position, heads
        self.weight = nn.Parameter(torch.empty(position.buckets, heads)) if isinstance(position, T5) else None
        self.fixed: Tensor
        self.register_buffer("fixed", self._slopes_or_buckets(), persistent=False)

    def reset(self) -> None:
        """Recompute in place the constants that checkpoints do not store: ALiBi slopes, or bucket indices."""
        self.fixed.copy_(self._slopes_or_buckets())

    def _slopes_or_buckets(self) -> Tensor:
        if isinstance(self.position, Alibi):
            return alibi_slopes(self.heads)
        return bucket_numbers(self.position.buckets, self.position.max_distance)

    def terms(self, length: int) -> Tensor:
        """Compute the bias of every head at distances 0 .. length - 1: (H, length), on the CPU.

        ALiBi slopes are rounded to the dtype of `fixed`.
        """
        if isinstance(self.position, Alibi):
            slopes_H = alibi_slopes(self.heads, accumulate_dtype(self.fixed.dtype)).to(self.fixed.dtype)
            return -slopes_H.double()[:, None] * torch.arange(length)
        bucket_T = self.fixed.cpu()[torch.arange(length).clamp(max=self.position.max_distance)]
        return bucket_T.expand(self.heads, -1) if self.weight is None else self.weight.detach().cpu()[bucket_T].T

    def score(self) -> Score:
        """Return the score function that adds the relative position bias to the logits."""
        if isinstance(self.position, Alibi):
            slopes_H = self.fixed
            if slopes_H.dtype == torch.float64:  # recomputed, because a converted buffer has the precision of float32
                slopes_H = alibi_slopes(self.heads, torch.float64).to(slopes_H.device)
            return Score(_minus_slope, (slopes_H,))
        if self.weight is None:
            return Score(_plus_bucket, (self.fixed,))
        table_NH = self.weight[self.fixed]
        # Copies, because FlexAttention adds up the gradients of all scores with one entry of the table atomically, and
        # all distances from max_distance on have one entry.
        spread = Score(_plus_copy, (table_NH.expand(COPIES, -1, -1),))
        return Score(_plus_table, (table_NH,), for_flex=FlexScore(spread))


def _minus_slope(z: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, slopes_H: Tensor) -> Tensor:
    return z - slopes_H[h].to(z.dtype) * (q - k).abs()


def _plus_bucket(z: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, bucket_N: Tensor) -> Tensor:
    return z + bucket_N[(q - k).clamp(0, bucket_N.shape[0] - 1)].to(z.dtype)


def _plus_table(z: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, table_NH: Tensor) -> Tensor:
    return z + table_NH[(q - k).clamp(0, table_NH.shape[0] - 1), h].to(z.dtype)


def _plus_copy(z: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, table_CNH: Tensor) -> Tensor:
    return z + table_CNH[q % COPIES, (q - k).clamp(0, table_CNH.shape[1] - 1), h].to(z.dtype)


def rotary_tables(
    length: int,
    width: int,
    theta: float,
    device: torch.device,
    first: int = 0,
    dtype: torch.dtype = torch.float32,
    padding_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of position * theta^(-2i / D), i = 0 .. D / 2 - 1, each (T, D / 2), for T positions.

    Args:
        length: number of positions T.
        width: number of rotated channels D.
        first: first position.
        padding_B: number of padding positions per row, subtracted from the positions; the tables are then
            (B, 1, T, D / 2).
    """
    position = torch.arange(first, first + length, device=device, dtype=dtype)
    if padding_B is not None:
        position = (position - padding_B[:, None])[:, None]
    angle = position[..., None] * frequencies(width, theta, device, dtype)
    return angle.cos(), angle.sin()


def rotate(x_BHTD: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
    """Apply RoPE: rotate each pair (x_i, x_{i + D/2}) at position t by the angle with cos_ti and sin_ti.

    The rotation is computed in the wider of the dtypes of input and tables, and returned in the dtype of the input.
    """
    if torch.compiler.is_compiling():  # fused anyway; Dynamo of PyTorch 2.11 computes wrong gradients for the class
        return _rotated(x_BHTD, cos_TC, sin_TC)
    return _Rotation.apply(x_BHTD, cos_TC, sin_TC)  # type: ignore[return-value]


def rotate_first(x_BHTD: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
    """Apply RoPE to the first 2 C channels; the others are unchanged."""
    width = 2 * cos_TC.shape[-1]
    if width == x_BHTD.shape[-1]:
        return rotate(x_BHTD, cos_TC, sin_TC)
    return torch.cat((rotate(x_BHTD[..., :width], cos_TC, sin_TC), x_BHTD[..., width:]), dim=-1)


class _Rotation(torch.autograd.Function):
    """RoPE whose backward pass, the inverse rotation, rounds like autograd with half of its memory traffic."""

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
    """Return (x_i, x_{i + D/2}) cos and (-x_{i + D/2}, x_i) sin, whose sum is the rotated x."""
    first, second = x_BHTD.to(torch.promote_types(x_BHTD.dtype, cos_TC.dtype)).chunk(2, dim=-1)
    kept = torch.cat((first, second), dim=-1).mul_(torch.cat((cos_TC, cos_TC), dim=-1))
    crossed = torch.cat((second, first), dim=-1).mul_(torch.cat((-sin_TC, sin_TC), dim=-1))
    return kept, crossed
