"""Watching a model from outside, through standard PyTorch hooks that are gone afterwards, also after an exception."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from numbers import Integral, Real
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinklab.errors import InputError
from sinklab.measuring.metrics import token_norms

Progress = Callable[[float, int], None]  # sequences done (parts of them count), sequences in all
Seen = TypeVar("Seen")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; every submodule gets back the mode it had."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in before:
            module.training = training


def residual_norms(blocks: Sequence[nn.Module]) -> AbstractContextManager[list[Tensor]]:
    """A list that after every forward pass holds |h| (B, T) before the first block and after each block."""
    return residual_stream(blocks, token_norms)


@contextmanager
def residual_stream(blocks: Sequence[nn.Module], read: Callable[[Tensor], Seen]) -> Iterator[list[Seen]]:
    """A list that after every forward pass holds read(h) before the first block and after each block, h (B, T, C).

    The last entry is the residual stream before the final norm (as figure 2 of 2410.10781 has it).
    """
    found: list[Seen] = []

    def entering(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found[:] = [read((args[0] if args else kwargs["hidden_states"]).detach())]

    def leaving(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        found.append(read((output[0] if isinstance(output, tuple) else output).detach()))

    handles = [block.register_forward_hook(leaving) for block in blocks]
    if blocks:
        handles.append(blocks[0].register_forward_pre_hook(entering, with_kwargs=True))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


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


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """torch.stack for layers that may lie on several devices."""
    return torch.stack([part.to(parts[0].device) for part in parts])


def check_request(tokens_NT: Tensor, eps: float | Sequence[float], batch_size: int | None) -> None:
    """Refuse what cannot be measured.

    Raises:
        InputError: tokens that are not a non-empty N x T matrix, no eps or one outside (0, 1), or batch_size below 1.
    """
    if tokens_NT.ndim != 2 or not tokens_NT.numel():
        raise InputError(f"tokens have shape {tuple(tokens_NT.shape)}; expected (sequences, length), neither empty")
    check_eps(eps)
    if batch_size is not None and not (isinstance(batch_size, Integral) and batch_size >= 1):
        raise InputError(f"batch size is {batch_size!r}; expected a whole number of at least 1")


def check_eps(eps: float | Sequence[float]) -> None:
    """Refuse thresholds that are no share of attention.

    Raises:
        InputError: none at all, or one that is no number in (0, 1).
    """
    given: Any = eps
    thresholds = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    if not thresholds:
        raise InputError("eps is empty; expected one share of attention or several, such as 0.3")
    for one in thresholds:
        if not isinstance(one, Real):
            raise InputError(f"eps is {one!r}, which is no number; expected a share of attention, such as 0.3")
        if not 0 < float(one) < 1:
            raise InputError(f"eps is {one}; expected a share of attention between 0 and 1, such as 0.3")


def check_lengths(lengths: Sequence[int], longest: int) -> None:
    """Refuse lengths at which sequences of `longest` tokens cannot be cut.

    Raises:
        InputError: not increasing, or not from 1 to longest - 1.
    """
    if any(low >= high for low, high in pairwise((0, *lengths, longest))):
        raise InputError(
            f"lengths {list(lengths)}: give increasing lengths from 1 to {longest - 1}, or longer sequences"
        )
