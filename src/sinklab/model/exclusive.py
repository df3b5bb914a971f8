"""Exclusive self-attention (2603.09078): what a head says of the context, without what it says of the token itself.

    z_t = o_t - (o_t.v_t) v_t / |v_t|^2

computed as (o_t - v_t) less its component, which is the same: of a token that sees itself alone and has o_t = v_t
exactly nothing is left then, and not rounding noise that a norm behind it would blow up three hundred times. Where the
row gives such a token another multiple of v_t (a sink logit or a key without a value takes a share, scores are not
normalised), the difference is rounding of v_t and set to 0 (`sees_itself_alone`).

o_t is the output of a query head at token t, and v_t the value of the same token as attention averages it, that of the
head's key head. |v_t| is taken to be 1e-12 where it is smaller. The formula is the paper's; its own code was not to be
had, and public ones (the submissions of openai/parameter-golf, `_xsa_efficient`) compute the same: v normalised by
`F.normalize`, the product with it subtracted, query heads by the group of their key head.

B batch, H heads, G key heads, R = H / G, L positions, D head width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from sinklab.attention.blocks import accumulate_dtype
from sinklab.attention.config import AttentionConfig
from sinklab.attention.visible import Mask, visible_keys


def without_own_value(out_BHLD: Tensor, v_BGLD: Tensor, alone_BL: Tensor | None = None) -> Tensor:
    """The output of every head less its component along the value of the same position, in float32 or float64.

    Args:
        out_BHLD: of the attention core; its type is that of the result.
        v_BGLD: values of the same positions, H a multiple of G.
        alone_BL: bool, (B or 1, L), where o_t is a multiple of v_t but for rounding: exactly 0 is left there.
    """
    dtype = accumulate_dtype(out_BHLD.dtype)
    out_BGRLD = out_BHLD.to(dtype).unflatten(1, (v_BGLD.shape[1], -1))
    unit_BG1LD = F.normalize(v_BGLD.to(dtype), dim=-1)[:, :, None]
    of_others_BGRLD = out_BGRLD - v_BGLD.to(dtype)[:, :, None]  # the same, and exactly nothing where o_t is v_t
    along_BGRL1 = (of_others_BGRLD * unit_BG1LD).sum(-1, keepdim=True)
    left_BGRLD = of_others_BGRLD - along_BGRL1 * unit_BG1LD
    if alone_BL is not None:
        # Where o_t is v_t it is 0 already, and the gradient stays what it is, to the last bit.
        rounded_BGRL = alone_BL[:, None, None] & (of_others_BGRLD != 0).any(-1)
        left_BGRLD = left_BGRLD.masked_fill(rounded_BGRL[..., None], 0)
    return left_BGRLD.flatten(1, 2).to(out_BHLD.dtype)


def may_be_rounding(config: AttentionConfig) -> bool:
    """Whether a token that sees itself alone has an output that is a multiple of its value, and perhaps another one."""
    bias = config.bias
    of_values_alone = config.operation.only_values and (bias.kind not in ("k", "kv", "v") or bias.without_value)
    return of_values_alone and (bias.without_value or not config.operation.plain)


def sees_itself_alone(mask: Mask, queries: int, keys: int, device: torch.device) -> Tensor:
    """Which of the last `queries` of so many keys see one key, which is their own: (B or 1, L), bool."""
    return visible_keys(mask, queries, device, keys) == 1
