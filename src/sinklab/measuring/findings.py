"""Parts of a measurement: massive activations, ablations, effect of a replaced token, propositions of 2410.10781.

Massive activations: entries of the residual stream far larger than all others, which accompany a sink (2402.17762).

They occur at few positions (mostly the first token) and in a few fixed dimensions, from an early block to the
second-to-last. Only the first sequence is searched: massive activations hardly depend on the input, and the median over
all sequences would cost more than the rest of the measurement.

Attention maps of the heads on one sequence (`--explore`), in 8 bits, for the report's interactive viewer.

Maps are computed in a separate forward pass after the measurement, at about the cost of one sequence with `--details`.
A map of S tokens takes S x S bytes in memory and on disk. Byte n encodes the attention weight (n / 255)^2; storing the
square root keeps small weights precise. The rounding error is at most 0.004, and smaller for small weights.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Annotated, Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, FiniteFloat, model_validator
from torch import Tensor, nn

from sinklab.attention.importance import Rows
from sinklab.attention.masks import RealTokens, real_tokens
from sinklab.device import on_host
from sinklab.errors import InputError
from sinklab.measuring.statistics.collecting import DetailsCollector, Head, layer_details
from sinklab.measuring.statistics.statistic_base import Angles, Array, Axes, WithArrays
from sinklab.model.position import PositionKind
from sinklab.models.adapter import Adapter
from sinklab.models.hooks import evaluating, hidden_states, hooked
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
            hidden_TC = hidden_states(output)[0, first : first + count].detach()
            size_TC, width = hidden_TC.abs(), hidden_TC.shape[1]
            place = size_TC.argmax()
            value = hidden_TC.flatten().gather(0, place[None])[0]
            numbers = (place // width, place % width, value, _median(size_TC.float()))
            seen.append(torch.stack([number.double() for number in numbers]))  # read by the host at the end

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


def _median(x: Tensor) -> Tensor:
    """Return the median as `torch.median` does (the lower of two), some 20 times faster on a CPU."""
    if x.device.type != "cpu":
        return x.median()
    middle = (x.numel() - 1) // 2
    return torch.tensor(np.partition(x.numpy(), middle, axis=None)[middle])


def strongest(found: Sequence[MassiveActivation]) -> list[MassiveActivation]:
    """Return at most STRONGEST activations with the largest ratios to the median, in descending order."""
    return sorted(found, key=lambda one: -one.ratio_to_median)[:STRONGEST]


class Ablation(Part):
    """Loss and sink rate of a model without and with one ablation (surgery.py).

    Attributes:
        name: name of the ablation, such as "mask_first:4". what: description of the ablation. first_target: 1-based
        position, in the unablated sequences, of the first target included in both losses. loss_before, loss_after: loss
        without and with the ablation, nats per token. loss_change: loss_after - loss_before. sink_rate_before: Sink_1
        without the ablation, percent. sink_rate_after: Sink_1 with the ablation, percent. For no_bos, position 1 is the
        first token of the text. sink_rate: sink rate by position with the ablation, percent, from position 1.
        sink_max_before, sink_max_after: highest sink rate among positions 1 to T / 2 (`highest_rate`), percent; None if
        no
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
    """Relative change of the hidden states at later positions when one token is replaced (surgery.py).

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


MOST_HEADS = 1000
MOST_TOKENS = 128
LEVELS = 255


class Explored(WithArrays):
    """Attention maps of one sequence.

    Attributes:
        tokens: ids of the first S tokens of the first sequence, without padding; S is at most MOST_TOKENS.
        texts: text of each token; None if measured without a tokenizer (`sinklab.measure`).
        heads: the P saved heads as (layer, head), 1-based, in layer order (`explored_heads`).
        attention: uint8 (P, S, S), query by key. A value n encodes the attention weight (n / 255)^2; masked keys are 0.
    """

    prefix: ClassVar[str] = "explored_"

    tokens: list[int]
    texts: list[str] | None = None
    heads: list[Head]
    attention: Annotated[Array, Axes("PSS")]

    @model_validator(mode="after")
    def _shapes_agree(self) -> Self:
        self.check_arrays(P=len(self.heads), S=len(self.tokens))
        if self.attention.dtype != np.uint8:
            raise ValueError(f"explored_attention is {self.attention.dtype}, expected uint8")
        return self

    def with_texts(self, decode: Callable[[list[int]], str]) -> Self:
        """Return a copy whose `texts` has the text of each token."""
        return self.model_copy(update={"texts": [decode([token]) for token in self.tokens]})


def explored_heads(adapter: Adapter, maps: Sequence[tuple[int, ...]]) -> Sequence[tuple[int, ...]] | None:
    """Return the heads to save as (layer, head), 1-based; None means all heads.

    All heads are saved if there are at most MOST_HEADS, else those in `maps`.

    Args:
        maps: heads selected with `--map`.

    Raises:
        InputError: if the model has more than MOST_HEADS heads, and `maps` has no head or more than MOST_HEADS.
        SinklabError: if no layer of the model has softmax attention.
    """
    heads = adapter.attention_layers * adapter.heads
    if heads <= MOST_HEADS:
        return None
    if not 0 < len(maps) <= MOST_HEADS:
        raise InputError(
            f"--explore keeps at most {MOST_HEADS:,} heads and the model has {heads:,}: select the heads to keep, "
            "at most that many, with --map LAYER.HEAD (repeatable)"
        )
    return maps


def explore(
    adapter: Adapter,
    tokens_T: Tensor,
    heads: Sequence[tuple[int, ...]] | None,
    recording: Callable[[DetailsCollector], AbstractContextManager[Any]],
) -> Explored:
    """Run the model on one sequence and return its attention maps; the model is restored afterwards.

    Args:
        tokens_T: real tokens of the sequence; only the first `MOST_TOKENS` are used.
        heads: heads to save as (layer, head), 1-based; None for all.
        recording: function from a collector to a context manager that records the attention layers of forward passes
            with this collector.

    Raises:
        InputError: if the sequence has fewer than two tokens.
        SinklabError: if attention cannot be recorded, or another thread probes or intercepts the model.
    """
    if len(tokens_T) < 2:
        raise InputError("explore compares positions, but the first sequence has one token: pass a longer sequence")
    tokens_1S = tokens_T[None, :MOST_TOKENS]
    real, collector = real_tokens(F.pad(torch.ones_like(tokens_1S), (adapter.leading, 0))), MapsCollector(heads)
    with evaluating(adapter.module), recording(collector) as records:
        collector.begin(real)
        adapter.read(tokens_1S.to(adapter.device), real.to(adapter.device), None, records.paused())
    return Explored(tokens=tokens_1S[0].tolist(), heads=collector.heads, attention=np.stack(collector.attention_SS))


class MapsCollector(DetailsCollector):
    """Collects the 8-bit attention maps of one forward pass, layer by layer.

    Args:
        wanted: heads to collect as (layer, head), 1-based; None for all.

    Attributes:
        heads: heads collected so far, as (layer, head).
        attention_SS: attention map of each collected head, uint8 (S, S), as in `Explored.attention`.
    """

    def __init__(self, wanted: Sequence[tuple[int, ...]] | None) -> None:
        super().__init__((), 0)
        self._wanted, self._layer = wanted, 0
        self.heads: list[Head] = []
        self.attention_SS: list[np.ndarray] = []

    def values(self, values_BGTV: Tensor) -> None:
        """Do nothing: values are not stored."""

    def attention(self, rows: Iterable[Rows], heads: int, angles: Angles | None) -> None:
        """Add the attention maps of the wanted heads of the next layer."""
        assert self._real is not None
        self._layer += 1
        kept = [head for head in range(heads) if self._wanted is None or (self._layer, head + 1) in self._wanted]
        self.heads += [(self._layer, head + 1) for head in kept]
        for map_KSS in layer_details(rows, self._real, None, kept)[1].values():
            root_SS = map_KSS[0].float().clamp(0, 1).sqrt()
            self.attention_SS.append((LEVELS * root_SS).round().to(torch.uint8).cpu().numpy())
