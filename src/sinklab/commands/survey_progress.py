"""How many measurements go on, in a terminal: a bar over all and one over the present; plain lines elsewhere."""

import time
from typing import Any

from rich.console import Console
from rich.markup import escape

from sinklab.commands.terminal.bars import Clock, Lines, bars
from sinklab.commands.terminal.tables import printable
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.statistics.highest import elsewhere_text, in_brackets
from sinklab.survey.items import Listener


class SurveyProgress(Listener):
    """Shows what is measured, how far it has come, and every result in a line.

    Args:
        console: where to print.
        what: what there are many of, such as "domains".
        total: how many.
        clock: seconds.
    """

    def __init__(self, console: Console, what: str, total: int, clock: Clock = time.monotonic) -> None:
        self._lines, self._present_name = Lines(console, clock), what
        self._progress = bars(console)
        self._all = self._progress.add_task(what, total=total)
        self._present = self._progress.add_task("", total=None)

    def __enter__(self) -> "SurveyProgress":
        self._progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._progress.stop()

    def starts(self, name: str) -> None:
        """Show the bar of `name`."""
        self._present_name = name
        self._progress.reset(self._present, description=escape(printable(name)), total=None)

    def advances(self, done: float, total: int) -> None:
        """Move the bar."""
        self._progress.update(self._present, completed=done, total=total)
        self._lines.reached(self._present_name, done, total)

    def ends(self, name: str, measurement: Measurement) -> None:
        """Print the result in a line."""
        self._say(name, _in_a_line(measurement))

    def fails(self, name: str, why: str) -> None:
        """Print why."""
        self._say(name, f"failed: {why}")

    def keeps(self, name: str, measurement: Measurement) -> None:
        """Print the earlier result in a line."""
        self._say(name, f"{_in_a_line(measurement)} (kept)")

    def _say(self, name: str, what: str) -> None:
        self._progress.advance(self._all)
        self._lines.say(f"{name}: {what}")


def _in_a_line(measurement: Measurement) -> str:
    parts = [f"Sink_1 {measurement.sink_rate[0]:.2f} %" + in_brackets(elsewhere_text(measurement.sink_rate))]
    if measurement.loss is not None:
        parts.append(f"loss {measurement.loss:.4f}")
    parts.append(f"{measurement.sequences} sequences")
    return ", ".join(parts)
