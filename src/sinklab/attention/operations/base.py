"""Base classes of attention operations.

Most operations with non-negative attention weights A_ts are defined by a log-similarity l_ts and a divisor Z_t:
A_ts = exp(l_ts) / Z_t. One call of `attend` with the logits l_ts returns (out, lse). The output of the operation is
then out * exp(lse) / Z, and the row sum is exp(lse) / Z. If Z is exp(lse), the output is out and the row sum is 1.

B batch, H query heads, G KV heads, T queries, L key positions, V value dimension.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from sinklab.attention.biases import with_extra_key
from sinklab.attention.chunked import finite_normaliser
from sinklab.attention.importance import Rows
from sinklab.attention.operations.call import Call
from sinklab.attention.scores import Score
from sinklab.schema import Kind


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
