"""Shared code of the engines on_ray and on_slurm, which communicate with other machines through a shared folder:

HASH.stop    if it exists, the run is to save and stop
HASH.log     a line per start, evaluation and end, with time (UTC), machine and process
"""

import os
import socket
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from sinklab.experiments.sweep.engine import Event, MetricsTail, PlannedRun
from sinklab.files import append_line
from sinklab.signals import PREEMPTING, PreemptedError, stop_on_signals

STOP_POLL_S = 1.0


class StopFile:
    """A file whose existence requests that a run save and stop.

    Calling the object returns True once the file has been seen. The file is checked at most once a second, to limit
    the load on a shared file system.

    Args:
        folder: the engine's shared folder.
        run: run, whose hash is the name of the file.
    """

    def __init__(self, folder: Path, run: PlannedRun) -> None:
        self._path = folder / f"{run.hash}.stop"
        self._polled, self._asked = float("-inf"), False

    def __call__(self) -> bool:
        if not self._asked and time.monotonic() - self._polled >= STOP_POLL_S:
            self._polled, self._asked = time.monotonic(), self.exists()
        return self._asked

    def exists(self) -> bool:
        """Return True if the file exists now."""
        return self._path.exists()

    def ask(self) -> None:
        """Create the file, which requests that the run save and stop."""
        self._path.touch()

    def withdraw(self) -> None:
        """Delete the file, before the run is trained again."""
        self._path.unlink(missing_ok=True)


def new_rows(tails: Mapping[str, MetricsTail]) -> list[Event]:
    """Return the evaluations of all runs since the last call as `row` events.

    Args:
        tails: readers by name of the run.
    """
    return [Event(name, "row", row["step"], row) for name, one in tails.items() for row in one.new_rows()]


def train_remotely(run: PlannedRun, folder: Path, threads: int) -> Event:
    """Train a run in this process, with a log and a stop file in `folder`; return the run's last event.

    Args:
        folder: the engine's shared folder.
        threads: number of PyTorch's CPU threads.

    Raises:
        PreemptedError: if a signal stopped the run and there is no stop file; the run is to be resumed.
        SinklabError: if the log cannot be written.
    """
    from sinklab.experiments.sweep.worker import train_cell

    def write(event: Event) -> None:
        if event.kind != "step":
            report = f"{event.kind} at step {event.step}" + (f": {event.message}" if event.message else "")
            when, where = datetime.now(UTC).isoformat(timespec="seconds"), f"{socket.gethostname()} {os.getpid()}"
            append_line(folder / f"{run.hash}.log", f"{when} {where} {report}")

    stop = StopFile(folder, run)
    with stop_on_signals(*PREEMPTING) as preempted:
        ended = train_cell(run, threads, write, lambda: preempted() or stop())
    write(ended)
    if ended.kind == "stopped" and not stop.exists():
        raise PreemptedError
    return ended
