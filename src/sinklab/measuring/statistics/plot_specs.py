"""Specifications of a statistic's table column in the terminal and of its figures in the report."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Column:
    """Of the table by layer in the terminal: a mean over heads, or that of key 1 / that of the others.

    Attributes:
        title: above the numbers.
        decimals: of each.
        of: the number of each layer, from the array; None if they are those of measurement.json.
    """

    title: str
    decimals: int
    of: Callable[[np.ndarray], np.ndarray] | None = None


@dataclass(frozen=True)
class Shown:
    """A figure over all measurements of a report.

    Attributes:
        key: of its files and of its place in the page; statistics with the same key share one figure.
        title: of the figure.
        caption: the quantity and how it was computed.
    """

    key: str
    title: str
    caption: str


@dataclass(frozen=True)
class Heatmap(Shown):
    """Coloured cells that share a scale.

    Attributes:
        what: the quantity of the colour.
        diverging: whether zero is the middle of the scale (a cosine).
    """

    what: str
    diverging: bool = False


@dataclass(frozen=True)
class HeadMap(Heatmap):
    """Layer by head (LH); of a statistic with positions (LHT) that of the first.

    Attributes:
        uniform: its value for uniform attention, by the number of tokens; part of the caption.
    """

    uniform: Callable[[int], float] | None = None


@dataclass(frozen=True)
class PositionMap(Heatmap):
    """Layer by position, mean over heads (LHT), or place in the residual stream by position (MT)."""


@dataclass(frozen=True)
class MatrixMap(Heatmap):
    """Query by key, one for each requested head (PTT)."""


@dataclass(frozen=True)
class BucketLines(Shown):
    """A share of the attention by buckets of distances (LHD) or queries (LHQ), mean over layers and heads.

    Attributes:
        series: the label of this line.
        x_title, y_title: of the axes.
        bucket: title of the first column in the table of numbers.
        logarithmic: of the share.
    """

    series: str
    x_title: str
    y_title: str
    bucket: str
    logarithmic: bool = False


@dataclass(frozen=True)
class SequenceLines(Shown):
    """A value of whole sequences by place in the residual stream (M), beside the first token's norm and the sink.

    Attributes:
        what: the quantity.
    """

    what: str


@dataclass(frozen=True)
class BlockLines(Shown):
    """The first token and the mean of the others, by place in the residual stream (MT) or layer (LHT, mean over heads).

    Attributes:
        what: the quantity.
    """

    what: str
