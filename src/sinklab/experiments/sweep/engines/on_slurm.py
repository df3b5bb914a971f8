"""Runs as jobs of a Slurm cluster, an array of them handed over at once by submitit.

What goes on between Slurm and a run:

| what happens | what the run hears | what becomes of its job |
|---|---|---|
| preemption, `scontrol requeue` | SIGTERM; after KillWait, SIGKILL | Slurm queues it again by itself (`--requeue`) |
| a node is lost | nothing | the same; the run goes on from its newest checkpoint |
| the time limit is near | SIGUSR1 (`--signal`) | ends with status 75; its script queues it again |
| `scancel --signal=TERM` or `=USR1` | that | the same |
| `scancel` | SIGTERM; after KillWait, SIGKILL | is cancelled: its script has heard SIGTERM as well, and is gone |
| the sweep is stopped | SIGTERM, and `HASH.stop` is there | ends with status 0, or is cancelled where it still waits |

Whatever it hears, the run saves. So one rule is enough, status 75 (`signals.CALL_AGAIN`) means again, and the script
applies it exactly where Slurm does not do so itself. submitit's own way, SIGUSR2 and `checkpoint()`, saves within a
signal handler, in the middle of an update: it is not used.

The command may be killed; its jobs go on. Called again it finds by `HASH.job` those that are still in the queue, and
hears of their ends. A job that finds its run done or held by another process says so, and ends.
"""

# pyright: reportMissingImports=false
# It is an extra, which `dev` leaves out.

import logging
import pickle
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from sinklab.errors import SinklabError
from sinklab.experiments.sweep.engines.elsewhere import StopFile, new_rows, train_elsewhere
from sinklab.experiments.sweep.engines.slurm_queue import ENDED, cancel, last_line, require_cluster, states
from sinklab.experiments.sweep.following import Follower
from sinklab.experiments.sweep.planned import Event, PlannedRun
from sinklab.files import write_text
from sinklab.schema import Part
from sinklab.signals import CALL_AGAIN, PREEMPTING, PreemptedError
from sinklab.train.directory.lock import SHOWS_WITHIN_S

if TYPE_CHECKING:
    from submitit import Job, SlurmExecutor

NAME = "sinklab"
LARGEST_ARRAY = 1000  # Slurm's own default
SAVES_WITHIN_S = 120
"""Before its time limit a run is asked to save."""

UNHEARD = [128 + number for number in PREEMPTING]  # of a process that died of the signal while it was still starting
AGAIN = [
    "status=$?",
    f'case $status in {"|".join(map(str, [CALL_AGAIN, *UNHEARD]))}) scontrol requeue "$SLURM_JOB_ID" ;; esac',
    "exit $status",
]


