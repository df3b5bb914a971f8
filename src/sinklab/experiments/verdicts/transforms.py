"""The scales on which numbers are compared: rates as logits, what is above zero as logarithms, all else as it is.

A rate of k out of N triples counts as (k + 1/2) / (N + 1), so that 0 % and 100 % have a logit.
"""

import math

from sinklab.experiments.quantities import Measure


def transformed(value: float, measure: Measure, triples: int) -> float:
    """A number as it is compared.

    Args:
        value: percent for a rate, above zero where it is positive.
        triples: that a rate is over.
    """
    if measure == "plain":
        return value
    if measure == "positive":
        return math.log(value)
    hits = min(max(value / 100, 0.0), 1.0) * triples
    return math.log((hits + 0.5) / (triples - hits + 0.5))


def turned_back(y: float, measure: Measure, triples: int) -> float:
    """The number that is compared as `y`; beyond 0 % and 100 % it is these."""
    if measure == "plain":
        return y
    if measure == "positive":
        return math.exp(min(y, 700.0))
    share = 1 / (1 + math.exp(-y)) if y > 0 else math.exp(y) / (1 + math.exp(y))
    hits = share * (triples + 1) - 0.5
    return 100 * min(max(hits / triples, 0.0), 1.0)


def slope(value: float, measure: Measure, triples: int) -> float:
    """How fast a number moves as it is compared, per step in the unit that people read: dy / d(value)."""
    if measure == "plain":
        return 1.0
    if measure == "positive":
        return 1 / value
    share = (value / 100 * triples + 0.5) / (triples + 1)
    return triples / (triples + 1) / 100 / (share * (1 - share))
