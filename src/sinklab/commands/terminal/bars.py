"""How far work has come: bars in a terminal, and elsewhere lines, one each ten seconds."""

import time
from collections.abc import Callable
from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sinklab.commands.terminal.tables import printable

SPEAKS_EVERY = 10.0  # seconds, where there is no terminal

Clock = Callable[[], float]


class Lines:
    """Progress lines where there is no terminal: one is due SPEAKS_EVERY seconds after the last line of any kind.

    Args:
        clock: seconds.
    """

    def __init__(self, console: Console, clock: Clock = time.monotonic) -> None:
        self._console, self._clock, self._said = console, clock, clock()

    def say(self, what: str) -> None:
        """A line, in a terminal as well."""
        self._said = self._clock()
        self._console.print(printable(what), markup=False, highlight=False, soft_wrap=True)

    def reached(self, name: str, done: float, total: float | None, shown: str = "", unit: str = "") -> None:
        """A line on how far it is, if one is due."""
        if not self._console.is_terminal and self._clock() - self._said >= SPEAKS_EVERY:
            of = "" if total is None else f" of {total:,.0f}"
            self.say(f"{name}: {done:,.0f}{of}{unit and ' '}{unit}" + (f", {shown}" if shown else ""))


def bars(console: Console) -> Progress:
    """Bars with how many of how many and the time left; nothing where there is no terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


class StepProgress:
    """One bar, of one thing after the other."""

    def __init__(self, console: Console, clock: Clock = time.monotonic) -> None:
        self._console, self._bar, self._lines = console, bars(console), Lines(console, clock)
        self._task = self._bar.add_task("", total=None)
        self._name, self._done, self._total = "", 0.0, 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.stop()

    def begin(self, name: str, total: int, done: int = 0) -> None:
        """A bar of so many steps."""
        self._name, self._total, self._done = name, total, float(done)
        self._bar.reset(self._task, description=escape(printable(name)), total=total, completed=done)

    def move(self, steps: int, shown: str = "") -> None:
        """Advance by `steps`; `shown` replaces the name beside the bar."""
        self.reach(self._done + steps, self._total, shown)

    def reach(self, done: float, total: int, shown: str = "") -> None:
        """Set the progress; `shown` replaces the name beside the bar."""
        self._done, self._total = done, total
        description = escape(printable(shown or self._name))
        self._bar.update(self._task, completed=done, total=total, description=description)
        self._lines.reached(self._name, done, total, shown)

    def say(self, what: str) -> None:
        """A line."""
        self._lines.say(what)

    def say_without_terminal(self, what: str) -> None:
        """A line where no bar says it."""
        if not self._console.is_terminal:
            self.say(what)
