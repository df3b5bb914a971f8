"""Engine that trains runs concurrently on this machine, one process per run.

Processes are forked from a server that has imported the modules, so that a run starts in a fraction of a second. Each
process has its own cores and GPUs if there are enough. On Ctrl-C, SIGTERM or SIGUSR1, the parent requests a stop, and
each process saves a checkpoint, from which the same command resumes. A process also saves and stops if its parent dies.
"""

import contextlib
import multiprocessing as mp
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from sinklab.experiments.sweep.engine import Event, PlannedRun
from sinklab.signals import PREEMPTING, stop_on_signals

PRELOADED = ["sinklab.experiments.sweep.worker", "torch._dynamo", "numpy.random"]
HELD_BACK = {signal.SIGINT, *PREEMPTING}


@dataclass(frozen=True)
class MachineShare:
    """Cores and GPUs assigned to a run.

    Attributes:
        cores: CPU cores to which the run is pinned; None if it is not pinned.
        threads: number of PyTorch's CPU threads.
        cards: value of CUDA_VISIBLE_DEVICES, which selects the GPUs; None leaves the variable unchanged.
    """

    cores: frozenset[int] | None
    threads: int
    cards: str | None = None


def shares(jobs: int) -> list[MachineShare]:
    """Split the cores and GPUs of this machine into `jobs` shares.

    The cores are those on which this process may run. If there is at least one core per share, each share is pinned to
    its own cores and has one thread per core. Otherwise, and on systems without CPU affinity, shares are not pinned and
    have max(1, cores // jobs) threads each. A share has at most OMP_NUM_THREADS threads, if this variable is set. With
    two visible GPUs or more, each share has its own GPUs, or shares one if there are fewer GPUs than shares.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    limit = os.environ.get("OMP_NUM_THREADS", "")
    most = int(limit) if limit.isdecimal() and int(limit) else cores_here()
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    cards = given.split(",") if given else [str(number) for number in range(cards_here())]
    found = []
    for job in range(jobs):
        own = frozenset(cores[job::jobs]) if jobs <= len(cores) else None
        mine = ",".join(cards[job::jobs] or [cards[job % len(cards)]]) if given != "" and len(cards) > 1 else None
        found.append(MachineShare(own, min(most, len(own) if own else max(1, cores_here() // jobs)), mine))
    return found


def cores_here() -> int:
    """Return the number of CPU cores on which this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def jobs_here() -> int:
    """Return the number of concurrent runs assumed in time estimates: that of the GPUs or, without GPUs, CPU cores."""
    return cards_here() or cores_here()


def default_jobs(runs: int) -> int:
    """Return the default number of concurrent runs: one per GPU; without a GPU, all if there are at most two per core,
    else one per core."""
    cores = cores_here()
    return cards_here() or max(1, runs if runs <= 2 * cores else cores)


def cards_here() -> int:
    """Return the number of CUDA devices visible to this process."""
    import torch

    return torch.cuda.device_count()


@dataclass(frozen=True)
class _Running:
    """A training process, its share of the machine, and the parent's end of the pipe to it."""

    process: BaseProcess
    share: MachineShare
    pipe: Connection


class LocalEngine:
    """Engine that trains up to `jobs` (at least 1) runs concurrently on this machine."""

    def __init__(self, jobs: int) -> None:
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._free = shares(jobs)
        self._running: dict[str, _Running] = {}

    def room(self) -> int:
        """Return the number of free shares of the machine."""
        return len(self._free)

    def submit(self, runs: Sequence[PlannedRun]) -> None:
        """Start a process for each run, on a free share of the machine.

        A process inherits blocked stop signals until it unblocks them. A terminal sends SIGINT (Ctrl-C), and a cluster
        SIGTERM, to all processes of a command, but only the parent should handle SIGINT, and the fork server must
        survive both.
        """
        for run in runs:
            share = self._free.pop(0)
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_train, args=(run, share, dict(os.environ), theirs), daemon=True)
            resource_tracker.ensure_running()  # starting it would end the block of signals
            before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
            try:
                process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()  # so that the pipe closes when the process ends
            self._running[run.name] = _Running(process, share, ours)

    def events(self, timeout: float) -> Sequence[Event]:
        """Return the new events; if a process died without sending a last event, the last event is `failed`."""
        ready = wait([one.pipe for one in self._running.values()], timeout) if self._running else []
        found: list[Event] = []
        for name, one in list(self._running.items()):
            if one.pipe not in ready:
                continue
            own: list[Event] = []
            try:
                while one.pipe.poll() and not (own and own[-1].is_last):
                    own.append(one.pipe.recv())
                closed = False
            except (EOFError, OSError):
                closed = True
            found += own
            if own and own[-1].is_last:
                self._join(name)
            elif closed:
                found.append(Event(name, "failed", message=_death(self._join(name))))
        return found

    def _join(self, name: str) -> int | None:
        """Wait for a process to exit, free its share, and return its exit code."""
        one = self._running.pop(name)
        one.pipe.close()  # first: a process that waits for space in the pipe would never exit
        one.process.join()
        self._free.append(one.share)
        return one.process.exitcode

    def processes(self) -> list[int]:
        """Return the ids of the training processes."""
        return [one.process.pid for one in self._running.values() if one.process.pid is not None]

    def stop(self) -> None:
        """Request that all training processes save a checkpoint and stop."""
        for one in self._running.values():
            with contextlib.suppress(OSError):  # the process has ended
                one.pipe.send(None)

    def close(self) -> None:
        """Request that the remaining training processes save and stop, and wait until they have exited."""
        self.stop()
        for name in list(self._running):
            self._join(name)


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        return f"the process was killed by {signal.Signals(-code).name}; run the same command again to resume"
    return f"the process ended with status {code} and no message; run the same command again to resume"


def _train(run: PlannedRun, share: MachineShare, environment: Mapping[str, str], pipe: Connection) -> None:
    """Main function of a training process: train a run and send its events to `pipe`.

    If the parent sends a message or closes the pipe, the run saves a checkpoint and stops.
    """
    from sinklab.experiments.sweep.worker import train_cell

    os.environ.clear()  # the fork server has the environment of its own start
    os.environ.update(environment)
    if share.cards is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = share.cards
    if share.cores is not None:
        os.sched_setaffinity(0, share.cores)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def report(event: Event) -> None:
        with contextlib.suppress(OSError):  # the parent has died
            pipe.send(event)

    with stop_on_signals(*PREEMPTING) as preempted:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)
        report(train_cell(run, share.threads, report, lambda: preempted() or pipe.poll()))
        signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
