"""How far a change of one token spreads, with the first token and without it: over-mixing (2504.02732).

The token at one position is replaced by the one that the next sequence has there, and both sequences are read. After
every block

    spread = mean over sequences and positions t behind it of |h'_t - h_t| / |h_t|

once as the model is, and once with the first key hidden from all later queries (changes.py), so that no head can rest
on it. Before the first block it is 0. The paper removes BOS from the text and shows the norm of the difference; in a
model that sees distances only, hiding and removing are the same. The norm is divided by that of the state here, as
norms grow from block to block.
"""

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sinklab.errors import InputError
from sinklab.measuring.findings import Mixing
from sinklab.measuring.surgery.changes import masked_first_keys, residual_blocks
from sinklab.model.transformer import Transformer
from sinklab.models.hooks import evaluating, residual_stream, token_norms
from sinklab.models.huggingface.anatomy import input_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOGETHER = 4  # sequences at a time unless said otherwise, each read twice


def measure_mixing(
    model: "PreTrainedModel | Transformer", tokens_NT: Tensor, position: int, batch_size: int | None = None
) -> Mixing:
    """The spread of a change at one position, by block; the model is left as it was found.

    Args:
        tokens_NT: whole sequences, without padding.
        position: of the token that is replaced, 1-based.
        batch_size: sequences per forward pass.

    Raises:
        InputError: no such position, or all sequences have the same token there.
        SinklabError: the blocks of the model could not be found, or the first key could not be hidden.
    """
    check_perturbed(position, tokens_NT.shape[1])
    changed_NT = tokens_NT.clone()
    changed_NT[:, position - 1] = tokens_NT[:, position - 1].roll(-1)
    differs_N = changed_NT[:, position - 1] != tokens_NT[:, position - 1]
    if not bool(differs_N.any()):
        raise InputError(
            f"--perturb {position}: all sequences have the same token there, so none can be replaced by another's; "
            "give another position, or more sequences"
        )
    pairs_N2T = torch.stack([tokens_NT[differs_N], changed_NT[differs_N]], 1)
    spreads = []
    for surgery in (nullcontext(), masked_first_keys(model, 1)):
        with surgery:
            spreads.append(_spread(model, pairs_N2T, position, batch_size or TOGETHER))
    with_first, without_first = spreads
    return Mixing(position=position, sequences=len(pairs_N2T), spread=with_first, spread_without_first=without_first)


def check_perturbed(position: int, length: int) -> None:
    """Refuse a position that is not between the first token and the last.

    Raises:
        InputError: says which there are.
    """
    if not 2 <= position < length:
        raise InputError(
            f"--perturb {position} on sequences of {length} tokens: give 2 to {length - 1}, past the first token, so "
            "that it can be hidden, and before the last, so that the change can spread"
        )


def _spread(model: "PreTrainedModel | Transformer", pairs_N2T: Tensor, position: int, together: int) -> list[float]:
    """Before the first block and after each: the mean over sequences and later positions."""
    leading = model.leading if isinstance(model, Transformer) else 0

    def change(hidden_BTC: Tensor) -> Tensor:
        """Of the later positions, summed over sequences: the first half of the batch is as it was, the second not."""
        before, after = hidden_BTC[:, leading + position :].double().chunk(2)
        return (token_norms(after - before) / token_norms(before).clamp(min=1e-30)).mean(1).sum().cpu()

    total_M = torch.zeros(())
    with evaluating(model), residual_stream(residual_blocks(model), change) as found:
        for part_B2T in pairs_N2T.split(together):
            tokens_BT = part_B2T.transpose(0, 1).flatten(0, 1).to(input_device(model))
            if isinstance(model, Transformer):
                model.hidden(tokens_BT)
            else:
                from sinklab.models.huggingface.piecewise_loss import forward_only

                forward_only(model, tokens_BT, {"use_cache": False})
            total_M = total_M + torch.stack(found)
    return (total_M / len(pairs_N2T)).tolist()
