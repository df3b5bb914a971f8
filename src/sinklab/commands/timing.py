"""When runs that go on side by side will all be done, from what they have reported so far."""

from collections.abc import Mapping
from dataclasses import dataclass

SECONDS_OF_A_YEAR = 365.25 * 86400
DAYS_WITH_HOURS = 10  # from here on hours are not said


@dataclass(frozen=True)
class RunLength:
    """Of a run: its updates, and after how many of them it is evaluated each time."""

    steps: int
    eval_every: int

    def evaluations_after(self, step: int) -> int:
        """Those still to come after that of `step`, with the one at the end and the measurement after it."""
        regular = self.steps // self.eval_every - step // self.eval_every
        return regular + (self.steps % self.eval_every > 0) + 1


@dataclass
class _Pace:
    """Seconds that a run has spent on updates (and saves in between) and on evaluations, and how many there were."""

    step: int = 0
    since: float | None = None
    updating: float = 0.0
    updates: int = 0
    evaluating: float = 0.0
    evaluations: int = 0
    ended: bool = False


class Forecast:
    """Seconds until all runs are done.

    Args:
        lengths: of the runs, by name, in the order in which they are begun.
        jobs: so many at a time.
    """

    def __init__(self, lengths: Mapping[str, RunLength], jobs: int) -> None:
        self._lengths, self._jobs = dict(lengths), jobs
        self._paces = {name: _Pace() for name in lengths}

    def reached(self, name: str, step: int, now: float, evaluated: bool = False) -> None:
        """A run has made an update or an evaluation, or is ready to go on from `step`; `now` in seconds."""
        pace = self._paces[name]
        if pace.since is not None and evaluated:
            pace.evaluating, pace.evaluations = pace.evaluating + now - pace.since, pace.evaluations + 1
        elif pace.since is not None and step > pace.step:
            pace.updating, pace.updates = pace.updating + now - pace.since, pace.updates + step - pace.step
        pace.step, pace.since = step, now

    def ended(self, name: str) -> None:
        """A run is done, or has stopped or failed."""
        self._paces[name].ended = True

    def seconds_left(self, now: float) -> float | None:
        """Until the last run is done; None before there was an update of each of those that are under way."""
        under_way = [name for name, pace in self._paces.items() if pace.since is not None and not pace.ended]
        waiting = [name for name, pace in self._paces.items() if pace.since is None and not pace.ended]
        if any(not self._paces[name].updates for name in under_way):
            return None
        known = [pace for pace in self._paces.values() if pace.updates]
        if not known or not (under_way or waiting):
            return None if waiting else 0.0
        per_update = sum(pace.updating for pace in known) / sum(pace.updates for pace in known)
        evaluations = sum(pace.evaluations for pace in known)
        per_evaluation = sum(pace.evaluating for pace in known) / evaluations if evaluations else 0.0
        free_at = [self._left(name, self._paces[name], per_evaluation, now) for name in under_way]
        free_at = sorted(free_at + [0.0] * (self._jobs - len(free_at)))
        for name in waiting:  # the next begins where one ends first
            length = self._lengths[name]
            whole = length.steps * per_update + (length.evaluations_after(0) + 1) * per_evaluation
            free_at = sorted([free_at[0] + whole, *free_at[1:]])
        return max(free_at)

    def _left(self, name: str, pace: _Pace, per_evaluation: float, now: float) -> float:
        length = self._lengths[name]
        each = pace.evaluating / pace.evaluations if pace.evaluations else per_evaluation
        left = (length.steps - pace.step) * pace.updating / pace.updates + length.evaluations_after(pace.step) * each
        return max(0.0, left - (now - (pace.since or now)))


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
