"""Score functions: applied to a raw score z = q.k * scale before the exponential, in FlexAttention's signature.

A score function maps (z, batch, head, query position, key position, *tensors) to a logit. Every backend uses the
same closure: indices arrive as broadcastable tensors (blocks) or scalars (FlexAttention). Tensors that need a
gradient, or that live on a device, are passed explicitly so that the chunked backend can differentiate them.

An operation with a non-negative similarity sim(z) is the score z -> log sim(z): the exponential gives sim back,
`lse` becomes the log of the row sum, and every operation is algebra on (out, lse). Such a score also stores sim(z),
so that the blocks need no logarithm (slow on a CPU, slowest at zero) while numbers are in range.

FlexAttention accumulates the gradient of a tensor read by a score function atomically, score by score, and supports one
read per tensor. A score may therefore have a second form for FlexAttention (`Apart`), without the terms common to a
row. The other backends use the first form, in which a row's gradient is a sum.
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
        tensors: further arguments of `function`; may require gradients.
        similarity: exp of `function`, computed directly; None if that is less exact even without overflow.
        vanishes: whether a similarity of zero is exact rather than an underflow.
        deep: whether most logits of a row may be so far below its largest that their shares underflow.
        apart: the same logits in the form for FlexAttention; None if that is `function`.
    """

    function: Callable[..., Tensor]
    tensors: tuple[Tensor, ...] = ()
    similarity: Callable[..., Tensor] | None = None
    vanishes: bool = False
    deep: bool = False
    apart: "Apart | None" = None

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
            chained(after.function),
            self.tensors + after.tensors,
            similarity,
            after.vanishes,
            self.deep or after.deep,
            _both_apart(self, after),
        )


@dataclass(frozen=True)
class Apart:
    """A score function without the terms common to a row: logit = score(factor z) + term.

    Attributes:
        score: remaining function; None is the identity. It reads each tensor that needs a gradient at most once.
        factor_BHT: factor of the row's raw scores, applied to the query; None is 1.
        term_BHS: term added to the log-normaliser, per position, queries at the last positions; None is 0.
    """

    score: Score | None
    factor_BHT: Tensor | None = None
    term_BHS: Tensor | None = None

    def query(self, q_BHTD: Tensor) -> Tensor:
        """The queries times their factors, in the dtype of the queries."""
        return q_BHTD if self.factor_BHT is None else (q_BHTD * self.factor_BHT[..., None]).to(q_BHTD.dtype)

    def normaliser(self, lse_BHT: Tensor) -> Tensor:
        """The log-normaliser of the logits, from the log-normaliser of `score`."""
        return lse_BHT if self.term_BHS is None else lse_BHT + self.term_BHS[..., -lse_BHT.shape[-1] :]


def apart(score: Score | None) -> Apart:
    """The form of a score for FlexAttention, which accumulates gradients score by score."""
    return Apart(score) if score is None or score.apart is None else score.apart


def _both_apart(first: Score, after: Score) -> Apart | None:
    """`Apart` of two scores in turn: only the first may have a factor, only the last a term."""
    before = apart(first) if apart(first).term_BHS is None else Apart(first)
    behind = apart(after) if apart(after).factor_BHT is None else Apart(after)
    if before.score is first and behind.score is after:
        return None
    return Apart(compose(before.score, behind.score), before.factor_BHT, behind.term_BHS)


def broadcast_index(index: Tensor, length: int) -> Tensor:
    """The index along an axis of `length` entries; 0 if the axis has one entry."""
    return torch.zeros_like(index) if length == 1 else index


def compose(*scores: Score | None) -> Score | None:
    """Compose the given score functions in order; None is the identity."""
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
        log_kept_BSH: running sums of log f up to and including every position.
        causal: False where a query may see later keys, which do not fade.
    """

    def between(z: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, log_kept_BSH: Tensor) -> Tensor:
        return z + (log_kept_BSH[b, q, h] - log_kept_BSH[b, k, h]).to(z.dtype)

    def earlier(z: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, log_kept_BSH: Tensor) -> Tensor:
        return torch.where(k <= q, between(z, b, h, q, k, log_kept_BSH), z)

    def at_key(z: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, log_kept_BSH: Tensor, own_BSH: Tensor) -> Tensor:
        key = k if causal else torch.minimum(k, q)
        return z + (own_BSH[b, q, h] - log_kept_BSH[b, key, h]).to(z.dtype)

    # The query's own sum is constant along a row: the kernel uses it detached, so that logits stay small, and its
    # gradient is the gradient of the row's normaliser.
    own_BSH = log_kept_BSH.detach()
    kernel = Apart(
        Score(at_key, (log_kept_BSH, own_BSH.clone()), deep=True), term_BHS=(log_kept_BSH - own_BSH).transpose(1, 2)
    )
    return Score(between if causal else earlier, (log_kept_BSH,), deep=True, apart=kernel)


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
    """log |z|, so that exp is the magnitude of a similarity that may be negative."""
    return log_of(lambda z, b, h, q, k: z.abs())


def log_of(x: Callable[..., Tensor], tensors: tuple[Tensor, ...] = ()) -> Score:
    """log relu(x(z, ..)): -inf with gradient zero where x is not positive, because relu masks the gradient of log."""
    return Score(
        lambda *arguments: torch.relu(x(*arguments)).log(),
        tensors,
        similarity=lambda *arguments: torch.relu(x(*arguments)),
        vanishes=True,
    )
