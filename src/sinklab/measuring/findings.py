"""Parts of a measurement: massive activations, ablations, effect of a replaced token, propositions of 2410.10781.

Massive activations: entries of the residual stream far larger than all others, which accompany a sink (2402.17762).

They occur at few positions (mostly the first token) and in a few fixed dimensions, from an early block to the
second-to-last. Only the first sequence is searched: massive activations hardly depend on the input, and the median over
all sequences would cost more than the rest of the measurement.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from pydantic import Field, FiniteFloat
from torch import Tensor, nn

from sinklab.attention.masks import RealTokens
from sinklab.device import on_host
from sinklab.model.position import PositionKind
from sinklab.models.hooks import hidden_states, hooked
from sinklab.schema import Part

STRONGEST = 8  # maximum number of blocks reported
MASSIVE, MASSIVE_RATIO = 100, 1000  # massive: |value| > MASSIVE, and |value| >= MASSIVE_RATIO times the median


class MassiveActivation(Part):
    """The largest |activation| of one sequence after one block; `is_massive` states whether it is massive.

    Attributes:
        layer: number of the block, 1-based; the activation is in the residual stream after it.
        position: position of the token, 1-based, without padding. 0 is the last learned token (sink token or
            register), -1 the one before it; only the activations of an `Ablation` can be at learned tokens.
        dimension: dimension of the residual stream, 0-based.
        value: signed value of the activation; 0 if it is not finite.
        ratio_to_median: |value| divided by the median |activation| of the sequence after that block; 0 if the median
            is 0 or the value is not finite.
    """

    layer: int = Field(ge=1)
    position: int
    dimension: int = Field(ge=0)
    value: FiniteFloat
    ratio_to_median: FiniteFloat

    @property
    def is_massive(self) -> bool:
        """True if |value| > 100 and at least 1,000 times the median (Sun et al., 2402.17762, section 2)."""
        return abs(self.value) > MASSIVE and self.ratio_to_median >= MASSIVE_RATIO


@contextmanager
def largest_activations(blocks: Sequence[nn.Module], real: RealTokens) -> Iterator[list[MassiveActivation]]:
    """Collect the largest |activation| after each block, for the first sequence of the first complete forward pass.

    The yielded list is filled, with one entry per block, when the `with` block ends without an exception.

    Args:
        blocks: decoder blocks, in order.
        real: real tokens of the first sequence. Other columns are excluded (padding, learned tokens, the predicting
            streams of ProphetNet), and position 1 is the first real token.
    """
    found: list[MassiveActivation] = []
    seen: list[Tensor] = []
    first, count = 0, real.mask_BT.shape[1]
    if real.padded:  # else not read from the tensors: it would wait for the GPU
        first, count = int(real.index_BR[0, 0]), int(real.count_B[0])

    def leaving(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        if len(seen) < len(blocks):
            seen.append(_largest(hidden_states(output)[0, first : first + count].detach()))

    def entering(_: nn.Module, __: tuple[Any, ...]) -> None:
        if len(seen) < len(blocks):  # the first pass, or a retry after a failed pass
            seen.clear()

    hooks = [block.register_forward_hook(leaving) for block in blocks]
    with hooked(hooks + [block.register_forward_pre_hook(entering) for block in blocks[:1]]):
        yield found
        for layer, numbers in enumerate(on_host(seen), start=1):
            position, dimension, value, median = numbers.tolist()
            value = value if math.isfinite(value) else 0.0  # NaN is reported by the accumulator
            found.append(
                MassiveActivation(
                    layer=layer,
                    position=int(position) + 1,
                    dimension=int(dimension),
                    value=value,
                    ratio_to_median=abs(value) / median if median > 0 else 0.0,
                )
            )


def strongest(found: Sequence[MassiveActivation]) -> list[MassiveActivation]:
    """Return at most STRONGEST activations with the largest ratios to the median, in descending order."""
    return sorted(found, key=lambda one: -one.ratio_to_median)[:STRONGEST]


def _largest(hidden_TC: Tensor) -> Tensor:
    """Return position and dimension (0-based) of the largest |activation|, its value, and the median: (4,), float64."""
    size = hidden_TC.abs()
    place = size.argmax()
    value = hidden_TC.flatten().gather(0, place[None])[0]
    numbers = (place // hidden_TC.shape[1], place % hidden_TC.shape[1], value, size.float().median())
    return torch.stack([number.double() for number in numbers])


class Ablation(Part):
    """Loss and sink rate of a model without and with one ablation (surgery.py).

    Attributes:
        name: name of the ablation, such as "mask_first:4".
        what: description of the ablation.
        first_target: 1-based position, in the unablated sequences, of the first target included in both losses.
        loss_before, loss_after: loss without and with the ablation, nats per token.
        loss_change: loss_after - loss_before.
        sink_rate_before: Sink_1 without the ablation, percent.
        sink_rate_after: Sink_1 with the ablation, percent. For no_bos, position 1 is the first token of the text.
        sink_rate: sink rate by position with the ablation, percent, from position 1.
        sink_max_before, sink_max_after: highest sink rate among positions 1 to T / 2 (highest.py), percent; None if no
            rate is known.
        sink_max_position_before, sink_max_position_after: position of the highest sink rate, 1-based.
        largest_before, largest_after: for zero_massive, the activation with the largest ratio to its block's median in
            the first sequence, including learned tokens, without and with the ablation. None for other ablations.
        still_massive: for zero_massive, whether `largest_after` is massive (`MassiveActivation.is_massive`). None for
            other ablations.
    """

    name: str
    what: str
    first_target: int = Field(ge=2)
    loss_before: FiniteFloat
    loss_after: FiniteFloat
    loss_change: FiniteFloat
    sink_rate_before: float = Field(ge=0, le=100)
    sink_rate_after: float = Field(ge=0, le=100)
    sink_rate: list[float]
    sink_max_before: float | None = Field(ge=0, le=100)
    sink_max_position_before: int | None = Field(ge=1)
    sink_max_after: float | None = Field(ge=0, le=100)
    sink_max_position_after: int | None = Field(ge=1)
    largest_before: MassiveActivation | None = None
    largest_after: MassiveActivation | None = None
    still_massive: bool | None = None

    @property
    def highest_after(self) -> str:
        """Highest sink rate in percent with the ablation at positions 1 to T / 2, and its position: `76.8 at 2`."""
        rate = self.sink_max_after
        return "" if rate is None else f"{rate:.1f} at {self.sink_max_position_after}"

    @property
    def sentences(self) -> list[str]:
        """Description of the ablation and, for zero_massive, a second text on the largest remaining activation."""
        before, after = self.largest_before, self.largest_after
        if before is None or after is None:
            return [self.what]
        if after.is_massive:
            verdict = "there is still a massive activation"
        elif before.is_massive:
            verdict = "no massive activation remains"
        else:
            verdict = "no activation was massive before (above 100 and 1,000 times the median)"
        where = f"position {after.position}" if after.position > 0 else "a learned token before the sequence"
        return [
            self.what,
            f"the largest remaining activation is {after.value:,.1f} (dimension {after.dimension} at {where} "
            f"after layer {after.layer}, {after.ratio_to_median:,.0f} times the median): {verdict}",
        ]


class Mixing(Part):
    """Relative change of the hidden states at later positions when one token is replaced (mixing.py).

    Attributes:
        position: position of the replaced token, 1-based.
        sequences: number of sequences in which the token could be replaced by a different one.
        spread: mean of |h' - h| / |h| over sequences and later positions, before the first block and after each block;
            h are the hidden states with the original token, h' those with the new one.
        spread_without_first: `spread` with the first key hidden from all later queries.
    """

    position: int = Field(ge=2)
    sequences: int = Field(ge=1)
    spread: list[FiniteFloat]
    spread_without_first: list[FiniteFloat]


class Propositions(Part):
    """Proposition of 2410.10781 on a repeated token, and the model's deviation from it (propositions.py).

    Attributes:
        position: kind of the model's positional embedding.
        number: number of the proposition, 1 to 4; None for absolute and learned positions, which no proposition covers.
        statement: text of the proposition, or a statement that none applies.
        tokens: number of tokens checked, each repeated.
        length: length of the repetition, in tokens.
        hidden_deviation: largest |h_t - h_1| / |h_1| of the hidden states h after a block, over tokens, positions t and
            blocks.
        attention_deviation: largest |difference| of an attention weight from the closed form (1/t if no proposition
            applies); None for rotary.
        bound_slack: for rotary, smallest value of (bound - attention weight), negative if a weight exceeds its bound;
            None for other embeddings.
        tolerance: size up to which deviations, and the excess of a weight over its bound, are attributed to rounding.
        dtype: dtype of the hidden states in the check. A model of lower precision is checked in float32 if it can be
            converted (`in_float32`).
        holds: whether the deviations are at most `tolerance` and `bound_slack` is at least -`tolerance`. None
            (inconclusive) if they are not and the dtype has less precision than float32.
    """

    position: PositionKind
    number: int | None
    statement: str
    tokens: int = Field(ge=1)
    length: int = Field(ge=2)
    hidden_deviation: FiniteFloat
    attention_deviation: FiniteFloat | None
    bound_slack: FiniteFloat | None
    tolerance: FiniteFloat
    dtype: str
    holds: bool | None
