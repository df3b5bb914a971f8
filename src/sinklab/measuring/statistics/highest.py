"""Position with the highest sink rate: the sink may be at another position than the first, as after an intervention."""

import math
from collections.abc import Sequence

NOISE = 1.0
"""Minimum rate in percent that is called a sink."""


def highest_rate(rates: Sequence[float | None]) -> tuple[int, float] | None:
    """Return the position (1-based) with the highest sink rate among 1 .. T / 2, and that rate; None if unknown.

    Later positions are seen by few queries, including themselves, and may exceed the threshold without being sinks.

    Args:
        rates: sink rate in percent by position, position 1 first; None or NaN if unknown.
    """
    known = {
        position: rate
        for position, rate in enumerate(rates[: max(1, len(rates) // 2)], 1)
        if rate is not None and not math.isnan(rate)
    }
    best = max(known, key=known.__getitem__, default=None)
    return None if best is None else (best, known[best])


def sink_elsewhere(rates: Sequence[float | None]) -> tuple[int, float] | None:
    """Return `highest_rate` if its position is not 1 and its rate at least 1 percent, else None."""
    found = highest_rate(rates)
    return found if found and found[0] > 1 and found[1] >= NOISE else None


def elsewhere_text(rates: Sequence[float | None]) -> str:
    """Return a text such as `76.8 % at position 2`, shown with Sink_1; empty if `sink_elsewhere` returns None."""
    found = sink_elsewhere(rates)
    return f"{found[1]:.1f} % at position {found[0]}" if found else ""


def in_brackets(text: str) -> str:
    """Put a text in parentheses with a leading space; an empty text stays empty."""
    return f" ({text})" if text else ""
