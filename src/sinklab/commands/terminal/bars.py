"""Progress bars in a terminal, and elsewhere a progress line every ten seconds."""

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sinklab.commands.terminal.tables import printable

SPEAKS_EVERY = 10.0  # seconds, without a terminal

Clock = Callable[[], float]


class Lines:
    """Progress lines without a terminal: one is due SPEAKS_EVERY seconds after the last line of any kind.

    Args:
        clock: seconds.
    """

    def __init__(self, console: Console, clock: Clock = time.monotonic) -> None:
        self._console, self._clock, self._said = console, clock, clock()

    def say(self, what: str) -> None:
        """Print a line, in a terminal as well."""
        self._said = self._clock()
        self._console.print(printable(what), markup=False, highlight=False, soft_wrap=True)

    def reached(self, name: str, done: float, total: float | None, shown: str = "", unit: str = "") -> None:
        """Print a progress line, if one is due."""
        if not self._console.is_terminal and self._clock() - self._said >= SPEAKS_EVERY:
            of = "" if total is None else f" of {total:,.0f}"
            self.say(f"{name}: {done:,.0f}{of}{unit and ' '}{unit}" + (f", {shown}" if shown else ""))


def bars(console: Console) -> Progress:
    """Bars with counts and the time left; none without a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
