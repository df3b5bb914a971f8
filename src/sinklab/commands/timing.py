"""Durations as text."""

SECONDS_OF_A_YEAR = 365.25 * 86400
DAYS_WITH_HOURS = 10  # from here on hours are left out


def duration(seconds: float) -> str:
    """A duration for people: `40 s`, `5 min`, `3 h 20 min`, `2 d 4 h`, `136 d`, `1.4 years`, `27 years`."""
    minutes = round(seconds / 60)
    if seconds < 59.5:
        return f"{max(1, round(seconds))} s"
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(round(seconds / 3600), 24)
    years = seconds / SECONDS_OF_A_YEAR
    if days >= DAYS_WITH_HOURS:
        whole_days = round(seconds / 86400)
        return (
            f"{whole_days} d" if whole_days < 365 else f"{years:.1f} years" if years < 9.95 else f"{years:,.0f} years"
        )
    return f"{days} d {hours} h" if hours else f"{days} d"


def short_duration(seconds: float) -> str:
    """A duration in one unit, for tables: `40 s`, `5 min`, `3.3 h`, `2.3 d`, `136 d`, `1.4 y`, `1,302 y`."""
    if seconds < 3570:
        return duration(seconds)
    if seconds < 23.95 * 3600:
        value, unit = seconds / 3600, "h"
    elif seconds < 364.5 * 86400:
        value, unit = seconds / 86400, "d"
    else:
        value, unit = seconds / SECONDS_OF_A_YEAR, "y"
    return f"{value:.1f} {unit}" if value < 9.95 else f"{value:,.0f} {unit}"
