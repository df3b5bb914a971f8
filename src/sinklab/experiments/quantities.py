"""Quantities of claims and tables, by their names in experiment files.

The value for a run is the mean over its last three evaluations (docs/verdicts.md), except for steps, norm_untrained,
norm_lowest, loss_change, kurtosis, and the quantities of `assess` and `tune`. alpha is the importance of a key, eps the
threshold of the sink rate (docs/glossary.md). h_t, q_t, k_t and v_t are hidden state, query, key and value at position
t. Maxima over blocks include the input of the first block.

sink_K            Sink_K, percent of (sequence, layer, head) triples, K from 1
sink_K_visible    Sink_K with alpha averaged over the queries that can see the key; equal to Sink_K if these are the
                  queries t >= K in every layer, as with causal masks
sink_first_P      Sink_1 + .. + Sink_P, percent; may exceed 100 if triples have several sinks
importance_first  alpha of the first position, mean over layers and heads, percent
sink_K_to_M       Sink_K + .. + Sink_M, percent
sink_bias         sink rate of the attention to a bias, sink logit, sink token, registers or the remainder of
                  stick-breaking, percent
sink_1_or_bias    Sink_1 + sink_bias, percent; Sink_1 if there is no bias
sink_first_or_bias    sink rate of the attention to the first token and the bias together (their alphas are added
                  before the threshold), percent; Sink_1 if there is no bias
dormant_share     share of the queries t > 1 whose largest attention weight is on the first token or the bias, mean over
                  layers and heads, percent
sink_growth       Sink_1 (mean of the last three evaluations) minus Sink_1 at the last evaluation up to half of the
                  steps, percentage points
sink_window_start sink rate of the first key of a query's window, percent, with alpha averaged over the queries whose
                  window does not contain position 1
valid_loss        validation loss, nats per token
train_loss        training loss, mean over the updates since the previous evaluation, nats per token
norm_ratio        |h_1| over the mean |h_t| of the other positions t, maximum over blocks; None if infinite
norm_ratio_block_K    the same ratio after block K, K from 1
norm_ratio_last   the same ratio after the last block, before the final norm, as in figures 7 and 8 of the paper
norm_growth_last  norm_ratio_last over that of the untrained model, a factor
norm_untrained    norm_ratio of the untrained model (step 0)
norm_lowest       minimum of norm_ratio over all evaluations after step 0
norm_growth       norm_ratio over norm_untrained, a factor. With the declared initialisation, block 1 of the untrained
                  model has the largest ratio (about 3), whatever training does to the later blocks
norm_ratio_before_norm   norm_ratio of the inputs of the norms of a post-norm model; None if infinite
norm_ratio_sink_token    |h| of the sink token or first register over the mean |h_t| of the text tokens, maximum over
                  blocks; None if infinite
norm_growth_sink_token   norm_ratio_sink_token over that of the untrained model, a factor
kurtosis          kurtosis of the hidden states, maximum over blocks; measured once, at the end
sink_1_layer_L    Sink_1 of attention layer L, percent of (sequence, head) pairs; the mean over layers is sink_1
sink_layer_L      maximum over the heads of attention layer L of the percentage of sequences with a sink on the first
                  token
emergence_step    first evaluated step with Sink_1 >= 10 %. As for the other steps, step 0 counts as 1, and the value is
                  infinite if no evaluation reaches the threshold
sink_step         first evaluated step with Sink_1 >= 1 %
norm_step         first evaluated step at which norm_ratio reaches 2 from below; the first evaluated step if norm_ratio
                  was never below 2. An untrained model (width 64) has 2.4 to 3.3: its attention is nearly uniform, so
                  later positions average many values and have smaller norms. Early training decreases the ratio
layer_step_L      first evaluated step with sink_layer_L >= 50 %
loss_change       discontinuity of valid_loss at emergence_step, nats per token (`discontinuity_at`)

key_norm_ratio    |k_1| over the mean |k_t| of the other positions t, mean over layers; None if infinite
value_norm_ratio  the same for values

Existing models have sink_K, sink_K_visible, sink_first_P, sink_K_to_M, sink_bias, sink_1_or_bias, importance_first,
norm_ratio, key_norm_ratio, value_norm_ratio, valid_loss (with `loss: true`), kurtosis * and the following (results.py);
* needs `details: true`:
activation_ratio                    largest |activation| after a block over the median |activation| there, maximum over
                                    blocks, in the first sequence
largest_activation                  largest |activation| after the 8 blocks with the largest of these ratios
cosine_first, cosine_rest *         cos(q, k) with the first key and with the other keys, mean over heads whose mean
                                    alpha of the first position exceeds eps
cosine_gap *                        cosine_first - cosine_rest
norm_product_ratio *                mean of |q| |k_1| over the mean of |q| |k_t| of the other keys, over the same heads
gate_first, gate_rest *             output or value gates of the first token and of the others, mean over layers and
                                    heads
gate_closed *                       share of gates below 0.1, mean over layers, heads and tokens, percent
importance_early                    importance_first of the first quarter of the layers, at least one layer
importance_gap                      importance_first of the other layers minus importance_early, percentage points
proposition_excess                  largest deviation from the paper's proposition on repeated tokens, or excess over
                                    its bound, in units of the rounding tolerance
accuracy, accuracy_norm             accuracy on a downstream task, percent, with answers ranked by likelihood (acc) or
                                    by likelihood per character (acc_norm)

Runs of an experiment with `assess` also have the `numbers` of the parts in `assessing/parts/`, nats per token. Runs of
an experiment with `tune` also have these numbers (`Tuning.numbers`):
sft_loss_fall     loss on the held-out conversations before tuning minus after, nats per token of the assistant
sft_largest_grad_norm    gradient norm before clipping, maximum over the updates
sft_sink_change   Sink_1 after tuning minus before, percentage points
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from statistics import fmean
from typing import Annotated, Literal, get_args

import numpy as np
from pydantic import AfterValidator

from sinklab.assessing.parts import NUMBERS
from sinklab.measuring.statistics.highest import NO_SINK
from sinklab.schema import finite_or_none
from sinklab.train.directory.history import Evaluation, highest_known
from sinklab.train.evaluator import OTHER_EPS

EMERGED = 10.0
"""Minimum Sink_1, percent, of a model in which a sink has emerged."""

MASSIVE = 2.0
"""Minimum norm ratio of a first token with a massive activation."""

SINK_HEAD = 50.0
"""Minimum percentage of sequences with a sink on the first token in a sink head."""

AVERAGED = 3
"""Number of final evaluations over which a run's quantities are averaged."""

