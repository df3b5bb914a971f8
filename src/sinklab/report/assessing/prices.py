"""What a sink costs and buys in a number per part, for tables of many models: nats per token."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from sinklab.assessing.documents import Assessment
from sinklab.assessing.numbers import assessed_numbers

OF_THE_MODEL = {"model", "files"}
"""What two assessments may have been asked for differently and still be compared."""


@dataclass(frozen=True)
class Price:
    """One number of an assessment.

    Attributes:
        name: as `assessed_numbers` has it.
        explained: where it comes from.
    """

    title: str
    unit: str
    name: str
    explained: str

    def of(self, assessment: Assessment) -> float | None:
        """The number, None where the part was not done."""
        return assessed_numbers(assessment).get(self.name)


def comparable(assessments: Mapping[str, Assessment]) -> dict[str, Assessment]:
    """Those that were made alike: on the same text, of the same sizes. Where there are several kinds, the commonest."""
    asked = {name: _asked(one) for name, one in assessments.items()}
    counts = Counter(asked.values())
    return {name: one for name, one in assessments.items() if asked[name] == max(counts, key=lambda key: counts[key])}


def _asked(one: Assessment) -> str:
    return repr(sorted((key, repr(value)) for key, value in one.asked.items() if key not in OF_THE_MODEL))


PRICES = (
    Price(
        "Streaming",
        "nats added, none kept",
        "streaming_added",
        "a rolling cache, the smaller of those tried, that keeps none of the first tokens",
    ),
    Price("First kept", "nats added", "streaming_kept_added", "that cache, with some of the first tokens kept"),
    Price("Int8", "static, nats added", "int8_added", "weights and activations in 8 bits, with fixed scales"),
    Price("of the sink", "of these", "int8_due_to_sink", "how much of what Int8 adds is due to the sink"),
    Price("Recent keys", "nats added", "recent_keys_added", "as few keys as in the smallest budget, the most recent"),
    Price("Twice as long", "nats added", "beyond_context_added", "reading beyond the context"),
    Price("Sink hidden", "nats added", "sink_hidden_added", "hiding the sink, or the bias that is one"),
)
"""Above the unchanged model, at the smallest cache and budget that were asked for."""
