"""Gradient sinks (2603.17771, Definition 1): the gradient of the loss at the attention input, by layer and position.

h~_t is the attention input, the output of the norm before attention. The gradients of the loss at h~_t are summed over
all sequences, as in an optimiser step, before the norm is computed:

    R_GS = |grad h~_1| / mean over t = 2 .. 32 of |grad h~_t|

The last position of a sequence has no target and no gradient; for T <= 32 the mean is over 2 .. T - 1. Zeros are
added to h~ in every layer, and the gradient is taken with respect to these zeros. The gradient therefore contains only
the path through attention, even if another part of the block uses the same norm output. The model's own attention code
is used.
"""

from contextlib import ExitStack

import torch
from torch import Tensor

from sinklab.attention.importance import first_to_rest
from sinklab.attention.query_blocks import accumulate_dtype
from sinklab.errors import InputError, SinklabError
from sinklab.measuring.batches import Batches
from sinklab.models.adapter import Adapter
from sinklab.models.hooks import evaluating, requiring_grad
from sinklab.models.memory_budget import fitting_batch

COMPARED = 32
"""Number of positions in the ratio, including the first (T_e = 31 in 2603.17771, which counts from 0)."""

FEWEST = 3
"""Minimum sequence length for the ratio: position 1, another position, and the last one, which has no gradient."""


def check_gradients(adapter: Adapter, length: int, padded: bool) -> None:
    """Check, before the measurement, that gradients can be computed; may run the model on a few tokens.

    Args:
        length: number of tokens of each sequence.
        padded: whether the sequences have padding.

    Raises:
        InputError: if sequences are padded, shorter than FEWEST tokens, or have no target after the prefix of a prefix
            mask; see also `Adapter.attention_inputs`.
        SinklabError: if an attention call of a Hugging Face model cannot be interpreted.
    """
    if padded:
        raise InputError("gradients are measured on sequences without padding: remove the padded sequences")
    fewest = max(FEWEST, adapter.first_target)
    if length < fewest:
        raise InputError(
            f"gradients need sequences of at least {fewest} tokens: the last token has no target, and targets inside "
            "the prefix of a prefix mask are excluded"
        )
    with adapter.attention_inputs(lambda _, x_BTE: x_BTE):
        pass


def gradient_norms(
    adapter: Adapter,
    tokens_NT: Tensor,
    *,
    first_target: int = 2,
    batch_size: int | None = None,
) -> tuple[Tensor, list[str]]:
    """Compute the norm of the gradient of the mean loss (nats per token) with respect to h~_t.

    The model is restored afterwards.

    Args:
        tokens_NT: token ids, without padding.
        first_target: 1-based position of the first target included in the loss.
        batch_size: sequences per backward pass; by default as many as fit in memory with the activations of all blocks,
            at most 16 sequences and 8,192 tokens.

    Returns:
        The norm by attention layer and position, (L, T), and a list with a note if the batch size was reduced, else an
        empty list.

    Raises:
        InputError: see `Adapter.attention_inputs`.
        SinklabError: if an attention call of a Hugging Face model cannot be interpreted, a gradient is not finite (the
            message names the layer), or a single sequence does not fit into memory.
    """
    N, T = tokens_NT.shape
    zeros: dict[int, Tensor] = {}

    def add_zero(index: int, x_BTE: Tensor) -> Tensor:
        zeros[index] = torch.zeros_like(x_BTE, requires_grad=True)
        return x_BTE + zeros[index]

    held = 2 * max(1, adapter.kinds.total)  # activations of all blocks, and the same again for logits and gradients
    size = batch_size or fitting_batch(adapter.sizes(False, matrices=False), T, adapter.device, held)
    batches = Batches(N, size, None, len(adapter.blocks))
    sums: list[Tensor] = []
    targets = 0
    with ExitStack() as stack:
        stack.enter_context(evaluating(adapter.module))
        stack.enter_context(requiring_grad(adapter.module.parameters(), False))  # autograd stores no inputs of layers
        stack.enter_context(adapter.attention_inputs(add_zero))  # may run the model on a few tokens
        stack.enter_context(torch.enable_grad())
        for start, stop in batches:
            with batches.attempt():
                zeros.clear()
                loss, number = adapter.summed_loss(tokens_NT[start:stop].to(adapter.device), first_target)
                found = torch.autograd.grad(loss, [zeros[index] for index in sorted(zeros)])
                parts = [x.to(accumulate_dtype(x.dtype)).sum(0)[adapter.leading :] for x in found]
                del loss, found
                sums = [a + b for a, b in zip(sums, parts, strict=True)] if sums else parts
                targets += number
        zeros.clear()
    norm_LT = torch.stack([total_TE.norm(dim=-1).cpu() for total_TE in sums]) / targets
    broken = (~norm_LT.isfinite().all(1)).nonzero()
    if len(broken):
        raise SinklabError(
            f"the gradients contain NaN or infinity in attention layer {int(broken[0]) + 1}, caused by the model or "
            "its dtype: load the model in float32 (--dtype float32)"
        )
    return norm_LT, batches.notes()


def gradient_sink(norm_LT: Tensor) -> list[float]:
    """Return R_GS of every attention layer from the norms of `gradient_norms`, T >= 3 (formula: module docstring)."""
    return first_to_rest(norm_LT[:, : min(COMPARED, norm_LT.shape[1] - 1)]).tolist()
