"""Shared code of the engines on_ray and on_slurm, which communicate with other machines through a shared folder.

Its files are named by the hash of the run:

HASH.stop    requests that the run save a checkpoint and stop
HASH.log     a line per start, evaluation and end, with time (UTC), machine and process
"""

import os
import socket
import time
from datetime import UTC, datetime
from pathlib import Path

from sinklab.experiments.sweep.engine import Event, PlannedRun
from sinklab.files import append_line
from sinklab.signals import PREEMPTING, PreemptedError, stop_on_signals

STOP_POLL_S = 1.0


def stop_file(folder: Path, run: PlannedRun) -> Path:
    """Return the path of a run's stop file in an engine's shared folder."""
    return folder / f"{run.hash}.stop"


def train_remotely(run: PlannedRun, folder: Path, threads: int) -> Event:
    """Train a run in this process, with a log and a stop file in `folder`; return the run's last event.

    Args:
        folder: the engine's shared folder.
        threads: number of PyTorch's CPU threads.

    Raises:
        PreemptedError: if the run was stopped without a stop file, that is by a signal, so that it should be resumed.
        SinklabError: if the log cannot be written.
    """
    from sinklab.experiments.sweep.worker import train_cell

    def write(event: Event) -> None:
        if event.kind != "step":
            report = f"{event.kind} at step {event.step}" + (f": {event.message}" if event.message else "")
            when, where = datetime.now(UTC).isoformat(timespec="seconds"), f"{socket.gethostname()} {os.getpid()}"
            append_line(folder / f"{run.hash}.log", f"{when} {where} {report}")

    stop = stop_file(folder, run)
    polled, asked = float("-inf"), False

    def should_stop() -> bool:
        """Return True after a signal, or if the stop file exists; look for the file at most once a second."""
        nonlocal polled, asked
        if not asked and time.monotonic() - polled >= STOP_POLL_S:
            polled, asked = time.monotonic(), stop.exists()
        return preempted() or asked

    with stop_on_signals(*PREEMPTING) as preempted:
        ended = train_cell(run, threads, write, should_stop)
    write(ended)
    if ended.kind == "stopped" and not stop.exists():
        raise PreemptedError
    return ended
