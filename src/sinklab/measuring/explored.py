"""Attention maps of the heads on one sequence (`--explore`), in 8 bits, for the report's interactive viewer.

Maps are computed in a separate forward pass after the measurement, at about the cost of one sequence with `--details`.
A map of S tokens takes S x S bytes in memory and on disk. Byte n encodes the attention weight (n / 255)^2; storing the
square root keeps small weights precise. The rounding error is at most 0.004, and smaller for small weights.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Annotated, Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import model_validator
from torch import Tensor

from sinklab.attention.importance import Rows
from sinklab.attention.masks import real_tokens
from sinklab.errors import InputError
from sinklab.measuring.statistics.collecting import DetailsCollector, Head, layer_details
from sinklab.measuring.statistics.statistic_base import Angles, Array, Axes, WithArrays
from sinklab.models.adapter import Adapter
from sinklab.models.hooks import evaluating

MOST_HEADS = 1000
MOST_TOKENS = 128
LEVELS = 255


class Explored(WithArrays):
    """Attention maps of one sequence.

    Attributes:
        tokens: ids of the first S tokens of the first sequence, without padding; S is at most MOST_TOKENS.
        texts: text of each token; None if measured without a tokenizer (`sinklab.measure`).
        heads: the P saved heads as (layer, head), 1-based, in layer order (`explored_heads`).
        attention: uint8 (P, S, S), query by key. A value n encodes the attention weight (n / 255)^2; masked keys are 0.
    """

    prefix: ClassVar[str] = "explored_"

    tokens: list[int]
    texts: list[str] | None = None
    heads: list[Head]
    attention: Annotated[Array, Axes("PSS")]

    @model_validator(mode="after")
    def _shapes_agree(self) -> Self:
        self.check_arrays(P=len(self.heads), S=len(self.tokens))
        if self.attention.dtype != np.uint8:
            raise ValueError(f"explored_attention is {self.attention.dtype}, expected uint8")
        return self

    def with_texts(self, decode: Callable[[list[int]], str]) -> Self:
        """Return a copy whose `texts` has the text of each token."""
        return self.model_copy(update={"texts": [decode([token]) for token in self.tokens]})


def explored_heads(adapter: Adapter, maps: Sequence[tuple[int, ...]]) -> Sequence[tuple[int, ...]] | None:
    """Return the heads to save as (layer, head), 1-based; None means all heads.

    All heads are saved if there are at most MOST_HEADS, else those in `maps`.

    Args:
        maps: heads selected with `--map`.

    Raises:
        InputError: if the model has more than MOST_HEADS heads, and `maps` has no head or more than MOST_HEADS.
        SinklabError: if no layer of the model has softmax attention.
    """
    heads = adapter.attention_layers * adapter.heads
    if heads <= MOST_HEADS:
        return None
    if not 0 < len(maps) <= MOST_HEADS:
        raise InputError(
            f"--explore keeps at most {MOST_HEADS:,} heads and the model has {heads:,}: select the heads to keep, "
            "at most that many, with --map LAYER.HEAD (repeatable)"
        )
    return maps


def explore(
    adapter: Adapter,
    tokens_T: Tensor,
    heads: Sequence[tuple[int, ...]] | None,
    recording: Callable[[DetailsCollector], AbstractContextManager[Any]],
) -> Explored:
    """Run the model on one sequence and return its attention maps; the model is restored afterwards.

    Args:
        tokens_T: real tokens of the sequence; only the first `MOST_TOKENS` are used.
        heads: heads to save as (layer, head), 1-based; None for all.
        recording: function from a collector to a context manager that records the attention layers of forward passes
            with this collector.

    Raises:
        InputError: if the sequence has fewer than two tokens.
        SinklabError: if attention cannot be recorded, or another thread probes or intercepts the model.
    """
    if len(tokens_T) < 2:
        raise InputError("explore compares positions, but the first sequence has one token: pass a longer sequence")
    tokens_1S = tokens_T[None, :MOST_TOKENS]
    real, collector = real_tokens(F.pad(torch.ones_like(tokens_1S), (adapter.leading, 0))), MapsCollector(heads)
    with evaluating(adapter.module), recording(collector) as records:
        collector.begin(real)
        adapter.read(tokens_1S.to(adapter.device), real.to(adapter.device), None, records.paused())
    return Explored(tokens=tokens_1S[0].tolist(), heads=collector.heads, attention=np.stack(collector.attention_SS))


class MapsCollector(DetailsCollector):
    """Collects the 8-bit attention maps of one forward pass, layer by layer.

    Args:
        wanted: heads to collect as (layer, head), 1-based; None for all.

    Attributes:
        heads: heads collected so far, as (layer, head).
        attention_SS: attention map of each collected head, uint8 (S, S), as in `Explored.attention`.
    """

    def __init__(self, wanted: Sequence[tuple[int, ...]] | None) -> None:
        super().__init__((), 0)
        self._wanted, self._layer = wanted, 0
        self.heads: list[Head] = []
        self.attention_SS: list[np.ndarray] = []

    def values(self, values_BGTV: Tensor) -> None:
        """Do nothing: values are not stored."""

    def attention(self, rows: Iterable[Rows], heads: int, angles: Angles | None) -> None:
        """Add the attention maps of the wanted heads of the next layer."""
        assert self._real is not None
        self._layer += 1
        kept = [head for head in range(heads) if self._wanted is None or (self._layer, head + 1) in self._wanted]
        self.heads += [(self._layer, head + 1) for head in kept]
        for map_KSS in layer_details(rows, self._real, None, kept)[1].values():
            root_SS = map_KSS[0].float().clamp(0, 1).sqrt()
            self.attention_SS.append((LEVELS * root_SS).round().to(torch.uint8).cpu().numpy())
