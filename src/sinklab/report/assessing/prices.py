"""What a sink costs and buys in a number per part, for tables of many models: nats per token."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from sinklab.assessing.documents import Assessment, Carries, Eviction, LossByLength, Quantisation, Streaming

OF_THE_MODEL = {"model", "files"}
"""What two assessments may have been asked for differently and still be compared."""

STATIC = "int8 static per tensor"


@dataclass(frozen=True)
class Price:
    """One number of an assessment.

    Attributes:
        of: None where the part was not done.
    """

    title: str
    unit: str
    of: Callable[[Assessment], float | None]


def comparable(assessments: Mapping[str, Assessment]) -> dict[str, Assessment]:
    """Those that were made alike: on the same text, of the same sizes. Where there are several kinds, the commonest."""
    asked = {name: _asked(one) for name, one in assessments.items()}
    counts = Counter(asked.values())
    return {name: one for name, one in assessments.items() if asked[name] == max(counts, key=lambda key: counts[key])}


def _asked(one: Assessment) -> str:
    return repr(sorted((key, repr(value)) for key, value in one.asked.items() if key not in OF_THE_MODEL))


def _streamed(part: Streaming | None, kept: Callable[[Iterable[int]], int]) -> float | None:
    if part is None or not part.caches:
        return None
    cache = min(row.cache for row in part.caches)
    first = kept({row.first for row in part.caches})
    found = [row.loss for row in part.caches if (row.cache, row.first) == (cache, first)]
    return found[0] - part.unchanged.loss if found else None


def _static(part: Quantisation | None) -> float | None:
    found = [one.everything.loss for one in part.settings if one.name == STATIC] if part else []
    return found[0] - part.unchanged.loss if part and found else None


def _due_to_sink(part: Quantisation | None) -> float | None:
    found = [one.due_to_sink for one in part.settings if one.name == STATIC] if part else []
    return found[0] if found else None


def _evicted(part: Eviction | None) -> float | None:
    found = [row for row in part.policies if row.policy == "recent"] if part else []
    return min(found, key=lambda row: row.budget).loss - part.unchanged.loss if part and found else None


def _beyond(part: LossByLength | None) -> float | None:
    last = part.buckets[-1] if part and part.buckets else None
    return last.whole.loss - last.within.loss if part and last and last.start > part.context else None


def _hidden(part: Carries | None) -> float | None:
    """Of the bias where there is one, else of the first tokens."""
    found = {one.keys: one.hidden.loss for one in part.keys} if part else {}
    loss = found.get("bias", found.get("sink"))
    return loss - part.unchanged.loss if part and loss is not None else None


PRICES = (
    Price("Streaming", "nats added, none kept", lambda one: _streamed(one.streaming, min)),
    Price("First kept", "nats added", lambda one: _streamed(one.streaming, max)),
    Price("Int8", "static, nats added", lambda one: _static(one.quantisation)),
    Price("of the sink", "of these", lambda one: _due_to_sink(one.quantisation)),
    Price("Recent keys", "nats added", lambda one: _evicted(one.eviction)),
    Price("Twice as long", "nats added", lambda one: _beyond(one.length)),
    Price("Sink hidden", "nats added", lambda one: _hidden(one.carries)),
)
"""Above the unchanged model, at the smallest cache and budget that were asked for."""