JUMP_WINDOW = 2.0
"""Factor w: a jump at step s is fitted to the evaluations from step s / w to step s * w."""

JUMP_POINTS = 8
"""Minimum number of points on either side of a jump."""

NORMS = {
    "norm_ratio",
    "norm_ratio_last",
    "norm_growth_last",
    "norm_ratio_before_norm",
    "norm_ratio_sink_token",
    "norm_growth",
    "norm_growth_sink_token",
    "norm_step",
    "kurtosis",
    "activation_ratio",
    "largest_activation",
}
"""Quantities of massive activations. `Experiment.requires_massive` applies to the claims that use one of them."""

LOSSES = {"valid_loss", "train_loss", "loss_change", "sft_loss_fall", "sft_largest_grad_norm"}
"""Quantities of the loss and of the stability of training. Losses that `assess` adds are about sinks."""

ClaimSubject = Literal["sinks", "norms", "loss"]
SUBJECTS: tuple[ClaimSubject, ...] = get_args(ClaimSubject)

OTHER_EPS_TEXTS = tuple(f"{eps:g}" for eps in OTHER_EPS)
"""Additional values of eps at which runs record sink rates, as in metrics.jsonl."""


@dataclass(frozen=True)
class Quantity:
    """A number of a run, or of a measurement of an existing model.

    Attributes:
        name: name in experiment files.
        label: label in tables and charts.
        unit: %, nats (per token), x (a ratio), steps, or empty if there is none.
        decimals: number of decimals in tables.
        read: function that returns the value at an evaluation, or None if the evaluation did not record it.
        of_run: function of a run and `at_step` that returns the value (see `RunNumbers.value`); default: the mean of
            `read` over the last evaluations.
        once: whether a run has the quantity only from a measurement after training, not from its evaluations.
    """

    name: str
    label: str
    unit: str
    decimals: int
    read: Callable[[Evaluation], float | None] = field(default=lambda one: None, compare=False, repr=False)
    of_run: "Callable[[RunNumbers, int | None], float | None] | None" = field(default=None, compare=False, repr=False)
    once: bool = False

    @property
    def is_sink_rate(self) -> bool:
        """True if the quantity is a sink rate, in percent, that is recorded at every evaluation."""
        return self.unit == "%" and self.name.startswith("sink_")

    @property
    def is_about_sinks(self) -> bool:
        """True if claims on the quantity are about sinks: sink rates, importance, dormant heads, emergence."""
        others = ("importance_first", "dormant_share", "sink_growth", "emergence_step", "sink_step", "loss_change")
        return self.is_sink_rate or self.name in others or self.name.startswith("layer_step_")


