"""What one forward pass shows of the details: filled in by the probes, layer by layer, and read after the pass."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sinklab.attention.importance import Rows
from sinklab.errors import InputError
from sinklab.measuring.hooks import residual_stream
from sinklab.measuring.metrics import accumulation, token_norms
from sinklab.measuring.padding import RealTokens
from sinklab.measuring.statistics.details import MAP_POSITIONS
from sinklab.measuring.statistics.layer import Angles, LayerDetails, layer_details


@dataclass(frozen=True)
class HiddenDetails:
    """The residual stream at one place: kurtosis over the channels, and the cosine with the first token (B, T)."""

    kurtosis_BT: Tensor
    alignment_BT: Tensor


@dataclass(frozen=True)
class BatchDetails:
    """What one forward pass shows, for the accumulator. R aligned positions.

    Attributes:
        layers: one for each attention layer, in the order of their calls.
        values: norms of the values of every layer (B, H, R), repeated over the heads that share them.
        kurtosis_MBR, alignment_MBR: before the first block and after each; None where blocks cannot be read.
        tokens_BR: ids.
        maps: (layer, head) asked for, 1-based.
    """

    layers: list[LayerDetails]
    values: list[Tensor]
    kurtosis_MBR: Tensor | None
    alignment_MBR: Tensor | None
    tokens_BR: Tensor
    maps: Sequence[tuple[int, int]]


class DetailsWatch:
    """Collects the details of one forward pass at a time.

    Args:
        maps: (layer, head) of the maps wanted, 1-based.
        length: of the longest sequence.

    Raises:
        InputError: maps of too long sequences.
    """

    def __init__(self, maps: Sequence[tuple[int, int]], length: int) -> None:
        if maps and length > MAP_POSITIONS:
            raise InputError(
                f"a map of {length} positions would take {3 * 4 * length**2 // 2**20} MB: "
                f"give at most --length {MAP_POSITIONS}, or leave out the maps"
            )
        self.maps = list(dict.fromkeys(maps))
        self._layers: list[LayerDetails] = []
        self._values: list[Tensor] = []
        self._hidden: list[HiddenDetails] = []
        self._real: RealTokens | None = None

    @contextmanager
    def watching(self, blocks: Sequence[nn.Module]) -> Iterator[None]:
        """Read the residual stream of every forward pass inside the block."""
        with residual_stream(blocks, self._stream) as self._hidden:
            yield

    def begin(self, real: RealTokens) -> None:
        """Forget the last pass; the next one has its real tokens here."""
        self._layers, self._values, self._real = [], [], real

    def values(self, values_BGTV: Tensor) -> None:
        """Take in the values of the next attention layer."""
        assert self._real is not None
        self._values.append(self._real.align(token_norms(values_BGTV.detach())))

    def attention(self, rows: Iterable[Rows], heads: int, angles: Angles | None) -> None:
        """Take in the rows of the next attention layer, and the angles where queries are seen.

        Raises:
            InputError: a map was asked for of a head that the layer does not have.
        """
        assert self._real is not None
        layer = len(self._layers) + 1
        mapped = [head - 1 for at, head in self.maps if at == layer]
        for head in mapped:
            if not 0 <= head < heads:
                raise InputError(f"--map {layer}.{head + 1}: layer {layer} has heads 1 to {heads}")
        self._layers.append(layer_details(rows, self._real, angles, mapped))

    def batch(self, tokens_BT: Tensor) -> BatchDetails:
        """What the pass has shown.

        Raises:
            InputError: a map was asked for of a layer that the model does not have.
        """
        assert self._real is not None
        for layer, head in self.maps:
            if not 1 <= layer <= len(self._layers):
                raise InputError(f"--map {layer}.{head}: the model has attention layers 1 to {len(self._layers)}")
        align = self._real.align
        return BatchDetails(
            layers=self._layers,
            values=[
                value_BGR.repeat_interleave(layer.entropy_BH.shape[1] // value_BGR.shape[1], 1)
                for value_BGR, layer in zip(self._values, self._layers, strict=True)
            ],
            kurtosis_MBR=_stacked([align(one.kurtosis_BT) for one in self._hidden]),
            alignment_MBR=_stacked([align(one.alignment_BT) for one in self._hidden]),
            tokens_BR=align(tokens_BT),
            maps=self.maps,
        )

    def _stream(self, hidden_BTC: Tensor) -> HiddenDetails:
        assert self._real is not None
        first_B = self._real.index_BR[:, 0].to(hidden_BTC.device)
        x_BTC = hidden_BTC.to(accumulation(hidden_BTC.dtype))
        index_B1C = first_B.view(-1, 1, 1).expand(-1, 1, x_BTC.shape[-1])
        return HiddenDetails(kurtosis(x_BTC), F.cosine_similarity(x_BTC, x_BTC.gather(1, index_B1C), dim=-1))


def kurtosis(x_BTC: Tensor) -> Tensor:
    """E[(x - mean x)^4] / E[(x - mean x)^2]^2 over the last axis; 3 for a Gaussian, 0 where all values are equal."""
    square = (x_BTC - x_BTC.mean(-1, keepdim=True)).square()
    variance_BT = square.mean(-1)
    scaled = square / torch.where(variance_BT > 0, variance_BT, 1)[..., None]  # the fourth power would overflow
    return scaled.square().mean(-1)


def _stacked(parts: Sequence[Tensor]) -> Tensor | None:
    return torch.stack([part.cpu() for part in parts]) if parts else None
