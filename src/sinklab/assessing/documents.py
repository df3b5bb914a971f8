"""assessment.json: what a sink costs and buys in one model, part by part; formulas in docs/assess.md.

Losses and divergences are in nats per token. Positions and layers count from 1, a sink token in front as position 0.
"""

from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field, ValidationError

from sinklab.errors import InputError
from sinklab.files import parse_json
from sinklab.schema import ReadDocument

ASSESSMENT = "assessment.json"
HELD_OUT = "held_out"

AssessPart = Literal["streaming", "quantisation", "eviction", "length", "carries", "heads"]
Placed = Literal["cache", "text"]
Keys = Literal["bias", "sink", "recent", "random"]
HeadKind = Literal["no sink", "nop", "broadcast", "between"]


class Effect(ReadDocument):
    """What came of a change.

    Attributes:
        loss: mean over the targets.
        kl: mean divergence of the changed model's predictions from the unchanged one's.
        targets: how many there were.
    """

    loss: float
    kl: float
    targets: int


class TextRead(ReadDocument):
    """What a part read.

    Attributes:
        sequences, length: N and T.
        unchanged: the unchanged model on it, within its context.
    """

    sequences: int
    length: int
    unchanged: Effect


class CachedReading(Effect):
    """Under a rolling cache.

    Attributes:
        cache: keys that it holds when a query reads it.
        first: how many of the first stay.
        perplexity: exp(loss); None where that is beyond any number.
    """

    cache: int
    first: int
    perplexity: float | None


class Streaming(TextRead):
    """Long text through a rolling cache; positions are those in the cache or those in the text."""

    positions: Placed
    caches: list[CachedReading]


class Quantised(ReadDocument):
    """One way of quantising.

    Attributes:
        weights, activations: what is done to each.
        everything: all tokens quantised.
        without_sink: the sink positions in full precision, and left out of the scales.
        due_to_sink: loss of the one less loss of the other.
        destroyed: whether the loss has grown tenfold.
    """

    name: str
    weights: str
    activations: str
    everything: Effect
    without_sink: Effect
    due_to_sink: float
    destroyed: bool


class Outliers(ReadDocument):
    """The residual stream after one block.

    Attributes:
        kurtosis: of a token over its channels, mean over tokens.
        largest: of all absolute values.
        largest_norm, median_norm: l2, over tokens.
        channels: those with a value more than six standard deviations from the mean.
    """

    layer: int
    kurtosis: float
    largest: float
    largest_norm: float
    median_norm: float
    channels: int


class Quantisation(TextRead):
    """Loss after simulated quantisation, and what makes it hard, by block."""

    sink_positions: int
    settings: list[Quantised]
    outliers: list[Outliers]


class Evicted(Effect):
    """Under a cache that keeps so many keys of a text within the context."""

    policy: str
    budget: int


class Eviction(TextRead):
    """Loss when the cache keeps a budget of keys, by policy."""

    first: int
    policies: list[Evicted]


class Bucket(ReadDocument):
    """Targets at positions start .. stop - 1.

    Attributes:
        whole: the text read at once, beyond the context as well.
        within: the same targets read within the context; the divergence of `whole` is from this.
    """

    start: int
    stop: int
    whole: Effect
    within: Effect


class LossByLength(TextRead):
    """Loss by position, beyond the context."""

    context: int
    buckets: list[Bucket]


class Shift(Effect):
    """The logits of some keys shifted by so much; None is minus infinity, which hides them."""

    by: float | None


class Carried(ReadDocument):
    """What was done to the sink, or to as many other keys.

    Attributes:
        share: of attention that they get, mean over layers, heads and the queries after them; over all queries for a
            bias.
        value_zeroed, hidden, spread: what was done.
        shifted: from hidden to strong.
    """

    keys: Keys
    share: float
    value_zeroed: Effect
    hidden: Effect
    spread: Effect
    shifted: list[Shift]


class Carries(TextRead):
    """What the sink carries, with recent and random keys as controls."""

    sink_keys: int
    keys: list[Carried]


class HeadRole(ReadDocument):
    """What one head does with its sink.

    Attributes:
        share: of attention on the sink, mean over the queries after it.
        value_norm: |v| of the sink over the mean of the other keys'.
        output_share: mean norm of what the sink adds to the head's output over the mean norm of that output.
        effective_rank: of the head's outputs, of at most `width`.
    """

    layer: int
    head: int
    share: float
    value_norm: float
    output_share: float
    effective_rank: float
    kind: HeadKind


class Heads(TextRead):
    """Every head and its sink, "bias" where the model has one of its own, else the first position."""

    sink: Literal["bias", "first position"]
    width: int
    heads: list[HeadRole]
    counts: dict[HeadKind, int]


class Assessment(ReadDocument):
    """assessment.json.

    Attributes:
        asked: what decides the numbers; the same call with the same goes on with the parts that are missing.
        context, layers: of the model.
        notes: what a reader must know.
        skipped: parts that this model cannot be given, and why.
        seconds: that a part has taken.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, populate_by_name=True)

    schema_version: Literal[1] = Field(default=1, alias="schema")
    model: str
    context: int
    layers: int
    asked: dict[str, object]
    notes: list[str] = Field(default_factory=list)
    skipped: dict[AssessPart, str] = Field(default_factory=dict)
    seconds: dict[AssessPart, float] = Field(default_factory=dict)
    streaming: Streaming | None = None
    quantisation: Quantisation | None = None
    eviction: Eviction | None = None
    length: LossByLength | None = None
    carries: Carries | None = None
    heads: Heads | None = None


def load_assessment(path: Path) -> Assessment:
    """Read an assessment.json.

    Raises:
        InputError: it is not there or damaged.
    """
    try:
        return Assessment.model_validate(parse_json(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, ValidationError) as error:
        raise InputError(f"{path} cannot be read as an assessment ({error}): make it again in another --out") from error


def on_held_out(assessment: Assessment) -> bool:
    """Whether a run was assessed on the text that it was validated on."""
    return assessment.asked.get(HELD_OUT) is True
