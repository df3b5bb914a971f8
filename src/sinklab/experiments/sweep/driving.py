"""Trains the runs of a sweep with an engine, sharing the work with whoever else has the same runs to train.

Who trains a run holds its lock, and writes its record before letting go. A run that another process holds is passed
over, and looked at again until it has ended; were that process to die, its run would be taken up here.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

from sinklab.experiments.sweep.engines.base import Engine
from sinklab.experiments.sweep.following import Follower
from sinklab.experiments.sweep.planned import Event, PlannedRun
from sinklab.experiments.sweep.store import record_of
from sinklab.signals import INTERRUPTED, PreemptedError, StopRequest, stop_on_signals
from sinklab.train.directory.lock import is_held

WAITS = 0.2  # seconds for an event
LOOKS_EVERY = 1.0  # seconds between two looks at the runs of others


def train_all(runs: Sequence[PlannedRun], engine: Engine, watch: Callable[[Event], None]) -> dict[str, Event]:
    """Have all runs trained that are not done yet; returns each one's last event, done or failed.

    Args:
        runs: in this order.
        watch: told of everything, also of what other processes train.

    Raises:
        KeyboardInterrupt: Ctrl-C, after everything here has saved and stopped.
        PreemptedError: SIGTERM or SIGUSR1, to this process or to one of the engine's, likewise.
    """
    with stop_on_signals() as asked:
        try:
            ended = _Sharing(runs, engine, watch).train(asked)
        finally:
            engine.close()
    if ended is None:
        raise KeyboardInterrupt if asked.exit_status == INTERRUPTED else PreemptedError
    return ended


class _Sharing:
    """Which runs wait, are with the engine, or with others.

    Args:
        runs, engine, watch: as `train_all`.
    """

    def __init__(self, runs: Sequence[PlannedRun], engine: Engine, watch: Callable[[Event], None]) -> None:
        self._engine, self._watch = engine, watch
        self._waiting = deque(runs)
        self._submitted: dict[str, PlannedRun] = {}
        self._held: dict[str, tuple[PlannedRun, Follower]] = {}
        self._ended: dict[str, Event] = {}
        self._looked = 0.0

    def train(self, asked: StopRequest) -> dict[str, Event] | None:
        """Until all have ended; None where it was stopped before."""
        self._end_those_done()
        stopping = False
        while self._waiting or self._submitted or self._held:
            if not stopping and (asked() or self._one_was_stopped()):
                stopping = True
                self._engine.stop()
            if stopping and not self._submitted:
                return None
            if not stopping:
                self._submit()
                self._look_at_others()
            self._hear()
        return None if self._one_was_stopped() else self._ended

    def _one_was_stopped(self) -> bool:
        return any(event.kind == "stopped" for event in self._ended.values())

    def _end_those_done(self) -> None:
        """Before any is trained, so that what is told of the time left is told of the others alone."""
        found = [(run, _found(run)) for run in self._waiting]
        self._waiting = deque(run for run, ended in found if ended is None)
        for _, ended in found:
            if ended is not None:
                self._end(ended)

    def _submit(self) -> None:
        """Hand over as many as there is room for, in order."""
        room, batch = self._engine.room(), []
        while self._waiting and len(batch) < room:
            run = self._waiting.popleft()
            if (ended := _found(run)) is not None:
                self._end(ended)
            elif is_held(run.directory):
                self._pass_over(run)
            else:
                batch.append(run)
        if batch:
            self._submitted |= {run.name: run for run in batch}
            self._engine.submit(batch)

    def _hear(self) -> None:
        if not self._submitted:
            time.sleep(WAITS)
            return
        for event in self._engine.events(WAITS):
            if event.kind == "busy":
                self._pass_over(self._submitted.pop(event.run))
            elif event.is_last:
                self._submitted.pop(event.run, None)
                self._end(event)
            else:
                self._watch(event)

    def _end(self, event: Event) -> None:
        self._ended[event.run] = event
        self._watch(event)

    def _pass_over(self, run: PlannedRun) -> None:
        self._held[run.name] = run, Follower(run.directory)

    def _look_at_others(self) -> None:
        """Whether the runs of others have ended, or are to be had again; else how far they are."""
        now = time.monotonic()
        if not self._held or now - self._looked < LOOKS_EVERY:
            return
        self._looked = now
        for name, (run, follower) in list(self._held.items()):
            held = is_held(run.directory)
            if (ended := _found(run)) is not None:
                del self._held[name]
                self._end(ended)
            elif not held:
                del self._held[name]
                self._waiting.appendleft(run)
            else:
                for row in follower.new_rows():
                    self._watch(Event(name, "row", row["step"], row))


def _found(run: PlannedRun) -> Event | None:
    """The end of a run that its record tells of."""
    record = record_of(run.directory, run.hash)
    return Event(run.name, record.status, record.step, message=record.message) if record else None