_N = r"([1-9]\d*)"
_RATES: Sequence[tuple[str, str, Callable[..., float | None]]] = (
    (f"sink_{_N}", "Sink_{}", lambda k, one: _at(one.sink_rate, k)),
    (f"sink_{_N}_visible", "Sink_{} (visible queries)", lambda k, one: _at(one.sink_rate_visible or one.sink_rate, k)),
    (f"sink_first_{_N}", "Sink rate of the first {} tokens", lambda last, one: _sum_to(one.sink_rate, 1, last)),
    (f"sink_{_N}_to_{_N}", "Sink rate of tokens {} to {}", lambda k, last, one: _sum_to(one.sink_rate, k, last)),
    (f"sink_1_layer_{_N}", "Sink_1 of layer {}", lambda layer, one: _mean_of_known(_heads(one, layer))),
    (
        f"sink_layer_{_N}",
        "Sequences with a sink head in layer {}",
        lambda layer, one: highest_known(_heads(one, layer)),
    ),
)
"""Sink rates with numbers in their names: (pattern, label, function from numbers and an evaluation to the value)."""

_NUMBERED = [one for one in NUMBERS if "N" in one.name]
_NAMED = {
    one.name: one
    for one in (
        Quantity("sink_bias", "Sink rate of the bias", "%", 1, lambda one: one.sink_rate_bias),
        Quantity("sink_1_or_bias", "Sink rate of the first token and the bias", "%", 1,
                 lambda one: _sum_of([*one.sink_rate[:1], one.sink_rate_bias or 0.0])),
        Quantity("sink_first_or_bias", "Sink rate of the first token and the bias together", "%", 1,
                 lambda one: one.sink_rate_first_or_bias if one.sink_rate_bias is not None
                 else _at(one.sink_rate, 1)),
        Quantity("dormant_share", "Queries whose largest weight is on the first token or bias", "%", 1,
                 lambda one: _mean_percent(one.dormant_heads)),
        Quantity("sink_growth", "Increase of Sink_1 in the second half", "points", 1,
                 of_run=lambda run, _: run.sink_growth()),
        Quantity("sink_window_start", "Sink rate of the first key of a window", "%", 1,
                 lambda one: one.sink_rate_window_start),
        Quantity("valid_loss", "Validation loss", "nats", 3, lambda one: one.valid_loss),
        Quantity("train_loss", "Training loss", "nats", 3, lambda one: one.train_loss),
        Quantity("norm_ratio", "Norm ratio of the first token", "x", 1, lambda one: _largest(one.hidden_norm_ratio)),
        Quantity("norm_ratio_last", "Norm ratio of the first token after the last block", "x", 1,
                 lambda one: finite_or_none(one.hidden_norm_ratio[-1]) if one.hidden_norm_ratio else None),
        Quantity("norm_growth_last", "Norm ratio after the last block relative to the untrained model", "x", 2,
                 of_run=lambda run, at_step: run.growth("norm_ratio_last", at_step)),
        Quantity("norm_untrained", "Norm ratio of the untrained model", "x", 1,
                 of_run=lambda run, _: run.untrained("norm_ratio")),
        Quantity("norm_lowest", "Lowest norm ratio after step 0", "x", 1,
                 of_run=lambda run, _: min((norm for step, norm in run.known("norm_ratio") if step > 0), default=None)),
        Quantity("norm_growth", "Norm ratio relative to the untrained model", "x", 2,
                 of_run=lambda run, at_step: run.growth("norm_ratio", at_step)),
        Quantity("norm_ratio_before_norm", "Norm ratio of the first token before normalisation", "x", 1,
                 lambda one: _largest(one.norm_ratio_before_norm)),
        Quantity("norm_ratio_sink_token", "Norm ratio of the sink token", "x", 1,
                 lambda one: _largest(one.norm_ratio_sink_token)),
        Quantity("norm_growth_sink_token", "Norm ratio of the sink token relative to the untrained model", "x", 2,
                 of_run=lambda run, at_step: run.growth("norm_ratio_sink_token", at_step)),
        Quantity("importance_first", "Mean importance of the first token", "%", 1,
                 lambda one: _mean_percent(one.importance_first_heads)),
        Quantity("kurtosis", "Kurtosis of the hidden states", "x", 1, once=True),
        Quantity("emergence_step", "Step at which the sink emerged", "steps", 0,
                 of_run=lambda run, _: run.first_step("sink_1", EMERGED)),
        Quantity("sink_step", "Step at which Sink_1 reached 1 %", "steps", 0,
                 of_run=lambda run, _: run.first_step("sink_1", NO_SINK)),
        Quantity("norm_step", "Step at which the norm of the first token grew", "steps", 0,
                 of_run=lambda run, _: run.first_step("norm_ratio", MASSIVE, from_below=True)),
        Quantity("loss_change", "Jump of the loss at the emergence of the sink", "nats", 3,
                 of_run=lambda run, _: run.loss_change()),
        Quantity("key_norm_ratio", "Norm ratio of the first key", "x", 2,
                 lambda one: _mean_of_finite(one.key_norm_ratio)),
        Quantity("value_norm_ratio", "Norm ratio of the first value", "x", 2,
                 lambda one: _mean_of_finite(one.value_norm_ratio)),
        Quantity("activation_ratio", "Ratio of the largest activation to the median", "x", 0),
        Quantity("largest_activation", "Largest activation", "", 0),
        Quantity("cosine_first", "cos(q, k) with the first key", "", 2),
        Quantity("cosine_rest", "cos(q, k) with the other keys", "", 2),
        Quantity("cosine_gap", "cos(q, k) with the first key minus the other keys", "", 2),
        Quantity("norm_product_ratio", "Ratio of |q| |k|, first key to the other keys", "x", 2),
        Quantity("gate_first", "Gate value of the first token", "", 3),
        Quantity("gate_rest", "Gate value of the other tokens", "", 3),
        Quantity("gate_closed", "Share of gates below 0.1", "%", 1),
        Quantity("importance_early", "Mean importance of the first token in early layers", "%", 1),
        Quantity("importance_gap", "Mean importance of the first token, later minus early layers", "points", 1),
        Quantity("proposition_excess", "Deviation from the proposition relative to rounding error", "x", 2),
        Quantity("sft_loss_fall", "Decrease of the loss by tuning", "nats", 3, once=True),
        Quantity("sft_largest_grad_norm", "Largest gradient norm during tuning", "", 2, once=True),
        Quantity("sft_sink_change", "Change of Sink_1 by tuning", "points", 1, once=True),
        Quantity("accuracy", "Accuracy", "%", 1),
        Quantity("accuracy_norm", "Accuracy, by likelihood per character", "%", 1),
        *(Quantity(one.name, one.label, "nats", 3, once=True) for one in NUMBERS if "N" not in one.name),
    )
}  # fmt: skip


