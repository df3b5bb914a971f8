"""The numbers that claims are about and tables show, by the names that experiment files use.

A run's number is the mean of its last three evaluations (docs/verdicts.md); steps, and quantities measured once, are
single numbers.

sink_K            Sink_K, percent of (sequence, layer, head) triples, K from 1
sink_K_visible    the same of the mean over the queries that may see the key (a window); Sink_K where all may
sink_first_P      Sink_1 + .. + Sink_P, percent: at eps above a half at most one position per triple counts
importance_first  alpha of the first position, mean over layers and heads, percent: the rate without its threshold
sink_K_to_M       Sink_K + .. + Sink_M, percent
sink_bias         on an added bias, sink logit or sink token, percent
sink_1_or_bias    Sink_1 and that together, percent; Sink_1 where nothing was added
sink_growth       Sink_1 at the end above Sink_1 at half of the steps, points
sink_window_start first key of a window, percent, of its mean over the queries that no longer see position 1
valid_loss        nats per token, and train_loss likewise
norm_ratio        |h_1| over the mean of the others, in the block where it is largest; none where it is infinite
norm_untrained    the same of the untrained model (step 0); norm_lowest is the lowest of all evaluations since
norm_growth       norm_ratio over norm_untrained
norm_ratio_before_norm   of a post-norm model: norm_ratio of the inputs of its norms, where largest; none if infinite
norm_ratio_sink_token    of a sink token: its |h| over the mean of the tokens', where largest; none if infinite
norm_growth_sink_token   that over the same of the untrained model
kurtosis          of the hidden states, in the block where it is largest; measured once, at the end
sink_1_layer_L    Sink_1 of attention layer L, percent of (sequence, head) pairs; their mean over layers is sink_1
sink_layer_L      percent of the sequences in which a head of attention layer L sinks into the first token: of the head
                  that most often does
emergence_step    first evaluated step at which Sink_1 reached 10 %
norm_step         first evaluated step at which norm_ratio reached 2 from below; that of the first evaluation where it
                  never was below. An untrained model has 2.4 to 3.3, and loses it: its later tokens are averages
layer_step_L      first evaluated step at which sink_layer_L reached 50 %
loss_change       the jump of valid_loss at emergence_step (`discontinuity_at`)

of existing models (results.py):
key_norm_ratio, value_norm_ratio    |k_1|, |v_1| over the mean of the others, mean over layers
activation_ratio                    the largest |activation| over the median of its block
largest_activation                  itself
cosine_first, cosine_rest           cos(q, k) with the first key and with the others, mean over the heads with a sink
cosine_gap                          the difference of the two
norm_product_ratio                  |q| |k_1| over the mean of |q| |k| of the other keys, mean over the same heads
gate_first, gate_rest               gates on the output or values, of the first token and of the others, mean over
                                    layers and heads; gate_closed: percent of all of them below 0.1 (cells with details)
importance_early, importance_gap    importance_first of the first quarter of the layers; of the others, above that
proposition_excess                  the largest deviation from the paper's proposition on repeated tokens, in units of
                                    what rounding may cause
accuracy, accuracy_norm             of a downstream task, percent of its items; answers by likelihood, and per character

of runs for which the experiment says `assess`: the `numbers` of the parts in `assessing/parts/`

of runs for which it says `tune` (`Tuning.numbers`)
sft_loss_fall     loss of the conversations held out, untuned minus tuned, nats per token of the assistant
sft_largest_grad_norm    gradient norm before clipping, the largest of all updates
sft_sink_change   Sink_1 on the conversations held out, tuned minus untuned, points
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import AfterValidator

from sinklab.assessing.parts import NUMBERS

EMERGED = 10.0
"""Least percent of heads at which a sink counts as emerged."""

MASSIVE = 2.0
"""Least norm ratio at which the first token counts as a massive activation."""

HALF = 50.0
"""Least percent of sequences at which a head counts as a sink."""

LAST = 3
"""Number of evaluations whose mean is a run's number."""

NO_SINK = 1.0
"""Percent of heads below which a sink is absent."""

JUMP_WINDOW = 2.0
"""A jump of a curve is fitted from its step over this to its step times this."""

JUMP_POINTS = 8
"""Fewest points on either side of a jump."""

BESIDE = ("0.2", "0.4")
"""Thresholds at which Sink_1 is recorded in addition to the recipe's."""


@dataclass(frozen=True)
class Quantity:
    """A number of a run.

    Attributes:
        name: as experiment files have it.
        label: for people.
        unit: percent, nats, x (a ratio), steps, or none.
        decimals: in tables.
        once: whether it is measured only at the end of a run, not at every evaluation.
    """

    name: str
    label: str
    unit: str
    decimals: int
    once: bool = False


