"""Base classes of attention operations.

Most operations with non-negative attention weights A_ts are defined by a log-similarity l_ts and a divisor Z_t:
A_ts = exp(l_ts) / Z_t. One call of `attend` with the logits l_ts returns (out, lse). The output of the operation is
then out * exp(lse) / Z, and the row sum is exp(lse) / Z. If Z is exp(lse), the output is out and the row sum is 1.

B batch, H query heads, G KV heads, T queries, L key positions, V value dimension.

Arguments of an attention operation: queries, keys, mask, biases and score functions.

B batch, H query heads, G KV heads, T queries, D key dimension, V value dimension.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sinklab.attention.biases import extra_logits, with_extra_key
from sinklab.attention.importance import ColumnSums, Rows, flex_column_sums, score_rows, sum_rows
from sinklab.attention.masks import Mask, visible_keys
from sinklab.attention.primitive import (
    Backend,
    attend,
    attend_output,
    finite_normaliser,
    flex_serves,
    log_normaliser,
)
from sinklab.attention.query_blocks import ScoreMatrix, accumulate_dtype
from sinklab.attention.scores import Score, compose, plus_of_head
from sinklab.schema import Kind


@dataclass(frozen=True)
class Call:
    """Arguments of one call of the attention core, except the values.

    Attributes:
        q_BHTD, k_BGTD: queries and keys. If there are more keys than queries (KV cache), the queries are at the last
            positions. If a head has several queries, they are concatenated in the last dimension of q_BHTD.
        mask: mask of visible keys.
        backend: backend of the primitive.
        cap: softcap of the scores and of the bias key's logit; None without a softcap.
        position: relative position bias, which is not applied to a bias key; None without one. For Hugging Face models:
            position bias and additive mask.
        forget_gates: score function of forget gates, applied after the position bias but not to a bias key; None
            without forget gates.
        key_HD: bias key; None without one.
        offset_H: number added to the logit of the bias key after the softcap; None means zero.
        logit_BHT: sink logit, used in place of a bias key's logit; None without one. Axes B and T may be 1.
        value_HV: value of the bias key, or the V bias if there is no bias key; None means zero.
        learned: learned parameters of the operation; None without parameters.
        weight_BTH: logits of the second softmax's weights (`OperationPart.weight_gate`); None for operations without
            them.
        scale: factor of q.k; None means 1 / sqrt(D). Kernel attention and stick-breaking support only None.
    """

    q_BHTD: Tensor
    k_BGTD: Tensor
    mask: Mask
    backend: Backend = "auto"
    cap: Score | None = None
    position: Score | None = None
    forget_gates: Score | None = None
    key_HD: Tensor | None = None
    offset_H: Tensor | None = None
    logit_BHT: Tensor | None = None
    value_HV: Tensor | None = None
    learned: Any = None
    weight_BTH: Tensor | None = None
    scale: float | None = None

    @property
    def first(self) -> int:
        """Position of the first query among the keys."""
        return self.k_BGTD.shape[2] - self.q_BHTD.shape[2]

    @property
    def has_bias(self) -> bool:
        """True if there is a bias key or a sink logit."""
        return self.key_HD is not None or self.logit_BHT is not None

    def cut(self, positions: int, first: int = 0) -> "Call":
        """Return the call for the first `positions` positions, with queries from index `first` on; requires T = S."""
        q_BHTD, k_BGTD = self.q_BHTD[:, :, first:positions], self.k_BGTD[:, :, :positions]
        weight_BTH = None if self.weight_BTH is None else self.weight_BTH[:, first:positions]
        logit_BHT = self.logit_BHT
        if logit_BHT is not None and logit_BHT.shape[-1] > 1:
            logit_BHT = logit_BHT[..., first:positions]
        return replace(self, q_BHTD=q_BHTD, k_BGTD=k_BGTD, weight_BTH=weight_BTH, logit_BHT=logit_BHT)

    def matrix(self, similarity: Score | None = None, mask: Mask | None = None) -> ScoreMatrix:
        """Return the score matrix for a log-similarity, without bias key and sink logit; `mask` replaces the mask."""
        mask = self.mask if mask is None else mask
        return ScoreMatrix(self.q_BHTD, self.k_BGTD, mask, self.score(similarity), self.scale)

    def attend(self, v_BGTV: Tensor, similarity: Score | None = None) -> tuple[Tensor, Tensor]:
        """Compute (out_BHTV, lse_BHT) for a log-similarity, without bias key and sink logit."""
        return attend(self.matrix(similarity), v_BGTV, self.backend)

    def attend_output(self, v_BGTV: Tensor, similarity: Score | None = None) -> Tensor:
        """Compute the output of `attend` without lse, for which a fused kernel may be used."""
        return attend_output(self.matrix(similarity), v_BGTV, self.backend)

    def rows(self, similarity: Score | None = None) -> Iterator[Rows]:
        """Yield similarities divided by their row sums, including a bias key or sink logit, in blocks of queries."""
        return score_rows(self.matrix(similarity), self.bias_logits(similarity))

    def keys_per_row(self) -> Tensor:
        """Return the number of keys that each query sees, including a bias key or sink logit: (B, H or 1, T), float."""
        B, _, T, _ = self.q_BHTD.shape
        seen_BHT = visible_keys(self.mask, T, self.q_BHTD.device, self.k_BGTD.shape[2])
        keys_BHT = seen_BHT.expand(B, -1, T) + int(self.has_bias)
        return keys_BHT.to(accumulate_dtype(self.q_BHTD.dtype))

    def bias_logits(self, similarity: Score | None = None) -> Tensor | None:
        """Compute the log-similarity of every query with the bias key or sink logit, (B, H, T); None without either.

        Kernel attention passes queries and keys after the feature map; the result is then the similarity itself.
        """
        if self.logit_BHT is not None:
            logit_BHT = self.logit_BHT.to(accumulate_dtype(self.q_BHTD.dtype)).expand(self.q_BHTD.shape[:3])
            return at_every_query(similarity, logit_BHT, self.first)
        if self.key_HD is None:
            return None
        z_BHT = extra_logits(self.q_BHTD, self.key_HD, self.matrix().factor)
        offset = None if self.offset_H is None else Score(plus_of_head, (self.offset_H,))
        return at_every_query(compose(self.cap, offset, similarity), z_BHT, self.first)

    def normaliser(self, similarity: Score | None) -> Tensor:
        """Compute the log of the similarity's row sum, including a bias key or sink logit: (B, H, T)."""
        lse_BHT = log_normaliser(self.matrix(similarity), self.backend)
        logits_BHT = self.bias_logits(similarity)
        return lse_BHT if logits_BHT is None else with_extra_key(lse_BHT[..., None], lse_BHT, logits_BHT)[1]

    def score(self, similarity: Score | None = None) -> Score | None:
        """Compose the score function: softcap, position bias, forget gates, then the log-similarity."""
        return compose(self.cap, self.position, self.forget_gates, similarity)


