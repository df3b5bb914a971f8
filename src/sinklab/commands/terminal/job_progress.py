"""Progress of every resumable job in the terminal."""

import time
from typing import Any, Self

from rich.console import Console
from rich.markup import escape

from sinklab.commands.console import duration
from sinklab.commands.terminal.bars import Clock, Lines, bars
from sinklab.commands.terminal.tables import printable
from sinklab.jobs.progress import JobEvent


class JobProgress:
    """Draws the events of a job: a bar for the current step, one for all steps if their number is known, and lines.

    Args:
        what: the steps are, such as "domains".
        steps: number of them; None draws no bar for all.
        clock: seconds.
    """

    def __init__(self, console: Console, what: str = "", steps: int | None = None, clock: Clock = time.monotonic):
        self._console, self._lines, self._bars = console, Lines(console, clock), bars(console)
        self._all = None if steps is None else self._bars.add_task(what, total=steps)
        self._step = self._bars.add_task("", total=None)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        """Print a line."""
        self._lines.say(text)

    def __call__(self, event: JobEvent) -> None:
        """Draw an event."""
        match event.kind:
            case "started":
                name = escape(printable(event.step))
                self._bars.reset(self._step, description=name, total=event.total, completed=int(event.done))
                if event.text and not self._console.is_terminal:
                    self.say(f"{event.step}: {event.text}")
            case "advanced":
                name = escape(printable(event.text or event.step))
                self._bars.update(self._step, description=name, total=event.total, completed=event.done)
                self._lines.reached(event.step, event.done, event.total, event.text)
            case "noted":
                self.say(event.text)
            case "finished":
                self._end(event, f"{event.text or 'done'} in {duration(event.seconds)}")
            case "kept":
                self._end(event, f"{event.text} (kept)" if event.text else "kept")
            case "failed" | "skipped":
                self._end(event, f"{event.kind}: {event.text}")

    def _end(self, event: JobEvent, text: str) -> None:
        if self._all is not None:
            self._bars.advance(self._all)
        self.say(f"{event.step}: {text}")
