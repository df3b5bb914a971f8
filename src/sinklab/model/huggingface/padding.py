"""An attention mask of transformers as padding before and behind the tokens of each sequence.

B batch, S tokens of a past and those that continue it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sinklab.errors import InputError
from sinklab.model.past import Past


@dataclass(frozen=True)
class Padding:
    """Where padding is.

    Attributes:
        before_B, behind_B: how many of the S tokens of each sequence are padding at its start and at its end.
    """

    before_B: Tensor
    behind_B: Tensor


def padding_of(mask_BS: Tensor | None, tokens_BT: Tensor, past: Past | None) -> Padding | None:
    """What a mask says is padding, or without a mask what was padding in the past; None where nothing is or was.

    Args:
        mask_BS: not 0 at tokens, those of the past included.
        tokens_BT: those that continue the past.

    Raises:
        InputError: a mask of another shape, padding between tokens, or behind those that continue a past.
    """
    earlier, padded_B = (0, None) if past is None else (past.get_seq_length(), past.padding_B)
    if mask_BS is None:
        return None if padded_B is None else Padding(padded_B, torch.zeros_like(padded_B))
    B, S = len(tokens_BT), earlier + tokens_BT.shape[1]
    if tuple(mask_BS.shape) != (B, S):
        raise InputError(
            f"attention_mask is {tuple(mask_BS.shape)}: give one of (sequences, tokens), here ({B}, {S}), those in "
            "past_key_values included"
        )
    real_BS = mask_BS.to(tokens_BT.device) != 0
    if padded_B is None and bool(real_BS.all()):
        return None
    count_B = real_BS.sum(1)
    before_B = torch.where(count_B > 0, real_BS.int().argmax(1), S)
    behind_B, at_S = S - before_B - count_B, torch.arange(S, device=real_BS.device)
    if not torch.equal(real_BS, (at_S >= before_B[:, None]) & (at_S < (before_B + count_B)[:, None])):
        raise InputError(
            "there is padding between the tokens of a sequence: pad on the left (tokenizer.padding_side = 'left'), or "
            "on the right where nothing is generated"
        )
    if earlier and bool(behind_B.any()):
        raise InputError("tokens that continue past_key_values are padding: pad on the left, before the first tokens")
    return Padding(before_B, behind_B)
