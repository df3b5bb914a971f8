"""Base classes of the statistics of `--details`, their arrays, and the blocks of attention weights they read.

A statistic declares its axes, its computation from a block of rows or a hidden state, and its column and figures.
Averaging, the fields of measurement.json and .npz with their validation, the terminal column and the report figure are
derived from this declaration. The docstring of a statistic states its formula. A is the matrix of attention weights;
each of its rows, with the attention to a bias or sink logit, sums to one. In a model whose weights do not sum to one, A
contains proxy scores (attention/importance.py). q and k are taken after rotary embedding and norms.

Axes: L attention layers, H heads, T positions, D buckets of distances, Q buckets of queries, M places of the residual
stream (before the first block and after each), P maps. Within a block: B sequences, G KV heads, T columns of the
batch, Q queries, S keys, R positions, aligned so that index 0 is the first real token.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar, cast

import numpy as np
import torch
from pydantic import ConfigDict, Field
from torch import Tensor

from sinklab.attention import query_blocks as bl
from sinklab.attention.importance import Rows
from sinklab.attention.masks import Mask, RealTokens
from sinklab.attention.query_blocks import accumulate_dtype
from sinklab.models.hooks import token_norms
from sinklab.schema import Part


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


Array = Annotated[np.ndarray, Field(exclude=True, repr=False)]
ArrayOrNone = Annotated[np.ndarray | None, Field(exclude=True, repr=False)]


class Axes:
    """The axes of an array, one letter per axis: `Annotated[Array, Axes("LHT")]`.

    Attributes:
        axes: letters of the axes, in order.
        infinite: whether values may be infinite.
        gaps: whether values are NaN in layers that do not have the quantity; others are never NaN.
    """

    axes: str
    infinite: ClassVar[bool] = False

    def __init__(self, axes: str, gaps: bool = False) -> None:
        self.axes, self.gaps = axes, gaps


class WithArrays(Part):
    """A part of measurement.json whose arrays are in measurement.npz.

    Attributes:
        prefix: prefix of the array names in the file.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)
    prefix: ClassVar[str] = ""

    @classmethod
    def array_axes(cls) -> Iterator[tuple[str, Axes]]:
        """Yield the name and axes of every array."""
        for name, field in cls.model_fields.items():
            yield from ((name, one) for one in field.metadata if isinstance(one, Axes))

    @classmethod
    def found_in(cls, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the arrays of this part among the arrays of a file, by field name."""
        return {name: arrays[cls.prefix + name] for name, _ in cls.array_axes() if cls.prefix + name in arrays}

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays of this part that are not None, by their names in measurement.npz."""
        found = {self.prefix + name: getattr(self, name) for name, _ in self.array_axes()}
        return {name: array for name, array in found.items() if array is not None}

    def __eq__(self, other: object) -> bool:
        """Return whether all fields and arrays are equal; NaN equals NaN."""
        if not isinstance(other, type(self)):
            return NotImplemented
        names, mine, theirs = dict(self.array_axes()), self.arrays(), other.arrays()
        return (
            mine.keys() == theirs.keys()
            and all(np.array_equal(array, theirs[name], equal_nan=True) for name, array in mine.items())
            and all(
                getattr(self, name) == getattr(other, name) for name in type(self).model_fields if name not in names
            )
        )

    def check_arrays(self, **sizes: int) -> None:
        """Check that the shapes of the arrays agree and their values are valid.

        Args:
            sizes: axis sizes by letter; the first array with a new axis sets its size.

        Raises:
            ValueError: if an array has a wrong shape, contains NaN, or is infinite although `Axes.infinite` is False.
        """
        arrays = self.arrays()
        for name, one in self.array_axes():
            if (array := arrays.get(self.prefix + name)) is None:
                continue
            if array.ndim == len(one.axes):
                sizes = dict(zip(one.axes, array.shape, strict=True)) | sizes
            expected = tuple(sizes.get(axis, "any") for axis in one.axes)
            if array.shape != expected:
                raise ValueError(f"{self.prefix}{name} has shape {array.shape}, expected {expected}")
            known = array[~np.isnan(array)] if one.gaps else array
            if np.isnan(known).any() or not (one.infinite or np.isfinite(known).all()):
                raise ValueError(f"{self.prefix}{name} contains NaN or infinity")


def bucket_starts(first: int, last: int) -> list[int]:
    """Return `first`, which is 0 or 1, and the powers of two above it, up to `last`: 0, 1, 2, 4, .. or 1, 2, 4, .."""
    return [first, *(2**power for power in range(first, last.bit_length()))]


class Angles:
    """Cosines and norms of the queries and keys of one layer, for whole sequences (T = S).

    Attributes:
        q_norm_BHT, k_norm_BHT: l2 norms of queries and keys; keys are repeated over the query heads that share them.
        plain: whether the mask is the plain causal one. Sums over the queries that see a key are then running sums.
    """

    def __init__(self, q_BHTD: Tensor, k_BGTD: Tensor, mask: Mask) -> None:
        dtype = accumulate_dtype(q_BHTD.dtype)
        q_BHTD, k_BGTD = q_BHTD.detach().to(dtype), k_BGTD.detach().to(dtype)
        # In differential attention V2, a head has two concatenated queries and one key.
        k_BGTD = k_BGTD.repeat(1, 1, 1, q_BHTD.shape[-1] // k_BGTD.shape[-1])
        self.q_norm_BHT = token_norms(q_BHTD)
        k_norm_BGT = token_norms(k_BGTD)
        self.k_norm_BHT = k_norm_BGT.repeat_interleave(q_BHTD.shape[1] // k_BGTD.shape[1], 1)
        units = _unit(q_BHTD, self.q_norm_BHT), _unit(k_BGTD, k_norm_BGT)
        self.plain, self._cosines = mask.plain, bl.ScoreMatrix(*units, mask, scale=1.0)

    def causal_cosines(self, counted_BT: Tensor) -> Tensor:
        """Sum the cosines of every key with the counted queries t >= k: (B, H, T).

        sum_t q_t.k_k = (sum_t q_t).k_k, so that no score is computed; for the plain causal mask only.
        """
        queries_BHTD = from_the_end(self._cosines.q_BHTD * counted_BT[:, None, :, None], -2)
        keys_BGTD = self._cosines.k_BGSD
        return (queries_BHTD * keys_BGTD.repeat_interleave(queries_BHTD.shape[1] // keys_BGTD.shape[1], 1)).sum(-1)

    def block(self, part: bl.Block) -> tuple[Tensor, Tensor]:
        """Return two tensors (B, H, Q, S) of a block.

        The first has the cosines, 0 at masked keys. The second is 1 where query t sees key k <= t, else 0.
        """
        cosine = self._cosines.raw(part)
        seen = self._cosines.hide_(torch.ones_like(cosine), part, 0)
        return cosine.mul_(seen), seen.tril_(part.start - part.low)


class Layer:
    """Data shared by all query blocks of one layer in one batch.

    Attributes:
        real: real tokens among the columns of the batch.
        sees_queries: whether queries are available; `angles` and `pairs_BHT` are used only then.
        angles: angles of the layer's queries and keys.
        pairs_BHT: number of queries counted so far that see each key.
        first_B11: column of the first real token.
        count_B1: number of real tokens.
        counted_BT: 1 if a query is a real token, else 0.
        starts_D: first distance of each bucket.
    """

    def __init__(self, weights_BHQS: Tensor, real: RealTokens, angles: Angles | None) -> None:
        device = weights_BHQS.device
        self.real, self.angles, self.sees_queries = real, cast(Angles, angles), angles is not None
        self.first_B11 = real.index_BR[:, :1, None].to(device)
        self.count_B1 = real.count_B.to(weights_BHQS)[:, None]
        self.counted_BT = real.mask_BT.to(device, weights_BHQS.dtype)
        self.starts_D = torch.tensor(bucket_starts(0, real.index_BR.shape[1] - 1), device=device)
        self.pairs_BHT = self.sums("LHT", weights_BHQS)

    def sums(self, axes: str, weights_BHQS: Tensor) -> Tensor:
        """Return zeros for the sums of a statistic with these axes: (B, H), (B, H, distances) or (B, H, T)."""
        columns, distances = self.counted_BT.shape[1], len(self.starts_D)
        wide = {"H": (), "D": (distances,), "T": (columns,), "Q": (columns,)}[axes[-1]]
        return weights_BHQS.new_zeros(*weights_BHQS.shape[:2], *wide)


class ScoreBlock:
    """Attention rows of a block of queries of one layer.

    Attributes:
        part: queries and keys of the block.
        layer: layer of the block.
        queries, keys: slices of the batch columns.
        counted_B1Q: 1 if a query is a real token, else 0.
        weights_BHQS: attention weights, 0 in rows of padding.
        bias_BHQ: attention to an added bias, sink logit or stick-breaking remainder; None if there is none.
        earlier_BQ: number of real tokens before a query; negative before the first real token.
    """

    def __init__(self, rows: Rows, layer: Layer) -> None:
        self.part, self.layer, self.bias_BHQ = rows.block, layer, rows.bias_BHQ
        self.queries, self.keys = slice(self.part.start, self.part.stop), slice(self.part.low, self.part.high)
        self.counted_B1Q, weights_BHQS = layer.counted_BT[:, None, self.queries], rows.weights_BHQS
        self.weights_BHQS = weights_BHQS * self.counted_B1Q[..., None] if layer.real.padded else weights_BHQS
        self._query_1Q1 = torch.arange(self.part.start, self.part.stop, device=weights_BHQS.device).view(1, -1, 1)
        self.earlier_BQ = (self._query_1Q1 - layer.first_B11)[..., 0]

    @cached_property
    def by_distance_BHQD(self) -> Tensor:
        """Attention of every query to the keys in each distance bucket."""
        first_B11 = self.layer.first_B11  # keys before ends_BQD[b, q, d] are in bucket d or a more distant one
        ends_BQD = torch.maximum(self._query_1Q1 - self.layer.starts_D + 1, first_B11)
        edges = self._up_to(torch.cat((ends_BQD, first_B11.expand(-1, ends_BQD.shape[1], 1)), -1))
        return edges[..., :-1] - edges[..., 1:]

    @cached_property
    def first_BHQ(self) -> Tensor:
        """Attention of every query to the first token."""
        first_BQ1 = self.layer.first_B11.expand(-1, self._query_1Q1.shape[1], 1)
        return (self._up_to(first_BQ1 + 1) - self._up_to(first_BQ1))[..., 0]

    @property
    def later_B1Q(self) -> Tensor:
        """1 for queries of real tokens after the first, else 0."""
        return (self.earlier_BQ > 0)[:, None] * self.counted_B1Q

    @property
    def at_first_BHQ(self) -> Tensor:
        """Largest weight of every query on the first token and the learned tokens before it."""
        first_B11 = self.layer.first_B11 - self.part.low
        leading = self.weights_BHQS[..., : max(int(first_B11.max()) + 1, 0)]
        if not leading.shape[-1]:
            return self.weights_BHQS.new_zeros(self.weights_BHQS.shape[:3])
        columns = torch.arange(leading.shape[-1], device=leading.device)
        return (leading * (columns <= first_B11[..., None])).amax(-1)

    @cached_property
    def cosine_and_seen(self) -> tuple[Tensor, Tensor]:
        """Cosines, 0 at masked keys, and 1 where a real query t sees a key k <= t, else 0; both (B, H, Q, S).

        Requires queries (`Layer.sees_queries`).
        """
        cosine, seen = self.layer.angles.block(self.part)
        return cosine, seen.mul_(self.counted_B1Q[..., None])

    @cached_property
    def sees_first_BHQ(self) -> Tensor:
        """1 where a query of a real token sees the first token, else 0; requires queries (`Layer.sees_queries`)."""
        seen_BHQS = self.cosine_and_seen[1]
        at_B11 = self.layer.first_B11 - self.part.low  # negative if a sliding window excludes it
        found_BHQ = seen_BHQS.gather(-1, at_B11.clamp(min=0)[:, None].expand(*seen_BHQS.shape[:3], 1))[..., 0]
        return found_BHQ * (at_B11 >= 0)

    @cached_property
    def _running_sums(self) -> Tensor:
        return self.weights_BHQS.cumsum(-1)

    def _up_to(self, column_BQX: Tensor) -> Tensor:
        """Sum the attention over the keys before a batch column: (B, Q, X) -> (B, H, Q, X)."""
        B, H, Q, S = self.weights_BHQS.shape
        last_BHQX = (column_BQX - self.part.low - 1).clamp(-1, S - 1)[:, None].expand(B, H, Q, -1)
        return self._running_sums.gather(-1, last_BHQX.clamp(min=0)) * (last_BHQX >= 0)


def from_the_end(x: Tensor, dim: int = -1) -> Tensor:
    """Return running sums over an axis that start at its end: the t-th is the sum of the entries from t on."""
    return x.flip(dim).cumsum(dim).flip(dim)


def _unit(x_BHTD: Tensor, norm_BHT: Tensor) -> Tensor:
    return x_BHTD / norm_BHT.masked_fill(norm_BHT == 0, 1)[..., None]


class Statistic(Axes):
    """One of the statistics of `--details`.

    Attributes:
        axes: axes of the statistic's array (see the module docstring).
        averaged: axes of the array that is averaged over sequences, if different.
        fields: names of fields in measurement.json, each with one value per layer or block; may be empty. Statistics
            with axes LH have one field, the mean over heads; LHT, two fields, the means over heads at position 1 and at
            later positions; MT, one field, the mean over tokens; M, one field, the array itself.
        column: column of the table by layer, if any.
        figures: figures of the report.
    """

    averaged: ClassVar[str | None] = None
    fields: ClassVar[tuple[str, ...]] = ()
    column: ClassVar[Column | None] = None
    figures: ClassVar[tuple[PlotSpec, ...]] = ()

    def __init__(self) -> None:
        super().__init__(self.axes)

    def of_mean(self, mean: np.ndarray, /) -> np.ndarray | None:
        """Compute the statistic's array from the mean over sequences; None if the statistic does not apply."""
        return mean

    def by_layer(self, array: np.ndarray, /) -> Sequence[list[float] | None]:
        """Return the values per layer or block for each of `fields`; the second is None for sequences of one token."""
        if self.axes == "M":
            return [array.tolist()]
        if self.axes == "LH":
            return [array.mean(1).tolist()]
        rest = array[..., 1:].mean((1, 2)).tolist() if array.shape[-1] > 1 else None
        return [array[..., 0].mean(1).tolist(), rest]


class OfRows(Statistic, ABC):
    """Base class of statistics of attention rows, computed in blocks of queries; axes LH, LHD, LHQ or LHT."""

    @abstractmethod
    def read(self, block: ScoreBlock, sums: Tensor, /) -> None:
        """Add the statistic of a block of queries to the sums of its layer.

        Args:
            block: block of attention rows.
            sums: sums of the layer, changed in place: (B, H); by distance (B, H, D); by key (B, H, T), summed over
                queries; or by query (B, H, T).
        """

    def mean(self, sums: Tensor, layer: Layer, /) -> Tensor:
        """Compute the statistic of each sequence from its sums over all blocks.

        Returns:
            Axes LH and LHD: mean over the real queries, (B, H) and (B, H, D). Axes LHT: mean over the real queries
            t >= k that see key k, (B, H, R). Axes LHQ: values of the queries, (B, H, R).
        """
        last = self.axes[-1]
        if last in "TQ":
            return layer.real.align(sums / layer.pairs_BHT.clamp(min=1) if last == "T" else sums)
        return sums / (layer.count_B1[..., None] if last == "D" else layer.count_B1)


class OfAngles(OfRows, ABC):
    """Base class of statistics of queries, which are unknown if attention is measured from the model's matrices."""

    @abstractmethod
    def causal(self, layer: Layer, /) -> Tensor:
        """Compute the sums that `read` adds up over all blocks, for the plain causal mask, without any score."""


class OfStream(Statistic, ABC):
    """Base class of statistics of every token's hidden state, before the first block and after each."""

    axes = "MT"

    @abstractmethod
    def read(self, x_BTC: Tensor, first_B1C: Tensor, /) -> Tensor:
        """Compute the statistic of every token (B, T).

        Args:
            x_BTC: hidden states at one place of the residual stream, float32 (float64 for a float64 model).
            first_B1C: hidden state of the first real token.
        """


class OfStates(Statistic, ABC):
    """Base class of statistics of all hidden states of a sequence, before the first block and after each."""

    axes = "M"

    @abstractmethod
    def read(self, x_BRC: Tensor, count_B: Tensor, /) -> Tensor:
        """Compute the statistic of every sequence (B,).

        Args:
            x_BRC: hidden states at one place of the residual stream, float32 (float64 for a float64 model); index 0 is
                the first real token, and values past the end of a sequence are 0.
            count_B: number of real tokens of each sequence.
        """
