"""Whether one cell lies above another by no more, or by no less, than so much in the unit that people read.

On the transformed scale a margin is as wide as the mean that it is laid on makes it, and that mean is an estimate like
the other one. The test of "high is low + margin" therefore rests on y_high - T(low + margin) with T the transform, and
its standard error has the slope of T(low + margin) in y_low as the weight of the lower cell. Of rates whose sum is
above 100 % the same is asked the other way round, T(high - margin) - y_low, as there the margin may lead beyond 100 %.
"""

from sinklab.experiments.verdicts.estimates import MeanOverSeeds
from sinklab.experiments.verdicts.observations import Observations
from sinklab.experiments.verdicts.transforms import slope, transformed


def beyond_margin(seen: Observations, high: str, low: str, margin: float) -> MeanOverSeeds | None:
    """Above 0 where `high` is further above `low` than the margin, in the quantity's unit, and below 0 where it is not.

    None where no number of the kind is so far away, or no seed has both.
    """
    seeds = seen.shared((high, low))
    if not seeds:
        return None
    highest, lowest = (seen.turned_back(seen.mean_y(cell, seeds), cell) for cell in (high, low))
    if seen.quantity.measure == "rate" and highest + lowest > 100:
        target = highest - margin
        return _apart(seen, high, low, target, _weight(seen, high, highest, low, target)) if target > 0 else None
    target = lowest + margin
    if seen.quantity.measure == "rate" and target >= 100:
        return None
    found = _apart(seen, low, high, target, _weight(seen, low, lowest, high, target))
    return found and found.negated()


def beyond_times(seen: Observations, high: str, low: str, times: float) -> MeanOverSeeds | None:
    """Above 0 where `high` is more than so many times `low`, below 0 where it is not; else as `beyond_margin`."""
    seeds = seen.shared((high, low))
    if not seeds:
        return None
    lowest = seen.turned_back(seen.mean_y(low, seeds), low)
    target = lowest * times
    if seen.quantity.measure == "rate" and target >= 100:
        return None
    found = _apart(seen, low, high, target, times * _weight(seen, low, lowest, high, target))
    return found and found.negated()


def _weight(seen: Observations, around: str, value: float, other: str, target: float) -> float:
    """How far the target moves, as it is compared with the other cell, when the cell it is laid on does."""
    measure = seen.quantity.measure
    return slope(target, measure, seen.triples(other)) / slope(value, measure, seen.triples(around))


def _apart(seen: Observations, around: str, other: str, target: float, weight: float) -> MeanOverSeeds | None:
    """The target less the other cell; the target moves with the cell that it is laid on."""
    found = seen.contrast({around: weight, other: -1.0})
    if found is None:
        return None
    seeds = seen.shared((around, other))
    mean = transformed(target, seen.quantity.measure, seen.triples(other)) - seen.mean_y(other, seeds)
    return found.moved_to(mean)
