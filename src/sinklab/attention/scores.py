"""Score functions, applied to a raw score z = q.k * scale before the exponential, like FlexAttention's `score_mod`.

A score function maps (z, batch, head, query position, key position, *tensors) to a logit. Every backend uses the
same function: indices are broadcastable tensors (blocks) or scalars (FlexAttention). Tensors are passed explicitly so
that the chunked backend can differentiate them.

An operation with a non-negative similarity sim(z) uses the score z -> log sim(z), so that `lse` is the log of the row
sum of sim. Such a score also stores sim(z), which avoids the logarithm (slow on a CPU, slowest at zero) while numbers
are in range.

FlexAttention accumulates the gradient of a captured tensor atomically, score by score, and supports one read per
tensor. A score may therefore have a second form for FlexAttention (`Apart`), without the terms common to a row.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, eq=False)  # Dynamo hashes the object before its fields are set
class Score:
    """A score function and the tensors it reads.

    Attributes:
        function: (z, b, h, q, k, *tensors) -> logit, elementwise and broadcasting.
        tensors: further arguments of `function`; may require gradients.
        similarity: function that computes exp of the logit directly; None if there is no better way than exp.
        vanishes: True if similarities can be exactly zero, not only by underflow.
        deep: True if most logits of a row may be so far below the maximum that their attention weights underflow.
        apart: form of this score for FlexAttention; None if FlexAttention uses `function` itself.
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
        """Return the composition: this score function followed by `after`."""
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
        score: remaining score function, which reads each tensor with gradients at most once; None is the identity.
        factor_BHT: factor of the raw scores of each query, applied to the query; None is 1.
        term_BHS: term added to the log-normaliser of the query at each position; None is 0.
    """

    score: Score | None
    factor_BHT: Tensor | None = None
    term_BHS: Tensor | None = None

    def query(self, q_BHTD: Tensor) -> Tensor:
        """Return the queries times their factors, in the dtype of the queries."""
        return q_BHTD if self.factor_BHT is None else (q_BHTD * self.factor_BHT[..., None]).to(q_BHTD.dtype)

    def normaliser(self, lse_BHT: Tensor) -> Tensor:
        """Return the log-normaliser of the full logits, given the log-normaliser `lse_BHT` of the logits of `score`."""
        return lse_BHT if self.term_BHS is None else lse_BHT + self.term_BHS[..., -lse_BHT.shape[-1] :]


def apart(score: Score | None) -> Apart:
    """Return the form of a score function that FlexAttention uses (`Apart`)."""
    return Apart(score) if score is None or score.apart is None else score.apart


def _both_apart(first: Score, after: Score) -> Apart | None:
    """Compose the `Apart` forms of two scores: only the first may have a factor, only the last a term."""
    before = apart(first) if apart(first).term_BHS is None else Apart(first)
    behind = apart(after) if apart(after).factor_BHT is None else Apart(after)
    if before.score is first and behind.score is after:
        return None
    return Apart(compose(before.score, behind.score), before.factor_BHT, behind.term_BHS)


def broadcast_index(index: Tensor, length: int) -> Tensor:
    """Return the index along an axis of `length` entries; 0 if the axis has size 1."""
    return torch.zeros_like(index) if length == 1 else index


def compose(*scores: Score | None) -> Score | None:
    """Compose the given score functions in order; None is the identity."""
    result: Score | None = None
    for score in scores:
        result = score if result is None else result.then(score)
    return result


def softcap(limit: float) -> Score:
    """Score limit * tanh(z / limit), the softcap of Gemma 2; `limit` is in nats."""
    return Score(lambda z, b, h, q, k: limit * torch.tanh(z / limit))


def fading(log_kept_BSH: Tensor, causal: bool) -> Score:
    """Forget gates: z + sum over s < l <= t of log f_l (2503.02130).

    Args:
        log_kept_BSH: cumulative sums of log f up to and including every position.
        causal: False if queries may see later keys, to which no forget gates apply.
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


def plus_of_head(z: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, term_H: Tensor) -> Tensor:
    """Add a term per head: z + term_h, the function of a `Score` with the terms as its tensor."""
    return z + term_H[h].to(z.dtype)


def times(factor: float) -> Score:
    """Score factor * z, the logarithm of sim ** factor."""
    return Score(lambda z, b, h, q, k: factor * z)


def log_sigmoid() -> Score:
    """Score log sigmoid(z), for sim(z) = sigmoid(z)."""
    return Score(lambda z, b, h, q, k: F.logsigmoid(z), similarity=lambda z, b, h, q, k: torch.sigmoid(z))


def log_elu_plus_one() -> Score:
    """Score log(elu(z) + 1) = min(z, 0) + log(1 + max(z, 0)), for sim(z) = elu(z) + 1 = exp(min(z, 0)) + max(z, 0)."""

    def function(z: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        positive = torch.relu(z)
        return z - positive + torch.log1p(positive)

    def similarity(z: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        positive = torch.relu(z)
        return torch.exp(z - positive) + positive

    return Score(function, similarity=similarity)


def log_relu(sign: int = 1) -> Score:
    """Score log relu(sign * z)."""
    return log_of(lambda z, b, h, q, k: z if sign > 0 else -z)


def log_magnitude() -> Score:
    """Score log |z|, the log magnitude of a similarity that may be negative."""
    return log_of(lambda z, b, h, q, k: z.abs())


def log_of(x: Callable[..., Tensor], tensors: tuple[Tensor, ...] = ()) -> Score:
    """Score log relu(x(z, ..)); where x is not positive, it is -inf with zero gradient."""
    return Score(
        lambda *arguments: torch.relu(x(*arguments)).log(),
        tensors,
        similarity=lambda *arguments: torch.relu(x(*arguments)),
        vanishes=True,
    )
