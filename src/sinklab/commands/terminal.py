"""Consoles, texts and tables in a terminal of any width, and the progress of training runs, data preparation and jobs.

Progress is shown as bars in a terminal, and as plain lines otherwise.

Text is wrapped; numbers are not (Rich alone would break 92.47 into 92.4 and 7). Columns that do not fit are printed
below, with the row names repeated. A word longer than its column, such as a recipe key, is broken after punctuation if
possible.
"""

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table as RichTable
from rich.text import Text

from sinklab.tables import Table, in_brackets, later_sink_text

if TYPE_CHECKING:
    from sinklab.experiments.sweep.engine import Event
    from sinklab.jobs import JobEvent

NARROWEST_NAME = 18  # minimum width in characters of a column of wrapped text
BETWEEN, EDGES = 3, 1  # characters of padding and borders, per column and per table
TONES = {
    "reproduced": "bold green",
    "direction only": "bold cyan",
    "contradicted": "bold red",
    "inconclusive": "bold yellow",
    "no verdict": "yellow",
    "not asked": "dim",
    "not run": "dim",
    "warn": "red",
}


def stderr() -> Console:
    """Return a rich console on stderr, for all output except results."""
    return Console(stderr=True, emoji=False)


def printable(text: str) -> str:
    """Replace non-printable characters, including line feeds, by `�`, because names may contain control sequences."""
    return "".join(character if character.isprintable() else "�" for character in text)


def print_table(table: Table, console: Console) -> None:
    """Print a table with its notes; columns beyond the console width are printed below as further tables."""
    names, cells, wanted = list(range(table.names)), table.cells(), list[int]()
    for at, column in enumerate(table.columns):  # the width of the longest line of each column, heading included
        texts = (f"{text} {cell.note}".strip() for text, cell in (row[at] for row in cells))
        lines = (line for text in (column.title, column.unit, *texts) for line in printable_lines(text))
        wanted.append(max(map(cell_len, lines)))
    least = [min(width, NARROWEST_NAME) if table.columns[at].text else width for at, width in enumerate(wanted)]
    groups: list[list[int]] = [[]]
    for column in range(table.names, len(table.columns)):
        if groups[-1] and EDGES + sum(BETWEEN + least[at] for at in (*names, *groups[-1], column)) > console.width:
            groups.append([])
        groups[-1].append(column)
    for number, group in enumerate(groups):
        title = "" if number else table.title
        console.print(_drawn(table, [*names, *group], title, console.width, wanted))
    for note in table.notes:
        console.print(printable(note), style="dim", markup=False, highlight=False)


def print_text(text: str, console: Console) -> None:
    """Print a text without wrapping and markup; non-printable characters are replaced, line feeds are kept."""
    console.print("\n".join(printable_lines(text)), highlight=False, markup=False, emoji=False, soft_wrap=True)


def print_notes(notes: Iterable[str], console: Console) -> None:
    """Print each note or warning on a line of its own."""
    for note in notes:
        console.print(Text("note: ", style="yellow"), Text(printable(note)), sep="")


def print_title(title: str, console: Console, below: Sequence[str] = ()) -> None:
    """Print a title, and on the next line the texts of `below`, separated by commas."""
    console.print(Text(printable(title), style="bold"))
    if below:
        console.print(Text(printable(", ".join(below)), style="dim"))


def broken(text: str, width: int) -> str:
    """Return the text with words longer than `width` broken into lines, if possible after punctuation."""

    def lines(word: str) -> Iterator[str]:
        while len(word) > width:
            end = max((found.end() for found in re.finditer(r"[_./=,:-]", word[:width])), default=width)
            yield word[:end]
            word = word[end:]
        yield word

    return re.sub(rf"\S{{{width + 1},}}", lambda found: "\n".join(lines(found[0])), text)


def printable_lines(text: str) -> list[str]:
    """Return the lines of a text, with non-printable characters replaced."""
    return [printable(line) for line in text.split("\n")]


