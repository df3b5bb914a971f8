"""Chunks cached apart: the loss after a prompt whose chunks were read alone and joined (EPIC, 2410.15332).

The first half of a sequence is a prompt of m chunks, such as retrieved documents. Each chunk after the first is read
alone, and its keys and values are cached. Then the cache of the prompt is joined: keys are rotated to their positions
in the text, and the first k tokens of each later chunk are computed again, where they see all tokens before them. The
other tokens of a chunk remain as they were cached. The second half is read with this cache.

    cached apart                  k = 0
    first k recomputed            EPIC's LegoLink, k = 1, 4 or 16
    own sinks hidden              k = 0; the continuation does not see the first --sink-tokens keys of the later chunks
    cached after the first n      k = 0; each later chunk was read with the first n tokens of the text in front of it,
                                  whose keys and values are not used again (as in Star Attention, 2411.17116)

A chunk that is read alone has a sink of its own, unless the first tokens of the text are in front of it. The last two
conditions show which part of the loss is due to these sinks.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sinklab.assessing.part import AssessPart, PartFigure, PartNumber, PartRow
from sinklab.assessing.reading import Effect, PartInput, SinkCost, changed_attention, probe, standard_error
from sinklab.assessing.settings import AssessSettings
from sinklab.attention.layer_call import LayerCall
from sinklab.attention.masks import Dense
from sinklab.models.adapter import Adapter
from sinklab.tables import PlotAxis

CHUNKS, SHORTEST = 4, 2  # number of chunks of a prompt, and least number of tokens of a chunk
RECOMPUTED = (0, 1, 4, 16)


class JoinedEffect(Effect):
    """Loss after a prompt of chunks that were cached apart and joined by `method`."""

    method: str


class Chunks(AssessPart):
    """Loss after a prompt whose chunks were cached apart; `unchanged` has the same targets.

    Attributes:
        prompt, chunks: number of tokens of the prompt, and number of its chunks, which have the same length.
        methods: losses over the targets from position `prompt` + 2 on.
        sinks: loss of `cached apart` minus that of `cached after the first n`, due to the sinks of the chunks.
    """

    name = "chunks"
    question = "Can the chunks of a prompt be cached apart?"
    on_request = True
    numbers = (
        PartNumber("chunks_apart_added", "Chunks cached apart, added loss"),
        PartNumber("chunks_due_to_sink", "Chunks cached apart, due to their sinks"),
    )
    layout = PartFigure(
        "Chunks cached apart",
        "Loss added to {0.unchanged.loss:.3f} after prompts of {0.prompt:,} tokens in {0.chunks} chunks "
        "({0.sequences} sequences) that were cached apart and joined (EPIC, 2410.15332).",
        PlotAxis("", "x", "joined", order=()),
    )

    prompt: int
    chunks: int
    methods: list[JoinedEffect]
    sinks: SinkCost

    @classmethod
    def refusal(cls, adapter: Adapter, settings: AssessSettings) -> str | None:
        if settings.length // 2 // CHUNKS < SHORTEST:
            return f"{CHUNKS} chunks of at least {SHORTEST} tokens need a --length of {2 * CHUNKS * SHORTEST} or more"
        if why := adapter.fixed_positions():
            return why
        if adapter.kinds.linear or any(layer.call.forget_gates is not None for layer in probe(adapter)):
            return "its layers depend on earlier tokens other than by keys and values, which alone are cached"
        if adapter.depends_on_length(settings.length // 2 // CHUNKS, settings.length):
            return "its RoPE scaling depends on the sequence length, so that keys of a chunk cannot be rotated"
        return None

    @classmethod
    def run(cls, given: PartInput) -> "Chunks":
        """Measure the loss of the continuation for every method, one sequence at a time."""
        reader, settings, adapter = given.reader(), given.settings, given.adapter
        size = given.tokens_NT.shape[1] // 2 // CHUNKS
        front = min(settings.most_kept, size)
        words = {0: "cached apart", **{k: f"first {k} recomputed" for k in RECOMPUTED[1:] if k < size}}
        given.passes.expect((len(words) + 2) * len(given.tokens_NT))
        hidden: dict[str, list[Tensor]] = {}
        for row_T in given.tokens_NT.to(adapter.device):
            alone, after = (_cached(adapter, row_T, size, shared) for shared in (0, front))
            edits = {name: JoinedCache(alone, size, recomputed=k) for k, name in words.items()}
            edits["own sinks hidden"] = JoinedCache(alone, size, hidden=settings.sink_tokens)
            edits[f"cached after the first {front}"] = JoinedCache(after, size)
            for name, edit in edits.items():
                with changed_attention(adapter, edit):
                    hidden.setdefault(name, []).append(adapter.hidden(row_T[None]))
                given.passes.read(1)
        start = CHUNKS * size + 2
        with changed_attention(adapter):
            read = {name: reader.against(torch.cat(rows)) for name, rows in hidden.items()}
        apart, *_, front_shared = read.values()
        due_NP = (apart.loss_NP - front_shared.loss_NP)[:, start - apart.first :]
        shared: dict[str, Any] = {**reader.result_fields(), "unchanged": reader.unchanged.effect(start=start)}
        return cls(
            **shared,
            prompt=CHUNKS * size,
            chunks=CHUNKS,
            methods=[JoinedEffect(method=name, **one.effect(start=start).model_dump()) for name, one in read.items()],
            sinks=SinkCost(due_to_sink=float(due_NP.mean()), due_error=standard_error(due_NP)),
        )

    def rows(self) -> Iterator[PartRow]:
        """The answers are all methods, and the part of the loss that is due to the sinks of the chunks."""
        yield self.row("unchanged", self.unchanged, f"{self.sequences} prompts of {self.prompt:,} tokens")
        for one in self.methods:
            answer = f"{one.method}, {self.chunks} chunks of {self.prompt // self.chunks:,} tokens"
            names = ["chunks_apart_added"] if one is self.methods[0] else []
            yield self.row(one.method, one, answer=answer, numbers=names, points=[("added loss", one.method)])
        answer, words = "due to the sinks of the chunks", "with chunks cached apart"
        yield self.cost_row(self.sinks, answer, "chunks_due_to_sink", gained=words)

    def remark(self) -> str:
        return f"chunks: of the loss with chunks cached apart, {self.sinks.due_said}"


@dataclass
class JoinedCache:
    """Attention edit: the later chunks of a prompt have the keys and values with which they were cached.

    Attributes:
        cached: keys and values (m - 1, G, S, ..) of the later chunks in each layer, of which the last `size` belong to
            the chunk; `_cached` makes it.
        size: tokens of a chunk.
        recomputed: number k of first tokens of each later chunk whose keys and values are computed again.
        hidden: number of first keys of each later chunk that the queries after the prompt do not see.
    """

    cached: dict[int, tuple[Tensor, Tensor]] = field(repr=False)
    size: int
    recomputed: int = 0
    hidden: int = 0

    def __call__(self, layer: LayerCall) -> LayerCall:
        """Return the edited call of a single sequence."""
        call, n = layer.call, layer.leading
        places = torch.arange(call.k_BGTD.shape[2], device=call.k_BGTD.device) - n
        within, later = places % self.size, (places >= self.size) & (places < CHUNKS * self.size)
        keys, values = (x[:, :, -self.size :].transpose(0, 1).flatten(1, 2) for x in self.cached[layer.index])
        if layer.shift_rope is not None:  # from the position in the row that was read to that in the text
            read = self.cached[layer.index][0].shape[2] - n - self.size
            moved = torch.arange(self.size, CHUNKS * self.size, device=places.device) // self.size * self.size - read
            keys = layer.shift_rope(keys[None], moved)[0]
        kept = later & (within >= self.recomputed)
        k_BGTD, v_BGTD = call.k_BGTD.clone(), layer.value_BGSV.clone()
        k_BGTD[0, :, kept] = keys[:, kept[later]].to(k_BGTD.dtype)
        v_BGTD[0, :, kept] = values[:, kept[later]]
        changed = replace(layer.changed(k_BGTD=k_BGTD), value_BGSV=v_BGTD)
        if not self.hidden:
            return changed
        after = places >= CHUNKS * self.size
        seen_TS = ~(after[:, None] & (later & (within < self.hidden))[None])
        return changed.masked(Dense(seen_TS.tril()[None, None]))


def _cached(adapter: Adapter, row_T: Tensor, size: int, front: int) -> dict[int, tuple[Tensor, Tensor]]:
    """Return keys and values of the later chunks, read alone or with the first `front` tokens of the text in front."""
    later_MS = row_T[size : CHUNKS * size].view(CHUNKS - 1, size)
    found: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(layer: LayerCall) -> LayerCall:
        found[layer.index] = (layer.call.k_BGTD, layer.value_BGSV)
        return layer

    with changed_attention(adapter, keep):
        adapter.hidden(torch.cat((row_T[:front].expand(CHUNKS - 1, -1), later_MS), 1))
    return found
