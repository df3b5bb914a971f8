"""What goes with a sink, beyond the sink metric: angles, entropy, distances, secondary sinks, kurtosis, maps.

All of it is asked for (`--details`), because it costs more than the sink metric. Everything is first a mean over the
real queries of a sequence, then a mean over the sequences. A is the matrix of attention scores, rows summing to one
with the share of a bias or sink logit; proxy scores where the model's own do not (metrics.py). q and k are the vectors
that enter attention, after rotary embedding and norms.

    cosine_k        mean over queries t >= k that see k of q_t.k_k / (|q_t| |k_k|)
    norm product_k  mean over the same queries of |q_t| |k_k|; the logit is cosine times norm product times scale
    entropy         mean over queries of - sum_k A_tk ln A_tk, the share of a bias included; nats
    by distance     mean over queries of the sum of A_tk over 0, 1, 2..3, 4..7, .. tokens back
    by query        over queries 1, 2..3, 4..7, ..: A_t1, and the mean of A_tk over the other keys 2 .. t
    value ratio     |v_1| / mean over t > 1 of |v_t|, of each query head's values
    kurtosis        E[(x - mean x)^4] / E[(x - mean x)^2]^2 over the channels of a token (plain: 3 for a Gaussian)
    alignment_t     cosine of the hidden state of token t and that of the first token, after a block
    secondary sink  alpha_k > eps at a position k past the first few that half of the queries can see: 5 .. T / 2
"""

from typing import Annotated, Any, Self

import numpy as np
from pydantic import ConfigDict, Field, FiniteFloat, model_validator

from sinklab.schema import Part

FIRST_FEW = 4  # positions that are not secondary: sinks of a first token often cover its neighbours
ALIGNED = 0.9  # a hidden state this close to the first token's is like it
STANDS_OUT = 3.0  # and that says something where the first token's norm is so many times that of the others
STRONGEST = 8  # secondary sinks listed
MAP_POSITIONS = 4096  # a map of so many positions takes 64 MB, and there are three of each head

Percent = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
PREFIX = "details_"  # of the names in measurement.npz


class SecondarySink(Part):
    """A token past the first few that heads attend to, or that is like the first token.

    Attributes:
        sequence, position: of the token, 1-based.
        token: its id.
        heads: percent of (layer, head) pairs with alpha > eps.
        importance: alpha, mean over layers and heads.
        block: after which the first token of the sequence stands out most; None where blocks could not be read.
        alignment: cosine of the token's hidden state and the first token's after that block.
    """

    sequence: int = Field(ge=1)
    position: int = Field(ge=1)
    token: int = Field(ge=0)
    heads: Percent
    importance: FiniteFloat
    block: int | None = Field(ge=0)
    alignment: FiniteFloat | None


