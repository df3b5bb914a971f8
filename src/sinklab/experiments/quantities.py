"""Metrics of a run: means over its last evaluations, steps, growth, and the jump of the loss.

The metrics are declared in `measuring/registry.py`; the numbers of assessments in `assessing/parts/` are metrics too.
"""

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import fmean
from typing import Annotated

import numpy as np
from pydantic import AfterValidator

from sinklab.assessing.parts import NUMBERS
from sinklab.measuring.registry import EMERGED, METRICS, SUBJECTS, ClaimSubject, Evaluation, Metric, metric
from sinklab.tables import highest_rate
from sinklab.train.evaluator import OTHER_EPS

__all__ = ["EMERGED", "SUBJECTS", "ClaimSubject"]

AVERAGED = 3
"""Number of final evaluations over which a run's metrics are averaged."""

JUMP_WINDOW = 2.0
"""Factor w: a jump at step s is fitted to the evaluations from step s / w to step s * w."""

JUMP_POINTS = 8
"""Minimum number of points on either side of a jump."""

NORMS = {one.name for one in METRICS.values() if one.about == "norms"}
"""Metrics of massive activations. `Experiment.requires_massive` applies to the claims that use one of them."""

AT_EPS = {one.name: one.at_eps for one in METRICS.values() if one.at_eps}
"""Functions that return the sink rates of an evaluation by threshold (with `OTHER_EPS_TEXTS`), by metric."""

OTHER_EPS_TEXTS = tuple(f"{eps:g}" for eps in OTHER_EPS)
"""Additional values of eps at which runs record sink rates, as in metrics.jsonl."""

_ASSESSED = {one.name: one for one in NUMBERS}


def subject_of(name: str) -> ClaimSubject:
    """Return the subject of claims on a quantity; an empty name is that of the checks `diverges` and `trains`."""
    if not name:
        return "loss"
    found = metric(name)
    return found.about if found else "sinks"


@cache
def quantity(name: str) -> Metric:
    """Return the metric or number of an assessment with this name.

    Raises:
        ValueError: if the name is unknown; the message lists the valid names.
    """
    if found := metric(name):
        return found
    for one in NUMBERS:
        if match := re.fullmatch(one.name.replace("N", r"(0|[1-9]\d*)"), name):
            label = one.label.replace("N", match[1]) if match.groups() else one.label
            return Metric(name, label, "nats", 3, once=True)
    known = [*METRICS, *_ASSESSED]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    meant = f", do you mean {' or '.join(near)}?" if near else "."
    raise ValueError(
        f"unknown quantity {name!r}{meant} Choose from: sink_1 (2, 3, ..), sink_first_5, sink_2_to_5, sink_1_layer_1, "
        f"sink_layer_1, layer_step_1, norm_ratio_block_1 (N from 0), {', '.join(known)}"
    )


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

    def highest_rate_except(self, position: int, at_step: int | None) -> float:
        """Return the highest sink rate (`highest_rate`) of the other positions, percent; 0 without other positions."""
        positions = range(1, len(self.last.sink_rate) + 1)
        rates = [None if k == position else self.value(f"sink_{k}", at_step) for k in positions]
        return (highest_rate(rates) or (0, 0.0))[1]

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
