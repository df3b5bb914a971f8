"""Planned runs, the engine protocol, and the scheduler.

The process that trains a run holds the run's lock, and writes record.json before releasing the lock. The scheduler
polls runs that other processes have locked; if such a process dies, the scheduler submits the run itself.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import yaml

from sinklab.errors import SinklabError
from sinklab.experiments.documents import record_of
from sinklab.signals import INTERRUPTED, PreemptedError, stop_on_signals
from sinklab.train.lock import is_held
from sinklab.train.recipe import Recipe, build_recipe
from sinklab.train.run import read_metrics

Ending = Literal["done", "failed", "stopped", "busy"]

EVENT_TIMEOUT_S = 0.2
HELD_POLL_S = 1.0


@dataclass(frozen=True)
class PlannedRun:
    """A run to be trained; pickled for worker processes on this or other machines with the same file system.

    Attributes:
        name: display name, unique in the sweep.
        recipe: resolved recipe as YAML.
        directory: run directory.
        hash: expected hash of the run; the run fails if the worker's text or version of sinklab gives a different hash.
    """

    name: str
    recipe: str
    directory: Path
    hash: str

    def read_recipe(self) -> Recipe:
        """Parse the YAML of the recipe; InputError if another version of sinklab has written it."""
        return build_recipe(yaml.safe_load(self.recipe), origin=self.name)

    def recorded(self) -> "Event | None":
        """Return the run's last event (done or failed) from record.json; None without such a record (`record_of`)."""
        record = record_of(self.directory, self.hash)
        return Event(self.name, record.status, record.step, message=record.message) if record else None


@dataclass(frozen=True)
class Event:
    """A progress event of a run.

    Attributes:
        run: name of the run.
        kind: `ready` (the model is built), `step` (after an update), `row` (after an evaluation), or a last event:
            `done`, `stopped` (by a request or signal; the run resumes when it is submitted again), `busy` (another
            process trains or has stopped the run) or `failed`.
        step: number of updates done; 0 if unknown.
        row: line of metrics.jsonl, for `row`; else None.
        message: reason for `failed` or `busy`; else empty.
    """

    run: str
    kind: Literal["ready", "step", "row"] | Ending
    step: int = 0
    row: dict[str, Any] | None = None
    message: str = ""

    @property
    def is_last(self) -> bool:
        """True if the engine reports nothing more about the run: it is done, failed, stopped or busy."""
        return self.kind in get_args(Ending)


class Engine(Protocol):
    """Engine that trains runs with `worker.train_cell`, each in a separate process.

    All results are written to the run directories; events report progress and the end of every run. An engine may be
    used only from the main thread of one process.
    """

    def room(self) -> int:
        """Return the number of runs that can be submitted now: free slots, or `sys.maxsize` for a cluster's queue."""
        ...

    def submit(self, runs: Sequence[PlannedRun]) -> None:
        """Start or queue runs, at most as many as `room` returns, without waiting for their end.

        Raises:
            SinklabError: if the runs cannot be submitted, for example because the cluster does not answer.
        """
        ...

    def events(self, timeout: float) -> Sequence[Event]:
        """Return the events of all runs since the last call, in order; wait at most `timeout` seconds for an event.

        Every submitted run has one last event; if the run's process was killed, this event is `failed` with the reason
        in the message. A run that is `stopped` although `stop` was not called was preempted.
        """
        ...

    def stop(self) -> None:
        """Request that all runs save a checkpoint and stop; no run is submitted afterwards.

        `events` then returns the last event of every submitted run, which is `stopped` also if the run has not started.
        """
        ...

    def close(self) -> None:
        """Release the engine's resources; runs that are still in progress end, except Slurm jobs."""
        ...


class MetricsTail:
    """Incremental reader of a run's metrics.jsonl, which may be missing; skips evaluations that resuming repeats."""

    def __init__(self, run: PlannedRun) -> None:
        self.run = run
        self._path = run.directory / "metrics.jsonl"
        self._size, self._step = -1, -1

    def rows(self) -> list[Event]:
        """Return the new evaluations since the last call as `row` events; empty if metrics.jsonl cannot be read."""
        try:
            size = self._path.stat().st_size
            if size == self._size:
                return []
            rows = [row for row in read_metrics(self._path) if row["step"] > self._step]
        except (OSError, SinklabError):
            return []
        self._size = size
        self._step = max([self._step, *(row["step"] for row in rows)])
        return [Event(self.run.name, "row", row["step"], row) for row in rows]


def train_all(runs: Sequence[PlannedRun], engine: Engine, watch: Callable[[Event], None]) -> dict[str, Event]:
    """Train the runs that have no record, in order; return the last event (done or failed) of every run by name.

    Args:
        engine: engine that trains the runs; it is closed at the end.
        watch: callback, called with every event except `busy`, and with the evaluations and ends of runs that other
            processes train.

    Raises:
        KeyboardInterrupt: on Ctrl-C, after all submitted runs have ended, with a checkpoint if they were stopped.
        PreemptedError: on SIGTERM or SIGUSR1 to this or a training process, after all submitted runs have ended.
        InputError: if a record cannot be read or is damaged.
        SinklabError: if runs cannot be submitted.
    """
    waiting, submitted = deque[PlannedRun](), dict[str, PlannedRun]()
    held, ended = dict[str, MetricsTail](), dict[str, Event]()  # held: runs locked by other processes
    polled, stopping, preempted = 0.0, False, False

    def end(event: Event) -> None:
        ended[event.run] = event
        watch(event)

    def submit() -> None:
        """Submit waiting runs without a record in order, unless another process has locked them."""
        batch: list[PlannedRun] = []
        room = engine.room()
        while waiting and len(batch) < room:
            run = waiting.popleft()
            if (recorded := run.recorded()) is not None:
                end(recorded)
            elif is_held(run.directory):
                held[run.name] = MetricsTail(run)
            else:
                batch.append(run)
        if batch:
            submitted.update({run.name: run for run in batch})
            engine.submit(batch)

    def poll() -> None:
        """Report progress or end of the runs that other processes have locked; requeue runs that are unlocked again."""
        for name, tail in list(held.items()):
            still = is_held(tail.run.directory)
            if (recorded := tail.run.recorded()) is not None:
                del held[name]
                end(recorded)
            elif not still:
                del held[name]
                waiting.appendleft(tail.run)
            else:
                for row in tail.rows():
                    watch(row)

    with stop_on_signals() as stop_requested, closing(engine):
        for run in runs:  # runs with a record first, so that only the others count for the remaining time
            if (recorded := run.recorded()) is not None:
                end(recorded)
            else:
                waiting.append(run)
        while submitted or (not stopping and (waiting or held)):
            if not stopping and (stop_requested() or preempted):
                stopping = True
                engine.stop()
            if not stopping:
                submit()
                if held and time.monotonic() - polled >= HELD_POLL_S:
                    polled = time.monotonic()
                    poll()
            if not submitted:
                time.sleep(EVENT_TIMEOUT_S)
                continue
            for event in engine.events(EVENT_TIMEOUT_S):
                if event.kind == "busy":
                    held[event.run] = MetricsTail(submitted.pop(event.run))
                elif event.is_last:
                    submitted.pop(event.run, None)
                    preempted = preempted or event.kind == "stopped"
                    end(event)
                else:
                    watch(event)
    if stopping or preempted:
        raise KeyboardInterrupt if stop_requested.exit_status == INTERRUPTED else PreemptedError
    return ended
