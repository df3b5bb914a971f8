"""Score functions, applied to a raw score z = q.k * scale before the exponential, like FlexAttention's `score_mod`.

A score function maps (z, batch, head, query position, key position, *tensors) to a logit. Every backend uses the same
function. The indices are broadcastable tensors in a block of scores, and scalars in FlexAttention. Tensors are passed
explicitly, so that the chunked backend can differentiate with respect to them.

An operation with a non-negative similarity sim(z) uses the score function z -> log sim(z), so that `lse` is the log of
the row sum of sim. Its `Score` also contains the function sim(z). The chunked backend uses sim(z) while row sums are in
range, because a logarithm is slow on a CPU, especially at zero.

FlexAttention adds up the gradient of a captured tensor atomically, once per score, and supports only one use of each
tensor. A `Score` may therefore have a second form for FlexAttention (`FlexScore`), without the terms common to a row.

B batch, H query heads, T queries, S positions, D key dimension.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, eq=False)  # Dynamo hashes the object before its fields are set
class Score:
    """A score function and the tensors that it uses.

    Attributes:
        function: (z, b, h, q, k, *tensors) -> logit, elementwise and broadcasting.
        tensors: further arguments of `function`; may require gradients.
        similarity: function that computes exp(logit) directly; None if exp(function(z)) is used.
        vanishes: True if exp(logit) can be exactly zero without underflow.
        deep: True if most logits of a row may be so far below the maximum that their attention weights underflow.
        for_flex: form of the score function for FlexAttention; None if FlexAttention uses `function` itself.
    """

    function: Callable[..., Tensor]
    tensors: tuple[Tensor, ...] = ()
    similarity: Callable[..., Tensor] | None = None
    vanishes: bool = False
    deep: bool = False
    for_flex: "FlexScore | None" = None

    def __call__(self, z: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.function(z, b, h, q, k, *self.tensors)

    def then(self, after: "Score | None") -> "Score":
        """Return the composition: this score function followed by `after`; `self` if `after` is None."""
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
            _both_for_flex(self, after),
        )


@dataclass(frozen=True)
class FlexScore:
    """A score function, split into the terms common to a row and the rest: logit = score(factor z) + term.

    Attributes:
        score: remaining score function, which uses each tensor with gradients at most once; None is the identity.
        factor_BHT: factor of the raw scores of each query, by which the query is multiplied; None is 1.
        term_BHS: term of the query at each position, added to the log-normaliser of that query; None is 0.
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


def for_flex(score: Score | None) -> FlexScore:
    """Return the form of a score function that FlexAttention uses (`FlexScore`)."""
    return FlexScore(score) if score is None or score.for_flex is None else score.for_flex


def _both_for_flex(first: Score, after: Score) -> FlexScore | None:
    """Compose the `FlexScore` forms of two scores; None if neither can be used.

    A form of `first` with a term cannot be used, nor a form of `after` with a factor.
    """
    before = for_flex(first) if for_flex(first).term_BHS is None else FlexScore(first)
    behind = for_flex(after) if for_flex(after).factor_BHT is None else FlexScore(after)
    if before.score is first and behind.score is after:
        return None
    return FlexScore(compose(before.score, behind.score), before.factor_BHT, behind.term_BHS)


def broadcast_index(index: Tensor, length: int) -> Tensor:
    """Return the index along an axis of `length` entries, or zeros if the axis has size 1 and is broadcast."""
    return torch.zeros_like(index) if length == 1 else index


def per_query(function: Callable[..., Tensor], first: int) -> Callable[..., Tensor]:
    """Return the function of a `Score`: `function` of z and, from each of its tensors, the number of the query.

    The tensors have the shape (B, H, T), where H may be 1.

    Args:
        first: position of the first query among the keys.
    """

    def at_query(z: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, *tensors_BHT: Tensor) -> Tensor:
        return function(z, *[x_BHT[b, broadcast_index(h, x_BHT.shape[1]), q - first] for x_BHT in tensors_BHT])

    return at_query


