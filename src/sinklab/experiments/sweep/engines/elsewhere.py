"""What engines whose runs are trained on other machines share: a folder that all of them see, and what is done there.

HASH.stop    the run is to save and end
HASH.log     a line for every begin, evaluation and end, with the time, the machine and the process
"""

import os
import socket
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from sinklab.experiments.sweep.following import Follower
from sinklab.experiments.sweep.planned import Event, PlannedRun
from sinklab.files import append_line
from sinklab.signals import PREEMPTING, PreemptedError, stop_on_signals

LOOKS_EVERY_S = 1.0


class StopFile:
    """A file whose being there asks a run to save and end. Calling it tells, once True for good.

    It is looked for once a second: that many questions a file system that a thousand runs share can bear.

    Args:
        folder: that all machines see.
        run: whose.
    """

    def __init__(self, folder: Path, run: PlannedRun) -> None:
        self._path = folder / f"{run.hash}.stop"
        self._looked, self._asked = float("-inf"), False

    def __call__(self) -> bool:
        if not self._asked and time.monotonic() - self._looked >= LOOKS_EVERY_S:
            self._looked, self._asked = time.monotonic(), self.is_there()
        return self._asked

    def is_there(self) -> bool:
        """Whether the file is there now."""
        return self._path.exists()

    def ask(self) -> None:
        """Ask it."""
        self._path.touch()

    def withdraw(self) -> None:
        """Of a run that is to be trained again."""
        self._path.unlink(missing_ok=True)


def new_rows(followers: Mapping[str, Follower]) -> list[Event]:
    """The evaluations of runs, by their names, since the last call."""
    return [Event(name, "row", row["step"], row) for name, one in followers.items() for row in one.new_rows()]


def train_elsewhere(run: PlannedRun, folder: Path, threads: int) -> Event:
    """Train a run in this process, on whatever machine it is; returns how it ended.

    Args:
        folder: of the engine.
        threads: of PyTorch.

    Raises:
        PreemptedError: a signal has stopped it, and nobody asked for that in `folder`: it is to go on, here or there.
    """
    from sinklab.experiments.sweep.worker import train_cell

    def write(event: Event) -> None:
        if event.kind != "step":
            said = f"{event.kind} at step {event.step}" + (f": {event.message}" if event.message else "")
            when, where = datetime.now(UTC).isoformat(timespec="seconds"), f"{socket.gethostname()} {os.getpid()}"
            append_line(folder / f"{run.hash}.log", f"{when} {where} {said}")

    told = StopFile(folder, run)
    with stop_on_signals(*PREEMPTING) as preempted:
        ended = train_cell(run, threads, write, lambda: preempted() or told())
    write(ended)
    if ended.kind == "stopped" and not told.is_there():
        raise PreemptedError
    return ended
