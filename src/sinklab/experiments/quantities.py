"""The numbers that claims are about and tables show, by the names that experiment files use.

sink_K            Sink_K, percent of (sequence, layer, head) triples, K from 1
sink_K_visible    the same of the mean over the queries that may see the key (a window); Sink_K where all may
sink_first_P      Sink_1 + .. + Sink_P, percent: at eps above a half at most one position per triple counts
sink_bias         on an added bias, sink logit or sink token, percent
valid_loss        nats per token, and train_loss likewise
norm_ratio        |h_1| over the mean of the others, in the block where it is largest; none where it is infinite
kurtosis          of the hidden states, in the block where it is largest
sink_layer_L      percent of the sequences in which a head of attention layer L sinks into the first token: of the head
                  that most often does
emergence_step    first evaluated step at which Sink_1 reached 10 %
norm_step         first evaluated step at which norm_ratio reached 2 from below; that of the first evaluation where it
                  never was below. An untrained model has 2.4 to 3.3, and loses it: its later tokens are averages
layer_step_L      first evaluated step at which sink_layer_L reached 50 %
loss_change       the jump of valid_loss at emergence_step (`breaks`)

of existing models (measured/numbers.py):
key_norm_ratio, value_norm_ratio    |k_1|, |v_1| over the mean of the others, mean over layers
activation_ratio                    the largest |activation| over the median of its block
largest_activation                  itself
cosine_first, cosine_rest           cos(q, k) with the first key and with the others, mean over the heads with a sink
cosine_gap                          the difference of the two
norm_product_ratio                  |q| |k_1| over the mean of |q| |k| of the other keys, mean over the same heads
accuracy, accuracy_norm             of a downstream task, percent of its items; answers by likelihood, and per character

of runs that `assess` of the experiment asks for (docs/assess.md has the formulas, `assessing/numbers.py` each number):
streamed_loss_N, streamed_gap_N, streaming_added, streaming_kept_added, int8_added, int8_due_to_sink,
recent_keys_added, beyond_context_added, sink_hidden_added
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator

from sinklab.experiments.breaks import jump_at

EMERGED = 10.0
"""Percent of heads from which on a sink counts as having emerged."""

MASSIVE = 2.0
"""Norm ratio from which on the first token counts as a massive activation."""

HALF = 50.0
"""Percent of sequences from which on a head counts as one that sinks."""

Measure = Literal["rate", "positive", "plain"]
"""How a number is compared: percent through its logit, what is above zero through its logarithm, others as they are."""


@dataclass(frozen=True)
class Quantity:
    """What a number is.

    Attributes:
        name: as experiment files have it.
        label: for people.
        unit: percent, nats, x (a ratio), steps, or none.
        measure: how it is compared.
        decimals: that are shown.
    """

    name: str
    label: str
    unit: str
    measure: Measure
    decimals: int


_SINK = re.compile(r"sink_([1-9]\d*)(_visible)?")
_FIRST = re.compile(r"sink_first_([1-9]\d*)")
_LAYER = re.compile(r"(sink_layer|layer_step)_([1-9]\d*)")
_STREAMED = re.compile(r"streamed_(loss|gap)_(0|[1-9]\d*)")
_NAMED = {
    one.name: one
    for one in (
        Quantity("sink_bias", "Sink on the bias", "%", "rate", 1),
        Quantity("valid_loss", "Validation loss", "nats", "positive", 3),
        Quantity("train_loss", "Training loss", "nats", "positive", 3),
        Quantity("norm_ratio", "Norm ratio of the first token", "x", "positive", 1),
        Quantity("kurtosis", "Kurtosis of the hidden states", "x", "positive", 1),
        Quantity("emergence_step", "Step at which the sink emerged", "steps", "positive", 0),
        Quantity("norm_step", "Step at which the first token's norm grew", "steps", "positive", 0),
        Quantity("loss_change", "Jump of the loss as the sink emerged", "nats", "plain", 3),
        Quantity("key_norm_ratio", "Norm ratio of the first key", "x", "positive", 2),
        Quantity("value_norm_ratio", "Norm ratio of the first value", "x", "positive", 2),
        Quantity("activation_ratio", "Largest activation over the median", "x", "positive", 0),
        Quantity("largest_activation", "Largest activation", "", "positive", 0),
        Quantity("cosine_first", "cos(q, k) with the first key", "", "plain", 2),
        Quantity("cosine_rest", "cos(q, k) with the other keys", "", "plain", 2),
        Quantity("cosine_gap", "cos(q, k) with the first key, above the others", "", "plain", 2),
        Quantity("norm_product_ratio", "|q| |k| of the first key over the others", "x", "positive", 2),
        Quantity("accuracy", "Accuracy", "%", "rate", 1),
        Quantity("accuracy_norm", "Accuracy, by likelihood per character", "%", "rate", 1),
        Quantity("streaming_added", "Streaming through a small cache, added loss", "nats", "plain", 3),
        Quantity("streaming_kept_added", "The same with first tokens kept, added loss", "nats", "plain", 3),
        Quantity("int8_added", "Static int8, added loss", "nats", "plain", 3),
        Quantity("int8_due_to_sink", "Of static int8's, due to the sink", "nats", "plain", 3),
        Quantity("recent_keys_added", "Recent keys only, added loss", "nats", "plain", 3),
        Quantity("beyond_context_added", "Beyond the context, added loss", "nats", "plain", 3),
        Quantity("sink_hidden_added", "Sink hidden, added loss", "nats", "plain", 3),
    )
}


def quantity(name: str) -> Quantity:
    """What a name stands for.

    Raises:
        ValueError: it stands for nothing; the message lists what does.
    """
    if name in _NAMED:
        return _NAMED[name]
    if found := _FIRST.fullmatch(name):
        return Quantity(name, f"Sinks on the first {found[1]} tokens", "%", "rate", 1)
    if found := _SINK.fullmatch(name):
        return Quantity(name, f"Sink_{found[1]}{' (visible queries)' if found[2] else ''}", "%", "rate", 1)
    if found := _LAYER.fullmatch(name):
        if found[1] == "sink_layer":
            return Quantity(name, f"Sequences in which a head of layer {found[2]} sinks", "%", "rate", 1)
        return Quantity(name, f"Step at which a head of layer {found[2]} sinks", "steps", "positive", 0)
    if found := _STREAMED.fullmatch(name):
        kept = f"streamed with the first {found[2]} kept"
        if found[1] == "loss":
            return Quantity(name, f"Loss {kept}", "nats", "positive", 3)
        return Quantity(name, f"Loss {kept}, above most kept", "nats", "plain", 3)
    raise ValueError(f"there is no number {name!r}; there are: sink_1 (or 2, 3, ..), sink_1_visible, sink_first_5, "
                     f"sink_layer_1, layer_step_1, "
                     f"streamed_loss_0 (or 1, 2, ..), streamed_gap_0, {', '.join(_NAMED)}")  # fmt: skip


def _known(name: str) -> str:
    quantity(name)
    return name


QuantityName = Annotated[str, AfterValidator(_known)]


@dataclass(frozen=True)
class Reading:
    """One evaluation of one run. What was not measured or not finite is None.

    Attributes:
        step: updates done.
        tokens: that the model was trained on.
        sink_rate, sink_rate_visible: percent, position 1 first; the latter None where it is no other.
        sink_layers: by attention layer, percent of the sequences of the head that sinks into the first position most
            often; empty in rows of older runs.
    """

    step: int
    tokens: float | None
    sink_rate: Sequence[float | None]
    sink_rate_visible: Sequence[float | None] | None
    sink_bias: float | None
    valid_loss: float | None
    train_loss: float | None
    norm_ratio: float | None
    sink_layers: Sequence[float | None] = ()


@dataclass(frozen=True)
class RunNumbers:
    """What a finished run of one seed has to say.

    Attributes:
        seed: of the recipe.
        readings: its evaluations by step, at least one.
        triples: (sequence, layer, head) triples that a rate is over.
        sequences: that the rate of one head is over; None where no reading has one.
        kurtosis: largest of all blocks at the end; None where it was not measured.
        seconds: of training.
        tokens_per_second: of its updates; None where unknown.
        peak_memory_mb: of the process that trained it; None where unknown.
        measured: numbers that no evaluation has, by name: of an existing model, or of a run that was assessed.
    """

    seed: int
    readings: Sequence[Reading]
    triples: int
    sequences: int | None = None
    kurtosis: float | None = None
    seconds: float | None = None
    tokens_per_second: float | None = None
    peak_memory_mb: float | None = None
    measured: Mapping[str, float] = field(default_factory=dict)

    @property
    def last(self) -> Reading:
        """The last evaluation."""
        return self.readings[-1]

    def value(self, name: str, at_step: int | None = None) -> float | None:
        """The number of that name, None where the run has none (a step: where it was never reached).

        Args:
            at_step: at the last evaluation up to this step; the end unless given.
        """
        if name in self.measured:
            return self.measured[name]
        if name == "kurtosis":
            return self.kurtosis
        if crossing := _crossing(name):
            return self._first_step(crossing)
        if name == "loss_change":
            return self._loss_change()
        upto = [one for one in self.readings if at_step is None or one.step <= at_step]
        return _of_reading(upto[-1], name) if upto else None

    def is_of_a_known_number(self, name: str) -> bool:
        """Whether a step that was never reached is one of a number that this run has."""
        crossing = _crossing(name)
        return crossing is not None and any(_of_reading(one, crossing.number) is not None for one in self.readings)

    def trials(self, name: str) -> int:
        """How many a rate is over: sequences where it is one head's in each, else triples."""
        found = _LAYER.fullmatch(name)
        return self.sequences if found and found[1] == "sink_layer" and self.sequences else self.triples

    def _loss_change(self) -> float | None:
        emerged = self.value("emergence_step")
        known = [(one.step, one.valid_loss) for one in self.readings if one.step > 0 and one.valid_loss is not None]
        return jump_at([step for step, _ in known], [loss for _, loss in known], emerged) if emerged else None

    def _first_step(self, crossing: "_Crossing") -> float | None:
        known = [(one.step, value) for one in self.readings
                 if (value := _of_reading(one, crossing.number)) is not None]  # fmt: skip
        if crossing.from_below:
            below = next((at for at, (_, value) in enumerate(known) if value < crossing.bound), 0)
            known = known[below:]
        return next((float(max(step, 1)) for step, value in known if value >= crossing.bound), None)


