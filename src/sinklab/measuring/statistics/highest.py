"""The position with the highest sink rate: a sink that a change takes from the first token may stand at another."""

import math
from collections.abc import Sequence


def highest_rate(rates: Sequence[float | None]) -> tuple[int, float] | None:
    """Position (1-based) and sink rate of the highest of positions 1 to T / 2; None where none is known.

    Later positions are seen by few queries, their own among them, and pass any threshold without being sinks.

    Args:
        rates: percent by position, position 1 first; None or NaN where unknown.
    """
    known = {
        position: rate
        for position, rate in enumerate(rates[: max(1, len(rates) // 2)], 1)
        if rate is not None and not math.isnan(rate)
    }
    best = max(known, key=known.__getitem__, default=None)
    return None if best is None else (best, known[best])
