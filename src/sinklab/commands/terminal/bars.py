"""How far work has come: bars in a terminal, and elsewhere lines, one each half minute."""

import time
from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sinklab.commands.terminal.text import printable

SPEAKS_EVERY = 30.0  # seconds, where there is no terminal


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

    def __init__(self, console: Console) -> None:
        self._console, self._bar = console, bars(console)
        self._task = self._bar.add_task("", total=None)
        self._name, self._done, self._total, self._said = "", 0, 0, time.monotonic()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.stop()

    def begin(self, name: str, total: int, done: int = 0) -> None:
        """A bar of so many steps."""
        self._name, self._total, self._done, self._said = name, total, done, time.monotonic()
        self._bar.reset(self._task, description=escape(printable(name)), total=total, completed=done)

    def move(self, steps: int, shown: str = "") -> None:
        """So many more; `shown` stands beside the bar."""
        self._done += steps
        description = escape(printable(shown or self._name))
        self._bar.update(self._task, completed=self._done, description=description)
        if not self._console.is_terminal and time.monotonic() - self._said >= SPEAKS_EVERY:
            self.say(f"{self._name}: {self._done:,} of {self._total:,}" + (f", {shown}" if shown else ""))

    def say(self, what: str) -> None:
        """A line."""
        self._said = time.monotonic()
        self._console.print(printable(what), markup=False, highlight=False, soft_wrap=True)

    def say_without_terminal(self, what: str) -> None:
        """A line where no bar says it."""
        if not self._console.is_terminal:
            self.say(what)
