"""What commands print: live progress in a terminal, plain lines elsewhere; everything but results goes to stderr."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
)

from sinklab.commands.terminal.bars import SPEAKS_EVERY, Clock, Lines
from sinklab.commands.timing import Forecast, RunLength, duration
from sinklab.experiments.sweep.engine import Event
from sinklab.measuring.statistics.highest import elsewhere_text, in_brackets


class RunBoard:
    """A line per run (steps, losses, the sink so far) and when all will be done; of many, only those under way.

    Without a terminal: a line per evaluation, and where none comes for a while, a line all the same. What failed is
    said at once.

    Args:
        console: where to print.
        lengths: of the runs, by name.
        jobs: how many go on at a time.
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

    def watch(self, event: Event) -> None:
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

    def _show(self, event: Event, now: float, latest: str) -> None:
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


MANY = 8  # runs: of more, only those under way have a line
PLAIN: Any = {"highlight": False, "markup": False, "soft_wrap": True}
LOOKS_EVERY = 1.0  # seconds: how often the time that is left is counted anew
STALLED = 0.02  # share of the time from which on waiting for data is worth a word


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
        """Show how far a stage is; what `prepare` takes as `progress`."""
        name = {"tokenizer": "training the tokenizer", "tokens": "preparing tokens"}.get(stage, stage)
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(name, total=total, rate="")
            if not self._console.is_terminal:
                self._lines.say(f"{name} ...")
        self._progress.update(self._tasks[stage], completed=done, total=total, rate=self._rate)
        self._lines.reached(name, done / 1e6, total and total / 1e6, self._rate, unit="MB")

    def counted(self, tokens: int) -> None:
        """Take in how many tokens there are by now; what `prepare` takes as `counted`."""
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
