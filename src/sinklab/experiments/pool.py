"""Runs side by side on one machine: a process each, told to stop rather than killed.

Every process trains one run and reports through a queue. Ctrl-C, SIGTERM and SIGUSR1 are requests to the parent; it
asks the processes to stop, each saves a checkpoint, and the same call continues later. A process whose parent has died
stops by itself.
"""

import multiprocessing as mp
import os
import queue
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sinklab.signals import PREEMPTING, PreemptedError, stop_on_signals
from sinklab.train.recipe import Recipe


@dataclass(frozen=True)
class PlannedRun:
    """A run to be trained: its name for people, its recipe and its directory."""

    name: str
    recipe: Recipe
    directory: Path


@dataclass(frozen=True)
class Event:
    """Something a run reports.

    Attributes:
        run: its name.
        kind: `ready` when the model is there, `step` after an update, `row` after an evaluation, then one of `done`,
            `stopped`, `failed`.
        step: updates done.
        row: the evaluation, for `row`.
        message: why, for `failed`.
    """

    run: str
    kind: Literal["ready", "step", "row", "done", "stopped", "failed"]
    step: int = 0
    row: dict[str, Any] | None = None
    message: str = ""


def processes_for(runs: int, cores: int) -> int:
    """How many runs at a time: all of up to two per core (they share the cores evenly), else one per core."""
    return runs if runs <= 2 * cores else cores


def train_side_by_side(runs: list[PlannedRun], jobs: int, watch: Callable[[Event], None]) -> dict[str, Event]:
    """Train all runs, `jobs` at a time; returns each one's last event.

    Raises:
        KeyboardInterrupt: Ctrl-C, after every running process has saved and stopped.
        PreemptedError: SIGTERM or SIGUSR1, to this process or to one of those, likewise.
    """
    with stop_on_signals(*PREEMPTING) as preempted:
        return _train_all(runs, jobs, watch, preempted)


def _train_all(
    runs: list[PlannedRun], jobs: int, watch: Callable[[Event], None], preempted: Callable[[], bool]
) -> dict[str, Event]:
    context = mp.get_context("spawn")
    events, stop = context.Queue(), context.Event()
    threads = max(1, (os.cpu_count() or 1) // jobs)
    waiting, running, ended = list(runs), {}, {}
    interrupted: type[BaseException] | None = None
    while waiting or running:
        try:
            if not interrupted and (preempted() or _one_was_stopped(ended)):
                interrupted = PreemptedError
                stop.set()
            while waiting and len(running) < jobs and not interrupted:
                run = waiting.pop(0)
                process = context.Process(target=_train, args=(run, threads, events, stop), daemon=True)
                with _ctrl_c_held_back():
                    process.start()
                running[run.name] = process
            for event in _drain(events):
                watch(event)
                if event.kind in ("done", "stopped", "failed"):
                    ended[event.run] = event
            for name, process in list(running.items()):
                if not process.is_alive() and (name in ended or events.empty()):
                    del running[name]
                    if name not in ended:
                        ended[name] = Event(name, "failed", message=_death(process.exitcode))
                        watch(ended[name])
            if interrupted and not running:
                break
        except KeyboardInterrupt:
            interrupted = KeyboardInterrupt
            stop.set()
    if interrupted or _one_was_stopped(ended):
        raise interrupted or PreemptedError
    return ended


@contextmanager
def _ctrl_c_held_back() -> Iterator[None]:
    """Until after it; a process that is started within it hears no Ctrl-C, which the terminal sends to all of them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _one_was_stopped(ended: dict[str, Event]) -> bool:
    return any(event.kind == "stopped" for event in ended.values())


def _drain(events: Any) -> list[Event]:
    """All events that have arrived; waits a moment for the first."""
    found = []
    try:
        found.append(events.get(timeout=0.2))
        while True:
            found.append(events.get_nowait())
    except queue.Empty:
        return found


def _death(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"the process was killed by {signal.Signals(-exitcode).name}; run the same command again to continue"
    return f"the process ended with status {exitcode} and no message; run the same command again to continue"


def _train(planned: PlannedRun, threads: int, events: Any, stop: Any) -> None:
    """The body of a process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = mp.parent_process()
    try:
        with stop_on_signals(*PREEMPTING) as preempted:
            import torch

            from sinklab.data.prepare import prepared
            from sinklab.errors import StoppedError
            from sinklab.train.directory.run import open_run
            from sinklab.train.loop import StepReport, Trainer

            torch.set_num_threads(threads)

            def watch(progress: StepReport) -> None:
                kind = "step" if progress.row is None else "row"
                events.put(Event(planned.name, kind, progress.step, progress.row))

            def should_stop() -> bool:
                return preempted() or stop.is_set() or (parent is not None and not parent.is_alive())

            run = open_run(planned.recipe, prepared(planned.recipe.data), planned.directory)
            try:
                trainer = Trainer(run, watch, should_stop)
                events.put(Event(planned.name, "ready", trainer.state.step))
                outcome = trainer.train()
                ended = Event(planned.name, outcome.status, outcome.step)
            except StoppedError:  # before there was a model
                ended = Event(planned.name, "stopped")
        events.put(ended)
    except Exception as error:
        from sinklab.errors import SinklabError

        text = str(error) if isinstance(error, SinklabError) else f"{type(error).__name__}: {error}"
        events.put(Event(planned.name, "failed", message=text))