class SlurmOptions(Part):
    """What a run is given, and where.

    Attributes:
        partition, account, qos: the cluster's own unless given.
        cpus: cores, and threads of PyTorch.
        gpus: cards; with several the run is trained on all of them together.
        memory_gb: the cluster's own unless given.
        hours: until a run is asked to save and queues again.
        at_once: runs at a time; as many as the cluster likes unless given.
        poll_seconds: between two questions to the queue.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    cpus: int = Field(default=1, ge=1)
    gpus: int = Field(default=0, ge=0)
    memory_gb: float | None = Field(default=None, gt=0)
    hours: float = Field(default=24.0, ge=0.1)
    at_once: int | None = Field(default=None, ge=1)
    poll_seconds: float = Field(default=10.0, ge=1.0)


@dataclass
class _Submitted:
    """A run with its job, until it has ended.

    Attributes:
        state: as the queue says; empty where it does not know the job.
        ended: when it was first seen to have ended.
    """

    run: PlannedRun
    job: "Job[Event]"
    stop: StopFile
    state: str = "PENDING"
    ended: float | None = None


class SlurmEngine:
    """Runs as jobs of the cluster that Slurm's commands find from here.

    Args:
        folder: for scripts, output and results of the jobs; all machines see it.

    Raises:
        InputError: submitit or Slurm is not installed here, or no cluster answers.
    """

    def __init__(self, folder: Path, options: SlurmOptions) -> None:
        self._folder, self._options = folder.resolve(), options
        self._submitted: dict[str, _Submitted] = {}
        self._followers: dict[str, Follower] = {}
        self._stopping, self._polled = False, 0.0
        require_cluster()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._executor = _executor(self._folder, options)

    def room(self) -> int:
        """The queue keeps them all."""
        return 0 if self._stopping else sys.maxsize

    def submit(self, runs: Sequence[PlannedRun]) -> None:
        """Submit an array of those that are not in the queue yet."""
        queue = states(self._folder)
        new = []
        for run in runs:
            job = self._job_of(run)
            if job is not None and queue.get(job.job_id, "") not in ENDED:
                self._follow(run, job)
            else:
                StopFile(self._folder, run).withdraw()
                new.append(run)
        for first in range(0, len(new), LARGEST_ARRAY):
            self._submit_array(new[first : first + LARGEST_ARRAY])

    def events(self, timeout: float) -> Sequence[Event]:
        """What the run directories and the queue say."""
        end = time.monotonic() + timeout
        while not (found := self._look()) and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.2))
        return found

    def stop(self) -> None:
        """Ask all runs to save, wherever they are, and take back those that wait."""
        self._stopping = True
        for one in self._submitted.values():
            one.stop.ask()
        self._cancel("--state=PENDING")
        self._cancel("--signal=TERM", "--state=RUNNING")  # at once, also where files show late
        self._polled = 0.0

    def close(self) -> None:
        """Leave the jobs alone."""

    def _submit_array(self, runs: Sequence[PlannedRun]) -> None:
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        bodies = [Body(run, self._folder, self._options.cpus) for run in runs]
        try:
            jobs = self._executor.submit_array(bodies)
        except (FailedJobError, FailedSubmissionError) as error:
            raise SinklabError(f"the cluster does not take the jobs: {last_line(str(error))}") from error
        for run, job in zip(runs, jobs, strict=True):
            write_text(self._noted(run), job.job_id)
            self._follow(run, job)

    def _follow(self, run: PlannedRun, job: "Job[Event]") -> None:
        self._submitted[run.name] = _Submitted(run, job, StopFile(self._folder, run))
        self._followers[run.name] = Follower(run.directory)

    def _noted(self, run: PlannedRun) -> Path:
        return self._folder / f"{run.hash}.job"

    def _job_of(self, run: PlannedRun) -> "Job[Event] | None":
        """That an earlier call has submitted."""
        from submitit import SlurmJob

        try:
            return SlurmJob(self._folder, self._noted(run).read_text(encoding="utf-8").strip())
        except OSError:
            return None

    def _cancel(self, *options: str) -> None:
        if ids := [one.job.job_id for one in self._submitted.values()]:
            cancel(*options, *ids)

    def _look(self) -> list[Event]:
        found = new_rows(self._followers)
        if self._submitted and time.monotonic() - self._polled >= self._options.poll_seconds:
            try:
                queue = states(self._folder)
            except SinklabError as error:  # it may come back; the jobs go on without
                logging.getLogger(__name__).warning("%s", error)
                queue = None
            self._polled = time.monotonic()
            if queue is not None:
                found += [event for name in list(self._submitted) if (event := self._heard(name, queue)) is not None]
        return found

    def _heard(self, name: str, queue: dict[str, str]) -> Event | None:
        """How a run has ended, if it has."""
        one = self._submitted[name]
        one.state = queue.get(one.job.job_id, "")
        if one.state not in ENDED:
            one.ended = None
            return None
        one.ended = one.ended or time.monotonic()
        event = _result(one.job)
        may_show = one.state in ("COMPLETED", "") and time.monotonic() - one.ended < SHOWS_WITHIN_S
        if event is None and may_show and not self._stopping:
            return None
        del self._submitted[name], self._followers[name]
        if event is None:
            event = Event(name, "stopped") if self._stopping else self._lost(one)
        if event.kind == "stopped" and not self._stopping:
            return Event(name, "busy", event.step, message="another call has stopped it")
        return event

    def _lost(self, one: _Submitted) -> Event:
        ended = f"ended as {one.state}" if one.state else "is no longer known to Slurm"
        message = (
            f"job {one.job.job_id} {ended} without a result; what it printed is in {one.job.paths.stderr}; "
            "run the same command again to continue"
        )
        return Event(one.run.name, "failed", message=message)


class Body:
    """What a job does. submitit pickles it.

    Args:
        folder: of the engine.
        threads: of PyTorch.
    """

    def __init__(self, run: PlannedRun, folder: Path, threads: int) -> None:
        self._run, self._folder, self._threads = run, folder, threads

    def __call__(self) -> Event:
        """Train the run; returns how it ended.

        Raises:
            SystemExit: with status 75, where a signal has stopped it and not the command.
        """
        try:
            return train_elsewhere(self._run, self._folder, self._threads)
        except PreemptedError:
            sys.exit(CALL_AGAIN)


def _executor(folder: Path, options: SlurmOptions) -> "SlurmExecutor":
    from submitit import SlurmExecutor

    executor = SlurmExecutor(folder)
    memory = {} if options.memory_gb is None else {"mem": f"{round(options.memory_gb * 1024)}M"}
    cards = {"gpus_per_node": options.gpus} if options.gpus else {}
    executor.update_parameters(
        job_name=NAME,
        comment=str(folder),
        partition=options.partition,
        account=options.account,
        qos=options.qos,
        cpus_per_task=options.cpus,
        srun_args=[f"--cpus-per-task={options.cpus}"],  # which it does not take over from sbatch since 22.05
        time=round(options.hours * 60),
        array_parallelism=options.at_once or LARGEST_ARRAY,
        additional_parameters={"requeue": True, "signal": f"USR1@{SAVES_WITHIN_S}"},
        teardown=AGAIN,
        **memory,
        **cards,
    )
    return executor


def _result(job: "Job[Event]") -> Event | None:
    """What the body has returned, None where it has not or that does not show yet."""
    with suppress(OSError):
        outcome, value = pickle.loads(job.paths.result_pickle.read_bytes())
        if outcome == "success":
            return value
    return None
