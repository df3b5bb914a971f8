"""Whether a curve jumps at a known time, as in an interrupted time series."""

from collections.abc import Sequence

import numpy as np

WINDOW = 2.0
"""The curve is looked at from the step over this to the step times this."""

FEWEST = 8
"""Points on either side, without which nothing is said."""


def jump_at(steps: Sequence[int], values: Sequence[float], at: float) -> float | None:
    """The size of the jump that a curve makes at one step; what sets in over several points is no jump.

    Least squares of value = a + b x + c x^2 + e x^3 + d [x >= 0], x = ln(step / at), over the points of the window; the
    jump is d. The powers take up the bend of a learning curve, which without the cube would count as up to 0.026 nats
    for the exponentials of the tests and with it as 0.004, and whatever else changes gradually.

    Args:
        steps: above zero, rising.
        values: one per step.
        at: the step of the jump.

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
