"""Table columns and report figures of the statistics."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Column:
    """A column of the table by layer: one number, or `a / b`, the means at position 1 and at later positions.

    Attributes:
        title: column title.
        decimals: number of decimals.
        of: function from the statistic's array to one number per layer; None to use the fields of measurement.json.
    """

    title: str
    decimals: int
    of: Callable[[np.ndarray], np.ndarray] | None = None


@dataclass(frozen=True)
class PlotSpec:
    """A report figure of a statistic, for all measurements in the report.

    Attributes:
        key: stem of the file name and page anchor; statistics with the same key share a figure.
        title: figure title.
        caption: figure caption.
    """

    key: str
    title: str
    caption: str


@dataclass(frozen=True)
class Heatmap(PlotSpec):
    """Heatmaps of a statistic, one or more per measurement, which share one colour scale.

    Attributes:
        what: label of the colour scale.
        diverging: whether the colour scale is centred at zero, as for cosines.
    """

    what: str
    diverging: bool = False


@dataclass(frozen=True)
class HeadMap(Heatmap):
    """Heatmap of layer by head (LH); for a statistic with positions (LHT), of its values at position 1.

    Attributes:
        uniform: function from the number of tokens to the value under uniform attention, shown in the caption.
    """

    uniform: Callable[[int], float] | None = None


@dataclass(frozen=True)
class PositionMap(Heatmap):
    """Heatmap of layer by position, mean over heads (LHT), or of block by position (MT)."""


@dataclass(frozen=True)
class MatrixMap(Heatmap):
    """Heatmap of query by key for each requested head (PTT)."""


@dataclass(frozen=True)
class BucketLines(PlotSpec):
    """Line chart of a share (`y_title`) by distance (LHD) or query bucket (LHQ), mean over layers and heads.

    Attributes:
        series: label of the line.
        x_title, y_title: axis titles.
        bucket: title of the bucket column in the data table.
        logarithmic: whether the y axis is logarithmic.
    """

    series: str
    x_title: str
    y_title: str
    bucket: str
    logarithmic: bool = False


@dataclass(frozen=True)
class SequenceLines(PlotSpec):
    """Three line charts: a per-sequence statistic by block (M), the norm ratio by block, and the sink rate by layer.

    Attributes:
        what: title of the first chart and label of its y axis.
    """

    what: str


@dataclass(frozen=True)
class BlockLines(PlotSpec):
    """Line chart of a statistic at the first token and its mean over later tokens, by block or layer.

    The array of the statistic has the shape (blocks + 1, tokens), before the first block and after each, or (attention
    layers, heads, tokens), of which the mean over heads is shown.

    Attributes:
        what: label of the y axis.
    """

    what: str
