"""One call of an attention layer, ours or of transformers: operation, arguments, and the quantities that are measured.

B batch, H query heads, G key heads (H a multiple of G), T queries, S keys, V value width. The T queries are the last of
the S positions; learned leading tokens are among these.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sinklab.attention import masks
from sinklab.attention.importance import ColumnSums, Importance, Rows, importance_of, sum_rows
from sinklab.attention.masks import Mask, visible_queries
from sinklab.attention.operations import Operation
from sinklab.attention.operations.base import LogSimilarity
from sinklab.attention.operations.call import Call
from sinklab.attention.query_blocks import accumulate_dtype
from sinklab.errors import InputError

ShiftRope = Callable[[Tensor, Tensor], Tensor]
"""(x_BHTD, by_T) -> x with the rotary embedding of every position shifted by so many positions."""


class LibraryKernel(NamedTuple):
    """The library's own computation of a call, and the name of its backend."""

    name: str
    output: Callable[[], Tensor]


@dataclass(frozen=True)
class LayerCall:
    """operation(call, values), of one layer.

    Attributes:
        operation, call: softmax for models of transformers.
        value_BGSV: values.
        leading: learned tokens in front of the sequence.
        padding_B: how many positions of each row, before the leading tokens, are padding; None for none.
        index: of the layer among those with attention, from 1; 0 outside of `intercept`.
        shift_rope: shifts positions; None without a rotary embedding of queries and keys.
        library: computes the output as the model itself does; None if the call has been changed, where the output
            is computed otherwise, and in our own models.
    """

    operation: Operation
    call: Call
    value_BGSV: Tensor
    leading: int = 0
    padding_B: Tensor | None = None
    index: int = 0
    shift_rope: ShiftRope | None = None
    library: LibraryKernel | None = None

    @property
    def length(self) -> int:
        """T."""
        return self.call.q_BHTD.shape[2]

    @property
    def fusible(self) -> bool:
        """Whether one_pass.py may replace the library's kernel: on a CPU, without gradients."""
        return self.library is not None and not torch.is_grad_enabled() and not self.call.q_BHTD.is_cuda

    def output(self) -> Tensor:
        """The attention output, (B, H, T, V)."""
        out = self.operation.output(self.call, self.value_BGSV)
        if self.call.key_HD is None and self.call.value_HV is not None:  # V biases
            out = out + self.call.value_HV[:, None].to(out.dtype)
        return out

    def changed(self, **call: Any) -> "LayerCall":
        """A copy with other fields of `call`, without the library's kernel, which ignores them."""
        return replace(self, call=replace(self.call, **call), library=None)

    def masked(self, mask: Mask) -> "LayerCall":
        """A copy in which this mask hides keys as well."""
        return self.changed(mask=masks.both(self.call.mask, mask))

    def exact(self) -> "LayerCall":
        """A copy without gradients, in float32 (float64 for float64)."""
        q, k, v = (
            x.detach().to(accumulate_dtype(x.dtype)) for x in (self.call.q_BHTD, self.call.k_BGTD, self.value_BGSV)
        )
        return replace(self, call=replace(self.call, q_BHTD=q, k_BGTD=k), value_BGSV=v, library=None)

    def cut(self, positions: int) -> "LayerCall":
        """The call of the sequences cut after so many positions; nothing before the cut depends on later positions."""
        q, k = (x[:, :, :positions] for x in (self.call.q_BHTD, self.call.k_BGTD))
        return replace(self, call=replace(self.call, q_BHTD=q, k_BGTD=k), value_BGSV=self.value_BGSV[:, :, :positions])

    def rows(self) -> Iterator[Rows]:
        """The rows of scores, leading tokens included, a block of queries at a time (`Operation.rows`)."""
        return self.operation.rows(self.call)

    def visible_queries(self, counted_BT: Tensor | None = None) -> Tensor:
        """How many of the counted queries see each key: (B or 1, H or 1, S)."""
        q_BHTD, keys = self.call.q_BHTD, self.call.k_BGTD.shape[2]
        return visible_queries(self.call.mask, self.length, keys, q_BHTD.device, counted_BT)

    @torch.no_grad()
    def column_sums(self, counted_BT: Tensor | None = None) -> ColumnSums:
        """Sums of the rows over the counted queries (bool; None counts all)."""
        return sum_rows(self.rows(), self.call.q_BHTD, self.call.k_BGTD.shape[2], self.call.mask, counted_BT)

    @torch.no_grad()
    def importance(self) -> Importance:
        """alpha_k of every real position and of the bias, sink token or registers (2410.10781, section 3.2).

        For whole sequences without padding, T = S. Where the operation's scores do not sum to one, alpha is that of the
        proxy scores and the mean raw row sum is reported with it.
        """
        sums, n = self.column_sums(), self.leading
        if n:
            q, k = (x[:, :, :n] for x in (self.call.q_BHTD, self.call.k_BGTD))
            first = replace(self, call=replace(self.call, q_BHTD=q, k_BGTD=k, mask=masks.CAUSAL)).column_sums()
            sums.keys_BHS[..., :n] -= first.keys_BHS
            if sums.bias_BH is not None and first.bias_BH is not None:
                sums.bias_BH.sub_(first.bias_BH)
        row_sums = None if self.operation.sums_to_one else self.operation.row_sums(self.call)[..., n:].mean(-1)
        return importance_of(sums, self.call.mask, n, row_sums)

    def scores(self) -> tuple[Tensor, Tensor | None]:
        """The attention matrix A_BHTS and the scores of the bias (B, H, T): rows over their sums, times their sums.

        Raises:
            InputError: an operation whose scores are not non-negative numbers over a divisor.
        """
        if not isinstance(self.operation, LogSimilarity):
            raise InputError(
                f"the scores of {self.operation.kind!r} attention cannot be edited individually: its outputs are not a "
                "weighted mean of the values with weights of the same sign"
            )
        parts = list(self.rows())
        first = parts[0].weights_BHQS
        scores_BHTS = first.new_zeros(*self.call.q_BHTD.shape[:3], self.call.k_BGTD.shape[2])
        bias_BHT = None if parts[0].bias_BHQ is None else first.new_zeros(self.call.q_BHTD.shape[:3])
        for part in parts:
            rows = slice(part.block.start, part.block.stop)
            scores_BHTS[:, :, rows, part.block.low : part.block.high] = part.weights_BHQS
            if bias_BHT is not None and part.bias_BHQ is not None:
                bias_BHT[:, :, rows] = part.bias_BHQ
        if not self.operation.sums_to_one:
            sums_BHT = self.operation.row_sums(self.call).to(first.dtype)
            scores_BHTS *= sums_BHT[..., None]
            bias_BHT = None if bias_BHT is None else bias_BHT * sums_BHT
        return scores_BHTS, bias_BHT

    def weighted(self, scores_BHTS: Tensor, bias_BHT: Tensor | None) -> Tensor:
        """sum_s A_ts v_s, the bias with its value: (B, H, T, V)."""
        repeats = self.call.q_BHTD.shape[1] // self.value_BGSV.shape[1]
        out = scores_BHTS.to(self.value_BGSV.dtype) @ self.value_BGSV.repeat_interleave(repeats, 1)
        value_HV = self.call.value_HV
        if value_HV is not None:
            share = 1.0 if bias_BHT is None else bias_BHT[..., None].to(out.dtype)
            out = out + share * value_HV[:, None].to(out.dtype)
        return out
