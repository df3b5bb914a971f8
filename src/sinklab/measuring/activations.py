"""Massive activations: entries of the residual stream far larger than all others, which accompany a sink (2402.17762).

They occur at few positions (mostly the first token) and in a few fixed dimensions, from an early block to the
second-to-last. Only the first sequence is searched: massive activations hardly depend on the input, and the median over
all sequences would cost more than the rest of the measurement.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from pydantic import Field, FiniteFloat
from torch import Tensor, nn

from sinklab.attention.real_tokens import RealTokens
from sinklab.device import on_host
from sinklab.models.hooks import hidden_states, hooked
from sinklab.schema import Part

STRONGEST = 8  # maximum number of blocks reported
MASSIVE, MASSIVE_RATIO = 100, 1000  # |value| is above the first, its ratio to the median at least the second


class MassiveActivation(Part):
    """The largest |activation| of one sequence after one block.

    Attributes:
        layer: number of the block, 1-based; the activation is in the residual stream after it.
        position: position of the token, 1-based, without padding; 0, -1, .. are the learned sink token or registers,
            from the last, which are included in an `Ablation` only.
        dimension: dimension of the residual stream, 0-based.
        value: signed value of the activation; 0 if it is not finite.
        ratio_to_median: |value| divided by the median |activation| of the sequence after that block; 0 if that is 0.
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
def largest_activations(
    blocks: Sequence[nn.Module], real: RealTokens | None = None
) -> Iterator[list[MassiveActivation]]:
    """Collect the largest activation after each block, for the first sequence of the first complete forward pass.

    The yielded list is filled at the end of the `with` block, unless an exception ends it.

    Args:
        blocks: decoder blocks, in order.
        real: real tokens of the first sequence; other columns (padding, learned tokens) are excluded, and position 1 is
            the first real token. None to include all columns.
    """
    found: list[MassiveActivation] = []
    seen: list[_Largest] = []

    def leaving(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        if len(seen) < len(blocks):
            hidden_TC = hidden_states(output)[0].detach()
            if real is not None and real.padded:
                first = int(real.index_BR[0, 0])
                hidden_TC = hidden_TC[first : first + int(real.count_B[0])]
            seen.append(_Largest(hidden_TC))

    def entering(_: nn.Module, __: tuple[Any, ...]) -> None:
        if len(seen) < len(blocks):  # the first pass, or a retry after a failed pass
            seen.clear()

    with hooked(
        [
            *(block.register_forward_hook(leaving) for block in blocks),
            *(block.register_forward_pre_hook(entering) for block in blocks[:1]),
        ]
    ):
        yield found
        numbers = on_host([one.numbers for one in seen])
        found.extend(one.found(layer, *numbers[layer - 1].tolist()) for layer, one in enumerate(seen, start=1))


def strongest(found: Sequence[MassiveActivation]) -> list[MassiveActivation]:
    """Return the top `STRONGEST` activations by ratio to the median, in descending order."""
    return sorted(found, key=lambda one: -one.ratio_to_median)[:STRONGEST]


class _Largest:
    """The largest activation of one sequence after one block.

    Attributes:
        numbers: flat index, value, and median |activation| (float64), on the device of the model.
    """

    def __init__(self, hidden_TC: Tensor) -> None:
        self._width, size = hidden_TC.shape[1], hidden_TC.abs()
        place = size.argmax()
        value = hidden_TC.flatten().gather(0, place[None])[0]
        self.numbers = torch.stack([place.double(), value.double(), _median(size.float()).double()])

    def found(self, layer: int, place: float, value: float, median: float) -> MassiveActivation:
        """Convert the entries of `numbers` to a `MassiveActivation`."""
        position, dimension = divmod(int(place), self._width)
        value = value if math.isfinite(value) else 0.0  # NaN is reported by the accumulator
        return MassiveActivation(
            layer=layer,
            position=position + 1,
            dimension=dimension,
            value=value,
            ratio_to_median=abs(value) / median if median > 0 else 0.0,
        )


def _median(x: Tensor) -> Tensor:
    """Return the lower median, as `torch.median`; on the CPU, NumPy's partition takes half the time."""
    if x.device.type != "cpu":
        return x.median()
    values, half = x.flatten().numpy(), (x.numel() - 1) // 2
    return torch.tensor(np.partition(values, half)[half])
