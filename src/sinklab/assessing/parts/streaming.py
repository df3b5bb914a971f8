"""Streaming: the loss on long text with a rolling KV cache that keeps or drops the first tokens (2309.17453, table 3).

A mask and a shift of positions simulate the rolling cache exactly in a single forward pass. The key of token t in a
rolling cache depends only on the keys that were in the cache at t. A mask that limits query t to these keys has the
same effect in each layer. A full cache holds C keys, including the query's own: the first n and the latest C - n. The
public code of StreamingLLM does not count the query's own key, so its caches have one key more.

If the model supports it, positions are by default those in the cache, counted from 0: key i of the cache has position
i, and the query has position C - 1 once the cache is full. Distances to the latest keys are as in the text; the
distance to a first key s is min(t, C - 1) - s. To shift queries relative to the first keys only, each query is
concatenated with its copy at position min(t, C - 1), and each key with zeros:
[q_t, q_min(t, C-1)] . [k_s, 0] for a recent key, [q_t, q_min(t, C-1)] . [0, k_s] for a first key.

Length: loss by position of the target, within and beyond the model's context.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, product

import torch
from torch import Tensor

from sinklab.assessing.cache_policies import Kept
from sinklab.assessing.part import AssessPart, PartFigure, PartNumber, PartRow, TextSize
from sinklab.assessing.reading import Effect, PartInput, refused, standard_error
from sinklab.assessing.settings import AssessSettings, Placed
from sinklab.attention.layer_call import LayerCall
from sinklab.attention.scores import Score
from sinklab.errors import InputError
from sinklab.models.adapter import Adapter
from sinklab.schema import Omitted, ReadDocument
from sinklab.tables import PlotAxis


class CachedReading(Effect):
    """Loss on long text with a rolling cache.

    Attributes:
        cache: number of keys in the cache, including the query's own.
        first: number of first keys kept in the cache.
        perplexity: exp(loss); None for a loss of 700 nats or more.
        gap_error: standard error of the loss above that with the most first keys kept in a cache of this size; None for
            that loss itself, for a single block of targets, and in assessments written before 2026-11-28.
    """

    cache: int
    first: int
    perplexity: float | None
    gap_error: Omitted[float] = None


class Streaming(AssessPart):
    """Loss on long text by size of the rolling cache and number of first keys kept.

    Attributes:
        positions: whether key positions are those in the rolling cache ("cache") or in the text ("text").
        caches: losses for each cache size and each smaller number of first keys kept.
    """

    name = "streaming"
    question = "Can the model stream without the sink?"
    in_quick = True
    setting = "streaming"
    loss_without_sink = "streaming with --keep 0 and 4"
    numbers = (
        PartNumber("streamed_loss_N", "Loss streamed with the first N kept"),
        PartNumber("streamed_gap_N", "Loss streamed with the first N kept, above most kept"),
        PartNumber(
            "streaming_added", "Streaming through a small cache, added loss", ("Streaming", "nats added, none kept")
        ),
        PartNumber("streaming_kept_added", "The same with first tokens kept, added loss", ("First kept", "nats added")),
    )
    layout = PartFigure(
        "Streaming through a rolling cache",
        "Perplexity of {0.sequences} x {0.length:,} tokens with a cache of the first and the most recent tokens, with "
        "positions in the {0.positions} (2309.17453). The dashed line is the unchanged model, evaluated in windows of "
        "its context.",
        PlotAxis("Keys in the cache", "x", "keys", order=()),
        PlotAxis("Perplexity", "y", scale="log"),
    )

    positions: Placed
    caches: list[CachedReading]

    @classmethod
    def refusal(cls, adapter: Adapter, settings: AssessSettings) -> str | None:
        return refused(adapter, RollingCache(2, 1, in_cache=settings.positions == "cache"))

    @classmethod
    def text_size(cls, settings: AssessSettings) -> TextSize:
        return TextSize(settings.stream_sequences, settings.stream_length)

    @classmethod
    def run(cls, given: PartInput) -> "Streaming":
        """Measure the loss and perplexity for every cache size and every smaller number of first tokens kept."""
        reader, settings = given.reader(), given.settings
        cases = [(size, first) for size, first in product(settings.caches, settings.kept) if first < size]
        given.passes.expect(len(cases) * len(given.tokens_NT))
        read = {
            (size, first): reader.under(RollingCache(size, first, in_cache=settings.positions == "cache"))
            for size, first in cases
        }

        def reading(size: int, first: int) -> CachedReading:
            here, most = read[size, first], read[size, max(kept for cache, kept in cases if cache == size)]
            effect = here.effect()
            return CachedReading(
                **effect.model_dump(),
                cache=size,
                first=first,
                perplexity=math.exp(effect.loss) if effect.loss < 700 else None,
                gap_error=None if here is most else standard_error(here.loss_NP - most.loss_NP),
            )

        caches = [reading(size, first) for size, first in cases]
        return cls(**reader.result_fields(), positions=settings.positions, caches=caches)

    def rows(self) -> Iterator[PartRow]:
        """The answers are the losses with the smallest cache and the fewest or the most first tokens kept.

        If caches with and without first tokens were measured, the difference of these losses, the loss without the
        sink, is an answer as well.
        """
        yield self.unchanged_row()
        size = min(one.cache for one in self.caches)
        smallest = {one.first: one for one in self.caches if one.cache == size}
        fewest, most = smallest[min(smallest)], smallest[max(smallest)]
        for one in self.caches:
            ends = {"streaming_added": fewest, "streaming_kept_added": most}
            numbers = [name for name, end in ends.items() if end is one]
            answer = f"cache of {size:,} keys, {f'first {one.first}' if one.first else 'none'} kept" if numbers else ""
            yield self.row(f"cache {one.cache}, first {one.first} kept", one, answer=answer, numbers=numbers)
        if most.first > fewest.first == 0:
            lost = f"in streaming through {size:,} keys"
            if max(fewest.loss, most.loss) < self.unchanged.loss:
                lost += " (with and without it, the loss is below the unchanged model's)"
            yield PartRow("", None, fewest.loss - most.loss, "", fewest.gap_error, "difference between the two", lost)

    def values(self) -> Iterator[tuple[str, float]]:
        """Iterate over the values of the rows, and `streamed_loss_N` and `streamed_gap_N` of the largest cache.

        The gap is the loss with N first keys kept, minus the loss with the most first keys kept.
        """
        yield from super().values()
        size = max(one.cache for one in self.caches)
        largest = {one.first: one.loss for one in self.caches if one.cache == size}
        for first, loss in largest.items():
            yield f"streamed_loss_{first}", loss
            yield f"streamed_gap_{first}", loss - largest[max(largest)]

    def figure(self) -> PartFigure:
        known = [one for one in self.caches if one.perplexity is not None]
        points = [self.point(one, f"first {one.first} kept", one.cache, one.perplexity) for one in known]
        return self.drawn(points, reference=math.exp(self.unchanged.loss))


@dataclass(frozen=True)
class RollingCache:
    """Attention edit that gives every layer a rolling cache; a bias key does not count towards the size.

    Attributes:
        size: number C of keys in the cache.
        first: number n of first keys kept, learned leading tokens included; 0 or more, below `size`.
        in_cache: whether to use positions in the cache instead of positions in the text.
    """

    size: int
    first: int
    in_cache: bool = True

    def __call__(self, layer: LayerCall) -> LayerCall:
        """Return the call with the cache's mask and, if `in_cache`, with positions in the cache.

        With positions in the cache, queries are shifted relative to the first keys and a bias key only.

        Raises:
            InputError: if RoPE cannot be shifted, because the attention operation has no logits.
        """
        layer = layer.masked(Kept(self.size, self.first))
        call = layer.call
        if not self.in_cache or layer.length <= self.size or (self.first == 0 and call.key_HD is None):
            return layer
        if (position := call.position) is not None:

            def nearer(z: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, *tensors: Tensor) -> Tensor:
                return position.function(
                    z, b, h, torch.where(k < self.first, q.clamp(max=self.size - 1), q), k, *tensors
                )

            call = replace(call, position=Score(nearer, position.tensors))
        if layer.shift_rope is not None:
            if not layer.operation.has_logits:
                raise InputError(
                    f"{layer.operation.kind!r} attention is not a function of the product of query and key, so "
                    "RoPE cannot use positions in the cache: set --positions text"
                )
            places_L = torch.arange(layer.length, device=call.q_BHTD.device)
            moved_BHLD = layer.shift_rope(call.q_BHTD, places_L.clamp(max=self.size - 1) - places_L)
            early_L1 = (places_L < self.first)[:, None]
            parts = layer.operation.keys_per_head
            queries = parts * layer.operation.queries_per_head
            q = _side_by_side(call.q_BHTD, moved_BHLD, queries) * math.sqrt(2)  # offsets the scale 1 / sqrt(width)
            k = _side_by_side(call.k_BGTD * ~early_L1, call.k_BGTD * early_L1, parts)
            key_HD = call.key_HD
            if key_HD is not None:
                key_HD = _side_by_side(torch.zeros_like(key_HD), key_HD, parts)  # for the shifted queries
            call = replace(call, q_BHTD=q, k_BGTD=k, key_HD=key_HD)
        return replace(layer, call=call)


def _side_by_side(one: Tensor, other: Tensor, parts: int) -> Tensor:
    """Concatenate two query or key tensors within each of the `parts` equal parts of the last dimension."""
    return torch.cat((one.unflatten(-1, (parts, -1)), other.unflatten(-1, (parts, -1))), -1).flatten(-2)


LONGEST_UNASKED = 2**14  # tokens per sequence; for longer sequences the part runs only if `--parts` names it
EDGES = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1, 9 / 8, 5 / 4, 3 / 2, 7 / 4, 2, 3, 4)
"""Edges of the position buckets, as multiples of the context length."""


class Bucket(ReadDocument):
    """Losses of the targets at positions start .. stop - 1.

    Attributes:
        whole: loss on whole sequences; its KL divergence is from the model in windows of the context.
        within: loss of the same targets in windows of the context (see `reading`).
    """

    start: int
    stop: int
    whole: Effect
    within: Effect

    @property
    def positions(self) -> str:
        """Range of positions, formatted as `1,025 to 1,280`."""
        return f"{self.start:,} to {self.stop - 1:,}"


class LossByLength(AssessPart):
    """Loss by bucket of target positions; `context` is the context length of the model in tokens."""

    name = "length"
    question = "Can the model read beyond its context?"
    long_text = True
    numbers = (PartNumber("beyond_context_added", "Beyond the context, added loss", ("Twice as long", "nats added")),)
    layout = PartFigure(
        "Loss beyond the context",
        "Loss by position, with whole sequences and with windows of the context of {0.context:,} tokens. Both have the "
        "same targets in every bucket.",
        PlotAxis("Position of the target", "x", "positions"),
        PlotAxis("Loss (nats per token)", "y", "loss", zero=False),
    )

    context: int
    buckets: list[Bucket]

    @classmethod
    def refusal(cls, adapter: Adapter, settings: AssessSettings) -> str | None:
        if adapter.ends is None and cls.name not in settings.parts and (settings.long_length or 0) > LONGEST_UNASKED:
            return (
                f"with a context of {adapter.context:,} tokens, the part evaluates {settings.long_length:,} tokens at "
                f"once, which is slow: pass --parts {cls.name} to include it"
            )
        return adapter.ends

    @classmethod
    def text_size(cls, settings: AssessSettings) -> TextSize:
        assert settings.long_length is not None, "refused otherwise"
        return TextSize(max(1, settings.sizes.streamed // settings.long_length), settings.long_length)

    @classmethod
    def run(cls, given: PartInput) -> "LossByLength":
        """Measure the loss by bucket of positions, with whole sequences and with windows of the context."""
        reader, context, T = given.reader(whole=True), given.adapter.context, given.tokens_NT.shape[1]
        whole, within = reader.whole, reader.unchanged
        assert whole is not None, "requested above"
        inner = {int(edge * context) + 1 for edge in EDGES}
        edges = [whole.first, *sorted(edge for edge in inner if whole.first < edge <= T), T + 1]
        buckets = [
            Bucket(start=start, stop=stop, whole=whole.effect(start, stop), within=within.effect(start, stop))
            for start, stop in pairwise(edges)
        ]
        return cls(**reader.result_fields(), context=context, buckets=buckets)

    def rows(self) -> Iterator[PartRow]:
        """The answer is the loss added at the last positions, if these are beyond the context."""
        for one in self.buckets:
            beyond, added = one.start > self.context, one.whole.loss - one.within.loss
            within = f"within the context {one.within.loss:.4f}" if beyond else ""
            row = PartRow(f"positions {one.positions}", one.whole, added, within, one.whole.error)
            if beyond and one is self.buckets[-1]:
                row = replace(row, answer=f"{row.what}, whole sequences", numbers=["beyond_context_added"])
            yield row

    def figure(self) -> PartFigure:
        points = [self.point(one.whole, "whole sequences", one.positions, one.whole.loss) for one in self.buckets]
        points += [self.point(one.within, "within the context", one.positions, one.within.loss) for one in self.buckets]
        return self.drawn(points, x=replace(self.layout.x, order=[one.positions for one in self.buckets]))
