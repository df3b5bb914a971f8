"""The loss of a forward pass whose logits are never held whole: 32,768 tokens times a vocabulary are 4 GB.

The first call keeps one position's logits and the final hidden states; then the head alone is run on pieces of them,
by calling the model with its body standing still. So whatever a model does between body and loss (softcap, scale) is
done by the model itself.
"""

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from sinklab.measuring.memory import LOGITS_AT_ONCE, LOGITS_AT_ONCE_CUDA


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
    at_once = LOGITS_AT_ONCE_CUDA if tokens_BT.is_cuda else LOGITS_AT_ONCE
    few = max(1, at_once // (vocabulary * len(tokens_BT)))
    if tokens_BT.shape[1] <= few or not makes_logits_in_pieces(model):
        return summed_loss(model(tokens_BT, **arguments).logits, tokens_BT, real_BT)
    total = torch.zeros((), dtype=torch.float64)
    targets = 0
    with ExitStack() as stack:
        body = stack.enter_context(_standing_still(model.base_model))
        model(tokens_BT, **arguments, logits_to_keep=1)
        body.still = True
        stack.enter_context(paused)
        for start in range(0, tokens_BT.shape[1] - 1, few):
            stop = min(start + few, tokens_BT.shape[1] - 1)
            keep = torch.arange(start, stop, device=tokens_BT.device)
            logits_BKV = model(tokens_BT, **arguments, logits_to_keep=keep).logits
            wanted_BK = tokens_BT[:, start + 1 : stop + 1].to(logits_BKV.device)
            both_BK = (real_BT[:, start + 1 : stop + 1] & real_BT[:, start:stop]).to(logits_BKV.device)
            wanted_BK = torch.where(both_BK, wanted_BK, -100)
            loss = F.cross_entropy(logits_BKV.flatten(0, 1).float(), wanted_BK.flatten(), reduction="sum")
            total += loss.double().cpu()
            targets += int(both_BK.sum())
    return float(total), targets


def summed_loss(logits_BTV: Tensor, tokens_BT: Tensor, real_BT: Tensor | None = None) -> tuple[float, int]:
    """Cross-entropy summed over targets 2..T, in nats, and their number; row by row, so that no second copy of the
    batch's logits is made in float32.
    """
    total, targets = 0.0, 0
    for row, (logits_TV, tokens_T) in enumerate(zip(logits_BTV, tokens_BT, strict=True)):
        logits_TV, wanted_T = logits_TV[:-1].float(), tokens_T[1:].to(logits_TV.device)
        if real_BT is not None:
            both_T = (real_BT[row, 1:] & real_BT[row, :-1]).to(logits_TV.device)
            logits_TV, wanted_T = logits_TV[both_T], wanted_T[both_T]
        total += float(F.cross_entropy(logits_TV, wanted_T, reduction="sum"))
        targets += wanted_T.numel()
    return total, targets


def forward_only(model: PreTrainedModel, tokens_BT: Tensor, arguments: dict[str, Any]) -> None:
    """One forward pass without a loss, and with the logits of one position where the model can be asked for that."""
    few = {"logits_to_keep": 1} if makes_logits_in_pieces(model) else {}
    model(tokens_BT, **arguments, **few)


def makes_logits_in_pieces(model: PreTrainedModel) -> bool:
    """Whether the model can be asked for the logits of some positions, apart from its body."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters and model.base_model is not model


class _Body:
    """The body's latest output; while `still`, the body answers with it instead of running."""

    def __init__(self, forward: Any) -> None:
        self.still = False
        self._forward, self._output = forward, None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.still:
            self._output = self._forward(*args, **kwargs)
        return self._output


@contextmanager
def _standing_still(base: nn.Module) -> Iterator[_Body]:
    own = base.__dict__.get("forward")
    body = _Body(base.forward)
    base.__dict__["forward"] = body
    try:
        yield body
    finally:
        if own is None:
            del base.__dict__["forward"]
        else:
            base.__dict__["forward"] = own
