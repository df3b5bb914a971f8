"""How much the first token gives where it is attended to."""

import numpy as np
import torch

from sinklab.measuring.metrics import first_to_rest
from sinklab.measuring.statistics.declared import Statistic
from sinklab.measuring.statistics.shown import Column, HeadMap


class ValueRatio(Statistic):
    """|v_1| / mean over t > 1 of |v_t|, of each query head's values; norms are averaged over sequences first.

    Infinite where the others are all zero and the first is not; 1 where all are.
    """

    axes = "LH"
    infinite = True
    averaged = "LHT"
    column = Column("lowest |v|", 2, of=lambda ratio_LH: ratio_LH.min(1))
    figures = (
        HeadMap(
            "value-ratio",
            "How much the first token gives",
            "Norm of the first token's value over the mean norm of the others. Below one, attention on the first token "
            "adds little to the output. A head is left out where the others are all zero.",
            "ratio of norms",
        ),
    )

    def of_mean(self, mean_LHT: np.ndarray) -> np.ndarray | None:
        if mean_LHT.shape[-1] < 2:
            return None
        return first_to_rest(torch.from_numpy(mean_LHT)).numpy()
