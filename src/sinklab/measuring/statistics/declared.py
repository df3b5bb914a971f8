"""What a statistic is. Each is declared once, in a file of this folder, and registered by one line of `details.py`.

The declaration says what the axes are, how a block of rows or a hidden state is read, and how the result is shown.
Means over queries, sequences and batches, the fields of measurement.json and .npz, their validation, the column in the
terminal and the figure of the report follow from it. The docstring of a statistic is its formula; A is the matrix of
attention scores, rows summing to one with the share of a bias or sink logit; proxy scores where the model's own do not
(attention/importance.py). q and k are the vectors that enter attention, after rotary embedding and norms.

Axes: L attention layers, H heads, T positions, D buckets of distances, Q buckets of queries, M places of the residual
stream (before the first block and after each), P maps.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from torch import Tensor

from sinklab.measuring.statistics.arrays import Axes
from sinklab.measuring.statistics.block import Layer, ScoreBlock
from sinklab.measuring.statistics.shown import Column, Shown


class Statistic(Axes):
    """One of the statistics of `--details`.

    Attributes:
        axes: of its array, as above.
        averaged: axes of what is averaged over sequences, where that is not the array itself.
        angles: whether it needs the queries, which a model that returns its own matrices does not show.
        fields: of measurement.json: means over heads of each layer (LH), that of position 1 and that of the others
            (LHT), means over tokens of each place (MT), or the array itself (M); () for none.
        column: in the terminal; None for none.
        figures: of the report.
    """

    averaged: ClassVar[str | None] = None
    angles: ClassVar[bool] = False
    fields: ClassVar[tuple[str, ...]] = ()
    column: ClassVar[Column | None] = None
    figures: ClassVar[tuple[Shown, ...]] = ()

    def __init__(self) -> None:
        super().__init__(self.axes)

    def of_mean(self, mean: np.ndarray, /) -> np.ndarray | None:
        """The array from the mean over sequences; None where the sequences are too short for it."""
        return mean

    def by_layer(self, array: np.ndarray, /) -> Sequence[list[float] | None]:
        """The values of `fields`; None for the other positions where there is only one."""
        if self.axes == "M":
            return [array.tolist()]
        if self.axes == "LH":
            return [array.mean(1).tolist()]
        rest = array[..., 1:].mean((1, 2)).tolist() if array.shape[-1] > 1 else None
        return [array[..., 0].mean(1).tolist(), rest]


class OfRows(Statistic, ABC):
    """A statistic of attention layers, read from blocks of their rows: LH, LHD, LHQ, or, with angles, LHT."""

    @abstractmethod
    def read(self, block: ScoreBlock, sums: Tensor, /) -> None:
        """Add a block of queries to the sums of its layer.

        Args:
            block: of the rows, with what statistics share.
            sums: of each sequence and head (B, H), of each distance (B, H, D), or of each column of the batch (B, H,
                T): of each key, over queries, or of each query, which is the whole value of that query.
        """

    def mean(self, sums: Tensor, layer: Layer, /) -> Tensor:
        """The mean over the real queries of each sequence from the sums over all blocks."""
        match self.axes[-1]:
            case "T":
                return layer.real.align(sums / layer.seen_by_BHT)
            case "Q":
                return layer.real.align(sums)
            case "D":
                return sums / layer.count_B1[..., None]
            case _:
                return sums / layer.count_B1


class OfStream(Statistic, ABC):
    """A statistic of tokens in the residual stream."""

    axes = "MT"

    @abstractmethod
    def read(self, x_BTC: Tensor, first_B1C: Tensor, /) -> Tensor:
        """The value of every token (B, T).

        Args:
            x_BTC: hidden states at one place, float32 (float64 for float64).
            first_B1C: that of the first real token.
        """


class OfStates(Statistic, ABC):
    """A statistic of all tokens of a sequence together, in the residual stream."""

    axes = "M"

    @abstractmethod
    def read(self, x_BRC: Tensor, count_B: Tensor, /) -> Tensor:
        """The value of every sequence (B,).

        Args:
            x_BRC: hidden states at one place, float32 (float64 for float64), the first real token first; 0 past the
                end of a sequence.
            count_B: tokens of each sequence.
        """
