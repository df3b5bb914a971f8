"""Gradient sinks (2603.17771, Definition 1): the gradient of the loss at what attention reads, by layer and position.

h~_t is the output of the norm that an attention layer reads. The gradients of the loss at h~_t are summed over all
sequences, as in one step of an optimiser, and then their norm is taken:

    R_GS = |grad h~_1| / mean over t = 2 .. 32 of |grad h~_t|

The last position of a sequence predicts nothing, and has no gradient: of shorter sequences the mean is over 2 .. T - 1.
A zero is added to h~ in every layer, and the gradient is that of the zeros: of the path through attention alone, also
where another part of the block reads the same norm. The model computes its attention itself, nothing is recorded.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sinklab.attention.query_blocks import accumulate_dtype
from sinklab.errors import InputError, SinklabError
from sinklab.measuring.batches import Batches
from sinklab.measuring.metrics import first_to_rest
from sinklab.models.adapter import Adapter
from sinklab.models.hooks import Progress, evaluating
from sinklab.models.memory_budget import fitting_batch

COMPARED = 32
"""Positions of the ratio, the first one included (T_e = 31 of the paper, which counts from 0)."""

FEWEST = 3
"""Tokens of a sequence that has a ratio: position 1, another, and the last one."""


def check_gradients(adapter: Adapter, length: int, padded: bool) -> None:
    """Refuse what has no gradients before anything is measured.

    Raises:
        InputError: too short or padded sequences, or a model as `Adapter.attention_inputs` refuses it.
    """
    if padded:
        raise InputError("gradients are summed by position, without padding: leave out the padded sequences")
    if length < FEWEST:
        raise InputError(f"gradients need sequences of at least {FEWEST} tokens: the last one predicts nothing")
    with adapter.attention_inputs(lambda _, x_BTE: x_BTE):
        pass


def gradient_norms(
    adapter: Adapter,
    tokens_NT: Tensor,
    *,
    first_target: int = 2,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> tuple[Tensor, list[str]]:
    """|gradient of the mean loss at h~_t| in every attention layer (L, T), and notes on halved batches.

    Args:
        tokens_NT: whole sequences, without padding.
        first_target: 1-based; the loss is over the targets from it on.
        batch_size: sequences per backward pass, by default as many as fit with the activations of all blocks in memory.
        progress: called with (sequences done, sequences in all) after every batch.

    Raises:
        InputError: as `Adapter.attention_inputs`.
        SinklabError: a gradient that is not finite; the layer is named.
    """
    N, T = tokens_NT.shape
    zeros: dict[int, Tensor] = {}

    def add_zero(index: int, x_BTE: Tensor) -> Tensor:
        zeros[index] = torch.zeros_like(x_BTE, requires_grad=True)
        return x_BTE + zeros[index]

    held = 2 * max(1, adapter.kinds.total)  # those of all blocks, and as much again for logits and gradients
    size = batch_size or fitting_batch(adapter.sizes(False, matrices=False), T, adapter.device, held)
    batches = Batches(N, size, progress, len(adapter.blocks))
    sums: list[Tensor] = []
    targets = 0
    with ExitStack() as stack:
        stack.enter_context(evaluating(adapter.module))
        stack.enter_context(_frozen(adapter.module))
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
            f"the gradients contain NaN or infinity in layer {int(broken[0]) + 1}; the model or its dtype is at fault: "
            "try --dtype float32"
        )
    return norm_LT, batches.notes()


def gradient_sink(norm_LT: Tensor) -> list[float]:
    """R_GS of every layer: that of position 1 over the mean of positions 2 .. 32, or 2 .. T - 1."""
    return first_to_rest(norm_LT[:, : min(COMPARED, norm_LT.shape[1] - 1)]).tolist()


def gradient_fields(norm_LT: Tensor) -> dict[str, Any]:
    """The fields of a measurement."""
    return {"gradient_norm_ratio": gradient_sink(norm_LT), "gradient_norm": norm_LT.float().numpy()}


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """No gradients of weights, and no inputs of layers kept for them."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
