"""Massive activations: entries of the residual stream far larger than all others, which accompany a sink (2402.17762).

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