def _drawn(table: Table, columns: Sequence[int], title: str, width: int, wanted: Sequence[int]) -> RichTable:
    heading = Text(printable(title), style="bold") if title else None
    drawn = RichTable(title=heading, title_justify="left", header_style="bold", box=SIMPLE_HEAD)
    texts = sorted((at for at in columns if table.columns[at].text), key=wanted.__getitem__)
    left = width - EDGES - BETWEEN * len(columns) - sum(wanted[at] for at in columns if at not in texts)
    widths: dict[int, int] = {}
    for number, at in enumerate(texts):  # short texts in full, long ones equal shares of the remaining width
        widths[at] = max(1, min(wanted[at], left // (len(texts) - number)))
        left -= widths[at]
    for at in columns:
        column = table.columns[at]
        head = Text(printable(column.title))
        if column.unit:
            head.append(f"\n{printable(column.unit)}", "dim")
        justify = "left" if column.text else "right"
        drawn.add_column(head, justify=justify, no_wrap=not column.text, overflow="fold", width=widths.get(at))
    for row in table.cells():
        shown = []
        for at in columns:
            text, cell = row[at]
            shown_text = "\n".join(printable_lines(f"{text} {cell.note}".strip()))
            shown.append(Text(broken(shown_text, widths[at]) if at in widths else shown_text, TONES.get(cell.tone, "")))
        drawn.add_row(*shown)
    return drawn


PROGRESS_INTERVAL = 10.0  # minimum seconds between progress lines without a terminal
BEATS_EVERY = 1.0  # seconds between checks whether a progress line is due

MANY = 8  # with more runs, only active runs are displayed
LOOKS_EVERY = 1.0  # minimum seconds between estimates of the remaining time
SPEED_OVER = 600.0  # seconds over which the speed is averaged, evaluations included
SPEED_AFTER = 10.0  # seconds of training before the remaining time is estimated
STALLED = 0.02  # the share of time spent waiting for data is displayed from this value on
YEAR = 365.25 * 86400  # seconds
DAYS_WITH_HOURS = 10  # durations of more days are shown without hours

Clock = Callable[[], float]


def duration(seconds: float) -> str:
    """Format a duration for display: `40 s`, `5 min`, `3 h 20 min`, `2 d 4 h`, `136 d`, `1.4 years`, `27 years`."""
    minutes, hours, days, years = (round(seconds / 60), round(seconds / 3600), round(seconds / 86400), seconds / YEAR)
    if seconds < 59.5:
        return f"{max(1, round(seconds))} s"
    if minutes < 24 * 60:
        return _two_units(minutes, 60, "h", "min")
    if hours < 24 * DAYS_WITH_HOURS:
        return _two_units(hours, 24, "d", "h")
    return f"{days} d" if days < 365 else f"{years:.1f} years" if years < 9.95 else f"{years:,.0f} years"


def _two_units(count: int, size: int, large: str, small: str) -> str:
    parts = zip(divmod(count, size), (large, small), strict=True)
    return " ".join(f"{number} {unit}" for number, unit in parts if number)


def elapsed(seconds: float) -> str:
    """Format the duration of a running phase: as `duration`, but from 1 to 10 minutes with seconds, `1 min 10 s`."""
    return _two_units(round(seconds), 60, "min", "s") if 60 <= round(seconds) < 600 else duration(seconds)


class ProgressDisplay:
    """Context manager with a live display: bars in a terminal, otherwise at most a line every PROGRESS_INTERVAL s.

    Without a terminal, a thread prints the current phase if no line was printed for so long, for example
    while a large model is loaded or a report is rendered.

    Args:
        phase: name of the first phase of the work.
        clock: clock in seconds.
        columns, settings: columns and further settings of `rich.progress.Progress`.
    """

    def __init__(self, console: Console, phase: str, clock: Clock, *columns: ProgressColumn, **settings: Any) -> None:
        self.console, self.clock = console, clock
        self.progress = Progress(*columns, console=console, disable=not console.is_terminal, **settings)
        self._left, self._thread = threading.Event(), threading.Thread(target=self._beats, daemon=True)
        self._phase = self._place = phase
        self._since = self._said = clock()

    def __enter__(self) -> Self:
        self.progress.start()
        if not self.console.is_terminal:
            self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._left.set()
        if self._thread.is_alive():
            self._thread.join()
        self.progress.stop()

    @property
    def due(self) -> bool:
        """True if a progress line is due: PROGRESS_INTERVAL seconds after the last line, and never in a terminal."""
        return not self.console.is_terminal and self.clock() - self._said >= PROGRESS_INTERVAL

    def begin(self, phase: str) -> None:
        """Set the current phase without printing. If its name is new, its duration restarts at zero."""
        if phase != self._phase:
            self._phase, self._place, self._since = phase, phase, self.clock()

    def say(self, what: str) -> None:
        """Print a line immediately, even if none is due, also in a terminal."""
        self._said = self.clock()
        print_text(what, self.console)

    def reached(self, name: str, done: float, total: float | None, shown: str = "", unit: str = "") -> None:
        """Set the progress text to `NAME: DONE of TOTAL UNIT, SHOWN`, and print it if a line is due."""
        of = "" if total is None else f" of {total:,.0f}"
        self.reach(f"{name}: {done:,.0f}{of}{unit and ' '}{unit}" + (f", {shown}" if shown else ""))

    def reach(self, place: str) -> None:
        """Set the text that describes the progress of the phase, and print it if a line is due."""
        self._place = place
        if self.due:
            self.say(place)

    def beat(self) -> None:
        """Print the latest progress text and the duration of the phase so far, if a line is due."""
        if self._place and self.due:
            self.say(f"{self._place}, {elapsed(self.clock() - self._since)} so far")

    def _beats(self) -> None:
        while not self._left.wait(BEATS_EVERY):
            self.beat()


class RunDisplay(ProgressDisplay):
    """Live display of steps, loss and sink rate of each run, or of each active run if there are more than MANY.

    The last line shows the steps of all runs and the remaining time. Without a terminal, it prints one line per
    evaluation, and at most one every PROGRESS_INTERVAL seconds in between. Failures are printed immediately.

    Args:
        lengths: number of updates by run name.
    """

    def __init__(self, console: Console, lengths: Mapping[str, int], clock: Clock = time.monotonic) -> None:
        names, latest = (TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[latest]}"))
        columns = (names, BarColumn(bar_width=24), MofNCompleteColumn(), latest)
        super().__init__(console, "starting", clock, *columns)
        self.lengths = lengths
        self.many = len(lengths) > MANY
        self.tasks = {
            name: self.progress.add_task(printable(name), total=length, latest="waiting", visible=not self.many)
            for name, length in lengths.items()
        }
        self.steps = dict.fromkeys(lengths, 0)
        self.first: dict[str, tuple[float, int]] = {}  # clock at a run's first event, and its updates until then
        self.timed: deque[tuple[float, int]] = deque()  # clock, and number of updates done while watching
        self.looked = clock()
        self.ended, self.given_up = 0, 0
        self.whole = self.progress.add_task("all", total=sum(lengths.values()), latest="")

    def watch(self, event: "Event") -> None:
        """Update the display with an event of a run."""
        now, latest = self.clock(), event.kind
        if not event.is_last or event.step:
            self.steps[event.run] = event.step
        since, _ = self.first.setdefault(event.run, (now, event.step))
        if now - since < LOOKS_EVERY:  # the earlier evaluations of another process's run are reported at once
            self.first[event.run] = since, event.step
        if event.is_last:
            self.ended += 1
            self.given_up += self.lengths[event.run] - self.steps[event.run]
            if event.kind == "failed":
                print_text(f"{event.run} failed: {event.message}", self.progress.console)
        if event.row is not None:
            latest = describe(event.row)
        if event.kind != "step":
            shown = not self.many or not event.is_last
            self.progress.update(self.tasks[event.run], latest=latest, visible=shown)
        self.progress.update(self.tasks[event.run], completed=self.steps[event.run])
        if event.kind in ("ready", "row") or event.is_last or now - self.looked >= LOOKS_EVERY:
            self.looked = now
            if self.timed or not event.is_last:
                self.timed.append((now, sum(self.steps.values()) - sum(step for _, step in self.first.values())))
            self._show(event, latest if event.row is not None else "")

    def seconds_left(self) -> float | None:
        """Return the estimated seconds until all runs end, at their total speed in the last SPEED_OVER seconds.

        None if no update, or training for less than SPEED_AFTER seconds, was observed.
        """
        while len(self.timed) > 1 and self.timed[1][0] < self.clock() - SPEED_OVER:
            self.timed.popleft()
        if not self.timed or self.timed[-1][0] - self.timed[0][0] < SPEED_AFTER:
            return None
        (start, before), (now, updates) = self.timed[0], self.timed[-1]
        remaining = sum(self.lengths.values()) - self.given_up - sum(self.steps.values())
        return remaining * (now - start) / (updates - before) if updates > before else None

    def _show(self, event: "Event", latest: str) -> None:
        seconds = self.seconds_left()
        left = f"about {duration(seconds)} left" if seconds else ""
        ended = f"{self.ended} of {len(self.lengths)} runs" if self.many else ""
        total, shown = sum(self.lengths.values()) - self.given_up, "  ".join(filter(None, (ended, left)))
        self.progress.update(self.whole, completed=sum(self.steps.values()), total=total, latest=shown)
        reached = f"{event.run}: step {event.step}/{self.lengths[event.run]}"
        whole = left if len(self.lengths) == 1 or not left else f"{left} for all"
        line = "  ".join(filter(None, (reached, latest, ended, whole)))
        if latest and not self.console.is_terminal:
            self.say(line)
        self.reach(line)


def numbers_of(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the loss and the sink rates of an evaluation (a line of metrics.jsonl) as text, by name, where known."""
    rates, visible, bias = row["sink_rate"], row.get("sink_rate_visible"), row["sink_rate_bias"]
    return {
        **({} if row["valid_loss"] is None else {"loss": f"{row['valid_loss']:.3f}"}),
        **({"Sink_1": f"{rates[0]:.1f} %" + in_brackets(later_sink_text(rates))} if rates else {}),
        **({"over visible queries": f"{visible[0]:.1f} %"} if visible else {}),
        **({} if bias is None else {"bias": f"{bias:.1f} %"}),
    }


def describe(row: Mapping[str, Any]) -> str:
    """Format validation loss, sink rates and speed of one evaluation (a line of metrics.jsonl) for display."""
    parts = [f"{name} {text}" for name, text in numbers_of(row).items()]
    if row["tokens_per_second"]:
        parts.append(f"{row['tokens_per_second']:,.0f} tokens/s")
    if row.get("mfu"):
        parts.append(f"{row['mfu']:.0%} of peak")
    if (row.get("stall_share") or 0) >= STALLED:
        parts.append(f"data stall {row['stall_share']:.0%}")
    return "  ".join(parts)


class DataDisplay(ProgressDisplay):
    """Display of data preparation: a progress bar per stage, in bytes of text, with the tokens written per second."""

    def __init__(self, console: Console, clock: Clock = time.monotonic) -> None:
        name, rate = TextColumn("{task.description}", markup=False), TextColumn("{task.fields[rate]}")
        columns = (name, BarColumn(bar_width=24), TaskProgressColumn(), DownloadColumn(), rate)
        super().__init__(console, "reading the text", clock, *columns, transient=True)
        self._tasks: dict[str, Any] = {}
        self._start: tuple[float, int] | None = None
        self._rate = ""

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """Display the progress of a stage in bytes; the callback `progress` of `prepare`."""
        name = {"tokenizer": "training the tokenizer", "tokens": "preparing tokens"}.get(stage, stage)
        if stage not in self._tasks:
            self._tasks[stage] = self.progress.add_task(name, total=total, rate="")
            if not self.console.is_terminal:
                self.say(f"{name} ...")
            self.begin(name)
        self.progress.update(self._tasks[stage], completed=done, total=total, rate=self._rate)
        self.reached(name, done / 1e6, total and total / 1e6, self._rate, unit="MB")

    def counted(self, tokens: int) -> None:
        """Update the tokens per second from the number written so far; the callback `counted` of `prepare`."""
        now = self.clock()
        if self._start is None:
            self._start = now, tokens
        elif now > self._start[0]:
            self._rate = f"{(tokens - self._start[1]) / (now - self._start[0]):,.0f} tokens/s"


class JobProgress(ProgressDisplay):
    """Display of a job's events: a bar for the current step, one for all steps if their number is known, and log lines.

    Args:
        what: plural noun for the steps, such as "domains".
        steps: number of steps; None shows no overall bar.
        phase: name of the phase before the first event, such as "loading MODEL".
    """

    def __init__(
        self,
        console: Console,
        what: str = "",
        steps: int | None = None,
        *,
        phase: str = "",
        clock: Clock = time.monotonic,
    ) -> None:
        times = (TimeElapsedColumn(), TimeRemainingColumn())
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), *times)
        super().__init__(console, phase, clock, *columns, transient=True)
        self._all = None if steps is None else self.progress.add_task(escape(printable(what)), total=steps)
        self._step = self.progress.add_task(escape(printable(phase)), total=None)

    def begin(self, phase: str, total: int | None = None, done: float = 0) -> None:
        """Set the current phase, of which `done` of `total` units are finished, and display it as the step's bar."""
        self.progress.reset(self._step, description=escape(printable(phase)), total=total, completed=int(done))
        super().begin(phase)

    def __call__(self, event: "JobEvent") -> None:
        """Display an event of the job."""
        match event.kind:
            case "started":
                self.begin(event.step, event.total, event.done)
                if event.text and not self.console.is_terminal:
                    self.say(f"{event.step}: {event.text}")
            case "advanced":
                if event.step != self._phase:
                    self.begin(event.step, event.total, event.done)
                name = escape(printable(event.text or event.step))
                self.progress.update(self._step, description=name, total=event.total, completed=event.done)
                self.reached(event.step, event.done, event.total, event.text)
            case "noted":
                self.say(event.text)
            case "finished":
                self._end(event, f"{event.text or 'done'} in {duration(event.seconds)}")
            case "kept":
                self._end(event, f"{event.text} (kept)" if event.text else "kept")
            case "failed" | "skipped":
                self._end(event, f"{event.kind}: {event.text}")

    def _end(self, event: "JobEvent", text: str) -> None:
        if self._all is not None:
            self.progress.advance(self._all)
        self.say(f"{event.step}: {text}")
        self.begin("working")
