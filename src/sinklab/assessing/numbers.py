"""An assessment as single numbers, for claims and for tables of many models. All are in nats per token.

streamed_loss_N           text read through the largest cache, the first N tokens kept
streamed_gap_N            the same, above what it is with most of them kept
streaming_added           through the smallest cache, the fewest kept, above the unchanged model
streaming_kept_added      likewise with most of them kept
int8_added                everything in int8, static per tensor, above the unchanged model
int8_due_to_sink          of these, what is due to the sink
recent_keys_added         the smallest budget of the latest keys only, above the unchanged model
beyond_context_added      the last positions of a text beyond the context, above reading them within it
sink_hidden_added         the bias hidden where there is one, else the first tokens, above the unchanged model
"""

from collections.abc import Iterator

from sinklab.assessing.documents import Assessment, Carries, Eviction, LossByLength, Quantisation, Streaming

STATIC = "int8 static per tensor"


def assessed_numbers(assessment: Assessment) -> dict[str, float]:
    """Those of the parts that were done, by name."""
    return dict(_numbers(assessment))


def _numbers(a: Assessment) -> Iterator[tuple[str, float]]:
    if a.streaming is not None:
        yield from _streamed(a.streaming)
    if a.quantisation is not None:
        yield from _quantised(a.quantisation)
    if a.eviction is not None:
        yield from _evicted(a.eviction)
    if a.length is not None:
        yield from _beyond(a.length)
    if a.carries is not None:
        yield from _hidden(a.carries)


def _streamed(part: Streaming) -> Iterator[tuple[str, float]]:
    if not part.caches:
        return
    sizes = {row.cache for row in part.caches}
    largest, smallest = (
        {row.first: row.loss for row in part.caches if row.cache == size} for size in (max(sizes), min(sizes))
    )
    for first, loss in largest.items():
        yield f"streamed_loss_{first}", loss
        yield f"streamed_gap_{first}", loss - largest[max(largest)]
    yield "streaming_added", smallest[min(smallest)] - part.unchanged.loss
    yield "streaming_kept_added", smallest[max(smallest)] - part.unchanged.loss


def _quantised(part: Quantisation) -> Iterator[tuple[str, float]]:
    for setting in part.settings:
        if setting.name == STATIC:
            yield "int8_added", setting.everything.loss - part.unchanged.loss
            yield "int8_due_to_sink", setting.due_to_sink


def _evicted(part: Eviction) -> Iterator[tuple[str, float]]:
    recent = [row for row in part.policies if row.policy == "recent"]
    if recent:
        yield "recent_keys_added", min(recent, key=lambda row: row.budget).loss - part.unchanged.loss


def _beyond(part: LossByLength) -> Iterator[tuple[str, float]]:
    if part.buckets and (last := part.buckets[-1]).start > part.context:
        yield "beyond_context_added", last.whole.loss - last.within.loss


def _hidden(part: Carries) -> Iterator[tuple[str, float]]:
    found = {one.keys: one.hidden.loss for one in part.keys}
    loss = found.get("bias", found.get("sink"))
    if loss is not None:
        yield "sink_hidden_added", loss - part.unchanged.loss
