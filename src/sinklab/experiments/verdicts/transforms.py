"""The scales on which numbers are compared: rates as logits, what is above zero as logarithms, and back again.

A rate of k out of N triples counts as (k + 1/2) / (N + 1), so that 0 % and 100 % have a logit.
"""

import math

from sinklab.experiments.quantities import Measure


def transformed(value: float, measure: Measure, triples: int) -> float:
    """A number as it is compared.

    Args:
        value: percent for a rate, otherwise above zero.
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


def shifted(y: float, by: float, measure: Measure, triples: int) -> float:
    """How far on the transformed scale a step in the unit that people read leads from `y`.

    Infinite where it leads to the end of what such a number can be or beyond: to nothing, to 100 %.
    """
    value = turned_back(y, measure, triples) + by
    if measure != "plain" and by < 0 and value <= 0:
        return -math.inf
    if by > 0 and measure == "rate" and value >= 100:
        return math.inf
    return transformed(value, measure, triples) - y
