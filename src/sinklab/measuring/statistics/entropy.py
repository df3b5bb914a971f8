"""How spread the attention is."""

from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from sinklab.measuring.statistics.block import ScoreBlock
from sinklab.measuring.statistics.declared import OfRows
from sinklab.measuring.statistics.shown import Column, HeadMap


class Entropy(OfRows):
    """Mean over queries of - sum_k A_tk ln A_tk, the share of a bias included; nats."""

    axes = "LH"
    fields = ("entropy_by_layer",)
    column = Column("entropy", 2)
    figures = (
        HeadMap(
            "entropy",
            "How spread the attention is",
            "Entropy of the attention of a query, in nats, mean over queries and sequences.",
            "entropy",
            uniform=lambda length: fmean(np.log(np.arange(1, length + 1)).tolist()),
        ),
    )

    def read(self, block: ScoreBlock, sums_BH: Tensor) -> None:
        sums_BH += torch.special.entr(block.weights_BHQS).sum((-2, -1))
        if block.bias_BHQ is not None:
            sums_BH += (torch.special.entr(block.bias_BHQ) * block.counted_B1Q).sum(-1)
