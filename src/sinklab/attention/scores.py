"""What is done to a raw score z = q.k * scale before the exponential, in FlexAttention's signature.

A score function maps (z, batch, head, query position, key position, *tensors) to a logit. The same closure serves
every backend: indices arrive as broadcastable tensors (blocks) or scalars (FlexAttention). Tensors that need a
gradient, or that live on a device, are passed explicitly so that the chunked backend can differentiate them.

An operation with a non-negative similarity sim(z) is the score z -> log sim(z): the exponential gives sim back,
`lse` becomes log of the row sum, and every operation is algebra on (out, lse). Such a score also says what sim(z) is,
so that the blocks need not take a logarithm (slow on a CPU, and of zero slowest) where numbers are in range.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Score:
    """A score function and the tensors it reads.

    Attributes:
        function: (z, b, h, q, k, *tensors) -> logit, elementwise and broadcasting.
        tensors: what `function` reads besides; may require gradients.
        similarity: exp of `function`, computed directly, where that is as exact as long as nothing overflows.
        vanishes: whether a similarity of exactly zero is meant, and not a number too small to be held.
        deep: whether most logits of a row may lie so far below its largest that their shares cannot be held.
    """

    function: Callable[..., Tensor]
    tensors: tuple[Tensor, ...] = ()
    similarity: Callable[..., Tensor] | None = None
    vanishes: bool = False
    deep: bool = False

    def __call__(self, z: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.function(z, b, h, q, k, *self.tensors)

    def then(self, after: "Score | None") -> "Score":
        """This score function followed by `after`."""
        if after is None:
            return self
        mine, first = len(self.tensors), self.function

        def chained(second: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def both(z: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, *tensors: Tensor) -> Tensor:
                return second(first(z, b, h, q, k, *tensors[:mine]), b, h, q, k, *tensors[mine:])

            return both

        similarity = None if after.similarity is None else chained(after.similarity)
        return Score(
            chained(after.function), self.tensors + after.tensors, similarity, after.vanishes, self.deep or after.deep
        )


def broadcast_index(index: Tensor, length: int) -> Tensor:
    """Where to look along an axis of `length` entries, of which a single one serves every index."""
    return torch.zeros_like(index) if length == 1 else index


def compose(*scores: Score | None) -> Score | None:
    """The given score functions in turn; None stands for the identity."""
    result: Score | None = None
    for score in scores:
        result = score if result is None else result.then(score)
    return result


def softcap(limit: float) -> Score:
    """limit * tanh(z / limit), in nats (Gemma 2)."""
    return Score(lambda z, b, h, q, k: limit * torch.tanh(z / limit))


def fading(log_kept_BSH: Tensor, causal: bool) -> Score:
    """z + sum over s < l <= t of log f_l, the forget gates after key s up to query t (2503.02130).

    Args:
        log_kept_BSH: running sums of log f up to every position, its own included.
        causal: False where a query may see later keys, which do not fade.
    """

    def between(z: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, log_kept_BSH: Tensor) -> Tensor:
        return z + (log_kept_BSH[b, q, h] - log_kept_BSH[b, k, h]).to(z.dtype)

    def earlier(z: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, log_kept_BSH: Tensor) -> Tensor:
        return torch.where(k <= q, between(z, b, h, q, k, log_kept_BSH), z)

    return Score(between if causal else earlier, (log_kept_BSH,), deep=True)


def times(factor: float) -> Score:
    """factor * z: the logarithm of sim ** factor."""
    return Score(lambda z, b, h, q, k: factor * z)


def log_sigmoid() -> Score:
    """log sigmoid(z), so that sim(z) = sigmoid(z)."""
    return Score(
        lambda z, b, h, q, k: F.logsigmoid(z),
        similarity=lambda z, b, h, q, k: torch.sigmoid(z),
    )


def log_elu_plus_one() -> Score:
    """log(elu(z) + 1) = min(z, 0) + log(1 + max(z, 0)), so that sim(z) = elu(z) + 1 = exp(min(z, 0)) + max(z, 0)."""

    def function(z: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        positive = torch.relu(z)
        return z - positive + torch.log1p(positive)

    def similarity(z: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        positive = torch.relu(z)
        return torch.exp(z - positive) + positive

    return Score(function, similarity=similarity)


def log_relu(sign: int = 1) -> Score:
    """log relu(sign * z)."""
    return log_of(lambda z, b, h, q, k: z if sign > 0 else -z)


def log_magnitude() -> Score:
    """log |z|, so that exp gives the size of a similarity that may be negative."""
    return log_of(lambda z, b, h, q, k: z.abs())


def log_of(x: Callable[..., Tensor], tensors: tuple[Tensor, ...] = ()) -> Score:
    """log relu(x(z, ..)): -inf with gradient zero where x is not positive, as relu drops what log sends back there."""
    return Score(
        lambda *arguments: torch.relu(x(*arguments)).log(),
        tensors,
        similarity=lambda *arguments: torch.relu(x(*arguments)),
        vanishes=True,
    )
