"""Statistics of the residual stream: outlier channels, and tokens that are like the first."""

import torch
import torch.nn.functional as F
from torch import Tensor

from sinklab.measuring.statistics.declared import OfStream
from sinklab.measuring.statistics.shown import BlockLines, Column, PositionMap


class Kurtosis(OfStream):
    """E[(x - mean x)^4] / E[(x - mean x)^2]^2 over the channels of a token (plain: 3 for a Gaussian)."""

    fields = ("kurtosis_by_block",)
    column = Column("kurtosis", 0)
    figures = (
        BlockLines(
            "kurtosis",
            "Outlier channels",
            "Kurtosis E[(x - mean)⁴] / E[(x - mean)²]² of a token's hidden state over its channels, mean over tokens "
            "and sequences. A Gaussian has 3; a few channels far above the others, which make a model hard to "
            "quantise, give hundreds.",
            "Kurtosis",
        ),
    )

    def read(self, x_BTC: Tensor, first_B1C: Tensor) -> Tensor:
        return kurtosis(x_BTC)


class Alignment(OfStream):
    """Cosine of the hidden state of token t and that of the first token, after a block."""

    figures = (
        PositionMap(
            "alignment",
            "Which tokens are like the first",
            "Cosine between the hidden state of each token and that of the first token, mean over sequences; 0 is the "
            "embedding. Tokens that are like the first one, where it stands out, are candidates for further sinks.",
            "cosine",
            diverging=True,
        ),
    )

    def read(self, x_BTC: Tensor, first_B1C: Tensor) -> Tensor:
        return F.cosine_similarity(x_BTC, first_B1C, dim=-1)


def kurtosis(x_BTC: Tensor) -> Tensor:
    """E[(x - mean x)^4] / E[(x - mean x)^2]^2 over the last axis; 3 for a Gaussian, 0 where all values are equal."""
    square = (x_BTC - x_BTC.mean(-1, keepdim=True)).square()
    variance_BT = square.mean(-1)
    scaled = square / torch.where(variance_BT > 0, variance_BT, 1)[..., None]  # the fourth power would overflow
    return scaled.square().mean(-1)
