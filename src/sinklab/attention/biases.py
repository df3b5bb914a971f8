"""Attention biases: an additional token, key, value or logit, usually learned (2410.10781, tables 4, 5, 12, 13).

Every query q_t (after RoPE) attends to a bias key k' with the logit z_t = q_t.k' * scale. The softcap applies to z_t, a
relative position bias does not. A learned offset is added after the softcap. A sink logit is used directly as z_t,
without scale and softcap. The operation's similarity is applied to z_t. Kernel attention applies its feature map to q_t
and k' instead.

In a softmax row, let lse be the log-sum-exp of the logits of the other keys. The attention weight of the bias key is
then sigmoid(z_t - lse), and all other weights are multiplied by sigmoid(lse - z_t). Only a sink token makes the
sequence and the mask longer.

B batch, H query heads, G KV heads, T queries, D key dimension, V value dimension.
"""

import math
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from sinklab.attention.query_blocks import accumulate_dtype
from sinklab.schema import LARGEST, Example, Kind, NeutralExample, Part

NEGLIGIBLE_LOGIT = -12.0
"""Default `start` of a bias that is added to a trained model; the weight sigmoid(-12 - lse) is 6e-6 for lse = 0."""


class BiasPart(Kind):
    """Base class of attention biases. `AttentionConfig` checks its properties against the operation."""

    adds_key: ClassVar[bool] = False  # whether it adds a learned key
    adds_logit: ClassVar[bool] = False  # whether it adds a logit without a key

    @property
    def starts_at(self) -> float | None:
        """Initial value of the learned logit or offset (`start`); None if it is not set or the bias has neither."""
        return getattr(self, "start", None)

    @property
    def leading(self) -> int:
        """Number of learned tokens before the sequence."""
        return 0

    @property
    def without_value(self) -> bool:
        """True for a bias key or logit whose value is zero, so that it affects only the row sum."""
        return self.adds_logit


class NoBias(BiasPart):
    """No bias."""

    kind: Literal["none"] = "none"


class SinkToken(BiasPart):
    """Learned token embeddings that the model prepends to the sequence; all tokens can attend to them."""

    kind: Literal["sink_token"] = "sink_token"
    count: int = Field(
        default=1, ge=1, le=LARGEST, description="number of learned tokens: 1 for a sink token, more for registers"
    )
    examples: ClassVar = {"sink_token": Example(), "registers": Example({"count": 4})}

    @property
    def leading(self) -> int:
        return self.count


class FixedValue(Part):
    """Fixed value vector of norm m and width V: m [1, 0, .., 0] or m [1, .., 1] / sqrt(V) (2410.10781, table 5)."""

    direction: Literal["first", "uniform"] = Field(description="first: first dimension only; uniform: all dimensions")
    norm: float = Field(ge=0, description="L2 norm m of the value vector")

    def build(self, width: int, like: Tensor) -> Tensor:
        """Build the value, (width,), in the dtype and on the device of `like`."""
        if self.direction == "first":
            return F.pad(like.new_full((1,), self.norm), (0, width - 1))
        return like.new_full((width,), self.norm / math.sqrt(width))


class _LearnedKey(BiasPart):
    """Base class of the biases with a learned key."""

    kind: Literal["k", "kv"]
    adds_key: ClassVar[bool] = True
    shared: bool = Field(default=False, description="one bias for all heads instead of one per KV head")
    learnable_dims: int | None = Field(
        default=None,
        ge=1,
        description="number of learned key dimensions; those after them are zero; null: all are learned",
    )
    start: float | None = Field(
        default=None,
        description="initial value of a learned offset per query head, added to the bias key's logit; null: no offset",
    )


class KeyBias(_LearnedKey):
    """K bias: a learned key with a fixed value vector, which is zero by default."""

    kind: Literal["k"] = "k"  # type: ignore[assignment]  # parts are immutable
    value: Literal["zero"] | FixedValue = Field(
        default="zero", description="value vector: zero, or with a fixed direction and norm"
    )
    examples: ClassVar = {
        "k_biases": Example(),
        "k_biases_shared": Example({"shared": True}),
        "k_biases_one_dim": Example({"learnable_dims": 1}),
        "k_biases_fixed_first": Example({"value": {"direction": "first", "norm": 1.0}}),
        "k_biases_fixed_uniform": Example({"value": {"direction": "uniform", "norm": 5.0}}),
    }
    neutral: ClassVar = {"value.norm": NeutralExample("0", {"value": {"direction": "first", "norm": 0.0}}, against={})}

    @property
    def without_value(self) -> bool:
        return self.value == "zero" or self.value.norm == 0


class KeyValueBias(_LearnedKey):
    """KV bias: a learned key and a learned value."""

    kind: Literal["kv"] = "kv"  # type: ignore[assignment]
    examples: ClassVar = {"kv_biases": Example(), "kv_biases_shared": Example({"shared": True})}


class ValueBias(BiasPart):
    """V bias: a learned vector added to the attention output."""

    kind: Literal["v"] = "v"
    shared: bool = Field(default=False, description="one bias for all heads instead of one per KV head")
    examples: ClassVar = {"v_biases": Example()}


class SinkLogit(BiasPart):
    """Learned sink logit s per query head: multiplies softmax output by sigmoid(lse - s) (gpt-oss, 2508.10925)."""

    kind: Literal["sink_logit"] = "sink_logit"
    start: float | None = Field(default=None, description="initial logit s; null: normal with standard deviation 0.02")
    adds_logit: ClassVar[bool] = True
    examples: ClassVar = {"sink_logit": Example()}


