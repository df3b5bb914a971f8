"""The statistics of `--details`: entropy, angles, distances, norms, kurtosis, gates, maps, and their result `Details`.

Statistics of attention rows are averaged over the real queries of a sequence (those by key only over queries that see
the key), then over sequences. To add a statistic, declare its class here and a field of `Details` for its array.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import fmean
from typing import Annotated, Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import ConfigDict, FiniteFloat, SerializerFunctionWrapHandler, model_serializer, model_validator
from torch import Tensor

from sinklab.attention.importance import first_to_rest
from sinklab.measuring.statistics.secondary import Percent, Secondary, SecondarySink, SecondaryToken
from sinklab.measuring.statistics.statistic_base import (
    Array,
    ArrayOrNone,
    BlockLines,
    BucketLines,
    Column,
    HeadMap,
    Layer,
    MatrixMap,
    OfAngles,
    OfRows,
    OfStates,
    OfStream,
    PositionMap,
    ScoreBlock,
    SequenceLines,
    Statistic,
    WithArrays,
    from_the_end,
)


class Entropy(OfRows):
    """Entropy - sum_k A_tk ln A_tk in nats, mean over queries; the attention to a bias or sink logit is included."""

    axes = "LH"
    fields = ("entropy_by_layer",)
    column = Column("entropy", 2)
    figures = (
        HeadMap(
            "entropy",
            "Attention entropy",
            "Entropy of the attention weights of a query, in nats, mean over queries and sequences.",
            "entropy",
            uniform=lambda length: fmean(np.log(np.arange(1, length + 1)).tolist()),
        ),
    )

    def read(self, block: ScoreBlock, sums_BH: Tensor) -> None:
        sums_BH -= logarithms(block.weights_BHQS).mul_(block.weights_BHQS).sum((-2, -1))
        if block.bias_BHQ is not None:
            sums_BH += (torch.special.entr(block.bias_BHQ) * block.counted_B1Q).sum(-1)


def logarithms(weights: Tensor) -> Tensor:
    """Return ln A, finite at zeros, so that A ln A is 0 there: half the time of `torch.special.entr` on a CPU."""
    return weights.clamp(min=torch.finfo(weights.dtype).tiny).log_()


class DormantShare(OfRows):
    """Share of the queries t > 1 whose largest attention weight is on the first token, or on a bias or sink logit.

    Ties count; rows of zeros do not. A head is dormant for such a query (2410.13835), and active for the others.
    """

    axes = "LH"
    fields = ("dormant_by_layer",)
    column = Column("dormant", 2)
    figures = (
        HeadMap(
            "dormant",
            "Dormant heads",
            "Share of the queries whose largest attention weight is on the first token (or a bias or sink logit), mean "
            "over sequences. A head with a share near one does nothing for nearly all tokens.",
            "share",
        ),
    )

    def read(self, block: ScoreBlock, sums_BH: Tensor) -> None:
        first_BHQ, largest_BHQ = block.at_first_BHQ, block.weights_BHQS.amax(-1)
        if block.bias_BHQ is not None:
            first_BHQ, largest_BHQ = (torch.maximum(x, block.bias_BHQ) for x in (first_BHQ, largest_BHQ))
        sums_BH += ((first_BHQ >= largest_BHQ) & (largest_BHQ > 0)).mul(block.later_B1Q).sum(-1)

    def mean(self, sums_BH: Tensor, layer: Layer) -> Tensor:
        return sums_BH / (layer.count_B1 - 1).clamp(min=1)


class ValueWeighted(Statistic):
    """Share of the first token in the attention weighted by value norms, sum_t A_t1 |v_1| / sum_tk A_tk |v_k|.

    An upper bound of its share in the head's outputs (2004.10102 weighs attention by the norms of transformed values).
    A sink whose value is near zero has a large alpha_1 and a small share here.
    """

    axes = "LH"
    fields = ("value_weighted_by_layer",)
    column = Column("|A||v|", 2)
    figures = (
        HeadMap(
            "value-weighted",
            "Attention on the first token, weighted by value norms",
            "Share of the first token in the sum of attention weights times value norms, mean over sequences. Compare "
            "with the sink by head: where it is smaller, the sink adds little to the output.",
            "share",
        ),
    )


class Cosine(OfAngles):
    """Cosine q_t.k_k / (|q_t| |k_k|) of key k, mean over the queries t >= k that see k."""

    axes = "LHT"
    fields = ("cosine_first", "cosine_rest")
    column = Column("cos(q, k)", 3)
    figures = (
        PositionMap(
            "angles-cosine",
            "Directions of queries and keys: cos(q, k)",
            "Cosine between a key and the queries that see it, mean over heads. An attention logit is the cosine times "
            "both norms: if the first column is large here but not in the next figure, the direction of the first key "
            "causes the large logits of the sink.",
            "cosine",
            diverging=True,
        ),
        HeadMap(
            "angles-heads",
            "Cosine with the key of the first token",
            "Mean cosine between the queries and the key of the first token. Compare with the sink by head.",
            "cosine",
            diverging=True,
        ),
    )

    def read(self, block: ScoreBlock, sums_BHT: Tensor) -> None:
        cosine, seen = block.cosine_and_seen
        sums_BHT[:, :, block.keys] += (cosine * seen).sum(-2)

    def causal(self, layer: Layer) -> Tensor:
        return layer.angles.causal_cosines(layer.counted_BT)


class NormProduct(OfAngles):
    """Norm product |q_t| |k_k| of key k, mean over the queries t >= k that see k."""

    axes = "LHT"
    fields = ("norm_product_first", "norm_product_rest")
    column = Column("|q| |k|", 1)
    figures = (
        PositionMap(
            "angles-norms",
            "Norms of queries and keys: |q| |k|",
            "Norm of a key times the norm of the queries that see it, after rotary embedding and norms, mean over "
            "heads. A dark first column means that the first key is small.",
            "norm product",
        ),
    )

    def read(self, block: ScoreBlock, sums_BHT: Tensor) -> None:
        q_norm_BH1Q, (_, seen) = block.layer.angles.q_norm_BHT[:, :, None, block.queries], block.cosine_and_seen
        sums_BHT[:, :, block.keys] += (q_norm_BH1Q @ seen)[:, :, 0]

    def causal(self, layer: Layer) -> Tensor:
        return from_the_end(layer.angles.q_norm_BHT * layer.counted_BT[:, None])

    def mean(self, sums_BHT: Tensor, layer: Layer) -> Tensor:
        return layer.real.align(sums_BHT * layer.angles.k_norm_BHT / layer.pairs_BHT.clamp(min=1))


BY_QUERY = BucketLines(
    "by-query",
    "The sink along the sequence",
    "Attention of a query to the first token (solid), and mean over the other earlier tokens (dashed), by query "
    "position, mean over layers, heads and seeds. Without a sink the two curves are close.",
    series="first token",
    x_title="Position of the query",
    y_title="Share of attention",
    bucket="Queries",
    logarithmic=True,
)


class ByDistance(OfRows):
    """Attention by distance t - k in buckets 0, 1, 2..3, 4..7, ..: sum of A_tk over a bucket, mean over queries."""

    axes = "LHD"
    column = Column("A[t, t]", 2, of=lambda shares_LHD: shares_LHD[..., 0].mean(1))
    figures = (
        BucketLines(
            "by-distance",
            "Attention by distance",
            "Share of a query's attention by distance of the key in tokens, mean over queries, layers, heads and "
            "seeds. The shares sum to one minus the attention to a bias or sink token. Only few queries have distant "
            "keys; attention to a sink appears at the right.",
            series="attention",
            x_title="Distance in tokens (0: the query itself)",
            y_title="Share",
            bucket="Distance",
        ),
    )

    def read(self, block: ScoreBlock, sums_BHD: Tensor) -> None:
        sums_BHD += block.by_distance_BHQD.sum(2)


class FirstByQuery(OfRows):
    """Attention A_t1 to the first token, mean over the queries t in each bucket 1, 2..3, 4..7, .."""

    axes = "LHQ"
    figures = (BY_QUERY,)

    def read(self, block: ScoreBlock, sums_BHT: Tensor) -> None:
        sums_BHT[:, :, block.queries] = block.first_BHQ


class RestByQuery(OfRows):
    """Attention A_tk to the other keys 2 .. t, mean over these keys and the queries in each bucket; 0 for t = 1."""

    axes = "LHQ"
    figures = (replace(BY_QUERY, series="an average other token"),)

    def read(self, block: ScoreBlock, sums_BHT: Tensor) -> None:
        others_B1Q = block.earlier_BQ[:, None].clamp(min=1)
        sums_BHT[:, :, block.queries] = (block.by_distance_BHQD.sum(-1) - block.first_BHQ) / others_B1Q


VISIBLE_BY_QUERY = BucketLines(
    "visible-by-query",
    "How many queries see the first token",
    "Share of the queries that see the first token (solid), and mean over the other earlier tokens (dashed), by query "
    "position, mean over layers, heads and seeds. Shown if a mask hides earlier keys: sliding windows, document masks, "
    "and indexers that select the keys of each query (DeepSeek-V3.2).",
    series="first token",
    x_title="Position of the query",
    y_title="Share of queries",
    bucket="Queries",
)


class FirstVisible(OfAngles):
    """Share of the queries t in each bucket 1, 2..3, 4..7, .. that see key 1; None if every query sees it."""

    axes = "LHQ"
    figures = (VISIBLE_BY_QUERY,)

    def read(self, block: ScoreBlock, sums_BHT: Tensor, /) -> None:
        sums_BHT[:, :, block.queries] = block.sees_first_BHQ

    def causal(self, layer: Layer) -> Tensor:
        return layer.counted_BT[:, None].expand(-1, layer.angles.q_norm_BHT.shape[1], -1)

    def of_mean(self, mean: np.ndarray) -> np.ndarray | None:
        return None if (mean == 1).all() else mean


class FirstVisibleByHead(FirstVisible):
    """Share of the queries that see key 1, mean over queries; None if every query sees it."""

    axes = "LH"
    fields = ("first_visible_by_layer",)
    column = Column("sees key 1", 2)
    figures = ()

    def read(self, block: ScoreBlock, sums_BH: Tensor, /) -> None:
        sums_BH += block.sees_first_BHQ.sum(-1)

    def causal(self, layer: Layer) -> Tensor:
        return super().causal(layer).sum(-1)


class RestVisible(OfAngles):
    """Share of the keys 2 .. t that a query sees, by query bucket; 0 for t = 1. None if queries see all of them."""

    axes = "LHQ"
    figures = (replace(VISIBLE_BY_QUERY, series="an average other token"),)

    def read(self, block: ScoreBlock, sums_BHT: Tensor) -> None:
        others_BHQ = block.cosine_and_seen[1].sum(-1) - block.sees_first_BHQ
        sums_BHT[:, :, block.queries] = others_BHQ / block.earlier_BQ[:, None].clamp(min=1)

    def causal(self, layer: Layer) -> Tensor:
        after_BT = torch.arange(layer.counted_BT.shape[1], device=layer.first_B11.device) > layer.first_B11[..., 0]
        return (after_BT * layer.counted_BT)[:, None].expand(-1, layer.angles.q_norm_BHT.shape[1], -1)

    def of_mean(self, mean_LHQ: np.ndarray) -> np.ndarray | None:
        return None if (mean_LHQ[..., 1:] == 1).all() else mean_LHQ


class ValueRatio(Statistic):
    """Value norm ratio |v_1| / mean over t > 1 of |v_t| per query head; norms are averaged over sequences first.

    It is infinite if only the first norm is nonzero, and 1 if all norms are zero. None for sequences of one token.
    """

    axes = "LH"
    infinite = True
    averaged = "LHT"
    column = Column("lowest |v|", 2, of=lambda ratio_LH: ratio_LH.min(1))
    figures = (
        HeadMap(
            "value-ratio",
            "Value norm of the first token",
            "Norm of the first token's value divided by the mean norm of the other values. If it is below one, "
            "attention to the first token adds little to the output. Heads whose other values are all zero are left "
            "out.",
            "norm ratio",
        ),
    )

    def of_mean(self, mean_LHT: np.ndarray) -> np.ndarray | None:
        if mean_LHT.shape[-1] < 2:
            return None
        return first_to_rest(torch.from_numpy(mean_LHT)).numpy()


class Kurtosis(OfStream):
    """Kurtosis E[(x - mean x)^4] / E[(x - mean x)^2]^2 over the channels of a token; 3 for a Gaussian."""

    fields = ("kurtosis_by_block",)
    column = Column("kurtosis", 0)
    figures = (
        BlockLines(
            "kurtosis",
            "Outlier channels",
            "Kurtosis E[(x - mean)⁴] / E[(x - mean)²]² of a token's hidden state over its channels, mean over tokens "
            "and sequences. A Gaussian has 3; a few outlier channels, which make a model hard to quantise, lead to "
            "values in the hundreds.",
            "Kurtosis",
        ),
    )

    def read(self, x_BTC: Tensor, first_B1C: Tensor) -> Tensor:
        return kurtosis(x_BTC)


class Alignment(OfStream):
    """Cosine between the hidden states of token t and of the first token, before the first block and after each."""

    figures = (
        PositionMap(
            "alignment",
            "Alignment with the first token",
            "Cosine between the hidden states of each token and of the first token, mean over sequences; block 0 is "
            "the embedding. Tokens with a high cosine may be further sinks if the first token's norm is large.",
            "cosine",
            diverging=True,
        ),
    )

    def read(self, x_BTC: Tensor, first_B1C: Tensor) -> Tensor:
        return F.cosine_similarity(x_BTC, first_B1C, dim=-1)


def kurtosis(x_BTC: Tensor) -> Tensor:
    """Compute E[(x - mean x)^4] / E[(x - mean x)^2]^2 over channels (B, T); 0 where all values are equal."""
    square = (x_BTC - x_BTC.mean(-1, keepdim=True)).square()
    variance_BT = square.mean(-1)
    scaled = square / torch.where(variance_BT > 0, variance_BT, 1)[..., None]  # an unscaled fourth power may overflow
    return scaled.square().mean(-1)


class MatrixEntropy(OfStates):
    """Normalised entropy H / ln min(n, E) of the singular values, H = - sum_j p_j ln p_j, p_j = s_j^2 / sum s^2.

    s are the singular values of a sequence's hidden states, a matrix of n tokens by E channels, not centred. The result
    is 0 for rank one, single tokens and zero matrices, and 1 for equal singular values. Sources: 2510.06477
    (matrix-based entropy; a massive activation leads to one dominant singular value) and 2502.02013 (equation 1 with
    order 1). The division by the maximum entropy is `maxEntropy` in the code of the latter
    (github.com/OFSkean/information_flow). Unlike in that code, negative entries of the Gram matrix are kept, as in the
    formula.
    """

    fields = ("matrix_entropy_by_block",)
    column = Column("matrix entropy", 2)
    figures = (
        SequenceLines(
            "compression",
            "Compression of the hidden states",
            "Left: entropy of the squared singular values of a sequence's hidden states, divided by the maximum "
            "entropy (0: a single direction, 1: equal singular values), mean over sequences. Next to it: the norm of "
            "the first token divided by the mean norm of the others, and the sink rate of the layer. If the entropy is "
            "low where the norm is large, the massive activation of the first token dominates the spectrum.",
            "Matrix entropy",
        ),
    )

    def read(self, x_BRC: Tensor, count_B: Tensor) -> Tensor:
        x_BRC = x_BRC.double()
        wide = x_BRC.shape[1] <= x_BRC.shape[2]
        gram = x_BRC @ x_BRC.mT if wide else x_BRC.mT @ x_BRC
        squares = torch.linalg.eigvalsh(gram).clamp(min=0)
        total_B1 = squares.sum(-1, keepdim=True)
        entropy_B = torch.special.entr(squares / torch.where(total_B1 > 0, total_B1, 1)).sum(-1)
        most_B = count_B.to(x_BRC).clamp(max=x_BRC.shape[2]).log()
        return torch.where(most_B > 0, entropy_B / most_B, 0)


CLOSED = 0.1
"""A gate below this value is nearly closed."""


class OfGates(Statistic, ABC):
    """Base class of statistics of gates on the attention output or the values (2505.06708), by head and token.

    github.com/rajo69/Gate-Sparsity-and-Functional-Sensitivity published the same statistics for the models of that
    paper (mean gate and share of gates below 0.1, for the first token and the others, by layer and head). Forget gates,
    which bias the attention logits, are not included.
    """

    axes = "LHT"

    @abstractmethod
    def read(self, gates_BHTX: Tensor, /) -> Tensor:
        """Compute the statistic of every head and token (B, H, T) from gates in [0, 1]; X is 1 or the channels."""


class GateMean(OfGates):
    """Gate g_t of token t, a factor in [0, 1] (sigmoid or V-scale), mean over channels; 1 in a layer without gates."""

    fields = ("gate_first", "gate_rest")
    column = Column("gate", 3)
    figures = (
        BlockLines(
            "gates",
            "Attention gates",
            "Gate, a factor in [0, 1] on the attention output (or on the values) of a head, at the first token (solid) "
            "and at the other tokens (dashed), mean over channels, heads, sequences and seeds. With a small gate, a "
            "head adds little to the residual stream even without a sink.",
            "Gate",
        ),
        HeadMap(
            "gates-heads",
            "Gates of the first token by head",
            "Gate at the first token, mean over channels and sequences.",
            "gate",
        ),
    )

    def read(self, gates_BHTX: Tensor) -> Tensor:
        return gates_BHTX.mean(-1)


class ClosedGates(OfGates):
    """Share of channels of token t with g_t < 0.1 (0 or 1 with one gate per head); 0 in a layer without gates."""

    fields = ("gate_closed_first", "gate_closed_rest")
    column = Column("gate < 0.1", 2)
    figures = (
        BlockLines(
            "gates-closed",
            "Closed gates",
            f"Share of gates below {CLOSED:g}, at the first token (solid) and at the other tokens (dashed), mean over "
            "heads, sequences and seeds.",
            "Share",
        ),
    )

    def read(self, gates_BHTX: Tensor) -> Tensor:
        return (gates_BHTX < CLOSED).to(gates_BHTX.dtype).mean(-1)


MAPS = "Query by key, mean over sequences"  # caption


class AttentionMap(Statistic):
    """Attention weights A of the requested heads, mean over sequences; 0 at masked keys."""

    axes = "PTT"
    figures = (MatrixMap("map-attention", "Attention of single heads", MAPS, "attention"),)


class CosineMap(Statistic):
    """Cosine q_t.k_k / (|q_t| |k_k|) of the requested heads, mean over sequences; 0 at masked keys."""

    axes = "PTT"
    figures = (MatrixMap("map-cosine", "Cosines of single heads", MAPS, "cosine", diverging=True),)


class NormProductMap(Statistic):
    """Norm product |q_t| |k_k| of the requested heads, mean over sequences; 0 at masked keys."""

    axes = "PTT"
    figures = (MatrixMap("map-norms", "Norm products of single heads", MAPS, "norm product"),)


class Details(WithArrays):
    """The statistics of `--details`, one array per statistic, in the order in which they are stored.

    Statistics that do not apply to the model are None. `by_layer` has the values per
    layer or block that statistics declare as `fields`, such as `entropy_by_layer`.

    Attributes:
        secondary_rate: percentage of (sequence, layer, head) triples with alpha_k > eps at some k in 5 .. T / 2.
        secondary_sinks: strongest secondary sinks from position 2 on (secondary.py), in descending order.
        secondary_tokens: tokens that are secondary sinks most often.
        distances: first distance of each distance bucket: 0, 1, 2, 4, ..
        queries: first query of each query bucket, 1-based: 1, 2, 4, ..
        maps: (layer, head) of every saved map, 1-based.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, list[FiniteFloat] | None]  # pyrefly: ignore[bad-override]
    prefix = "details_"

    secondary_rate: Percent
    secondary_sinks: list[SecondarySink]
    secondary_tokens: list[SecondaryToken]
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
    first_visible_by_head: Annotated[ArrayOrNone, FirstVisibleByHead()] = None
    dormant: Annotated[ArrayOrNone, DormantShare()] = None
    value_weighted: Annotated[ArrayOrNone, ValueWeighted()] = None
    gate: Annotated[ArrayOrNone, GateMean()] = None
    gate_closed: Annotated[ArrayOrNone, ClosedGates()] = None
    map_attention: Annotated[ArrayOrNone, AttentionMap()] = None
    map_cosine: Annotated[ArrayOrNone, CosineMap()] = None
    map_norm_product: Annotated[ArrayOrNone, NormProductMap()] = None

    @property
    def by_layer(self) -> Mapping[str, list[float] | None]:
        """Values per layer or block that statistics declare as `fields`, by name."""
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
        """Yield the declaration and array of every statistic that is not None."""
        for name, statistic in STATISTICS.items():
            array: np.ndarray | None = getattr(self, name)
            if array is not None:
                yield statistic, array


STATISTICS = {name: axes for name, axes in Details.array_axes() if isinstance(axes, Statistic)}
"""The statistics of `--details` by field name of `Details`."""
