"""Streaming: long text through a rolling cache, with and without the first tokens (2309.17453, table 3)."""

import math
from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor

from sinklab.assessing.caches import RollingCache
from sinklab.assessing.part import (
    AssessPart,
    Effect,
    PartFigure,
    PartJob,
    PartNumber,
    PlotAxis,
    ResultRow,
    plot_row,
)
from sinklab.assessing.plan import AssessSettings, Placed
from sinklab.assessing.reading import PairedReader, Step, refused
from sinklab.assessing.text import AssessText
from sinklab.models.adapter import Adapter


class CachedReading(Effect):
    """Under a rolling cache.

    Attributes:
        cache: keys that it holds when a query reads it.
        first: how many of the first stay.
        perplexity: exp(loss); None where that overflows.
    """

    cache: int
    first: int
    perplexity: float | None


class Streaming(AssessPart):
    """Long text through a rolling cache; positions are those in the cache or those in the text."""

    name = "streaming"
    rank = 1
    numbers = (
        PartNumber("streamed_loss_N", "Loss streamed with the first N kept"),
        PartNumber("streamed_gap_N", "Loss streamed with the first N kept, above most kept"),
        PartNumber(
            "streaming_added",
            "Streaming through a small cache, added loss",
            ("Streaming", "nats added, none kept"),
            "a rolling cache, the smaller of those tried, that keeps none of the first tokens",
        ),
        PartNumber(
            "streaming_kept_added",
            "The same with first tokens kept, added loss",
            ("First kept", "nats added"),
            "that cache, with some of the first tokens kept",
        ),
    )

    positions: Placed
    caches: list[CachedReading]

    @classmethod
    def refusal(cls, adapter: Adapter, settings: AssessSettings) -> str | None:
        return refused(adapter, RollingCache(2, 1, in_cache=settings.positions == "cache"))

    @classmethod
    def job(cls, text: AssessText, settings: AssessSettings) -> PartJob:
        tokens_NT = text.sequences(settings.stream_sequences, settings.stream_length)
        sizes, kept = settings.caches, settings.kept
        readings = sum(first < size for size in sizes for first in kept)
        run = partial(assess_streaming, text.model.adapter, tokens_NT, sizes, kept, settings.positions)
        return PartJob((1 + readings) * len(tokens_NT), run)

    def rows(self) -> Iterator[ResultRow]:
        yield self.unchanged_row()
        for one in self.caches:
            yield ResultRow(f"cache {one.cache}, first {one.first} kept", one)

    def values(self) -> Iterator[tuple[str, float]]:
        """Through the largest cache by N kept, and above most kept; through the smallest, above the unchanged model."""
        if not self.caches:
            return
        sizes = {one.cache for one in self.caches}
        largest, smallest = (
            {one.first: one for one in self.caches if one.cache == size} for size in (max(sizes), min(sizes))
        )
        for first, one in largest.items():
            yield f"streamed_loss_{first}", one.loss
            yield f"streamed_gap_{first}", one.loss - largest[max(largest)].loss
        yield "streaming_added", self.added(smallest[min(smallest)])
        yield "streaming_kept_added", self.added(smallest[max(smallest)])

    def figure(self) -> PartFigure:
        rows = [
            plot_row(one, one.perplexity, f"first {one.first} kept", one.cache)
            for one in self.caches
            if one.perplexity is not None
        ]
        where = "in the cache" if self.positions == "cache" else "in the text"
        return PartFigure(
            "lines",
            "Streaming through a rolling cache",
            f"Perplexity of {self.sequences} x {self.length:,} tokens read through a cache that keeps the first tokens "
            f"and the most recent ones, positions as they are {where} (2309.17453). The dashed line is the unchanged "
            "model, which reads the text in windows of its context.",
            rows,
            PlotAxis("Keys in the cache", "x", "keys", order=sorted({one.cache for one in self.caches})),
            PlotAxis("Perplexity", "y", scale="log"),
            reference=math.exp(self.unchanged.loss),
        )


def assess_streaming(
    adapter: Adapter, tokens_NT: Tensor, sizes: Sequence[int], kept: Sequence[int], positions: Placed, step: Step
) -> Streaming:
    """Perplexity of the text for every size of the cache and every number of first tokens kept.

    Raises:
        InputError: a cache that holds no more keys than it keeps.
    """
    reader = PairedReader(adapter, tokens_NT, step)
    caches = []
    for size in sizes:
        for first in kept:
            if first >= size:
                continue
            effect = reader.under(RollingCache(size, first, in_cache=positions == "cache")).effect()
            perplexity = math.exp(effect.loss) if effect.loss < 700 else None
            caches.append(CachedReading(cache=size, first=first, perplexity=perplexity, **effect.model_dump()))
    return Streaming(
        sequences=len(tokens_NT),
        length=tokens_NT.shape[1],
        unchanged=reader.unchanged.effect(),
        positions=positions,
        caches=caches,
    )
