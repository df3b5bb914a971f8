"""The loss of a forward pass whose logits are never held whole: 32,768 tokens times a vocabulary are 4 GB.

The first call keeps one position's logits and the final hidden states; then the head alone is run on pieces of them,
by calling the model with its body standing still. So whatever a model does between body and loss (softcap, scale) is
done by the model itself.
"""

import inspect
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from sinklab.model.loss import IGNORED
from sinklab.models.huggingface.anatomy import bodies
from sinklab.models.memory import LOGITS_AT_ONCE, LOGITS_AT_ONCE_CUDA

LOGITS_IN_CACHE = 2**20  # whose log-probabilities are made at a time: 4 MB in float32


def forward_loss(
    model: PreTrainedModel,
    tokens_BT: Tensor,
    real_BT: Tensor,
    *,
    arguments: dict[str, Any],
    vocabulary: int,
    paused: AbstractContextManager[None],
) -> tuple[float, int]:
    """One forward pass: the cross-entropy summed over real targets 2..T, in nats, and their number.

    Args:
        arguments: passed on to the model, beside the tokens.
        vocabulary: rows of the token embedding, from which the size of the logits is judged.
        paused: entered while the head alone is run, when there is nothing to record.
    """
    wanted_BT = targets(tokens_BT, real_BT)
    number = int((wanted_BT != IGNORED).sum())
    at_once = LOGITS_AT_ONCE_CUDA if tokens_BT.is_cuda else LOGITS_AT_ONCE
    pieces = math.ceil(vocabulary * tokens_BT.numel() / at_once)
    if pieces == 1 or not makes_logits_in_pieces(model):
        return summed_loss(model(tokens_BT, **arguments).logits, wanted_BT), number
    total = 0.0
    with ExitStack() as stack:
        parts = [stack.enter_context(answering(part)) for part in bodies(model)]
        model(tokens_BT, **arguments, logits_to_keep=1)
        for part in parts:
            part.still = True
        stack.enter_context(paused)
        few = math.ceil(tokens_BT.shape[1] / pieces)
        for start in range(0, tokens_BT.shape[1] - 1, few):
            stop = min(start + few, tokens_BT.shape[1] - 1)
            keep = torch.arange(start, stop, device=tokens_BT.device)
            total += summed_loss(model(tokens_BT, **arguments, logits_to_keep=keep).logits, wanted_BT[:, start:stop])
    return total, number


def targets(tokens_BT: Tensor, real_BT: Tensor) -> Tensor:
    """What each position predicts, the next token; IGNORED where there is none, or one of the two is padding."""
    both_BT = real_BT & F.pad(real_BT[:, 1:], (0, 1))
    return F.pad(tokens_BT[:, 1:], (0, 1)).masked_fill(~both_BT, IGNORED)


def summed_loss(logits_BTV: Tensor, wanted_BT: Tensor) -> float:
    """Cross-entropy in nats, summed over all targets that are not IGNORED.

    A few rows at a time: no copy in float32 is made of the whole, and on a CPU the log-probabilities stay in the cache.
    """
    logits_NV, wanted_N = logits_BTV.flatten(0, 1), wanted_BT.to(logits_BTV.device).flatten()
    rows = max(1, (LOGITS_AT_ONCE_CUDA if logits_NV.is_cuda else LOGITS_IN_CACHE) // logits_NV.shape[1])
    total = 0.0
    for some_NV, wanted_n in zip(logits_NV.split(rows), wanted_N.split(rows), strict=True):
        total += float(F.cross_entropy(some_NV.float(), wanted_n, ignore_index=IGNORED, reduction="sum"))
    return total


def forward_only(model: PreTrainedModel, tokens_BT: Tensor, arguments: dict[str, Any]) -> None:
    """One forward pass without a loss, and with the logits of one position where the model can be asked for that."""
    few = {"logits_to_keep": 1} if makes_logits_in_pieces(model) else {}
    model(tokens_BT, **arguments, **few)


def makes_logits_in_pieces(model: PreTrainedModel) -> bool:
    """Whether the model can be asked for the logits of some positions, apart from its body."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters and model.base_model is not model


class _Body:
    """The latest output of a body; while `still`, the body answers with it instead of running."""

    def __init__(self, forward: Any, output: Any) -> None:
        self.still = output is not None
        self._forward, self._output = forward, output

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.still:
            self._output = self._forward(*args, **kwargs)
        return self._output


@contextmanager
def answering(part: nn.Module, output: Any = None) -> Iterator[_Body]:
    """The body answers with this output instead of running; where none is given, with its latest once it is `still`."""
    own = part.__dict__.get("forward")
    body = _Body(part.forward, output)
    part.__dict__["forward"] = body
    try:
        yield body
    finally:
        if own is None:
            del part.__dict__["forward"]
        else:
            part.__dict__["forward"] = own
