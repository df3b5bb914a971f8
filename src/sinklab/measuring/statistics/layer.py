"""The statistics of one attention layer, from its rows as they pass by in blocks: read once for all of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sinklab.attention.importance import Rows
from sinklab.attention.real_tokens import RealTokens
from sinklab.measuring.statistics.block import Angles, Layer, ScoreBlock
from sinklab.measuring.statistics.declared import OfRows
from sinklab.measuring.statistics.details import STATISTICS
from sinklab.measuring.statistics.maps import draw


@dataclass(frozen=True)
class LayerDetails:
    """One layer in one batch.

    Attributes:
        means: over the queries of each sequence, by name of the statistic: (B, H), (B, H, distances) or (B, H, R),
            of every key or query; without those that need angles where queries are not seen.
        maps: sums over the batch (3, R, R) by head, 0-based.
    """

    means: dict[str, Tensor]
    maps: dict[int, Tensor]


@torch.no_grad()
def layer_details(
    rows: Iterable[Rows], real: RealTokens, angles: Angles | None, mapped: Sequence[int] = ()
) -> LayerDetails:
    """Read the rows of one layer.

    Args:
        rows: of all T queries over T keys.
        real: which columns of the batch are real tokens.
        angles: of the same queries and keys; None where queries are not seen.
        mapped: heads whose maps are wanted, 0-based.
    """
    reading: _Reading | None = None
    for one in rows:
        if reading is None:
            reading = _Reading(one.weights_BHQS, real, angles, mapped)
        reading.read(one)
    assert reading is not None
    return reading.result()


class _Reading:
    """Sums over the blocks of one layer."""

    def __init__(self, weights_BHQS: Tensor, real: RealTokens, angles: Angles | None, mapped: Sequence[int]) -> None:
        self._layer = Layer(weights_BHQS, real, angles)
        R = real.index_BR.shape[1]
        self._maps = {head: weights_BHQS.new_zeros(3, R, R) for head in mapped}
        self._sums = {
            name: (one, self._layer.sums(one.axes, weights_BHQS))
            for name, one in STATISTICS.items()
            if isinstance(one, OfRows) and (angles is not None or not one.angles)
        }

    def read(self, rows: Rows) -> None:
        block = ScoreBlock(rows, self._layer)
        self._layer.count(block)
        for statistic, sums in self._sums.values():
            statistic.read(block, sums)
        draw(self._maps, block)

    def result(self) -> LayerDetails:
        means = {name: statistic.mean(sums, self._layer) for name, (statistic, sums) in self._sums.items()}
        return LayerDetails(means, self._maps)
