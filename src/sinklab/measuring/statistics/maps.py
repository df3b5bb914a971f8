"""Attention, cosine and norm product matrices (query by key) of the requested heads."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from sinklab.measuring.statistics.plot_specs import MatrixMap
from sinklab.measuring.statistics.statistic_base import ScoreBlock, Statistic

MAP_POSITIONS = 4096  # a float32 map of this size takes 64 MiB, and each head has three
CAPTION = "Query by key, mean over sequences"
Head = tuple[int, int]


class AttentionMap(Statistic):
    """Attention weights A of the requested heads, mean over sequences; 0 at masked keys."""

    axes = "PTT"
    figures = (MatrixMap("map-attention", "Attention of single heads", CAPTION, "attention"),)


class CosineMap(Statistic):
    """Cosine q_t.k_k / (|q_t| |k_k|) of the requested heads, mean over sequences; 0 at masked keys."""

    axes = "PTT"
    angles = True
    figures = (MatrixMap("map-cosine", "Cosines of single heads", CAPTION, "cosine", diverging=True),)


class NormProductMap(Statistic):
    """Norm product |q_t| |k_k| of the requested heads, mean over sequences; 0 at masked keys."""

    axes = "PTT"
    angles = True
    figures = (MatrixMap("map-norms", "Norm products of single heads", CAPTION, "norm product"),)


def draw(sums: Mapping[int, Tensor], block: ScoreBlock) -> None:
    """Add a block of queries to the maps (3, R, R) of its layer, by head, 0-based; masked keys are 0.

    Only the attention is added if queries cannot be read; maps of shape (1, R, R) then suffice.
    """
    part, layer = block.part, block.layer
    for head, sums_KRR in sums.items():
        drawn = [block.weights_BHQS[:, head]]
        if layer.sees_queries:
            cosine, seen = (x_BHQS[:, head] for x_BHQS in block.cosine_and_seen)
            q_norm_BQ1 = layer.angles.q_norm_BHT[:, head, block.queries, None]
            drawn += [cosine * seen, q_norm_BQ1 * layer.angles.k_norm_BHT[:, head, None, block.keys] * seen]
        firsts, counts = layer.first_B11.flatten().tolist(), layer.real.count_B.tolist()
        for drawn_KQS, first, count in zip(torch.stack(drawn, 1), firsts, counts, strict=True):
            top, bottom = max(part.start, first), min(part.stop, first + count)
            left, right = max(part.low, first), min(part.high, first + count)
            if top < bottom and left < right:  # aligned at the first real token of each sequence
                inside = drawn_KQS[:, top - part.start : bottom - part.start, left - part.low : right - part.low]
                sums_KRR[: len(inside), top - first : bottom - first, left - first : right - first] += inside


class MapTotals:
    """Running sums of the maps over batches, for sequences of at most `length` positions.

    Attributes:
        sums: sums of attention, cosine and norm product (3, T, T), float64, by (layer, head), 1-based.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self.sums: dict[Head, Tensor] = {}
        self._reaching_T = torch.zeros(length, dtype=torch.float64)

    def add(self, maps: Mapping[Head, Tensor], valid_BR: Tensor) -> None:
        """Add the maps of one batch, summed over its sequences (3, R, R), and count its valid positions."""
        short = self._length - valid_BR.shape[1]
        pad = torch.nn.functional.pad
        self._reaching_T += pad(valid_BR.double().sum(0), (0, short))
        for head, sums_KRR in maps.items():
            sums_KTT = pad(sums_KRR.cpu().double(), (0, short, 0, short))
            self.sums[head] = self.sums[head] + sums_KTT if head in self.sums else sums_KTT

    def means(self) -> dict[str, np.ndarray]:
        """Return the maps (P, T, T) by name, each entry averaged over the sequences with its query; {} without maps."""
        if not self.sums:
            return {}
        reaching_T1 = self._reaching_T.clamp(min=1)[:, None]
        means_KPTT = (torch.stack(list(self.sums.values()), 1) / reaching_T1).float().numpy()
        return dict(zip(("map_attention", "map_cosine", "map_norm_product"), means_KPTT, strict=True))
