"""What one forward pass shows of the details: filled in by the probes, layer by layer, and read after the pass."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sinklab.attention.blocks import accumulate_dtype
from sinklab.attention.importance import Rows
from sinklab.attention.real_tokens import RealTokens
from sinklab.errors import InputError
from sinklab.measuring.statistics.block import Angles
from sinklab.measuring.statistics.declared import OfStates, OfStream
from sinklab.measuring.statistics.details import STATISTICS
from sinklab.measuring.statistics.layer import LayerDetails, layer_details
from sinklab.measuring.statistics.maps import MAP_POSITIONS, Head
from sinklab.models.hooks import residual_stream, token_norms


@dataclass(frozen=True)
class BatchDetails:
    """What one forward pass shows, for the accumulator. R aligned positions.

    Attributes:
        layers: what every attention layer has, by name of the statistic, in the order of their calls: (B, H) or (B, H,
            R), of the value ratio the norms of the values, repeated over the heads that share them.
        stream: before the first block and after each, by name, of tokens (places, B, R) or of sequences (places, B);
            empty where blocks cannot be read.
        tokens_BR: ids.
        maps: sums over the batch (3, R, R) by (layer, head), 1-based, in the order they were asked for.
    """

    layers: Mapping[str, Sequence[Tensor]]
    stream: Mapping[str, Tensor]
    tokens_BR: Tensor
    maps: Mapping[Head, Tensor]


class DetailsWatch:
    """Collects the details of one forward pass at a time.

    Args:
        maps: (layer, head) of the maps wanted, 1-based.
        length: of the longest sequence.

    Raises:
        InputError: maps of too long sequences.
    """

    def __init__(self, maps: Sequence[Head], length: int) -> None:
        if maps and length > MAP_POSITIONS:
            raise InputError(
                f"a map of {length} positions would take {3 * 4 * length**2 // 2**20} MB: "
                f"give at most --length {MAP_POSITIONS}, or leave out the maps"
            )
        self.maps = list(dict.fromkeys(maps))
        self._layers: list[LayerDetails] = []
        self._values: list[Tensor] = []
        self._hidden: list[dict[str, Tensor]] = []
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
            InputError: a map was asked for of a head that the layer does not have, where layers differ.
        """
        assert self._real is not None
        layer = len(self._layers) + 1
        mapped = [head - 1 for at, head in self.maps if at == layer]
        for head in mapped:
            if head >= heads:
                raise InputError(f"--map {layer}.{head + 1}: layer {layer} has heads 1 to {heads}")
        self._layers.append(layer_details(rows, self._real, angles, mapped))

    def batch(self, tokens_BT: Tensor) -> BatchDetails:
        """What the pass has shown."""
        assert self._real is not None
        align, known = self._real.align, self._hidden[0] if self._hidden else ()
        layers = {name: [one.means[name] for one in self._layers] for name in self._layers[0].means}
        layers["value_ratio"] = [
            value_BGR.repeat_interleave(entropy_BH.shape[1] // value_BGR.shape[1], 1)
            for value_BGR, entropy_BH in zip(self._values, layers["entropy"], strict=True)
        ]
        return BatchDetails(
            layers=layers,
            stream={name: torch.stack([place[name].cpu() for place in self._hidden]) for name in known},
            tokens_BR=align(tokens_BT),
            maps={(layer, head): self._layers[layer - 1].maps[head - 1] for layer, head in self.maps},
        )

    def _stream(self, hidden_BTC: Tensor) -> dict[str, Tensor]:
        """Statistics at one place of the residual stream, by name: of tokens (B, R) and of sequences (B,)."""
        assert self._real is not None
        first_B = self._real.index_BR[:, 0].to(hidden_BTC.device)
        x_BTC = hidden_BTC.to(accumulate_dtype(hidden_BTC.dtype))
        first_B1C = x_BTC.gather(1, first_B.view(-1, 1, 1).expand(-1, 1, x_BTC.shape[-1]))
        x_BRC, align = self._real.align(x_BTC.mT).mT, self._real.align
        found = {
            name: align(one.read(x_BTC, first_B1C)) for name, one in STATISTICS.items() if isinstance(one, OfStream)
        }
        return found | {
            name: one.read(x_BRC, self._real.count_B) for name, one in STATISTICS.items() if isinstance(one, OfStates)
        }