def subject_of(name: str) -> ClaimSubject:
    """Return the subject of claims on a quantity; an empty name is that of the checks `diverges` and `trains`."""
    if not name or name in LOSSES:
        return "loss"
    return "norms" if name in NORMS or name.startswith("norm_ratio") else "sinks"


@cache
def quantity(name: str) -> Quantity:
    """Return the quantity with this name.

    Raises:
        ValueError: if the name is unknown; the message lists the valid names.
    """
    if name in _NAMED:
        return _NAMED[name]
    for pattern, label, read in _RATES:
        if found := re.fullmatch(pattern, name):
            numbers = [int(number) for number in found.groups()]
            if numbers == sorted(numbers):
                return Quantity(name, label.format(*numbers), "%", 1, partial(read, *numbers))
    if found := re.fullmatch(f"norm_ratio_block_{_N}", name):
        block = int(found[1])
        return Quantity(name, f"Norm ratio of the first token after block {block}", "x", 1,
                        lambda one: _largest(one.hidden_norm_ratio[block : block + 1]))  # fmt: skip
    if found := re.fullmatch(f"layer_step_{_N}", name):
        heads = f"sink_layer_{found[1]}"
        return Quantity(name, f"Step of the first sink head in layer {found[1]}", "steps", 0,
                        of_run=lambda run, _: run.first_step(heads, SINK_HEAD))  # fmt: skip
    for one in _NUMBERED:
        if found := re.fullmatch(one.name.replace("N", r"(0|[1-9]\d*)"), name):
            return Quantity(name, one.label.replace("N", found[1]), "nats", 3, once=True)
    raise ValueError(f"unknown quantity {name!r}; choose from: sink_1 (or 2, 3, ..), sink_1_visible, sink_first_5, "
                     f"sink_2_to_5, "
                     f"sink_1_layer_1, sink_layer_1, layer_step_1, norm_ratio_block_1, "
                     f"{', '.join(one.name for one in _NUMBERED)} (N from 0), {', '.join(_NAMED)}")  # fmt: skip


