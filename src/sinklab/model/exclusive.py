"""Exclusive self-attention (2603.09078): what a head says of the context, without what it says of the token itself.

    z_t = o_t - (o_t.v_t) v_t / |v_t|^2

computed as (o_t - v_t) less its component, which is the same: of a token that sees itself alone exactly nothing is left
then, and not rounding noise that a norm behind it would blow up three hundred times.

o_t is the output of a query head at token t, and v_t the value of the same token as attention averages it, that of the
head's key head. |v_t| is taken to be 1e-12 where it is smaller. The formula is the paper's; its own code was not to be
had, and public ones (the submissions of openai/parameter-golf, `_xsa_efficient`) compute the same: v normalised by
`F.normalize`, the product with it subtracted, query heads by the group of their key head.

B batch, H heads, G key heads, R = H / G, L positions, D head width.
"""

import torch.nn.functional as F
from torch import Tensor

from sinklab.attention.blocks import accumulate_dtype


def without_own_value(out_BHLD: Tensor, v_BGLD: Tensor) -> Tensor:
    """The output of every head less its component along the value of the same position, in float32 or float64.

    Args:
        out_BHLD: of the attention core; its type is that of the result.
        v_BGLD: values of the same positions, H a multiple of G.
    """
    dtype = accumulate_dtype(out_BHLD.dtype)
    out_BGRLD = out_BHLD.to(dtype).unflatten(1, (v_BGLD.shape[1], -1))
    unit_BG1LD = F.normalize(v_BGLD.to(dtype), dim=-1)[:, :, None]
    of_others_BGRLD = out_BGRLD - v_BGLD.to(dtype)[:, :, None]  # the same, and exactly nothing where o_t is v_t
    along_BGRL1 = (of_others_BGRLD * unit_BG1LD).sum(-1, keepdim=True)
    return (of_others_BGRLD - along_BGRL1 * unit_BG1LD).flatten(1, 2).to(out_BHLD.dtype)