def at_every_query(score: Score | None, z_BHT: Tensor, first: int) -> Tensor:
    """Apply a score function to one score per query (B, H, T), such as the score of a bias key; None is the identity.

    Args:
        first: position of the first query among the keys.
    """
    if score is None:
        return z_BHT
    B, H, T = z_BHT.shape
    device = z_BHT.device
    rows, heads = torch.arange(B, device=device).view(-1, 1, 1), torch.arange(H, device=device).view(-1, 1)
    queries, key = torch.arange(first, first + T, device=device), torch.zeros((), dtype=torch.long, device=device)
    return score(z_BHT, rows, heads, queries, key)


class OperationPart(Kind, ABC):
    """Base class of attention operations, which are chosen in a recipe."""

    has_logits: ClassVar[bool] = True  # False for kernel attention: phi(q).phi(k) instead of a function of q.k
    zero_at_zero: ClassVar[bool] = False  # whether the similarity of a key with logit 0 is 0
    forgets: ClassVar[bool] = False  # whether the operation uses forget gates (`forget_gate`)
    sequential: ClassVar[bool] = False  # whether attention weights depend on the order of keys (stick-breaking)
    keys_per_head: ClassVar[int] = 1  # number of parts into which a head's queries and keys are split
    queries_per_head: ClassVar[int] = 1  # number of queries per head and position, concatenated
    normal: ClassVar[bool] = False  # whether the attention weights of a row sum to one for all settings
    weighs: ClassVar[bool] = False  # whether a `weight_gate` weights the second softmax

    @property
    def sums_to_one(self) -> bool:
        """True if the attention weights of a row sum to one; else importance is computed from proxy scores."""
        return self.normal or self.plain

    @property
    def only_values(self) -> bool:
        """True if the output is a weighted sum of values (including a bias key's), without a norm or learned vector."""
        return True

    @property
    def divides(self) -> bool:
        """True if a row is divided by its sum or norm, so that a key with value zero affects the output."""
        return True

    @property
    def plain(self) -> bool:
        """True if the operation equals softmax, possibly because of its settings."""
        return False

    def parameters(
        self, heads: int, head_width: int, value_width: int, layer: int, context: int | None
    ) -> nn.Module | None:
        """Build the operation's learned parameters for one layer; None for operations without parameters.

        Args:
            heads: number of query heads.
            head_width: width of a head's queries and keys, before any split by `keys_per_head`.
            value_width: width of a head's values and output.
            layer: layer number, 1-based.
            context: training sequence length; may be None for operations that do not depend on it.
        """
        return None

    def forget_gate(self, width: int, heads: int) -> nn.Module | None:
        """Build the module: attention input (B, L, width) -> cumulative sums of log forget gates (B, L, heads).

        Returns None for operations without forget gates.
        """
        return None

    def weight_gate(self, width: int, heads: int) -> nn.Module | None:
        """Build the module: attention input (B, L, width) -> logits (B, L, heads) of the second softmax's weights.

        Returns None for operations without such weights (`weighs`).
        """
        return None

    @abstractmethod
    def output(self, call: Call, v_BGTV: Tensor) -> Tensor:
        """Compute the attention output in the dtype of the values: (B, H, T, V).

        The output is sum_s A_ts v_s, including a bias key. Differential attention also normalises it, and
        stick-breaking may add a value for the remaining attention. A V bias is added later (`LayerCall.output`).
        """

    @abstractmethod
    def rows(self, call: Call) -> Iterator[Rows]:
        """Yield proxy scores |A_tk| / sum_s |A_ts| in blocks of queries (2410.10781, table 6).

        The sum includes a bias key or sink logit. If the attention weights of a row sum to one, the proxy scores equal
        them. For stick-breaking, the remaining attention is returned as the attention to a bias.
        """

    def column_sums(self, call: Call, counted_BT: Tensor | None = None) -> ColumnSums:
        """Sum the rows over the queries in the boolean mask `counted_BT` (None: all)."""
        return sum_rows(self.rows(call), call.q_BHTD, call.k_BGTD.shape[2], call.mask, counted_BT)

    @abstractmethod
    def row_sums(self, call: Call) -> Tensor:
        """Compute the row sums sum_s A_ts: (B, H, T).

        A bias key, a sink logit and the remaining attention of stick-breaking are included.
        """


