"""Progress of training runs and of data preparation: live in a terminal, plain lines elsewhere, and the time left."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
)

from sinklab.commands.ending import PLAIN
from sinklab.commands.terminal.bars import SPEAKS_EVERY, Clock, Lines
from sinklab.measuring.statistics.highest import elsewhere_text, in_brackets

if TYPE_CHECKING:
    from sinklab.experiments.sweep.engine import Event

MANY = 8  # runs: of more, only those in progress have a line
LOOKS_EVERY = 1.0  # seconds between two estimates of the time left
STALLED = 0.02  # share of the time spent waiting for data from which on it is shown
SECONDS_OF_A_YEAR = 365.25 * 86400
DAYS_WITH_HOURS = 10  # from here on without hours


@dataclass(frozen=True)
class RunLength:
    """The updates of a run, and the updates between two evaluations."""

    steps: int
    eval_every: int

    def evaluations_after(self, step: int) -> int:
        """Evaluations left after that of `step`, with the last one and the final measurement."""
        regular = self.steps // self.eval_every - step // self.eval_every
        return regular + (self.steps % self.eval_every > 0) + 1


@dataclass
class _Pace:
    """Seconds that a run has spent on updates (and saves) and on evaluations, and their numbers."""

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
        lengths: of the runs, by name, in the order in which they start.
        jobs: number of concurrent runs.
    """

    def __init__(self, lengths: Mapping[str, RunLength], jobs: int) -> None:
        self._lengths, self._jobs = dict(lengths), jobs
        self._paces = {name: _Pace() for name in lengths}

    def reached(self, name: str, step: int, now: float, evaluated: bool = False) -> None:
        """Record an update or an evaluation of a run, or its start at `step`; `now` in seconds."""
        pace = self._paces[name]
        if pace.since is not None and evaluated:
            pace.evaluating, pace.evaluations = pace.evaluating + now - pace.since, pace.evaluations + 1
        elif pace.since is not None and step > pace.step:
            pace.updating, pace.updates = pace.updating + now - pace.since, pace.updates + step - pace.step
        pace.step, pace.since = step, now

    def ended(self, name: str) -> None:
        """Record that a run is done, has stopped or has failed."""
        self._paces[name].ended = True

    def seconds_left(self, now: float) -> float | None:
        """Seconds until the last run is done; None before every run in progress has made an update."""
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


class RunBoard:
    """A line per run (steps, losses, sink rate) and the time left; of many runs, only those in progress.

    Without a terminal: a line per evaluation, and one after each longer silence. Failures are printed at once.

    Args:
        console: where to print.
        lengths: of the runs, by name.
        jobs: number of concurrent runs.
        clock: seconds.
    """

    def __init__(
        self,
        console: Console,
        lengths: Mapping[str, RunLength],
        jobs: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console, self.lengths, self.clock = console, lengths, clock
        self.forecast = Forecast(lengths, jobs)
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[latest]}", markup=False),
            console=console,
            disable=not console.is_terminal,
        )
        self.many = len(lengths) > MANY
        self.tasks = {
            name: self.progress.add_task(name, total=length.steps, latest="waiting", visible=not self.many)
            for name, length in lengths.items()
        }
        self.steps = dict.fromkeys(lengths, 0)
        self.said = self.looked = clock()
        total = sum(length.steps for length in lengths.values())
        self.ended = 0
        self.whole = self.progress.add_task("all", total=total, latest="")

    def __enter__(self) -> "RunBoard":
        self.progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.progress.stop()

    def watch(self, event: "Event") -> None:
        """Show an event."""
        now, latest = self.clock(), event.kind
        if event.kind in ("ready", "step", "row"):
            self.forecast.reached(event.run, event.step, now, evaluated=event.kind == "row")
            self.steps[event.run] = event.step
        else:
            self.forecast.ended(event.run)
            self.ended += 1
            self.steps[event.run] = event.step or self.steps[event.run]
            if event.kind == "failed":
                self.progress.console.print(f"{event.run} failed: {event.message}", **PLAIN)
        if event.row is not None:
            latest = describe(event.row)
        if event.kind != "step":
            shown = not self.many or not event.is_last
            self.progress.update(self.tasks[event.run], latest=latest, visible=shown)
        self.progress.update(self.tasks[event.run], completed=self.steps[event.run])
        if event.row is not None or event.is_last or now - self.looked >= LOOKS_EVERY:
            self.looked = now
            self._show(event, now, latest if event.row is not None else "")

    def _show(self, event: "Event", now: float, latest: str) -> None:
        seconds = self.forecast.seconds_left(now)
        left = "" if not seconds else f"about {duration(seconds)} left"
        ended = f"{self.ended} of {len(self.lengths)} runs" if self.many else ""
        shown = "  ".join(filter(None, (ended, left)))
        self.progress.update(self.whole, completed=sum(self.steps.values()), latest=shown)
        if not self.console.is_terminal and (latest or now - self.said >= SPEAKS_EVERY):
            self.said = now
            reached = f"{event.run}: step {event.step}/{self.lengths[event.run].steps}"
            whole = left if len(self.lengths) == 1 or not left else f"{left} for all"
            whole = f"{ended}  {whole}" if ended else whole
            said = "  ".join(filter(None, (reached, latest, whole)))
            self.console.print(said, **PLAIN)


def describe(row: dict[str, Any]) -> str:
    """One evaluation in a few words."""
    parts = [
        f"loss {row['valid_loss']:.3f}",
        f"Sink_1 {row['sink_rate'][0]:.1f} %" + in_brackets(elsewhere_text(row["sink_rate"])),
    ]
    if row.get("sink_rate_visible"):
        parts.append(f"over visible queries {row['sink_rate_visible'][0]:.1f} %")
    if row["sink_rate_bias"] is not None:
        parts.append(f"bias {row['sink_rate_bias']:.1f} %")
    if row["tokens_per_second"]:
        parts.append(f"{row['tokens_per_second']:,.0f} tokens/s")
    if row.get("mfu"):
        parts.append(f"{row['mfu']:.0%} of peak")
    if (row.get("stall_share") or 0) >= STALLED:
        parts.append(f"waited for data {row['stall_share']:.0%}")
    return "  ".join(parts)


class DataBoard:
    """A bar over the bytes of text while data is prepared, and how fast tokens are written."""

    def __init__(self, console: Console, progress: Progress, clock: Clock = time.monotonic) -> None:
        self._console, self._progress, self._lines = console, progress, Lines(console, clock)
        self._tasks: dict[str, Any] = {}
        self._start: tuple[float, int] | None = None
        self._rate = ""

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """Show the progress of a stage; the `progress` of `prepare`."""
        name = {"tokenizer": "training the tokenizer", "tokens": "preparing tokens"}.get(stage, stage)
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(name, total=total, rate="")
            if not self._console.is_terminal:
                self._lines.say(f"{name} ...")
        self._progress.update(self._tasks[stage], completed=done, total=total, rate=self._rate)
        self._lines.reached(name, done / 1e6, total and total / 1e6, self._rate, unit="MB")

    def counted(self, tokens: int) -> None:
        """Update the rate from the number of tokens so far; the `counted` of `prepare`."""
        now = time.monotonic()
        if self._start is None:
            self._start = now, tokens
        elif now > self._start[0]:
            self._rate = f"{(tokens - self._start[1]) / (now - self._start[0]):,.0f} tokens/s"


@contextmanager
def data_progress(console: Console) -> Iterator[DataBoard]:
    """A live board while data is prepared; without a terminal, a line per stage."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        DownloadColumn(),
        TextColumn("{task.fields[rate]}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield DataBoard(console, progress)