class _Crossing(NamedTuple):
    """A number and the bound that it reaches."""

    number: str
    bound: float
    from_below: bool = False


def _crossing(name: str) -> _Crossing | None:
    """What is reached at the step of that name; None where it is the name of no step."""
    if (found := _LAYER.fullmatch(name)) and found[1] == "layer_step":
        return _Crossing(f"sink_layer_{found[2]}", HALF)
    return {
        "emergence_step": _Crossing("sink_1", EMERGED),
        "norm_step": _Crossing("norm_ratio", MASSIVE, from_below=True),
    }.get(name)


def _of_reading(reading: Reading, name: str) -> float | None:
    if found := _FIRST.fullmatch(name):
        rates = reading.sink_rate[: int(found[1])]
        return None if None in rates or not rates else math.fsum(rate or 0.0 for rate in rates)
    if found := _LAYER.fullmatch(name):
        layer = int(found[2])
        return reading.sink_layers[layer - 1] if layer <= len(reading.sink_layers) else None
    if found := _SINK.fullmatch(name):
        visible = reading.sink_rate_visible if found[2] else None
        rates, position = visible or reading.sink_rate, int(found[1])
        return rates[position - 1] if position <= len(rates) else None
    values = {
        "sink_bias": reading.sink_bias,
        "valid_loss": reading.valid_loss,
        "train_loss": reading.train_loss,
        "norm_ratio": reading.norm_ratio,
    }
    return values.get(name)
