"""One attention call of a layer of a sinklab or Hugging Face model, and the quantities measured from it.

B batch, H query heads, G KV heads (H a multiple of G), T queries, S keys, D key dimension, V value dimension. The
queries are at the last T of the S positions, which include learned leading tokens.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sinklab.attention import masks
from sinklab.attention.importance import ColumnSums, Importance, Rows, seen_by, sum_rows, unpadded_importance
from sinklab.attention.masks import Mask, visible_queries
from sinklab.attention.operations import Operation
from sinklab.attention.operations.base import Call, LogSimilarity
from sinklab.attention.query_blocks import accumulate_dtype
from sinklab.errors import InputError

ShiftRope = Callable[[Tensor, Tensor], Tensor]
"""Function (x_BHTD, by_T) -> x_BHTD that shifts the RoPE position of query or key t by by_T[t] positions."""


class LibraryKernel(NamedTuple):
    """Function that computes an unedited attention call of a Hugging Face model.

    Attributes:
        name: "sdpa" for the SDPA attention of transformers; "chunked" or "flex" for sinklab's backend, which is used
            for models with a softcap or sink logits; the name of the model's own implementation if that is called.
        output: function that computes the attention output, (B, H, T, V).
        fixed: True if the output of an unedited call must be that of `output`, not another one that equals it up to
            rounding.
    """

    name: str
    output: Callable[[], Tensor]
    fixed: bool = False


@dataclass(frozen=True)
class LayerCall:
    """Arguments of one attention call of a layer, including the values.

    Attributes:
        operation: attention operation; softmax for Hugging Face models.
        call: queries, keys, mask, biases and score functions.
        value_BGSV: values.
        leading: number of learned tokens before the sequence.
        padding_B: number of padding positions of each row, before the leading tokens; None without padding, and for
            Hugging Face models.
        index: 1-based index of the layer among the attention layers; 0 outside `intercept`.
        shift_rope: function that shifts RoPE positions; None outside `intercept`, in layers without RoPE, and for
            Hugging Face models whose RoPE is not supported.
        library: function of a Hugging Face model that computes the call; None for sinklab models, for edited calls, and
            if another function computes the output.
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
        """Number of queries T."""
        return self.call.q_BHTD.shape[2]

    def output(self) -> Tensor:
        """Compute the attention output, (B, H, T, V), including a V bias."""
        out = self.operation.output(self.call, self.value_BGSV)
        if self.call.key_HD is None and self.call.value_HV is not None:  # V biases
            out = out + self.call.value_HV[:, None].to(out.dtype)
        return out

    def own_output(self) -> Tensor:
        """Compute the attention output, (B, H, T, V), as the model does: by `library` if there is one."""
        return self.output() if self.library is None else self.library.output()

    def changed(self, **call: Any) -> "LayerCall":
        """Return a copy with these fields of `call` replaced, and `library` None, as it computes the unedited call."""
        return replace(self, call=replace(self.call, **call), library=None)

    def masked(self, mask: Mask) -> "LayerCall":
        """Return a copy with `mask` in addition to the existing mask."""
        return self.changed(mask=masks.both(self.call.mask, mask))

    def exact(self) -> "LayerCall":
        """Return a copy with q, k and v detached and in float32 (float64 for float64), and `library` None."""
        q, k, v = (
            x.detach().to(accumulate_dtype(x.dtype)) for x in (self.call.q_BHTD, self.call.k_BGTD, self.value_BGSV)
        )
        return replace(self, call=replace(self.call, q_BHTD=q, k_BGTD=k), value_BGSV=v, library=None)

    def cut(self, positions: int) -> "LayerCall":
        """Return the call for the first `positions` positions; requires T = S and queries that see no removed key."""
        return replace(self, call=self.call.cut(positions), value_BGSV=self.value_BGSV[:, :, :positions], library=None)

    def rows(self) -> Iterator[Rows]:
        """Yield attention rows, including those of leading tokens, in blocks of queries (`OperationPart.rows`)."""
        return self.operation.rows(self.call)

    def visible_queries(self, counted_BT: Tensor | None = None) -> Tensor:
        """Return the number of queries in `counted_BT` (None: all) that see each key: (B or 1, H or 1, S)."""
        q_BHTD, keys = self.call.q_BHTD, self.call.k_BGTD.shape[2]
        return visible_queries(self.call.mask, self.length, keys, q_BHTD.device, counted_BT)

    @torch.no_grad()
    def column_sums(self, counted_BT: Tensor | None = None) -> ColumnSums:
        """Sum the attention rows over the queries in the boolean mask `counted_BT` (None: all)."""
        return sum_rows(self.rows(), self.call.q_BHTD, self.call.k_BGTD.shape[2], self.call.mask, counted_BT)

    @torch.no_grad()
    def importance(self) -> Importance:
        """Compute alpha_k of every position and of the bias, sink token or registers (2410.10781, section 3.2).

        Requires sequences without padding and T = S. If the attention weights of a row do not sum to one, alpha is
        computed from the proxy scores, and the mean row sum is returned too. Leading tokens count as a bias: the alpha
        of each is the mean over all queries of the sequence, and their sum is added to that of the bias.
        """
        sums, n = self.column_sums(), self.leading
        if n:  # subtract the rows of leading tokens
            first = replace(self, call=replace(self.call.cut(n), mask=masks.CAUSAL)).column_sums()
            sums.keys_BHS[..., :n] -= first.keys_BHS
            if sums.bias_BH is not None and first.bias_BH is not None:
                sums.bias_BH.sub_(first.bias_BH)
        alpha_BHT, real = unpadded_importance(sums.keys_BHS, self.length)[..., n:], self.length - n
        bias_BH = None if sums.bias_BH is None else sums.bias_BH / real
        registers_BHN = sums.keys_BHS[..., :n] / real
        if n:
            bias_BH = registers_BHN.sum(-1) if bias_BH is None else registers_BHN.sum(-1) + bias_BH
        row_sums_BH = None if self.operation.sums_to_one else self.operation.row_sums(self.call)[..., n:].mean(-1)
        counts_BGT, seen_by_BGT = (x[..., n:] for x in seen_by(self.call.mask, self.length, sums.keys_BHS.device))
        visible_BHT = None
        if not torch.equal(seen_by_BGT, torch.arange(real, 0, -1).expand_as(seen_by_BGT)):
            visible_BHT = sums.all_queries()[..., n:] / counts_BGT.clamp(min=1)
        several = registers_BHN if n > 1 else None
        return Importance(alpha_BHT, bias_BH, row_sums_BH, seen_by_BGT, visible_BHT, several)

    def scores(self) -> tuple[Tensor, Tensor | None]:
        """Compute the attention matrix, (B, H, T, S), and the attention to a bias key or sink logit, (B, H, T).

        The second result is None without a bias key and a sink logit.

        Raises:
            InputError: for kernel, differential and stick-breaking attention.
        """
        if not isinstance(self.operation, LogSimilarity):
            raise InputError(
                f"the attention weights of {self.operation.kind!r} attention cannot be edited: this needs softmax or "
                "another non-negative function of q.k, not kernel, differential or stick-breaking attention"
            )
        parts = list(self.rows())
        first = parts[0].weights_BHQS
        scores_BHTS = first.new_zeros(*self.call.q_BHTD.shape[:3], self.call.k_BGTD.shape[2])
        bias_BHT = None if parts[0].bias_BHQ is None else first.new_zeros(self.call.q_BHTD.shape[:3])
        for part in parts:
            scores_BHTS[:, :, part.block.rows, part.block.keys] = part.weights_BHQS
            if bias_BHT is not None and part.bias_BHQ is not None:
                bias_BHT[:, :, part.block.rows] = part.bias_BHQ
        if not self.operation.sums_to_one:
            sums_BHT = self.operation.row_sums(self.call).to(first.dtype)
            scores_BHTS *= sums_BHT[..., None]
            bias_BHT = None if bias_BHT is None else bias_BHT * sums_BHT
        return scores_BHTS, bias_BHT

    def weighted(self, scores_BHTS: Tensor, bias_BHT: Tensor | None) -> Tensor:
        """Compute the output sum_s A_ts v_s of the given attention weights A, (B, H, T, V).

        The value of a bias key, weighted by `bias_BHT`, or a V bias is added.
        """
        repeats = self.call.q_BHTD.shape[1] // self.value_BGSV.shape[1]
        out = scores_BHTS.to(self.value_BGSV.dtype) @ self.value_BGSV.repeat_interleave(repeats, 1)
        value_HV = self.call.value_HV
        if value_HV is not None:
            share = 1.0 if bias_BHT is None else bias_BHT[..., None].to(out.dtype)
            out = out + share * value_HV[:, None].to(out.dtype)
        return out