@dataclass(frozen=True)
class Normalisation:
    """Similarity and divisor that define the attention weights of an operation.

    Attributes:
        similarity: log-similarity l_ts, applied to the call's score; None is the identity.
        log_divisor: log Z_t (B, H, T); 0.0 means no divisor, None the row sum including a bias key or sink logit.
        log_addend: log of a term (B, H, T) that is added to the row sum in the divisor; None for no term. Used only
            if `log_divisor` is None.
        factor: constant factor of the attention weights, applied after the division.
    """

    similarity: Score | None = None
    log_divisor: Tensor | float | None = None
    log_addend: Tensor | None = None
    factor: float = 1.0


class LogSimilarity(OperationPart):
    """Base class of operations with attention weights exp(l_ts) / Z_t, times a constant factor."""

    @abstractmethod
    def normalisation(self, call: Call) -> Normalisation:
        """Return the operation's log-similarity and divisor for this call."""

    def output(self, call: Call, v_BGTV: Tensor) -> Tensor:
        normalisation = self.normalisation(call)
        logits = call.bias_logits(normalisation.similarity)
        if logits is None and normalisation.log_divisor is None and normalisation.log_addend is None:
            out = call.attend_output(v_BGTV, normalisation.similarity)
        else:
            out, lse = call.attend(v_BGTV, normalisation.similarity)
            if logits is not None:
                out, lse = with_extra_key(out, lse, logits, call.value_HV)
            if normalisation.log_addend is not None:
                out, _ = with_extra_key(out, lse, normalisation.log_addend)
            if normalisation.log_divisor is not None:
                out = out * _quotient(lse, normalisation.log_divisor)[..., None].to(out.dtype)
        return out if normalisation.factor == 1 else out * normalisation.factor

    def rows(self, call: Call) -> Iterator[Rows]:
        return call.rows(self.normalisation(call).similarity)

    def column_sums(self, call: Call, counted_BT: Tensor | None = None) -> ColumnSums:
        if not flex_serves(call.q_BHTD, call.k_BGTD):
            return super().column_sums(call, counted_BT)
        similarity = self.normalisation(call).similarity
        return flex_column_sums(call.matrix(similarity), call.bias_logits(similarity), counted_BT)

    def row_sums(self, call: Call) -> Tensor:
        normalisation = self.normalisation(call)
        lse = log_divisor = call.normaliser(normalisation.similarity)
        if normalisation.log_divisor is not None:
            log_divisor = normalisation.log_divisor
        elif normalisation.log_addend is not None:
            log_divisor = torch.logaddexp(lse, normalisation.log_addend)
        return _quotient(lse, log_divisor) * normalisation.factor


def _quotient(log_sum: Tensor, log_divisor: Tensor | float) -> Tensor:
    if isinstance(log_divisor, Tensor):
        log_divisor = finite_normaliser(log_divisor)
    return torch.exp(log_sum - log_divisor)