QuantityName = Annotated[str, AfterValidator(lambda name: quantity(name).name)]


@dataclass(frozen=True)
class RunNumbers:
    """Quantities of a finished run, or of one measurement of an existing model.

    Attributes:
        seed: seed of the recipe, or index of the draw or model.
        readings: evaluations sorted by step, at least one; exactly one for a measurement.
        sequences: number of measured sequences; None for a run.
        measured: quantities that evaluations do not record, by name.
    """

    seed: int
    readings: Sequence[Evaluation]
    sequences: int | None = None
    measured: Mapping[str, float] = field(default_factory=dict)

    @property
    def last(self) -> Evaluation:
        """The last evaluation."""
        return self.readings[-1]

    def value(self, name: str, at_step: int | None = None, eps: str | None = None) -> float | None:
        """Return the value of a quantity; None if the run has no value, infinity for a step that was never reached.

        Args:
            at_step: average over the last three evaluations up to this step; the value is None if the run ended before
                this step. Default: the last three evaluations of the run. Ignored for quantities with a single value
                per run, such as steps, and for `sink_growth`.
            eps: threshold of the sink rate, one of `OTHER_EPS_TEXTS`; the value is None for quantities not in `AT_EPS`.
                Default: the recipe's threshold. Ignored for quantities in `measured`.
        """
        if name in self.measured:
            return self.measured[name]
        if of_run := quantity(name).of_run:
            return of_run(self, at_step) if eps is None else None
        last = self.evaluations(name, at_step, eps)
        return fmean(last) if last else None

    def evaluations(
        self, name: str, at_step: int | None = None, eps: str | None = None, count: int = AVERAGED
    ) -> list[float]:
        """Return the values of a quantity at the last `count` evaluations up to `at_step`, without missing values.

        The list is empty if evaluations do not record the quantity (with `eps`: at this threshold of the sink rate), or
        if the run ended before `at_step`. The evaluation at step 0 counts only if it is the only one.
        """
        if at_step is not None and self.last.step < at_step:
            return []
        upto = [one for one in self.readings if at_step is None or one.step <= at_step]
        upto = ([one for one in upto if one.step > 0] or upto)[-count:]
        read, at_eps = quantity(name).read, AT_EPS.get(name, lambda one: None)
        values = [read(one) if eps is None else (at_eps(one) or {}).get(eps) for one in upto]
        return [value for value in values if value is not None]

    def known(self, name: str) -> list[tuple[int, float]]:
        """Return (step, value) pairs of a quantity for the evaluations that recorded it, in order."""
        read = quantity(name).read
        return [(one.step, value) for one in self.readings if (value := read(one)) is not None]

    def untrained(self, name: str) -> float | None:
        """Return the value of a quantity at step 0; None if it was not recorded."""
        return next((value for step, value in self.known(name) if step == 0), None)

    def growth(self, name: str, at_step: int | None) -> float | None:
        """Return `value(name, at_step)` over the value at step 0; None if either is unknown or the latter is 0."""
        before, now = self.untrained(name), self.value(name, at_step)
        return now / before if before and now is not None else None

    def sink_growth(self) -> float | None:
        """Return Sink_1 minus Sink_1 at the last evaluation up to half of the steps, points; None if one is unknown."""
        half, now = self.evaluations("sink_1", self.last.step // 2, count=1), self.value("sink_1")
        return now - half[0] if half and now is not None else None

    def first_step(self, name: str, bound: float, from_below: bool = False) -> float | None:
        """Return the first evaluated step at which a quantity is at least `bound`; step 0 counts as 1.

        The result is infinity if there is no such step, and None if no evaluation recorded the quantity.

        Args:
            from_below: skip evaluations until one is below the bound; without such an evaluation, skip none.
        """
        known = self.known(name)
        if from_below:
            known = known[next((at for at, (_, value) in enumerate(known) if value < bound), 0) :]
        never = math.inf if known else None
        return next((float(max(step, 1)) for step, value in known if value >= bound), never)

    def loss_change(self) -> float | None:
        """Return `discontinuity_at` the step at which the sink emerged, nats per token; None without such a step."""
        emerged = self.value("emergence_step") or math.inf
        known = [(step, loss) for step, loss in self.known("valid_loss") if step > 0]
        if emerged == math.inf:
            return None
        return discontinuity_at([step for step, _ in known], [loss for _, loss in known], emerged)


AT_EPS: Mapping[str, Callable[[Evaluation], Mapping[str, float | None] | None]] = {
    "sink_1": lambda one: one.sink_rate_eps,
    "sink_1_visible": lambda one: one.sink_rate_visible_eps or one.sink_rate_eps,
    "sink_bias": lambda one: one.sink_rate_bias_eps,
    "sink_1_or_bias": lambda one: _first_or_bias(one),
    "sink_first_or_bias": lambda one: (
        one.sink_rate_eps if one.sink_rate_bias is None else one.sink_rate_first_or_bias_eps
    ),
}
"""Functions that return the sink rates of an evaluation by threshold (with `OTHER_EPS_TEXTS`), by quantity."""


def _first_or_bias(one: Evaluation) -> Mapping[str, float | None]:
    first, bias = one.sink_rate_eps or {}, one.sink_rate_bias_eps or {}
    return first if one.sink_rate_bias is None else {eps: _sum_of([first[eps], bias.get(eps)]) for eps in first}


def _at(rates: Sequence[float | None], position: int) -> float | None:
    return rates[position - 1] if position <= len(rates) else None


def _heads(one: Evaluation, layer: int) -> Sequence[float | None]:
    """Return the sink rates of the first token in the heads of an attention layer (1-based); empty if not recorded."""
    return next(iter((one.sink_rate_heads or [])[layer - 1 : layer]), [])


def _sum_of(rates: Sequence[float | None]) -> float | None:
    return None if None in rates or not rates else math.fsum(rate or 0.0 for rate in rates)


def _sum_to(rates: Sequence[float | None], first: int, last: int) -> float | None:
    return _sum_of(rates[first - 1 : last]) if last <= len(rates) else None


def _mean_percent(by_layer: Sequence[Sequence[float | None]] | None) -> float | None:
    mean = _mean_of_known([one for heads in by_layer or () for one in heads])
    return None if mean is None else 100 * mean


def _mean_of_known(values: Sequence[float | None]) -> float | None:
    known = [one for one in values if one is not None]
    return fmean(known) if known else None


def _mean_of_finite(ratios: Sequence[float] | None) -> float | None:
    """Return the mean over layers; None if there are no values or one is infinite."""
    return finite_or_none(fmean(ratios)) if ratios else None


def _largest(ratios: Sequence[float] | None) -> float | None:
    """Return the maximum over blocks; None if there are no values or the maximum is infinite."""
    return finite_or_none(max(ratios or (), default=None))


def discontinuity_at(steps: Sequence[int], values: Sequence[float], at: float) -> float | None:
    """Estimate the size d of a discontinuity of a curve at one step.

    The curve value = a + b x + c x^2 + e x^3 + d [x >= 0], where x = ln(step / at), is fitted by least squares to the
    points with at / 2 <= step <= 2 at. The polynomial models gradual changes: on the exponential curves of the tests,
    the error of d is up to 0.026 nats without the cubic term, and up to 0.004 with it.

    Args:
        steps: positive, increasing steps.
        values: one value per step.
        at: step of the discontinuity, positive; a value at this step counts as after the discontinuity.

    Returns:
        d, in the unit of the values; None if either side has fewer than `JUMP_POINTS` points.
    """
    t, y = np.asarray(steps, dtype=float), np.asarray(values, dtype=float)
    near = (t >= at / JUMP_WINDOW) & (t <= at * JUMP_WINDOW)
    x, y = np.log(t[near] / at), y[near]
    after = x >= 0
    if min(after.sum(), (~after).sum()) < JUMP_POINTS:
        return None
    design = np.stack([after.astype(float), np.ones_like(x), x, x**2, x**3], axis=1)
    return float(np.linalg.lstsq(design, y, rcond=None)[0][0])