_SINK = re.compile(r"sink_([1-9]\d*)(_visible)?")
_FIRST = re.compile(r"sink_first_([1-9]\d*)")
_RANGE = re.compile(r"sink_([1-9]\d*)_to_([1-9]\d*)")
_LAYER = re.compile(r"(sink_1_layer|sink_layer|layer_step)_([1-9]\d*)")
_NUMBERED = [one for one in NUMBERS if "N" in one.name]
_NAMED = {
    one.name: one
    for one in (
        Quantity("sink_bias", "Sink on the bias", "%", 1),
        Quantity("sink_1_or_bias", "Sink on the first token or the bias", "%", 1),
        Quantity("sink_growth", "Growth of Sink_1 in the second half", "%", 1),
        Quantity("sink_window_start", "Sink on the first key of a window", "%", 1),
        Quantity("valid_loss", "Validation loss", "nats", 3),
        Quantity("train_loss", "Training loss", "nats", 3),
        Quantity("norm_ratio", "Norm ratio of the first token", "x", 1),
        Quantity("norm_untrained", "Norm ratio, untrained", "x", 1),
        Quantity("norm_lowest", "Norm ratio, lowest since", "x", 1),
        Quantity("norm_growth", "Norm ratio over the untrained one", "x", 2),
        Quantity("norm_ratio_before_norm", "Norm ratio of the first token before the norm", "x", 1),
        Quantity("norm_ratio_sink_token", "Norm ratio of the sink token", "x", 1),
        Quantity("norm_growth_sink_token", "Norm ratio of the sink token over the untrained one", "x", 2),
        Quantity("importance_first", "Mean importance of the first token", "%", 1),
        Quantity("kurtosis", "Kurtosis of the hidden states", "x", 1, once=True),
        Quantity("emergence_step", "Step at which the sink emerged", "steps", 0),
        Quantity("norm_step", "Step at which the first token's norm grew", "steps", 0),
        Quantity("loss_change", "Jump of the loss as the sink emerged", "nats", 3),
        Quantity("key_norm_ratio", "Norm ratio of the first key", "x", 2),
        Quantity("value_norm_ratio", "Norm ratio of the first value", "x", 2),
        Quantity("activation_ratio", "Largest activation over the median", "x", 0),
        Quantity("largest_activation", "Largest activation", "", 0),
        Quantity("cosine_first", "cos(q, k) with the first key", "", 2),
        Quantity("cosine_rest", "cos(q, k) with the other keys", "", 2),
        Quantity("cosine_gap", "cos(q, k) with the first key, above the others", "", 2),
        Quantity("norm_product_ratio", "|q| |k| of the first key over the others", "x", 2),
        Quantity("gate_first", "Gate of the first token", "", 3),
        Quantity("gate_rest", "Gate of the other tokens", "", 3),
        Quantity("gate_closed", "Gates below 0.1", "%", 1),
        Quantity("importance_early", "Mean importance of the first token in early layers", "%", 1),
        Quantity("importance_gap", "Of later layers, above the early ones", "%", 1),
        Quantity("proposition_excess", "Deviation from the proposition, over that of rounding", "x", 2),
        Quantity("sft_loss_fall", "Fall of the loss in tuning", "nats", 3, once=True),
        Quantity("sft_largest_grad_norm", "Largest gradient norm in tuning", "", 2, once=True),
        Quantity("sft_sink_change", "Change of Sink_1 by tuning", "%", 1, once=True),
        Quantity("accuracy", "Accuracy", "%", 1),
        Quantity("accuracy_norm", "Accuracy, by likelihood per character", "%", 1),
        *(Quantity(one.name, one.label, "nats", 3, once=True) for one in NUMBERS if "N" not in one.name),
    )
}


def quantity(name: str) -> Quantity:
    """The quantity of a name.

    Raises:
        ValueError: no quantity has that name; the message lists the valid names.
    """
    if name in _NAMED:
        return _NAMED[name]
    if found := _FIRST.fullmatch(name):
        return Quantity(name, f"Sinks on the first {found[1]} tokens", "%", 1)
    if found := _RANGE.fullmatch(name):
        return Quantity(name, f"Sinks on tokens {found[1]} to {found[2]}", "%", 1)
    if found := _SINK.fullmatch(name):
        return Quantity(name, f"Sink_{found[1]}{' (visible queries)' if found[2] else ''}", "%", 1)
    if found := _LAYER.fullmatch(name):
        if found[1] == "sink_1_layer":
            return Quantity(name, f"Sink_1 of layer {found[2]}", "%", 1)
        if found[1] == "sink_layer":
            return Quantity(name, f"Sequences in which a head of layer {found[2]} sinks", "%", 1)
        return Quantity(name, f"Step at which a head of layer {found[2]} sinks", "steps", 0)
    for one in _NUMBERED:
        if found := re.fullmatch(one.name.replace("N", r"(0|[1-9]\d*)"), name):
            return Quantity(name, one.label.replace("N", found[1]), "nats", 3, once=True)
    raise ValueError(f"there is no number {name!r}; there are: sink_1 (or 2, 3, ..), sink_1_visible, sink_first_5, "
                     f"sink_2_to_5, "
                     f"sink_1_layer_1, sink_layer_1, layer_step_1, "
                     f"{', '.join(one.name for one in _NUMBERED)} (N from 0), {', '.join(_NAMED)}")  # fmt: skip


