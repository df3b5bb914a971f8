"""Position with the highest sink rate, which is not always the first position, for example after an intervention."""

import math
from collections.abc import Sequence

NO_SINK = 1.0
"""Sink rate in percent below which a model has no sink."""


def highest_rate(rates: Sequence[float | None]) -> tuple[int, float] | None:
    """Return the position (1-based) with the highest sink rate among 1 .. T / 2, and this rate.

    None if no rate is known. Later positions are excluded: few queries see them, and one of these is the query at the
    same position, so that alpha may be above the threshold without a sink. If T is 1, position 1 is included.

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


def later_sink(rates: Sequence[float | None]) -> tuple[int, float] | None:
    """Return the result of `highest_rate` if the position is not 1 and the rate at least 1 percent, else None."""
    found = highest_rate(rates)
    return found if found and found[0] > 1 and found[1] >= NO_SINK else None


def later_sink_text(rates: Sequence[float | None]) -> str:
    """Return a text such as `76.8 % at position 2`, shown with Sink_1; empty if `later_sink` returns None."""
    found = later_sink(rates)
    return f"{found[1]:.1f} % at position {found[0]}" if found else ""


def in_brackets(text: str) -> str:
    """Put a text in parentheses with a leading space; an empty text stays empty."""
    return f" ({text})" if text else ""
