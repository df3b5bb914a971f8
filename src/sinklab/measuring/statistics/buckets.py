"""How far back attention goes, and what the first token gets as the sequence goes on: buckets of powers of two."""

from dataclasses import replace

from torch import Tensor

from sinklab.measuring.statistics.block import ScoreBlock
from sinklab.measuring.statistics.declared import OfRows
from sinklab.measuring.statistics.shown import BucketLines

BY_QUERY = BucketLines(
    "by-query",
    "The sink as the sequence goes on",
    "What a query pays to the first token (solid) and to an average other token before it (dashed), by where the query "
    "stands, mean over layers, heads and seeds. Without a sink both fall together.",
    series="first token",
    x_title="Position of the query",
    y_title="Share of its attention",
    bucket="Queries",
    logarithmic=True,
)


class ByDistance(OfRows):
    """Mean over queries of the sum of A_tk over the keys 0, 1, 2..3, 4..7, .. tokens back."""

    axes = "LHD"
    figures = (
        BucketLines(
            "by-distance",
            "How far back attention goes",
            "How far back attention goes: the share of a query's attention on keys so many tokens before it, mean over "
            "queries, layers, heads and seeds. The shares add up to one, less what is on a bias. Few queries have keys "
            "far back; what they pay to a sink stands at the right.",
            series="attention",
            x_title="Distance (tokens back; 0 is the query itself)",
            y_title="Share",
            bucket="Distance",
        ),
    )

    def read(self, block: ScoreBlock, sums_BHD: Tensor) -> None:
        sums_BHD += block.by_distance_BHQD.sum(2)


class FirstByQuery(OfRows):
    """Over queries t = 1, 2..3, 4..7, ..: the mean of A_t1."""

    axes = "LHQ"
    figures = (BY_QUERY,)

    def read(self, block: ScoreBlock, sums_BHT: Tensor) -> None:
        sums_BHT[:, :, block.queries] = block.first_BHQ


class RestByQuery(OfRows):
    """Over the same queries the mean of A_tk over the other keys 2 .. t; 0 for t = 1."""

    axes = "LHQ"
    figures = (replace(BY_QUERY, series="an average other token"),)

    def read(self, block: ScoreBlock, sums_BHT: Tensor) -> None:
        others_B1Q = block.earlier_BQ[:, None].clamp(min=1)
        sums_BHT[:, :, block.queries] = (block.by_distance_BHQD.sum(-1) - block.first_BHQ) / others_B1Q
