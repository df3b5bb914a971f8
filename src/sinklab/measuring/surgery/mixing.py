"""Over-mixing (2504.02732): how far the effect of replacing one token spreads, with and without the first key.

The token at one position is replaced by the next sequence's token at that position. After every block

    spread = mean over sequences and later positions t of |h'_t - h_t| / |h_t|

is computed for the original model, and with the first key hidden from all later queries (changes.py), so that no head
can use it as a sink. Before the first block the spread is 0. 2504.02732 does not hide the first key. It removes BOS
from the text, which is equivalent in a model with relative positions only, and reports the norm of the difference. Here
this norm is divided by that of the hidden state, because norms grow from block to block.
"""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from sinklab.errors import InputError
from sinklab.measuring.findings import Mixing
from sinklab.measuring.surgery.changes import masked_first_keys
from sinklab.models.adapter import Adapter, residual_blocks
from sinklab.models.hooks import evaluating, residual_stream, token_norms

BATCH_SIZE = 4  # default number of sequences per forward pass, which runs each with and without the replacement
MIXING_PASSES = 4  # forward passes per sequence: original and replaced token, with the first key and without it


def measure_mixing(
    adapter: Adapter,
    tokens_NT: Tensor,
    position: int,
    batch_size: int | None = None,
    reached: Callable[[int], None] = lambda done: None,
) -> Mixing:
    """Measure how far replacing the token at one position spreads, by block; the model is restored afterwards.

    Args:
        tokens_NT: token ids, without padding.
        position: position of the replaced token, 1-based, within 2 .. T - 1 (`Study.check`).
        batch_size: sequences per forward pass, each with both tokens; by default `BATCH_SIZE`.
        reached: called after every forward pass with the work done so far. A sequence counts MIXING_PASSES times;
            sequences whose token cannot be replaced count as done.

    Raises:
        InputError: if all sequences have the same token at the position.
        SinklabError: if the blocks of the model cannot be found, or the first key cannot be hidden (see
            `masked_first_keys`).
    """
    changed_NT = tokens_NT.clone()
    changed_NT[:, position - 1] = tokens_NT[:, position - 1].roll(-1)
    differs_N = changed_NT[:, position - 1] != tokens_NT[:, position - 1]
    if not bool(differs_N.any()):
        raise InputError(
            f"--perturb {position}: all sequences have the same token there, so it cannot be replaced by that of "
            "another sequence; use another position, or more sequences"
        )
    pairs_N2T = torch.stack([tokens_NT[differs_N], changed_NT[differs_N]], 1)
    done = MIXING_PASSES * (len(tokens_NT) - len(pairs_N2T))  # sequences that are left out count as done
    spreads = []

    def change(hidden_BTC: Tensor) -> Tensor:
        """Return |h' - h| / |h|, mean over later positions, summed over sequences.

        h are the hidden states in the first half of the batch, h' those in the second half, with the replaced token.
        """
        before, after = hidden_BTC[:, adapter.leading + position :].double().chunk(2)
        return (token_norms(after - before) / token_norms(before).clamp(min=1e-30)).mean(1).sum().cpu()

    for surgery in (nullcontext(), masked_first_keys(adapter.module, 1)):
        total_M = torch.zeros(())
        with surgery, evaluating(adapter.module), residual_stream(residual_blocks(adapter), change) as found:
            for part_B2T in pairs_N2T.split(batch_size or BATCH_SIZE):
                adapter.run(part_B2T.transpose(0, 1).flatten(0, 1).to(adapter.device))
                total_M = total_M + torch.stack(found)
                done += 2 * len(part_B2T)
                reached(done)
        spreads.append((total_M / len(pairs_N2T)).tolist())
    with_first, without_first = spreads
    return Mixing(position=position, sequences=len(pairs_N2T), spread=with_first, spread_without_first=without_first)