class OffByOne(BiasPart):
    """Sink logit fixed at 0; softmax becomes softmax-off-by-one, exp(z_ts) / (1 + sum_j exp(z_tj)) (2410.17174)."""

    kind: Literal["off_by_one"] = "off_by_one"
    adds_logit: ClassVar[bool] = True
    examples: ClassVar = {"off_by_one": Example()}


Bias = Annotated[
    NoBias | SinkToken | KeyBias | KeyValueBias | ValueBias | SinkLogit | OffByOne, Field(discriminator="kind")
]


class BiasParameters(nn.Module):
    """Parameters of a bias. Attributes that the bias does not use are None.

    Attributes:
        key: learned key, (G, d), or (1, d) if shared; d is `learnable_dims`, by default D.
        value: learned value of the bias key, or the V bias, (G, V), or (1, V) if shared.
        fixed: direction and norm of the bias key's value, the same for all heads; None if it is learned or zero.
        logit: learned sink logit, (H,); None for off-by-one, whose logit is fixed at 0.
        offset: learned offset of the bias key's logit, (H,); None unless the recipe sets `start` of a K or KV bias.
        initial: mean and standard deviation of the initial values, by parameter name. It contains only the parameter
            whose `start` the recipe sets, and is empty without a `start`. model/config.py initialises all others.
    """

    def __init__(self, bias: Bias, kv_heads: int, head_width: int, heads: int, value_width: int) -> None:
        super().__init__()
        self.heads, self.head_width, self.value_width = heads, head_width, value_width
        self.off_by_one = bias.kind == "off_by_one"
        rows, self.key, self.value = 1 if getattr(bias, "shared", False) else kv_heads, None, None
        if isinstance(bias, _LearnedKey):
            self.key = nn.Parameter(torch.zeros(rows, bias.learnable_dims or head_width))
        if isinstance(bias, KeyValueBias | ValueBias):
            self.value = nn.Parameter(torch.zeros(rows, value_width))
        self.logit = nn.Parameter(torch.zeros(heads)) if bias.kind == "sink_logit" else None
        start = bias.starts_at
        offset = start is not None and self.key is not None
        self.offset = nn.Parameter(torch.zeros(heads)) if offset else None
        self.initial = {} if start is None else {"offset" if offset else "logit": (start, 0.0)}
        self.fixed = bias.value if bias.kind == "k" and bias.value != "zero" else None

    def key_per_head(self) -> Tensor | None:
        """Return the bias key per query head, (H, D), zero outside the learned dimensions; None without a key."""
        if self.key is None:
            return None
        missing = self.head_width - self.key.shape[1]
        return self._per_head(F.pad(self.key, (0, missing)) if missing else self.key)

    def value_per_head(self) -> Tensor | None:
        """Return the value of the bias key, or the V bias, per query head, (H, V); None without one."""
        if self.fixed is not None and self.key is not None:
            return self._per_head(self.fixed.build(self.value_width, self.key)[None])
        return None if self.value is None else self._per_head(self.value)

    def logit_per_head(self, like: Tensor) -> Tensor | None:
        """Return the sink logit per query head, (H,); None without one.

        Args:
            like: tensor with the dtype and device of the zeros that off-by-one returns.
        """
        return like.new_zeros(self.heads) if self.off_by_one else self.logit

    def _per_head(self, parameter: Tensor) -> Tensor:
        rows = len(parameter)
        if rows == self.heads:
            return parameter
        return parameter.expand(self.heads, -1) if rows == 1 else parameter.repeat_interleave(self.heads // rows, 0)


SMALLEST_LOGIT = -1e30  # used as log 0, because the gradient of logaddexp(-inf, -inf) is NaN


def with_extra_key(
    out_BHTV: Tensor, lse_BHT: Tensor, logits_BHT: Tensor, value_HV: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Add a key with logit l and value v to every row, and return the new output and log-normaliser.

    lse' = log(exp(lse) + exp(l)),  out' = out exp(lse - lse') + v exp(l - lse').

    Args:
        out_BHTV, lse_BHT: attention output and log of the row sum (log-normaliser) without the key.
        logits_BHT: log-similarity l of every query with the key.
        value_HV: value v of the key; None means zero.

    Returns:
        out' (B, H, T, V) in the dtype of out_BHTV, and lse' (B, H, T).
    """
    total_BHT = torch.logaddexp(lse_BHT.clamp(min=SMALLEST_LOGIT), logits_BHT.clamp(min=SMALLEST_LOGIT))
    out = out_BHTV * torch.exp(lse_BHT - total_BHT)[..., None].to(out_BHTV.dtype)
    if value_HV is not None:
        share_BHT = torch.exp(logits_BHT - total_BHT)
        out = out + share_BHT[..., None].to(out.dtype) * value_HV[:, None].to(out.dtype)
    return out, total_BHT.masked_fill(total_BHT < SMALLEST_LOGIT / 2, -torch.inf)


def extra_logits(q_BHTD: Tensor, key_HD: Tensor, scale: float) -> Tensor:
    """Compute the bias key's raw logits q_t.k' * scale in float32 (float64 for float64): (B, H, T)."""
    dtype = accumulate_dtype(q_BHTD.dtype)
    return torch.einsum("bhtd,hd->bht", q_BHTD.to(dtype), key_HD.to(dtype)) * scale
