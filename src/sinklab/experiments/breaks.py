"""Whether a curve has a break at a known time: the level change of an interrupted time series."""

from collections.abc import Sequence

import numpy as np

WINDOW = 2.0
"""The curve is looked at from the step over this to the step times this."""

FEWEST = 4
"""Points on either side, without which nothing is said."""


def level_change(steps: Sequence[int], values: Sequence[float], at: float) -> float | None:
    """By how much a curve lies higher from a step on than what was before would have led to.

    Least squares of value = a + b x + c x^2 + e x^3 + d [x >= 0], x = ln(step / at), over the points of the window;
    d is the level change, as in segmented regression. The powers take up the bend that any learning curve has: without
    the cube an exponential one would count as a change of up to 0.026 nats, with it of 0.004.

    Args:
        steps: above zero, rising.
        values: one per step.
        at: the step of the break.

    Returns:
        d in the unit of the values; None where either side has fewer points than `FEWEST`.
    """
    t, y = np.asarray(steps, dtype=float), np.asarray(values, dtype=float)
    near = (t >= at / WINDOW) & (t <= at * WINDOW)
    x, y = np.log(t[near] / at), y[near]
    after = x >= 0
    if min(after.sum(), (~after).sum()) < FEWEST:
        return None
    design = np.stack([after.astype(float), np.ones_like(x), x, x**2, x**3], axis=1)
    return float(np.linalg.lstsq(design, y, rcond=None)[0][0])