def compose(*scores: Score | None) -> Score | None:
    """Compose the given score functions in order; None is the identity."""
    result: Score | None = None
    for score in scores:
        result = score if result is None else result.then(score)
    return result


def softcap(limit: float) -> Score:
    """Return the score function limit * tanh(z / limit), the softcap of Gemma 2; `limit` is in nats."""
    return Score(lambda z, b, h, q, k: limit * torch.tanh(z / limit))


def forget_gates(log_kept_BSH: Tensor, causal: bool) -> Score:
    """Return the score function of forget gates f: z + sum over s < l <= t of log f_l (2503.02130).

    Args:
        log_kept_BSH: cumulative sums of log f, up to and including each position.
        causal: False if queries may see later keys; the scores z of later keys are unchanged.
    """

    def between(z: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, log_kept_BSH: Tensor) -> Tensor:
        return z + (log_kept_BSH[b, q, h] - log_kept_BSH[b, k, h]).to(z.dtype)

    def earlier(z: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, log_kept_BSH: Tensor) -> Tensor:
        return torch.where(k <= q, between(z, b, h, q, k, log_kept_BSH), z)

    def at_key(z: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, log_kept_BSH: Tensor, own_BSH: Tensor) -> Tensor:
        key = k if causal else torch.minimum(k, q)
        return z + (own_BSH[b, q, h] - log_kept_BSH[b, key, h]).to(z.dtype)

    # The cumulative sum at the query is constant along a row. FlexAttention adds it detached, so that logits are small.
    # Its gradient flows through `term_BHS`, whose value is 0.
    own_BSH = log_kept_BSH.detach()
    kernel = FlexScore(
        Score(at_key, (log_kept_BSH, own_BSH.clone()), deep=True), term_BHS=(log_kept_BSH - own_BSH).transpose(1, 2)
    )
    return Score(between if causal else earlier, (log_kept_BSH,), deep=True, for_flex=kernel)


def plus_of_head(z: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, term_H: Tensor) -> Tensor:
    """Return z + term_h: the function of a `Score` whose only tensor is `term_H`."""
    return z + term_H[h].to(z.dtype)


def times(factor: float) -> Score:
    """Return the score function factor * z; for z = log sim, it is log(sim ** factor)."""
    return Score(lambda z, b, h, q, k: factor * z)


def log_sigmoid() -> Score:
    """Return the score function log sigmoid(z), for sim(z) = sigmoid(z)."""
    return Score(lambda z, b, h, q, k: F.logsigmoid(z), similarity=lambda z, b, h, q, k: torch.sigmoid(z))


def log_elu_plus_one() -> Score:
    """Return the score function log(elu(z) + 1) = min(z, 0) + log(1 + max(z, 0)).

    Its similarity is sim(z) = elu(z) + 1 = exp(min(z, 0)) + max(z, 0).
    """

    def function(z: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        positive = torch.relu(z)
        return z - positive + torch.log1p(positive)

    def similarity(z: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        positive = torch.relu(z)
        return torch.exp(z - positive) + positive

    return Score(function, similarity=similarity)


def log_relu(sign: int = 1) -> Score:
    """Return the score function log relu(sign * z)."""
    return log_of(lambda z, b, h, q, k: z if sign > 0 else -z)


def log_magnitude() -> Score:
    """Return the score function log |z|, for a similarity z that may be negative."""
    return log_of(lambda z, b, h, q, k: z.abs())


def log_of(x: Callable[..., Tensor], tensors: tuple[Tensor, ...] = ()) -> Score:
    """Return the score function log relu(x(z, ..)), which is -inf with zero gradient where x is not positive."""
    return Score(
        lambda *arguments: torch.relu(x(*arguments)).log(),
        tensors,
        similarity=lambda *arguments: torch.relu(x(*arguments)),
        vanishes=True,
    )
