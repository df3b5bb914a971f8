"""The matrices of single heads, for those that were asked for: attention, cosine and norm product, query by key."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from sinklab.measuring.statistics.block import Layer, ScoreBlock
from sinklab.measuring.statistics.declared import Statistic
from sinklab.measuring.statistics.shown import MatrixMap

MAP_POSITIONS = 4096  # a map of so many positions takes 64 MB, and there are three of each head
CAPTION = "Query by key, mean over sequences"
Head = tuple[int, int]


class AttentionMap(Statistic):
    """A of the heads asked for, mean over sequences; 0 where a query does not see a key."""

    axes = "PTT"
    figures = (MatrixMap("map-attention", "Attention of single heads", CAPTION, "attention"),)


class CosineMap(Statistic):
    """q_t.k_k / (|q_t| |k_k|) of the heads asked for, mean over sequences; 0 where a query does not see a key."""

    axes = "PTT"
    angles = True
    figures = (MatrixMap("map-cosine", "Cosines of single heads", CAPTION, "cosine", diverging=True),)


class NormProductMap(Statistic):
    """|q_t| |k_k| of the heads asked for, mean over sequences; 0 where a query does not see a key."""

    axes = "PTT"
    angles = True
    figures = (MatrixMap("map-norms", "Norm products of single heads", CAPTION, "norm product"),)


class LayerMaps:
    """Sums over a batch of the maps of one layer.

    Args:
        layer: whose rows are read.
        heads: whose maps are wanted, 0-based.
        weights_BHQS: of its first block.

    Attributes:
        sums: of attention, cosine and norm product, query by key, by head (3, R, R); 0 for what is not seen.
    """

    def __init__(self, layer: Layer, heads: Sequence[int], weights_BHQS: Tensor) -> None:
        R = layer.real.index_BR.shape[1]
        self.sums = {head: weights_BHQS.new_zeros(3, R, R) for head in heads}

    def read(self, block: ScoreBlock) -> None:
        """Add a block of queries."""
        for head, sums_KRR in self.sums.items():
            drawn = [block.weights_BHQS[:, head]]
            if block.layer.angles is not None:
                q_norm_BQ1 = block.angles.q_norm_BHT[:, head, block.queries, None]
                norms_BQS = q_norm_BQ1 * block.angles.k_norm_BHT[:, head, None, block.keys]
                seen_BQS = block.seen_BHQS[:, head]
                drawn += [block.cosine_BHQS[:, head] * seen_BQS, norms_BQS * seen_BQS]
            _draw(sums_KRR, torch.stack(drawn, 1), block)


def _draw(sums_KRR: Tensor, drawn_BKQS: Tensor, block: ScoreBlock) -> None:
    """Add the block to a map, every sequence from its first real token on."""
    part, layer = block.part, block.layer
    for drawn_KQS, first, count in zip(drawn_BKQS, layer.first_B.tolist(), layer.real.count_B.tolist(), strict=True):
        top, bottom = max(part.start, first), min(part.stop, first + count)
        left, right = max(part.low, first), min(part.high, first + count)
        if top < bottom and left < right:
            inside = drawn_KQS[:, top - part.start : bottom - part.start, left - part.low : right - part.low]
            sums_KRR[: len(inside), top - first : bottom - first, left - first : right - first] += inside


class MapTotals:
    """Sums over batches, for sequences of at most `length` positions.

    Attributes:
        heads: (layer, head) of every map, 1-based.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._sums: dict[Head, Tensor] = {}
        self._reaching_T = torch.zeros(length, dtype=torch.float64)

    @property
    def heads(self) -> list[Head]:
        return list(self._sums)

    def add(self, maps: Mapping[Head, Tensor], valid_BR: Tensor) -> None:
        """Take in one batch: sums over its sequences (3, R, R) by head, and where they have tokens."""
        short = self._length - valid_BR.shape[1]
        pad = torch.nn.functional.pad
        self._reaching_T += pad(valid_BR.double().sum(0), (0, short))
        for head, sums_KRR in maps.items():
            sums_KTT = pad(sums_KRR.cpu().double(), (0, short, 0, short))
            self._sums[head] = self._sums[head] + sums_KTT if head in self._sums else sums_KTT

    def means(self) -> dict[str, np.ndarray]:
        """Mean over the sequences that have the query, by name (P, T, T)."""
        if not self._sums:
            return {}
        reaching_T1 = self._reaching_T.clamp(min=1)[:, None]
        means_KPTT = (torch.stack(list(self._sums.values()), 1) / reaching_T1).float().numpy()
        return dict(zip(("map_attention", "map_cosine", "map_norm_product"), means_KPTT, strict=True))
