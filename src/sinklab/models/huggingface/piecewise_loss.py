"""Loss of a forward pass without storing all logits (4 GB in float32 for 32,768 tokens and a vocabulary of 32,768).

The first call of the model computes the final hidden states and the logits of one position. Then the model is called
once for each chunk of positions, and its body returns the stored hidden states. Thus the model's own code computes
everything after the body, such as scaling and softcap of the logits.
"""

import inspect
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from sinklab.attention.query_blocks import accumulate_dtype
from sinklab.model.loss import IGNORED
from sinklab.models.families import bodies, vocabulary_size
from sinklab.models.memory_budget import LOGITS_AT_ONCE, LOGITS_AT_ONCE_CUDA

LOGITS_IN_CACHE = 2**20  # logits per chunk of log-probabilities: 4 MB in float32


def forward_loss(
    model: PreTrainedModel,
    tokens_BT: Tensor,
    real_BT: Tensor,
    *,
    arguments: dict[str, Any],
    paused: AbstractContextManager[None],
) -> tuple[float, int]:
    """Run one forward pass; return the cross-entropy summed over targets, in nats, and the number of targets.

    Args:
        tokens_BT: token ids (B, T).
        real_BT: bool, True at real tokens; a target counts if it and the token before it are real.
        arguments: keyword arguments passed to the model in addition to the tokens.
        paused: context manager that is entered while only the LM head runs, if the logits are computed in chunks.
    """
    both_BT = real_BT & F.pad(real_BT[:, 1:], (0, 1))  # the position and its target are real
    wanted_BT = F.pad(tokens_BT[:, 1:], (0, 1)).masked_fill(~both_BT, IGNORED)
    number = int((wanted_BT != IGNORED).sum())
    at_once = LOGITS_AT_ONCE_CUDA if tokens_BT.is_cuda else LOGITS_AT_ONCE
    pieces = math.ceil(vocabulary_size(model) * tokens_BT.numel() / at_once)
    if pieces == 1 or not has_piecewise_logits(model):
        return cross_entropy_sum(model(tokens_BT, **arguments).logits, wanted_BT), number
    total = 0.0
    with ExitStack() as stack:
        parts = [stack.enter_context(fixed_output(part)) for part in bodies(model)]
        model(tokens_BT, **arguments, logits_to_keep=1)
        for part in parts:
            part.frozen = True
        stack.enter_context(paused)
        few = math.ceil(tokens_BT.shape[1] / pieces)
        for start in range(0, tokens_BT.shape[1] - 1, few):
            stop = min(start + few, tokens_BT.shape[1] - 1)
            keep = torch.arange(start, stop, device=tokens_BT.device)
            total += cross_entropy_sum(
                model(tokens_BT, **arguments, logits_to_keep=keep).logits, wanted_BT[:, start:stop]
            )
    return total, number


def cross_entropy_sum(logits_BTV: Tensor, wanted_BT: Tensor) -> float:
    """Return the cross-entropy in nats, summed over all targets `wanted_BT` that are not IGNORED.

    It is computed in float32 (float64 for float64 logits) and in chunks of positions. This avoids a float32 copy of all
    logits, and on a CPU a chunk fits into the cache.
    """
    logits_NV, wanted_N = logits_BTV.flatten(0, 1), wanted_BT.to(logits_BTV.device).flatten()
    rows = max(1, (LOGITS_AT_ONCE_CUDA if logits_NV.is_cuda else LOGITS_IN_CACHE) // logits_NV.shape[1])
    total = 0.0
    for some_NV, wanted_n in zip(logits_NV.split(rows), wanted_N.split(rows), strict=True):
        exact_NV = some_NV.to(accumulate_dtype(some_NV.dtype))
        total += float(F.cross_entropy(exact_NV, wanted_n, ignore_index=IGNORED, reduction="sum"))
    return total


def has_piecewise_logits(model: PreTrainedModel) -> bool:
    """Return True if the model has a separate body and can compute the logits of selected positions."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters and model.base_model is not model


class _Body:
    """Replacement for a module's `forward`; while it is `frozen`, it returns the latest output without running."""

    def __init__(self, forward: Any, output: Any) -> None:
        self.frozen = output is not None
        self._forward, self._output = forward, output

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.frozen:
            self._output = self._forward(*args, **kwargs)
        return self._output


@contextmanager
def fixed_output(part: nn.Module, output: Any = None) -> Iterator[_Body]:
    """Make a module return `output` without running, in the `with` block.

    If `output` is None, the module runs until the yielded object is `frozen`, and then returns its latest output.
    """
    body = _Body(part.forward, output)
    with patch.object(part, "forward", body):
        yield body
