"""The statistics of `--details`: entropy, angles, distances, norms, kurtosis, compression, and the `Details` they fill.

They cost more than the sink metric and are computed only with `--details`. Each is a mean over the real queries of a
sequence, then over the sequences. To add one, declare its class here and a field of `Details` that holds its array.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import fmean
from typing import Annotated, Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import ConfigDict, FiniteFloat, SerializerFunctionWrapHandler, model_serializer, model_validator
from torch import Tensor

from sinklab.measuring.metrics import first_to_rest
from sinklab.measuring.statistics.gates import ClosedGates, GateMean
from sinklab.measuring.statistics.maps import AttentionMap, CosineMap, NormProductMap
from sinklab.measuring.statistics.plot_specs import BlockLines, BucketLines, Column, HeadMap, PositionMap, SequenceLines
from sinklab.measuring.statistics.secondary import Percent, Secondary, SecondarySink, SecondaryToken
from sinklab.measuring.statistics.statistic_base import (
    Array,
    ArrayOrNone,
    Layer,
    OfRows,
    OfStates,
    OfStream,
    ScoreBlock,
    Statistic,
    WithArrays,
)


class Entropy(OfRows):
    """Mean over queries of - sum_k A_tk ln A_tk, the share of a bias included; nats."""

    axes = "LH"
    fields = ("entropy_by_layer",)
    column = Column("entropy", 2)
    figures = (
        HeadMap(
            "entropy",
            "Entropy of the attention",
            "Entropy of the attention of a query, in nats, mean over queries and sequences.",
            "entropy",
            uniform=lambda length: fmean(np.log(np.arange(1, length + 1)).tolist()),
        ),
    )

    def read(self, block: ScoreBlock, sums_BH: Tensor) -> None:
        sums_BH += torch.special.entr(block.weights_BHQS).sum((-2, -1))
        if block.bias_BHQ is not None:
            sums_BH += (torch.special.entr(block.bias_BHQ) * block.counted_B1Q).sum(-1)


class Cosine(OfRows):
    """Of key k the mean over queries t >= k that see k of q_t.k_k / (|q_t| |k_k|)."""

    axes = "LHT"
    angles = True
    fields = ("cosine_first", "cosine_rest")
    column = Column("cos(q, k)", 3)
    figures = (
        PositionMap(
            "angles-cosine",
            "Directions of queries and keys: cos(q, k)",
            "Mean over heads of the cosine between a key and the queries that see it. The logit of a query and a key "
            "is their cosine times both norms: where the first column is large here, and not in the next figure, the "
            "sink has its large logits from the direction of its key.",
            "cosine",
            diverging=True,
        ),
        HeadMap(
            "angles-heads",
            "Cosine with the key of the first token",
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
            "Norms of queries and keys: |q| |k|",
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


BY_QUERY = BucketLines(
    "by-query",
    "The sink along the sequence",
    "Attention of a query on the first token (solid) and on an average other token before it (dashed), by the position "
    "of the query, mean over layers, heads and seeds. Without a sink both fall together.",
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
            "Attention by distance",
            "The share of a query's attention on keys by their distance in tokens, mean over "
            "queries, layers, heads and seeds. The shares add up to one, less what is on a bias. Few queries have keys "
            "far back; their attention on a sink is at the right.",
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


VISIBLE_BY_QUERY = BucketLines(
    "visible-by-query",
    "How many queries see the first token",
    "Share of the queries that see the first token (solid) and an average other token before them (dashed), by the "
    "position of the query, mean over layers, heads and seeds: under a window, and where an indexer selects the keys "
    "of each query (DeepSeek-V3.2).",
    series="first token",
    x_title="Position of the query",
    y_title="Share of queries",
    bucket="Queries",
)


class FirstVisible(OfRows):
    """Over queries t = 1, 2..3, 4..7, ..: the share that sees key 1; None where every query sees every earlier key."""

    axes = "LHQ"
    angles = True
    figures = (VISIBLE_BY_QUERY,)

    def read(self, block: ScoreBlock, sums_BHT: Tensor) -> None:
        sums_BHT[:, :, block.queries] = block.sees_first_BHQ

    def of_mean(self, mean_LHQ: np.ndarray) -> np.ndarray | None:
        return None if (mean_LHQ == 1).all() else mean_LHQ


class RestVisible(OfRows):
    """Over the same queries the share of keys 2 .. t that a query sees; 0 for t = 1, and None likewise."""

    axes = "LHQ"
    angles = True
    figures = (replace(VISIBLE_BY_QUERY, series="an average other token"),)

    def read(self, block: ScoreBlock, sums_BHT: Tensor) -> None:
        others_BHQ = block.cosine_and_seen[1].sum(-1) - block.sees_first_BHQ
        sums_BHT[:, :, block.queries] = others_BHQ / block.earlier_BQ[:, None].clamp(min=1)

    def of_mean(self, mean_LHQ: np.ndarray) -> np.ndarray | None:
        return None if (mean_LHQ[..., 1:] == 1).all() else mean_LHQ


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
            "Value norm of the first token",
            "Norm of the first token's value over the mean norm of the others. Below one, attention on the first token "
            "adds little to the output. A head is left out where the others are all zero.",
            "ratio of norms",
        ),
    )

    def of_mean(self, mean_LHT: np.ndarray) -> np.ndarray | None:
        if mean_LHT.shape[-1] < 2:
            return None
        return first_to_rest(torch.from_numpy(mean_LHT)).numpy()


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
            "Alignment with the first token",
            "Cosine between the hidden state of each token and that of the first token, mean over sequences; 0 is the "
            "embedding. Tokens with a high cosine, where the first token's norm is large, may be further sinks.",
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
            "Compression of the hidden states",
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


class Details(WithArrays):
    """The statistics of a measurement, each by the name of its array, in the order of the files.

    Statistics that the model or an older file does not have are None. The fields that statistics declare, such as
    `entropy_by_layer`, are lists of a number for each layer or block, in `by_layer`.

    Attributes:
        secondary_rate: percent of (sequence, layer, head) triples with a secondary sink at a position of 5 .. T / 2.
        secondary_sinks: the strongest from position 2 on (secondary.py), strongest first.
        secondary_tokens: which tokens are such sinks most often; None in older files.
        distances: first distance of each bucket: 0, 1, 2, 4, ..
        queries: first query of each bucket, 1-based: 1, 2, 4, ..
        maps: (layer, head) of every map, 1-based.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, list[FiniteFloat] | None]  # pyright: ignore[reportIncompatibleVariableOverride]
    prefix = "details_"

    secondary_rate: Percent
    secondary_sinks: list[SecondarySink]
    secondary_tokens: list[SecondaryToken] | None = None
    distances: list[int]
    queries: list[int]
    maps: list[tuple[int, int]]
    entropy: Annotated[Array, Entropy()]
    cosine: Annotated[ArrayOrNone, Cosine()] = None
    norm_product: Annotated[ArrayOrNone, NormProduct()] = None
    by_distance: Annotated[Array, ByDistance()]
    first_by_query: Annotated[Array, FirstByQuery()]
    rest_by_query: Annotated[Array, RestByQuery()]
    value_ratio: Annotated[ArrayOrNone, ValueRatio()] = None
    secondary: Annotated[Array, Secondary()]
    kurtosis: Annotated[ArrayOrNone, Kurtosis()] = None
    alignment: Annotated[ArrayOrNone, Alignment()] = None
    matrix_entropy: Annotated[ArrayOrNone, MatrixEntropy()] = None
    first_visible: Annotated[ArrayOrNone, FirstVisible()] = None
    rest_visible: Annotated[ArrayOrNone, RestVisible()] = None
    gate: Annotated[ArrayOrNone, GateMean()] = None
    gate_closed: Annotated[ArrayOrNone, ClosedGates()] = None
    map_attention: Annotated[ArrayOrNone, AttentionMap()] = None
    map_cosine: Annotated[ArrayOrNone, CosineMap()] = None
    map_norm_product: Annotated[ArrayOrNone, NormProductMap()] = None

    @property
    def by_layer(self) -> Mapping[str, list[float] | None]:
        """The fields that statistics declare, by name."""
        return self.__pydantic_extra__

    @model_validator(mode="after")
    def _agrees_with_the_declarations(self) -> Self:
        unknown = set(self.by_layer) - {field for one in STATISTICS.values() for field in one.fields}
        if unknown:
            raise ValueError(f"unknown fields: {', '.join(sorted(unknown))}")
        self.check_arrays(D=len(self.distances), Q=len(self.queries), P=len(self.maps))
        for statistic, array in self.present():
            numbers = [self.by_layer.get(field) for field in statistic.fields]
            if numbers and numbers[0] is None:
                raise ValueError(f"{statistic.fields[0]} is missing")
            for field, values in zip(statistic.fields, numbers, strict=True):
                if values is not None and len(values) != len(array):
                    raise ValueError(f"{field} has {len(values)} values, expected {len(array)}")
        return self

    @model_serializer(mode="wrap")
    def _layers_first(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        document = handler(self)
        return {name: document[name] for name in (*self.by_layer, *document)}

    def present(self) -> Iterator[tuple[Statistic, np.ndarray]]:
        """Declaration and array of every statistic that is not None."""
        for name, statistic in STATISTICS.items():
            array: np.ndarray | None = getattr(self, name)
            if array is not None:
                yield statistic, array


STATISTICS = {name: declared for name, declared in Details.declared() if isinstance(declared, Statistic)}
"""Every statistic by its name."""
