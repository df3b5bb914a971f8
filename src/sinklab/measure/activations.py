"""Massive activations: single channels of the residual stream, far above all others, that come with a sink.

In every model that has them they stand at few positions (the first token above all) and in few fixed dimensions, from
an early block to the last but one. They are looked for in the first sequence only: they hardly depend on the input, and
a median over every activation of every sequence would cost more than the rest of the measurement.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import Field, FiniteFloat
from torch import Tensor, nn

from sinklab.measure.padding import RealTokens
from sinklab.schema import Part

STRONGEST = 8  # blocks reported


class MassiveActivation(Part):
    """The largest |activation| after one block.

    Attributes:
        layer: block, 1-based; the activation stands in the residual stream after it.
        position: of the token, 1-based.
        dimension: of the residual stream, 0-based.
        value: signed.
        ratio_to_median: |value| over the median |activation| after that block.
    """

    layer: int = Field(ge=1)
    position: int = Field(ge=1)
    dimension: int = Field(ge=0)
    value: FiniteFloat
    ratio_to_median: FiniteFloat


@contextmanager
def largest_activations(blocks: Sequence[nn.Module]) -> Iterator[list[MassiveActivation]]:
    """A list that after the first forward pass holds the largest activation of its first sequence after each block.

    Positions are columns of the batch (1-based), padding included.
    """
    found: list[MassiveActivation] = []

    def leaving(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        if len(found) < len(blocks):
            hidden_BTC = output[0] if isinstance(output, tuple) else output
            found.append(_largest(hidden_BTC[0].detach(), len(found) + 1))

    def entering(_: nn.Module, __: tuple[Any, ...]) -> None:
        if len(found) < len(blocks):  # the first pass, or one after a pass that ended halfway
            found.clear()

    handles = [block.register_forward_hook(leaving) for block in blocks]
    handles += [block.register_forward_pre_hook(entering) for block in blocks[:1]]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def strongest(found: Sequence[MassiveActivation], real: RealTokens | None = None) -> list[MassiveActivation]:
    """The STRONGEST of them by ratio to the median, strongest first.

    Args:
        real: of the first sequence: positions are counted from its first real token, and others are left out. None
            keeps the columns.
    """
    counted = found if real is None else _placed(found, real)
    return sorted(counted, key=lambda one: -one.ratio_to_median)[:STRONGEST]


def _placed(found: Sequence[MassiveActivation], real: RealTokens) -> list[MassiveActivation]:
    first, count = int(real.index_BR[0, 0]), int(real.count_B[0])
    moved = [one.model_copy(update={"position": one.position - first}) for one in found]
    return [one for one in moved if 1 <= one.position <= count]


def _largest(hidden_TC: Tensor, layer: int) -> MassiveActivation:
    size = hidden_TC.abs()
    position, dimension = divmod(int(size.argmax()), size.shape[1])
    value = float(hidden_TC[position, dimension])
    value = value if math.isfinite(value) else 0.0  # NaN is reported by layer where sums are taken
    median = float(size.float().median())
    return MassiveActivation(
        layer=layer,
        position=position + 1,
        dimension=dimension,
        value=value,
        ratio_to_median=abs(value) / median if median > 0 else 0.0,
    )
