"""Value residual learning (2410.17897): every layer's values are mixed with those of the first layer.

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
"""

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from sinklab.attention.config import AttentionConfig
from sinklab.attention.query_blocks import accumulate_dtype
from sinklab.schema import Part


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
