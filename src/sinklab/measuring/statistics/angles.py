"""Where queries and keys point, and how long they are: the logit is cosine times norm product times scale."""

from torch import Tensor

from sinklab.measuring.statistics.block import Layer, ScoreBlock
from sinklab.measuring.statistics.declared import OfRows
from sinklab.measuring.statistics.shown import Column, HeadMap, PositionMap


class Cosine(OfRows):
    """Of key k the mean over queries t >= k that see k of q_t.k_k / (|q_t| |k_k|)."""

    axes = "LHT"
    angles = True
    fields = ("cosine_first", "cosine_rest")
    column = Column("cos(q, k)", 3)
    figures = (
        PositionMap(
            "angles-cosine",
            "Where queries point: cos(q, k)",
            "Mean over heads of the cosine between a key and the queries that see it. The logit of a query and a key "
            "is their cosine times both norms: where the first column stands out here, and not in the next figure, the "
            "sink has its large logits from the direction of its key.",
            "cosine",
            diverging=True,
        ),
        HeadMap(
            "angles-heads",
            "Which heads point at the first token",
            "Mean cosine between the queries and the key of the first token. Compare it with the heads of the sink.",
            "cosine",
            diverging=True,
        ),
    )

    def read(self, block: ScoreBlock, sums_BHT: Tensor) -> None:
        cosine, seen = block.cosine_and_seen
        sums_BHT[:, :, block.keys] += (cosine * seen).sum(-2)


class NormProduct(OfRows):
    """Of key k the mean over the same queries of |q_t| |k_k|."""

    axes = "LHT"
    angles = True
    fields = ("norm_product_first", "norm_product_rest")
    column = Column("|q| |k|", 1)
    figures = (
        PositionMap(
            "angles-norms",
            "How long queries and keys are: |q| |k|",
            "Mean over heads of the norm of a key times the norms of the queries that see it, as they enter attention. "
            "A dark first column is a small key.",
            "norm product",
        ),
    )

    def read(self, block: ScoreBlock, sums_BHT: Tensor) -> None:
        q_norm_BH1Q, (_, seen) = block.layer.angles.q_norm_BHT[:, :, None, block.queries], block.cosine_and_seen
        sums_BHT[:, :, block.keys] += (q_norm_BH1Q @ seen)[:, :, 0]

    def mean(self, sums_BHT: Tensor, layer: Layer) -> Tensor:
        return layer.real.align(sums_BHT * layer.angles.k_norm_BHT / layer.seen_by_BHT)