class Details(Part):
    """The statistics above. L attention layers, H heads, T positions, M blocks of the residual stream, P maps.

    Attributes:
        entropy_by_layer: mean over heads (L).
        cosine_first, cosine_rest: mean over heads of the cosine with key 1, and with keys 2 .. T (L); None where
            queries cannot be seen (backend "eager").
        norm_product_first, norm_product_rest: the same of the norm product.
        kurtosis_by_block: mean over tokens before the first block and after every block (M + 1); None if unknown.
        secondary_rate: percent of (sequence, layer, head) triples with a secondary sink.
        secondary_sinks: the strongest, strongest first.
        distances: first distance of each bucket: 0, 1, 2, 4, ..
        queries: first query of each bucket, 1-based: 1, 2, 4, ..
        maps: (layer, head) of every map, 1-based.
        entropy: (L, H).
        cosine, norm_product: (L, H, T).
        by_distance: (L, H, distances).
        first_by_query, rest_by_query: (L, H, queries).
        value_ratio: (L, H); None for sequences of one token.
        secondary: percent of sequences with a secondary sink (L, H).
        kurtosis, alignment: (M + 1, T).
        map_attention, map_cosine, map_norm_product: mean over sequences (P, T, T), query by key, 0 where a query does
            not see a key; None where none was asked for, or, of the last two, where queries cannot be seen.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    entropy_by_layer: list[FiniteFloat]
    cosine_first: list[FiniteFloat] | None
    cosine_rest: list[FiniteFloat] | None
    norm_product_first: list[FiniteFloat] | None
    norm_product_rest: list[FiniteFloat] | None
    kurtosis_by_block: list[FiniteFloat] | None
    secondary_rate: Percent
    secondary_sinks: list[SecondarySink]
    distances: list[int]
    queries: list[int]
    maps: list[tuple[int, int]]
    entropy: np.ndarray = Field(exclude=True, repr=False)
    cosine: np.ndarray | None = Field(default=None, exclude=True, repr=False)
    norm_product: np.ndarray | None = Field(default=None, exclude=True, repr=False)
    by_distance: np.ndarray = Field(exclude=True, repr=False)
    first_by_query: np.ndarray = Field(exclude=True, repr=False)
    rest_by_query: np.ndarray = Field(exclude=True, repr=False)
    value_ratio: np.ndarray | None = Field(default=None, exclude=True, repr=False)
    secondary: np.ndarray = Field(exclude=True, repr=False)
    kurtosis: np.ndarray | None = Field(default=None, exclude=True, repr=False)
    alignment: np.ndarray | None = Field(default=None, exclude=True, repr=False)
    map_attention: np.ndarray | None = Field(default=None, exclude=True, repr=False)
    map_cosine: np.ndarray | None = Field(default=None, exclude=True, repr=False)
    map_norm_product: np.ndarray | None = Field(default=None, exclude=True, repr=False)

    @model_validator(mode="after")
    def _shapes_agree(self) -> Self:
        if self.entropy.ndim != 2 or self.secondary.ndim != 2:
            raise ValueError("details_entropy and details_secondary have one value for each layer and head")
        (L, H), T = self.entropy.shape, self._positions()
        D, Q, P = len(self.distances), len(self.queries), len(self.maps)
        M = len(self.kurtosis_by_block or ())
        expected: dict[str, tuple[int, ...]] = {"secondary": (L, H), "value_ratio": (L, H), "by_distance": (L, H, D)}
        expected |= dict.fromkeys(("first_by_query", "rest_by_query"), (L, H, Q))
        expected |= dict.fromkeys(("cosine", "norm_product"), (L, H, T))
        expected |= dict.fromkeys(("kurtosis", "alignment"), (M, T))
        expected |= dict.fromkeys(("map_attention", "map_cosine", "map_norm_product"), (P, T, T))
        for name, shape in {"entropy": (L, H), **expected}.items():
            array: np.ndarray | None = getattr(self, name)
            if array is not None and array.shape != shape:
                raise ValueError(f"{PREFIX}{name} has shape {array.shape}, expected {shape}")
            if array is not None and not np.isfinite(array).all():
                raise ValueError(f"{PREFIX}{name} contains NaN or infinity")
        return self

    def _positions(self) -> int:
        known = (self.cosine, self.kurtosis, self.map_attention)
        return next((array.shape[-1] for array in known if array is not None and array.ndim > 1), 0)

    def arrays(self) -> dict[str, np.ndarray]:
        """What measurement.npz holds of this, under its names there."""
        return {f"{PREFIX}{name}": array for name in ARRAYS if (array := getattr(self, name)) is not None}


ARRAYS = tuple(name for name, field in Details.model_fields.items() if field.exclude)


def with_arrays(document: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """The `details` of a measurement.json with their arrays, to be validated."""
    found = {name: arrays[f"{PREFIX}{name}"] for name in ARRAYS if f"{PREFIX}{name}" in arrays}
    return {**document, **found}


def bucket_starts(first: int, last: int) -> list[int]:
    """`first` and the powers of two above it, up to `last`: 0, 1, 2, 4, .. or 1, 2, 4, .."""
    starts, power = [first], max(first * 2, 1)
    while power <= last:
        starts.append(power)
        power *= 2
    return starts
