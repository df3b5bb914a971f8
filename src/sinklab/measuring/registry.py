"""Registry of metrics: every number that metrics.jsonl, tables, charts, claims and comparisons show, declared once.

A new number is a field of `Evaluation` with its line in `recorded` (if every evaluation records it) and an entry in
`METRICS`: name in experiment files, label, unit, decimals, subject, how it is read and averaged, and its column.
Tables, charts, claims, the leaderboard and the terminal read this file.

The value for a run is the mean over its last three evaluations (docs/verdicts.md), except for steps, norm_untrained,
norm_lowest, loss_change, kurtosis, and the quantities of `assess` and `tune`. alpha is the importance of a key, eps the
threshold of the sink rate (docs/glossary.md). h_t, q_t, k_t and v_t are hidden state, query, key and value at position
t. Maxima over blocks include the input of the first block.

sink_K            Sink_K, percent of (sequence, layer, head) triples, K from 1
sink_K_visible    Sink_K with alpha averaged over the queries that can see the key; equal to Sink_K if these are the
                  queries t >= K in every layer, as with causal masks
sink_first_P      Sink_1 + .. + Sink_P, percent; may exceed 100 if triples have several sinks
importance_first  alpha of the first position, mean over layers and heads, percent
highest_rate_except_K  highest sink rate of the positions 1 .. T / 2 other than K, percent; 0 if there are none
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
norm_ratio_block_N    the same ratio after block N; 0 is the embeddings
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
norm_ratio, key_norm_ratio, value_norm_ratio, valid_loss (with `loss: true`), kurtosis * and the following;
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
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from pydantic import ConfigDict, Field

from sinklab.schema import Ratio, ReadDocument, finite_or_none
from sinklab.tables import NO_SINK, SINK_1, TableColumn

if TYPE_CHECKING:
    from sinklab.measuring.measurement import Measurement


class Evaluation(ReadDocument):
    """One evaluation of a run. Values that are not recorded, not applicable or not finite are None or empty.

    Sink rates in percent, `importance_first_heads` (alpha_1) and norm ratios are as in `Measurement`.

    Attributes:
        step: number of completed updates.
        tokens: number of training tokens so far.
        train_loss: mean cross-entropy over the updates since the previous evaluation, nats per token.
        valid_loss: cross-entropy on held-out documents, nats per token.
        valid_added_losses: weighted value of each auxiliary loss (`losses` of a recipe) on the same documents, by name.
        sink_rate_heads: percent of the sequences in which the first position is a sink, by attention layer and head.
        sink_rate_eps, sink_rate_visible_eps, sink_rate_bias_eps: Sink_1, `sink_rate_visible` of position 1, and
            `sink_rate_bias` for the thresholds `metric.eps`, 0.2 and 0.4, by threshold ("0.3").
        sink_rate_first_or_bias, sink_rate_first_or_bias_eps: sink rate of the attention to the first position and the
            bias together, and by threshold.
        importance_first_heads: alpha_1, mean over sequences, by attention layer and head (0..1).
        dormant_heads: share of the queries t > 1 whose largest attention weight is on the first position or the bias
            (`Measurement.dormant`), by attention layer and head (0..1).
        key_norm_ratio, value_norm_ratio: norm of the first key (value) over the mean of the others, by layer.
        lr: learning rate of the next update.
        grad_norm: gradient norm of the last update, before clipping.
        tokens_per_second: training throughput of all processes since the previous evaluation or the start of this
            process; None without updates since then.
        mfu: model FLOPs utilisation (0..1) in the same period; None if the peak FLOP/s is unknown.
        stall_share: fraction of the same period in which rank 0 waited for batches (0..1).
    """

    model_config = ConfigDict(strict=True)

    step: int = Field(ge=0)
    tokens: int | float | None = None
    train_loss: float | None = None
    valid_loss: float | None = None
    valid_added_losses: dict[str, float | None] | None = None
    sink_rate: list[float | None] = Field(default_factory=list)
    sink_rate_visible: list[float | None] | None = None
    sink_rate_bias: float | None = None
    sink_rate_heads: list[list[float | None]] | None = None
    sink_rate_eps: dict[str, float | None] | None = None
    sink_rate_visible_eps: dict[str, float | None] | None = None
    sink_rate_bias_eps: dict[str, float | None] | None = None
    sink_rate_first_or_bias: float | None = None
    sink_rate_first_or_bias_eps: dict[str, float | None] | None = None
    sink_rate_window_start: float | None = None
    norm_ratio_before_norm: list[Ratio] | None = None
    norm_ratio_sink_token: list[Ratio] | None = None
    importance_first_heads: list[list[float | None]] | None = None
    dormant_heads: list[list[float | None]] | None = None
    hidden_norm_ratio: list[Ratio] = Field(default_factory=list)
    key_norm_ratio: list[Ratio] | None = None
    value_norm_ratio: list[Ratio] | None = None
    lr: float | None = None
    grad_norm: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    stall_share: float | None = None

    @property
    def rate_layers(self) -> list[float | None]:
        """Maximum of `sink_rate_heads` by attention layer (%), None if unknown; empty without `sink_rate_heads`."""
        return [highest_known(rates) for rates in self.sink_rate_heads or ()]

    @property
    def largest_norm_ratio(self) -> float | None:
        """Maximum of `hidden_norm_ratio` before the first block and after every block; None if unknown."""
        return max(self.hidden_norm_ratio, default=None)


def highest_known(values: Sequence[float | None]) -> float | None:
    """Return the maximum of the values that are not None; None if there are no such values."""
    return max((one for one in values if one is not None), default=None)


def recorded(m: "Measurement") -> dict[str, Any]:
    """Return the fields of an `Evaluation` that are read from a measurement of the model."""

    def of_first(rates: Mapping[str, Sequence[float]] | None) -> dict[str, float] | None:
        return None if rates is None else {eps: by_position[0] for eps, by_position in rates.items()}

    return {
        "sink_rate": m.sink_rate,
        "sink_rate_visible": m.sink_rate_visible,
        "sink_rate_bias": m.sink_rate_bias,
        "sink_rate_first_or_bias": m.sink_rate_first_or_bias,
        "sink_rate_heads": m.sink_rate_of_heads().tolist(),
        "sink_rate_eps": of_first(m.sink_rates),
        "sink_rate_visible_eps": of_first(m.sink_rates_visible),
        "sink_rate_bias_eps": m.sink_rates_bias,
        "sink_rate_first_or_bias_eps": m.sink_rates_first_or_bias,
        "importance_first_heads": m.importance[..., 0].tolist(),
        "dormant_heads": None if m.dormant is None else m.dormant.tolist(),
        "hidden_norm_ratio": m.hidden_norm_ratio,
        "key_norm_ratio": m.key_norm_ratio,
        "value_norm_ratio": m.value_norm_ratio,
        "norm_ratio_before_norm": m.norm_ratio_before_norm,
        "norm_ratio_sink_token": m.norm_ratio_sink_token,
        "sink_rate_window_start": m.sink_rate_window_start,
    }


EMERGED = 10.0
"""Minimum Sink_1, percent, of a model in which a sink has emerged."""

MASSIVE = 2.0
"""Minimum norm ratio of a first token with a massive activation."""

SINK_HEAD = 50.0
"""Minimum percentage of sequences with a sink on the first token in a sink head."""

ClaimSubject = Literal["sinks", "norms", "loss"]
SUBJECTS: tuple[ClaimSubject, ...] = get_args(ClaimSubject)


@dataclass(frozen=True)
class Metric:
    """A number of a run, or of a measurement of an existing model.

    Attributes:
        name: name in experiment files. The letter N is a placeholder for an integer.
        label: label in tables and charts, with {} for each number of the name.
        unit: %, nats (per token), x (a ratio), steps, points, or empty if there is none.
        decimals: number of decimals in tables.
        read: function of an evaluation, after the numbers of the name, that returns the value, or None if the
            evaluation did not record it. The value of a run is the mean over its last evaluations.
        of_run: function of a run and `at_step` that returns the value instead (see `RunNumbers.value`).
        of_model: function of a measurement of an existing model and its eps, if evaluations do not record the number.
        at_eps: function of an evaluation that returns the values at the other thresholds of the sink rate.
        once: whether a run has the number only from a measurement after training, not from its evaluations.
        about: subject of claims on the number; `norms` are massive activations (`Experiment.requires_massive`), and
            `loss` includes the stability of training.
        of_a_sink: whether claims on the number presuppose a sink (`Experiment.requires_sink`); sink rates always do.
        title, place: heading and unit of the column in tables of runs and the leaderboard; empty for the label.
    """

    name: str
    label: str
    unit: str
    decimals: int
    read: Callable[..., float | None] = field(default=lambda *_: None, compare=False, repr=False)
    of_run: Callable[..., float | None] | None = field(default=None, compare=False, repr=False)
    of_model: "Callable[[Measurement, float], float | None] | None" = field(default=None, compare=False, repr=False)
    at_eps: Callable[[Evaluation], Mapping[str, float | None] | None] | None = field(
        default=None, compare=False, repr=False
    )
    once: bool = False
    about: ClaimSubject = "sinks"
    of_a_sink: bool = False
    title: str = ""
    place: str = ""

    @property
    def is_sink_rate(self) -> bool:
        """True if the metric is a sink rate, in percent, that is recorded at every evaluation."""
        return self.unit == "%" and self.name.startswith("sink_")

    @property
    def column(self) -> TableColumn:
        """Column of the metric in tables of runs."""
        return TableColumn(self.title or self.label, self.place or self.unit, f",.{self.decimals}f")

    @property
    def shown(self) -> str:
        """Label for charts, with a subscript in Sink_1."""
        return self.label.replace("Sink_1", SINK_1)

    def with_numbers(self, name: str) -> "Metric | None":
        """Return the metric of a name in which numbers replace each N; None if the name does not match."""
        found = re.fullmatch(self.name.replace("N", r"([1-9]\d*)"), name)
        numbers = [int(number) for number in found.groups()] if found else []
        if not found or numbers != sorted(numbers):
            return None
        return replace(
            self,
            name=name,
            label=self.label.format(*numbers),
            read=partial(self.read, *numbers),
            of_run=self.of_run and partial(self.of_run, *numbers),
        )


def _at(rates: Sequence[float | None], position: int) -> float | None:
    return rates[position - 1] if position <= len(rates) else None


def _heads(one: Evaluation, layer: int) -> Sequence[float | None]:
    """Return the sink rates of the first token in the heads of an attention layer (1-based); empty if not recorded."""
    return next(iter((one.sink_rate_heads or [])[layer - 1 : layer]), [])


def _sum_of(rates: Sequence[float | None]) -> float | None:
    return None if None in rates or not rates else math.fsum(rate or 0.0 for rate in rates)


def _sum_to(rates: Sequence[float | None], first: int, last: int) -> float | None:
    return _sum_of(rates[first - 1 : last]) if last <= len(rates) else None


def _mean_of_known(values: Sequence[float | None]) -> float | None:
    known = [one for one in values if one is not None]
    return fmean(known) if known else None


def _mean_percent(by_layer: Sequence[Sequence[float | None]] | None) -> float | None:
    mean = _mean_of_known([one for heads in by_layer or () for one in heads])
    return None if mean is None else 100 * mean


def _mean_of_finite(ratios: Sequence[float] | None) -> float | None:
    """Return the mean over layers; None if there are no values or one is infinite."""
    return finite_or_none(fmean(ratios)) if ratios else None


def _largest(ratios: Sequence[float] | None) -> float | None:
    """Return the maximum over blocks; None if there are no values or the maximum is infinite."""
    return finite_or_none(max(ratios or (), default=None))


def _first_or_bias(one: Evaluation) -> Mapping[str, float | None]:
    first, bias = one.sink_rate_eps or {}, one.sink_rate_bias_eps or {}
    return first if one.sink_rate_bias is None else {eps: _sum_of([first[eps], bias.get(eps)]) for eps in first}


def _early_and_late(m: "Measurement") -> tuple[float, float | None]:
    """Return the mean importance of position 1, percent, in the first quarter of the layers and in the others."""
    layers_L = 100 * m.importance[..., 0].mean(-1)
    early, late = np.split(layers_L, [max(1, len(layers_L) // 4)])
    return float(early.mean()), float(late.mean()) if late.size else None


def _importance_gap(m: "Measurement") -> float | None:
    early, late = _early_and_late(m)
    return None if late is None else late - early


def _first_and_rest(of_heads_ST: np.ndarray) -> tuple[float, float]:
    return float(of_heads_ST[:, 0].mean()), float(of_heads_ST[:, 1:].mean())


def _angles(of: Callable[[float, float, float], float]) -> "Callable[[Measurement, float], float | None]":
    """Return a function that calculates a number from the cosines of the first and of the other keys and the ratio of
    their norm products, over the heads whose mean importance of the first token exceeds eps; None without them."""

    def read(m: "Measurement", eps: float) -> float | None:
        heads_LH, d = m.importance[:, :, 0] > eps, m.details
        if d is None or d.cosine is None or d.norm_product is None or not heads_LH.any() or m.length < 2:
            return None
        product_first, product_rest = _first_and_rest(d.norm_product[heads_LH])
        return None if product_rest == 0 else of(*_first_and_rest(d.cosine[heads_LH]), product_first / product_rest)

    return read


def _gate(of: "Callable[[Measurement, float, float], float]") -> "Callable[[Measurement, float], float | None]":
    """Return a function that calculates a number from the gates of the first and of the other tokens, if any."""

    def read(m: "Measurement", _: float) -> float | None:
        d = m.details
        if d is None or d.gate is None or d.gate_closed is None or m.length < 2:
            return None
        return of(m, *_first_and_rest(d.gate.reshape(-1, m.length)))

    return read


def _kurtosis(m: "Measurement", _: float = 0.0) -> float | None:
    by_block = m.details and m.details.by_layer.get("kurtosis_by_block")
    return max(by_block) if by_block else None


def _excess(m: "Measurement", _: float) -> float | None:
    if (checked := m.propositions) is None:
        return None
    return (
        max(checked.hidden_deviation, checked.attention_deviation or 0.0, -(checked.bound_slack or 0.0))
        / checked.tolerance
    )


def _activation(attribute: str) -> "Callable[[Measurement, float], float | None]":
    return lambda m, _: max((abs(getattr(one, attribute)) for one in m.massive_activations or ()), default=None)


def _score(name: str) -> "Callable[[Measurement, float], float | None]":
    return lambda m, _: (m.scores or {}).get(name)


OTHERS = "highest_rate_except_"
"""Name of the metric of the other positions, without the position."""

HEADS, BLOCKS = "% of heads", "maximum over blocks"
NAMED = (
    Metric("sink_1", "Sink_1", "%", 1, lambda one: _at(one.sink_rate, 1),
           at_eps=lambda one: one.sink_rate_eps, title=SINK_1, place=HEADS),
    Metric("sink_1_visible", "Sink_1 (visible queries)", "%", 1,
           lambda one: _at(one.sink_rate_visible or one.sink_rate, 1),
           at_eps=lambda one: one.sink_rate_visible_eps or one.sink_rate_eps, title=f"{SINK_1} visible", place=HEADS),
    Metric("sink_bias", "Sink rate of the bias", "%", 1, lambda one: one.sink_rate_bias,
           at_eps=lambda one: one.sink_rate_bias_eps, title="Sink on the bias", place=HEADS),
    Metric("sink_1_or_bias", "Sink rate of the first token and the bias", "%", 1,
           lambda one: _sum_of([*one.sink_rate[:1], one.sink_rate_bias or 0.0]), at_eps=_first_or_bias),
    Metric("sink_first_or_bias", "Sink rate of the first token and the bias together", "%", 1,
           lambda one: one.sink_rate_first_or_bias if one.sink_rate_bias is not None else _at(one.sink_rate, 1),
           at_eps=lambda one: one.sink_rate_eps if one.sink_rate_bias is None else one.sink_rate_first_or_bias_eps),
    Metric("dormant_share", "Queries whose largest weight is on the first token or bias", "%", 1,
           lambda one: _mean_percent(one.dormant_heads), of_a_sink=True),
    Metric("sink_growth", "Increase of Sink_1 in the second half", "points", 1,
           of_run=lambda run, _: run.sink_growth(), of_a_sink=True),
    Metric("sink_window_start", "Sink rate of the first key of a window", "%", 1,
           lambda one: one.sink_rate_window_start),
    Metric("valid_loss", "Validation loss", "nats", 3, lambda one: one.valid_loss, about="loss",
           title="Valid. loss", place="nats / token"),
    Metric("train_loss", "Training loss", "nats", 3, lambda one: one.train_loss, about="loss"),
    Metric("norm_ratio", "Norm ratio of the first token", "x", 1, lambda one: _largest(one.hidden_norm_ratio),
           about="norms", title="Norm ratio", place=BLOCKS),
    Metric("norm_ratio_last", "Norm ratio of the first token after the last block", "x", 1,
           lambda one: finite_or_none(one.hidden_norm_ratio[-1]) if one.hidden_norm_ratio else None, about="norms"),
    Metric("norm_growth_last", "Norm ratio after the last block relative to the untrained model", "x", 2,
           of_run=lambda run, at_step: run.growth("norm_ratio_last", at_step), about="norms"),
    Metric("norm_untrained", "Norm ratio of the untrained model", "x", 1,
           of_run=lambda run, _: run.untrained("norm_ratio")),
    Metric("norm_lowest", "Lowest norm ratio after step 0", "x", 1,
           of_run=lambda run, _: min((norm for step, norm in run.known("norm_ratio") if step > 0), default=None)),
    Metric("norm_growth", "Norm ratio relative to the untrained model", "x", 2,
           of_run=lambda run, at_step: run.growth("norm_ratio", at_step), about="norms"),
    Metric("norm_ratio_before_norm", "Norm ratio of the first token before normalisation", "x", 1,
           lambda one: _largest(one.norm_ratio_before_norm), about="norms"),
    Metric("norm_ratio_sink_token", "Norm ratio of the sink token", "x", 1,
           lambda one: _largest(one.norm_ratio_sink_token), about="norms"),
    Metric("norm_growth_sink_token", "Norm ratio of the sink token relative to the untrained model", "x", 2,
           of_run=lambda run, at_step: run.growth("norm_ratio_sink_token", at_step), about="norms"),
    Metric("importance_first", "Mean importance of the first token", "%", 1,
           lambda one: _mean_percent(one.importance_first_heads),
           of_model=lambda m, _: float((100 * m.importance[..., 0].mean(-1)).mean()), of_a_sink=True),
    Metric("kurtosis", "Kurtosis of the hidden states", "x", 1, of_model=_kurtosis, once=True, about="norms",
           title="Kurtosis", place=BLOCKS),
    Metric("emergence_step", "Step at which the sink emerged", "steps", 0,
           of_run=lambda run, _: run.first_step("sink_1", EMERGED), of_a_sink=True),
    Metric("sink_step", "Step at which Sink_1 reached 1 %", "steps", 0,
           of_run=lambda run, _: run.first_step("sink_1", NO_SINK), of_a_sink=True),
    Metric("norm_step", "Step at which the norm of the first token grew", "steps", 0,
           of_run=lambda run, _: run.first_step("norm_ratio", MASSIVE, from_below=True), about="norms"),
    Metric("loss_change", "Jump of the loss at the emergence of the sink", "nats", 3,
           of_run=lambda run, _: run.loss_change(), about="loss", of_a_sink=True),
    Metric("key_norm_ratio", "Norm ratio of the first key", "x", 2, lambda one: _mean_of_finite(one.key_norm_ratio)),
    Metric("value_norm_ratio", "Norm ratio of the first value", "x", 2,
           lambda one: _mean_of_finite(one.value_norm_ratio)),
    Metric("activation_ratio", "Ratio of the largest activation to the median", "x", 0,
           of_model=_activation("ratio_to_median"), about="norms"),
    Metric("largest_activation", "Largest activation", "", 0, of_model=_activation("value"), about="norms"),
    Metric("cosine_first", "cos(q, k) with the first key", "", 2, of_model=_angles(lambda first, rest, ratio: first)),
    Metric("cosine_rest", "cos(q, k) with the other keys", "", 2, of_model=_angles(lambda first, rest, ratio: rest)),
    Metric("cosine_gap", "cos(q, k) with the first key minus the other keys", "", 2,
           of_model=_angles(lambda first, rest, ratio: first - rest)),
    Metric("norm_product_ratio", "Ratio of |q| |k|, first key to the other keys", "x", 2,
           of_model=_angles(lambda first, rest, ratio: ratio)),
    Metric("gate_first", "Gate value of the first token", "", 3, of_model=_gate(lambda m, first, rest: first)),
    Metric("gate_rest", "Gate value of the other tokens", "", 3, of_model=_gate(lambda m, first, rest: rest)),
    Metric("gate_closed", "Share of gates below 0.1", "%", 1,
           of_model=_gate(lambda m, first, rest: 100 * float(m.details.gate_closed.mean()))),  # type: ignore[union-attr]
    Metric("importance_early", "Mean importance of the first token in early layers", "%", 1,
           of_model=lambda m, _: _early_and_late(m)[0]),
    Metric("importance_gap", "Mean importance of the first token, later minus early layers", "points", 1,
           of_model=lambda m, _: _importance_gap(m)),
    Metric("proposition_excess", "Deviation from the proposition relative to rounding error", "x", 2,
           of_model=_excess),
    Metric("sft_loss_fall", "Decrease of the loss by tuning", "nats", 3, once=True, about="loss"),
    Metric("sft_largest_grad_norm", "Largest gradient norm during tuning", "", 2, once=True, about="loss"),
    Metric("sft_sink_change", "Change of Sink_1 by tuning", "points", 1, once=True),
    Metric("accuracy", "Accuracy", "%", 1, of_model=_score("accuracy")),
    Metric("accuracy_norm", "Accuracy, by likelihood per character", "%", 1, of_model=_score("accuracy_norm")),
)  # fmt: skip
NUMBERED = (
    Metric("sink_N", "Sink_{}", "%", 1, lambda k, one: _at(one.sink_rate, k)),
    Metric("sink_N_visible", "Sink_{} (visible queries)", "%", 1,
           lambda k, one: _at(one.sink_rate_visible or one.sink_rate, k)),
    Metric("sink_first_N", "Sink rate of the first {} tokens", "%", 1,
           lambda last, one: _sum_to(one.sink_rate, 1, last)),
    Metric("sink_N_to_N", "Sink rate of tokens {} to {}", "%", 1,
           lambda k, last, one: _sum_to(one.sink_rate, k, last)),
    Metric(f"{OTHERS}N", "Highest sink rate except at {}", "%", 1,
           of_run=lambda k, run, at_step: run.highest_rate_except(k, at_step)),
    Metric("sink_1_layer_N", "Sink_1 of layer {}", "%", 1, lambda layer, one: _mean_of_known(_heads(one, layer))),
    Metric("sink_layer_N", "Sequences with a sink head in layer {}", "%", 1,
           lambda layer, one: highest_known(_heads(one, layer))),
    Metric("norm_ratio_block_N", "Norm ratio of the first token after block {}", "x", 1,
           lambda block, one: _largest(one.hidden_norm_ratio[block : block + 1]), about="norms"),
    Metric("layer_step_N", "Step of the first sink head in layer {}", "steps", 0,
           of_run=lambda layer, run, _: run.first_step(f"sink_layer_{layer}", SINK_HEAD), of_a_sink=True),
)  # fmt: skip
METRICS = {one.name: one for one in NAMED}

STORED = (
    "sink_1", "sink_bias", "importance_first", "valid_loss", "train_loss", "norm_ratio", "norm_untrained",
    "norm_lowest", "norm_growth", "kurtosis", "emergence_step", "norm_step",
)  # fmt: skip
"""Metrics in `CellRun.values` of every run, in addition to those of the experiments' tables and claims."""