def _known(name: str) -> str:
    quantity(name)
    return name


QuantityName = Annotated[str, AfterValidator(_known)]


@dataclass(frozen=True)
class Reading:
    """One evaluation of one run. Numbers that were not measured or not finite are None.

    Attributes:
        step: updates done.
        tokens: that the model was trained on.
        sink_rate, sink_rate_visible: percent, position 1 first; the latter None if it is the same.
        sink_layers: by attention layer, percent of the sequences of the head that sinks into the first position most
            often; empty if it was not recorded.
        sink_1_layers: by attention layer, Sink_1, percent; empty if it was not recorded.
        importance_first: alpha of the first position, mean over layers and heads, percent.
        window_start: percent, of the first key of a window.
        norm_ratio_before_norm, norm_ratio_sink_token: the largest of all blocks; None if there are none.
        beside: Sink_1 (`sink_1`, `sink_1_visible`) and `sink_bias` at the thresholds of `BESIDE`, by quantity.
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
    sink_1_layers: Sequence[float | None] = ()
    importance_first: float | None = None
    window_start: float | None = None
    norm_ratio_before_norm: float | None = None
    norm_ratio_sink_token: float | None = None
    beside: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class RunNumbers:
    """The numbers of one finished run, or of one draw of a measured cell.

    Attributes:
        seed: of the recipe; of a draw its number.
        readings: its evaluations by step, at least one.
        kurtosis: largest of all blocks at the end; None if it was not measured.
        seconds: of training, or of measuring.
        tokens_per_second: of its updates; None if unknown.
        peak_memory_mb: of the process that trained it; None if unknown.
        sequences: of a draw, that were read.
        measured: numbers that no evaluation has, by name: of an existing model, or of a run that was assessed or
            tuned.
    """

    seed: int
    readings: Sequence[Reading]
    kurtosis: float | None = None
    seconds: float | None = None
    tokens_per_second: float | None = None
    peak_memory_mb: float | None = None
    sequences: int | None = None
    measured: Mapping[str, float] = field(default_factory=dict)

    @property
    def last(self) -> Reading:
        """The last evaluation."""
        return self.readings[-1]

    def value(self, name: str, at_step: int | None = None, eps: str | None = None) -> float | None:
        """The number of that name; None if the run has none, infinity for a step that it never reached.

        Args:
            at_step: the mean of the last evaluation up to this step and the two before it, None if the run ended
                before it; the end unless given.
            eps: the threshold of the rate, one of `BESIDE`; the recipe's unless given.
        """
        if name in self.measured:
            return self.measured[name]
        if name == "kurtosis":
            return self.kurtosis
        if crossing := _crossing(name):
            return self._first_step(crossing) if eps is None else None
        if name == "loss_change":
            return self._loss_change()
        norms = [(one.step, one.norm_ratio) for one in self.readings if one.norm_ratio is not None]
        if name == "norm_untrained":
            return next((norm for step, norm in norms if step == 0), None)
        if name == "norm_lowest":
            return min((norm for step, norm in norms if step > 0), default=None)
        if name == "norm_growth":
            before, now = self.value("norm_untrained"), self.value("norm_ratio", at_step)
            return now / before if before and now is not None else None
        if name == "norm_growth_sink_token":
            first, now = self.readings[0], self.value("norm_ratio_sink_token", at_step)
            before = first.norm_ratio_sink_token if first.step == 0 else None
            return now / before if before and now is not None else None
        if name == "sink_growth":
            half, now = self.evaluations("sink_1", self.last.step // 2, count=1), self.value("sink_1")
            return now - half[0] if half and now is not None else None
        last = self.evaluations(name, at_step, eps)
        return fmean(last) if last else None

    def evaluations(
        self, name: str, at_step: int | None = None, eps: str | None = None, count: int = LAST
    ) -> list[float]:
        """Its last evaluations, up to a limit; empty if the run has none, or ended before `at_step`."""
        if at_step is not None and self.last.step < at_step:
            return []
        upto = [one for one in self.readings if at_step is None or one.step <= at_step][-count:]
        return [value for one in upto if (value := _of_reading(one, name, eps)) is not None]

    def _loss_change(self) -> float | None:
        emerged = self.value("emergence_step") or math.inf
        known = [(one.step, one.valid_loss) for one in self.readings if one.step > 0 and one.valid_loss is not None]
        return (
            discontinuity_at([step for step, _ in known], [loss for _, loss in known], emerged)
            if emerged < math.inf
            else None
        )

    def _first_step(self, crossing: "_Crossing") -> float | None:
        known = [(one.step, value) for one in self.readings
                 if (value := _of_reading(one, crossing.number)) is not None]  # fmt: skip
        if crossing.from_below:
            below = next((at for at, (_, value) in enumerate(known) if value < crossing.bound), 0)
            known = known[below:]
        never = math.inf if known else None
        return next((float(max(step, 1)) for step, value in known if value >= crossing.bound), never)


class _Crossing(NamedTuple):
    """A quantity and the bound whose first crossing is a step."""

    number: str
    bound: float
    from_below: bool = False


def _crossing(name: str) -> _Crossing | None:
    """The crossing that defines a step quantity; None if the name is not a step quantity."""
    if (found := _LAYER.fullmatch(name)) and found[1] == "layer_step":
        return _Crossing(f"sink_layer_{found[2]}", HALF)
    return {
        "emergence_step": _Crossing("sink_1", EMERGED),
        "norm_step": _Crossing("norm_ratio", MASSIVE, from_below=True),
    }.get(name)


def _of_reading(reading: Reading, name: str, eps: str | None = None) -> float | None:
    if eps is not None:
        at_eps = reading.beside.get(name) or (reading.beside.get("sink_1") if name == "sink_1_visible" else None)
        return at_eps.get(eps) if at_eps else None
    if found := _FIRST.fullmatch(name):
        rates = reading.sink_rate[: int(found[1])]
        return _sum_of(rates)
    if found := _RANGE.fullmatch(name):
        return _sum_of(reading.sink_rate[int(found[1]) - 1 : int(found[2])])
    if found := _LAYER.fullmatch(name):
        layer, rates = int(found[2]), reading.sink_1_layers if found[1] == "sink_1_layer" else reading.sink_layers
        return rates[layer - 1] if layer <= len(rates) else None
    if found := _SINK.fullmatch(name):
        visible = reading.sink_rate_visible if found[2] else None
        rates, position = visible or reading.sink_rate, int(found[1])
        return rates[position - 1] if position <= len(rates) else None
    values = {
        "sink_bias": reading.sink_bias,
        "sink_1_or_bias": _sum_of([*reading.sink_rate[:1], reading.sink_bias or 0.0]),
        "sink_window_start": reading.window_start,
        "norm_ratio_before_norm": reading.norm_ratio_before_norm,
        "norm_ratio_sink_token": reading.norm_ratio_sink_token,
        "valid_loss": reading.valid_loss,
        "train_loss": reading.train_loss,
        "norm_ratio": reading.norm_ratio,
        "importance_first": reading.importance_first,
    }
    return values.get(name)


def _sum_of(rates: Sequence[float | None]) -> float | None:
    return None if None in rates or not rates else math.fsum(rate or 0.0 for rate in rates)


def discontinuity_at(steps: Sequence[int], values: Sequence[float], at: float) -> float | None:
    """The size of a curve's jump at one step; a change over several points is no jump.

    Least squares of value = a + b x + c x^2 + e x^3 + d [x >= 0], x = ln(step / at), over the points of the window; the
    jump is d. The powers fit the curvature of a learning curve and other gradual changes: for the exponentials of the
    tests the error of d is up to 0.026 nats without the cube, and 0.004 with it.

    Args:
        steps: above zero, rising.
        values: one per step.
        at: the step of the jump.

    Returns:
        d in the unit of the values; None if either side has fewer points than `JUMP_POINTS`.
    """
    t, y = np.asarray(steps, dtype=float), np.asarray(values, dtype=float)
    near = (t >= at / JUMP_WINDOW) & (t <= at * JUMP_WINDOW)
    x, y = np.log(t[near] / at), y[near]
    after = x >= 0
    if min(after.sum(), (~after).sum()) < JUMP_POINTS:
        return None
    design = np.stack([after.astype(float), np.ones_like(x), x, x**2, x**3], axis=1)
    return float(np.linalg.lstsq(design, y, rcond=None)[0][0])
