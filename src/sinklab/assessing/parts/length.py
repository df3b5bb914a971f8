"""Length: loss by position of the target, within and beyond the model's context."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from sinklab.assessing.part import AssessPart, PartFigure, PartNumber, PartRow, TextSize
from sinklab.assessing.reading import Effect, PartInput
from sinklab.assessing.settings import AssessSettings
from sinklab.models.adapter import Adapter
from sinklab.schema import ReadDocument
from sinklab.tables import PlotAxis

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
            row = PartRow(f"positions {one.positions}", one.whole, added, within)
            if beyond and one is self.buckets[-1]:
                row = replace(row, answer=f"{row.what}, whole sequences", numbers=["beyond_context_added"])
            yield row

    def figure(self) -> PartFigure:
        points = [self.point(one.whole, "whole sequences", one.positions, one.whole.loss) for one in self.buckets]
        points += [self.point(one.within, "within the context", one.positions, one.within.loss) for one in self.buckets]
        return self.drawn(points, x=replace(self.layout.x, order=[one.positions for one in self.buckets]))
