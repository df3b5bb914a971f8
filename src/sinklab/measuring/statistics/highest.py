"""The position with the highest sink rate: a change may move the sink from the first token to another."""

import math
from collections.abc import Sequence

NOISE = 1.0
"""Percent below which the rate at a later position does not count as a sink."""


def highest_rate(rates: Sequence[float | None]) -> tuple[int, float] | None:
    """Position (1-based) and sink rate of the highest of positions 1 to T / 2; None if all are unknown.

    Later positions are seen by few queries, their own among them, and exceed any threshold without being sinks.

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


def sink_elsewhere(rates: Sequence[float | None]) -> tuple[int, float] | None:
    """The highest of `highest_rate` where that is not position 1 and at least 1 percent; None elsewhere."""
    found = highest_rate(rates)
    return found if found and found[0] > 1 and found[1] >= NOISE else None


def elsewhere_text(rates: Sequence[float | None]) -> str:
    """`76.8 % at position 2`, shown beside Sink_1; empty if no later position has a higher rate."""
    found = sink_elsewhere(rates)
    return f"{found[1]:.1f} % at position {found[0]}" if found else ""


def in_brackets(text: str) -> str:
    """` (text)` to append to a number; empty for an empty text."""
    return f" ({text})" if text else ""
