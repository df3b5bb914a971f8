"""How many directions the hidden states of a sequence take up: compression valleys."""

import torch
from torch import Tensor

from sinklab.measuring.statistics.declared import OfStates
from sinklab.measuring.statistics.shown import Column, SequenceLines


class MatrixEntropy(OfStates):
    """H / ln min(n, E) with H = - sum_j p_j ln p_j, p_j = s_j^2 / sum s^2: 0 for one direction, 1 for all alike.

    s are the singular values of the n x E matrix of the hidden states of a sequence's n tokens, not centred: 2510.06477
    (matrix-based entropy; a massive activation of the first token gives one singular value that dwarfs the others) and
    2502.02013, equation 1 with alpha = 1, whose code (github.com/OFSkean/information_flow) has the division by the
    largest entropy possible as `maxEntropy`. That code sets negative entries of the Gram matrix to zero first; here
    they stay, as the formula has them.
    """

    fields = ("matrix_entropy_by_block",)
    column = Column("matrix entropy", 2)
    figures = (
        SequenceLines(
            "compression",
            "Where the hidden states are compressed",
            "Left: entropy of the squared singular values of the hidden states of a sequence's tokens, over the "
            "largest there can be (1: as many directions as tokens or channels allow, 0: a single one), mean over "
            "sequences. Beside it the norm of the first token over the others' and the sink rate of the layer. A "
            "valley on the left where the norm is large is the massive activation of the first token, which alone "
            "fills the spectrum.",
            "Matrix entropy",
        ),
    )

    def read(self, x_BRC: Tensor, count_B: Tensor) -> Tensor:
        return matrix_entropy(x_BRC, count_B)


def matrix_entropy(x_BRC: Tensor, count_B: Tensor) -> Tensor:
    """Normalised entropy (B,) of the squared singular values of each matrix, float64; 0 of a single token or of zeros.

    Args:
        x_BRC: hidden states, 0 past the end of a sequence.
        count_B: n, the tokens of each.
    """
    x_BRC = x_BRC.double()
    wide = x_BRC.shape[1] <= x_BRC.shape[2]
    gram = x_BRC @ x_BRC.mT if wide else x_BRC.mT @ x_BRC
    squares = torch.linalg.eigvalsh(gram).clamp(min=0)
    total_B1 = squares.sum(-1, keepdim=True)
    entropy_B = torch.special.entr(squares / torch.where(total_B1 > 0, total_B1, 1)).sum(-1)
    most_B = count_B.to(x_BRC).clamp(max=x_BRC.shape[2]).log()
    return torch.where(most_B > 0, entropy_B / most_B, 0)
