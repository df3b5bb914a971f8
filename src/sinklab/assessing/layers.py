"""One layer's attention as the model would compute it, and what may be put in its place.

B batch, H query heads, G key heads, L positions (a learned sink token in front counts), D head width, S = L keys.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from sinklab.attention.importance import Rows
from sinklab.attention.masks import Mask, both
from sinklab.attention.operations import Operation
from sinklab.attention.operations.base import LogSimilarity
from sinklab.attention.operations.call import Call
from sinklab.errors import InputError
from sinklab.models.layer_kinds import LayerKinds

Turn = Callable[[Tensor, Tensor], Tensor]
"""(x_BHLD, by_L) -> x with the rotary embedding of every position moved on by so many positions."""


@dataclass(frozen=True)
class LayerAttention:
    """What one layer was about to compute: operation(call, values).

    Attributes:
        number: of the layer among those with attention, from 1.
        operation, call: ours, also for models that are not.
        value_BGLV: values.
        turn: moves positions; None where no rotary embedding turns queries and keys.
    """

    number: int
    operation: Operation
    call: Call
    value_BGLV: Tensor
    turn: Turn | None = None

    @property
    def length(self) -> int:
        """L."""
        return self.call.q_BHTD.shape[2]

    @property
    def has_bias(self) -> bool:
        """Whether a bias key or a sink logit takes part in every row."""
        return self.call.key_HD is not None or self.call.logit_H is not None

    def output(self) -> Tensor:
        """The attention output: (B, H, L, V)."""
        out = self.operation.output(self.call, self.value_BGLV)
        if self.call.key_HD is None and self.call.value_HV is not None:  # V biases
            out = out + self.call.value_HV[:, None].to(out.dtype)
        return out

    def under(self, mask: Mask) -> "LayerAttention":
        """The same where a query sees only what this mask allows as well."""
        return replace(self, call=replace(self.call, mask=both(self.call.mask, mask)))

    def scores(self) -> tuple[Tensor, Tensor | None]:
        """The attention matrix A_BHLS and the scores of the bias (B, H, L): rows over their sums, times their sums.

        Raises:
            InputError: an operation whose scores are not non-negative numbers over a divisor.
        """
        if not isinstance(self.operation, LogSimilarity):
            raise InputError(
                f"the scores of {self.operation.kind!r} attention cannot be changed one by one: its outputs are no "
                "weighted mean of the values with weights of one sign"
            )
        B, H, L, _ = self.call.q_BHTD.shape
        parts: list[Rows] = list(self.operation.rows(self.call))
        first = parts[0].weights_BHQS
        scores_BHLS = first.new_zeros(B, H, L, self.call.k_BGTD.shape[2])
        bias_BHL = None if parts[0].bias_BHQ is None else first.new_zeros(B, H, L)
        for part in parts:
            rows = slice(part.block.start, part.block.stop)
            scores_BHLS[:, :, rows, part.block.low : part.block.high] = part.weights_BHQS
            if bias_BHL is not None and part.bias_BHQ is not None:
                bias_BHL[:, :, rows] = part.bias_BHQ
        if not self.operation.sums_to_one:
            sums_BHL = self.operation.row_sums(self.call).to(first.dtype)
            scores_BHLS *= sums_BHL[..., None]
            bias_BHL = None if bias_BHL is None else bias_BHL * sums_BHL
        return scores_BHLS, bias_BHL

    def weighted(self, scores_BHLS: Tensor, bias_BHL: Tensor | None) -> Tensor:
        """sum_s A_ts v_s, the bias with its value: (B, H, L, V)."""
        repeats = self.call.q_BHTD.shape[1] // self.value_BGLV.shape[1]
        out = scores_BHLS.to(self.value_BGLV.dtype) @ self.value_BGLV.repeat_interleave(repeats, 1)
        value_HV = self.call.value_HV
        if value_HV is not None:
            share = 1.0 if bias_BHL is None else bias_BHL[..., None].to(out.dtype)
            out = out + share * value_HV[:, None].to(out.dtype)
        return out


Change = Callable[[LayerAttention], Tensor]
"""What stands in a layer's place: its output, (B, H, L, V)."""


def as_it_is(layer: LayerAttention) -> Tensor:
    """The change that changes nothing."""
    return layer.output()


class Patient(Protocol):
    """A causal language model whose attention can be taken apart.

    Attributes:
        name: as the user calls it.
        context: tokens it was trained to read at once.
        leading: learned positions in front of every sequence, which are no tokens.
        first_target: 1-based position of the first token that a loss counts.
        kinds: which layers have attention; a `LayerAttention` is numbered among these.
        fixed_positions: why positions cannot be those in a cache; None where they can.
        ends: why it cannot read beyond its context; None where it can.
    """

    name: str
    context: int
    leading: int
    first_target: int
    kinds: LayerKinds
    fixed_positions: str | None
    ends: str | None

    @property
    def module(self) -> nn.Module:
        """The model itself."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it takes its tokens."""
        ...

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """Of the residual stream in order."""
        ...

    def changed(self, change: Change) -> AbstractContextManager[None]:
        """All attention is computed by `change` for the length of the block."""
        ...

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        """The stream that the head reads, of the tokens: (B, T, E)."""
        ...

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """Of rows of `hidden`: (R, V), float32 at least."""
        ...