BOARD = ("valid_loss", "sink_1", "sink_bias", "norm_ratio", "kurtosis")
"""Metrics with a column in the leaderboard of mitigations, in this order."""


def compared(m: "Measurement") -> "list[tuple[str, str, Callable[[Measurement], float | None]]]":
    """Return the numbers of comparison.json for a measurement like `m`: quantity, unit, and how it is read."""
    found: list[tuple[str, str, Callable[[Measurement], float | None]]] = [
        *((f"Sink_{k + 1}", HEADS, lambda m, k=k: m.sink_rate[k]) for k in range(min(4, m.length))),
        *(
            (f"Sink_1 at eps {eps}", HEADS, lambda m, eps=eps: (m.sink_rates or {})[eps][0])
            for eps in m.sink_rates or {}
            if float(eps) != m.eps
        ),
        ("Sink_1, visible queries", HEADS, lambda m: (m.sink_rate_visible or [None])[0]),
        ("sink on the bias", HEADS, lambda m: m.sink_rate_bias),
        ("importance of position 1", "mean", lambda m: float(m.importance[:, :, 0].mean())),
        ("importance of position 1", "times uniform", lambda m: m.uniform_ratio[0]),
        ("loss", "nats/token", lambda m: m.loss),
        ("bits per byte", "bits/byte", lambda m: m.bits_per_byte),
        ("|h_1| over the rest", "largest block", lambda m: max(m.hidden_norm_ratio or [], default=None)),
        ("|k_1| over the rest", "mean layer", lambda m: fmean(m.key_norm_ratio) if m.key_norm_ratio else None),
        ("|v_1| over the rest", "mean layer", lambda m: fmean(m.value_norm_ratio) if m.value_norm_ratio else None),
        ("largest activation", "absolute", lambda m: _activation("value")(m, m.eps)),
        ("largest activation", "over median", lambda m: _activation("ratio_to_median")(m, m.eps)),
    ]
    return found


def metric(name: str) -> Metric | None:
    """Return the metric with this name; None if there is none."""
    found = METRICS.get(name)
    return found or next((one for of in NUMBERED if (one := of.with_numbers(name))), None)
