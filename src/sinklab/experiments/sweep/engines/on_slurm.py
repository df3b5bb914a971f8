"""Engine that trains runs as jobs of a Slurm cluster, submitted as job arrays by submitit.

Events that end a job:

| event | signal to the run | effect on its job |
|---|---|---|
| preemption, `scontrol requeue` | SIGTERM; after KillWait, SIGKILL | requeued by Slurm (`--requeue`) |
| loss of a node | none | requeued by Slurm; the run resumes from its newest checkpoint |
| the time limit is near | SIGUSR1 (`--signal`) | exits with status 75; requeued by the script |
| `scancel --signal=TERM` or `=USR1` | SIGTERM or SIGUSR1 | exits with status 75; requeued by the script |
| `scancel` | SIGTERM; after KillWait, SIGKILL | cancelled, because the script receives SIGTERM, too |
| the sweep is stopped | SIGTERM, and `HASH.stop` exists | exits with status 0; a pending job is cancelled |

On SIGTERM and SIGUSR1, the run saves a checkpoint. Exit status 75 (`signals.CALL_AGAIN`) makes the job script requeue
the job. submitit's mechanism (SIGUSR2 and `checkpoint()`) is not used, because it saves within a signal handler, during
an update.

If the command is killed, its jobs keep running. The next call finds the jobs by the files `HASH.job`, named by the hash
of the run, and reports when they end. A job whose run is done returns the event `done`, and a job whose run is locked
by another process `busy`. The queue is read with `squeue`, which every cluster has; `sacct` would need a database.
"""

# pyright: reportMissingImports=false
# submitit is an optional dependency that the extra `dev` does not contain.

import logging
import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from sinklab.errors import InputError, SinklabError
from sinklab.experiments.sweep.engine import Event, MetricsTail, PlannedRun
from sinklab.experiments.sweep.engines.remote import stop_file, train_remotely
from sinklab.extras import require_extra
from sinklab.files import write_text
from sinklab.schema import Part
from sinklab.signals import CALL_AGAIN, PREEMPTING, PreemptedError
from sinklab.train.directory.lock import SHOWS_WITHIN_S

if TYPE_CHECKING:
    from submitit import Job

ENDED = ("", "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED")
ENDED += ("REVOKED", "TIMEOUT")
"""Final states of a job; the empty string is the state of a job that the queue no longer lists."""

ANSWERS_WITHIN_S = 60

NAME = "sinklab"
LARGEST_ARRAY = 1000  # jobs; Slurm's default limit
SAVES_WITHIN_S = 120
"""Seconds between SIGUSR1, which requests a checkpoint, and the time limit of the job."""

UNHANDLED = [128 + number for number in PREEMPTING]  # status of a process killed by the signal before it handles it
REQUEUE = [
    "status=$?",
    f'case $status in {"|".join(map(str, [CALL_AGAIN, *UNHANDLED]))}) scontrol requeue "$SLURM_JOB_ID" ;; esac',
    "exit $status",
]


class SlurmOptions(Part):
    """Slurm resources per run, and limits on the queue.

    Attributes:
        partition, account, qos: options of sbatch; default: the cluster's.
        cpus: number of cores and of PyTorch's CPU threads of a run.
        gpus: number of GPUs of a run; with several GPUs, torchrun trains it.
        memory_gb: memory of a job, GB (2**30 bytes); default: the cluster's.
        hours: time limit of a job; `SAVES_WITHIN_S` seconds before it, the run saves a checkpoint and is requeued.
        at_once: maximum number of concurrent runs of a job array, which has up to 1,000 runs; default: no limit.
        poll_seconds: minimum interval between queries of the queue, seconds.
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
    """A submitted run with its Slurm job.

    Attributes:
        ended: monotonic time in seconds at which the job was first seen to have ended; None if it has not.
    """

    tail: MetricsTail
    job: "Job[Event]"
    ended: float | None = None


class SlurmEngine:
    """Engine that trains runs as jobs of a Slurm cluster.

    Args:
        folder: folder for scripts, outputs, results, ids, stop files and logs of the jobs, on a file system that all
            nodes share.

    Raises:
        InputError: if submitit or Slurm is not installed here, or no cluster answers.
    """

    def __init__(self, folder: Path, options: SlurmOptions) -> None:
        self._folder, self._options = folder.resolve(), options
        self._submitted: dict[str, _Submitted] = {}
        self._stopping, self._polled = False, 0.0
        _require_cluster()
        self._folder.mkdir(parents=True, exist_ok=True)
        from submitit import SlurmExecutor

        self._executor = SlurmExecutor(self._folder)
        memory = {} if options.memory_gb is None else {"mem": f"{round(options.memory_gb * 1024)}M"}
        cards = {"gpus_per_node": options.gpus} if options.gpus else {}
        self._executor.update_parameters(
            job_name=NAME,
            comment=str(self._folder),
            **options.model_dump(include={"partition", "account", "qos"}),
            cpus_per_task=options.cpus,
            srun_args=[f"--cpus-per-task={options.cpus}"],  # not inherited from sbatch since Slurm 22.05
            time=round(options.hours * 60),
            array_parallelism=options.at_once or LARGEST_ARRAY,
            additional_parameters={"requeue": True, "signal": f"USR1@{SAVES_WITHIN_S}"},
            teardown=REQUEUE,
            **memory,
            **cards,
        )

    def room(self) -> int:
        """Return `sys.maxsize`, as Slurm queues jobs."""
        return sys.maxsize

    def submit(self, runs: Sequence[PlannedRun]) -> None:
        """Submit the runs as job arrays, and remove the runs' stop files of earlier calls.

        If an earlier call has submitted a job for a run and this job has not ended, it is followed instead.

        Raises:
            SinklabError: if the cluster does not answer or rejects the jobs.
        """
        queue = states(self._folder)
        new = []
        for run in runs:
            job = self._job_of(run)
            if job is not None and queue.get(job.job_id, "") not in ENDED:
                self._follow(run, job)
            else:
                stop_file(self._folder, run).unlink(missing_ok=True)
                new.append(run)
        for first in range(0, len(new), LARGEST_ARRAY):
            self._submit_array(new[first : first + LARGEST_ARRAY])

    def events(self, timeout: float) -> Sequence[Event]:
        """Return new evaluations, read from the run directories, and the last events of jobs that have ended."""
        end = time.monotonic() + timeout
        while not (found := self._poll()) and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.2))
        return found

    def stop(self) -> None:
        """Request that all running jobs save a checkpoint and stop, and cancel pending jobs."""
        self._stopping = True
        for one in self._submitted.values():
            stop_file(self._folder, one.tail.run).touch()
        self._cancel("--state=PENDING")
        self._cancel("--signal=TERM", "--state=RUNNING")  # network file systems may show stop files late
        self._polled = 0.0

    def close(self) -> None:
        """Do nothing; submitted jobs keep running."""

    def _submit_array(self, runs: Sequence[PlannedRun]) -> None:
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        try:
            jobs = self._executor.submit_array(
                [partial(train_in_job, run, self._folder, self._options.cpus) for run in runs]
            )
        except (FailedJobError, FailedSubmissionError) as error:
            raise SinklabError(f"the cluster rejected the jobs: {_last_line(str(error))}") from error
        for run, job in zip(runs, jobs, strict=True):
            write_text(self._folder / f"{run.hash}.job", job.job_id)
            self._follow(run, job)

    def _follow(self, run: PlannedRun, job: "Job[Event]") -> None:
        self._submitted[run.name] = _Submitted(MetricsTail(run), job)

    def _job_of(self, run: PlannedRun) -> "Job[Event] | None":
        """Return the Slurm job that an earlier call submitted for a run; None if there is none."""
        from submitit import SlurmJob

        try:
            return SlurmJob(self._folder, (self._folder / f"{run.hash}.job").read_text(encoding="utf-8").strip())
        except OSError:
            return None

    def _cancel(self, *options: str) -> None:
        if ids := [one.job.job_id for one in self._submitted.values()]:
            # --quiet: no error for jobs that have ended
            subprocess.run(["scancel", "--quiet", *options, *ids], capture_output=True, check=False)

    def _poll(self) -> list[Event]:
        found = [row for one in self._submitted.values() for row in one.tail.rows()]
        if self._submitted and time.monotonic() - self._polled >= self._options.poll_seconds:
            try:
                queue = states(self._folder)
                found += [event for name in list(self._submitted) if (event := self._end_of(name, queue)) is not None]
            except SinklabError as error:  # temporary failure of Slurm; the jobs keep running
                logging.getLogger(__name__).warning("%s", error)
            self._polled = time.monotonic()
        return found

    def _end_of(self, name: str, queue: dict[str, str]) -> Event | None:
        """Return the last event of a submitted run, given job states by job id; None if its job has not ended."""
        one = self._submitted[name]
        state = queue.get(one.job.job_id, "")
        if state not in ENDED:
            one.ended = None
            return None
        one.ended = one.ended or time.monotonic()
        event = _result(one.job)
        may_appear = state in ("COMPLETED", "") and time.monotonic() - one.ended < SHOWS_WITHIN_S
        if event is None and may_appear and not self._stopping:
            return None
        del self._submitted[name]
        if event is None and self._stopping:
            return Event(name, "stopped")
        if event is None:
            ended = f"ended as {state}" if state else "is no longer known to Slurm"
            message = (
                f"job {one.job.job_id} {ended} without a result; its output is in {one.job.paths.stderr}; "
                "run the same command again to resume"
            )
            return Event(name, "failed", message=message)
        if event.kind == "stopped" and not self._stopping:
            return Event(name, "busy", event.step, message="another call has stopped it")
        return event


def train_in_job(run: PlannedRun, folder: Path, threads: int) -> Event:
    """Main function of a Slurm job, pickled by submitit: train a run and return its last event.

    If a signal stopped the run and there is no stop file, the process exits with status 75, which requeues the job.
    """
    try:
        return train_remotely(run, folder, threads)
    except PreemptedError:
        sys.exit(CALL_AGAIN)


def _result(job: "Job[Event]") -> Event | None:
    """Return the last event, which a job has saved as its result; None if the job failed or has no result (yet)."""
    with suppress(OSError):
        outcome, value = pickle.loads(job.paths.result_pickle.read_bytes())
        if outcome == "success":
            return value
    return None


def _require_cluster() -> None:
    """Raise InputError if submitit or a Slurm command is not installed, or no cluster answers."""
    require_extra("cluster", ("submitit",), "--engine slurm")
    for command in ("sbatch", "srun", "squeue", "scancel"):
        if shutil.which(command) is None:
            raise InputError(f"--engine slurm: {command} is not on the PATH; run sinklab where jobs can be submitted")
    try:
        _output_of("squeue", "--me", "--noheader")
    except SinklabError as error:
        where = os.environ.get("SLURM_CONF", "not set")
        raise InputError(f"--engine slurm: no cluster answers ({error}); SLURM_CONF is {where}") from error


def states(folder: Path) -> dict[str, str]:
    """Return the Slurm states of the jobs that an engine with this folder has submitted, by job id.

    Jobs that have ended are included for some minutes.

    Raises:
        SinklabError: if Slurm does not answer.
    """
    listed = _output_of("squeue", "--me", "--array", "--noheader", "--states=all", "--format=%i|%T|%k")
    jobs = (line.split("|", 2) for line in listed.splitlines())
    return {job: state for job, state, comment in jobs if comment == str(folder)}


def _output_of(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=ANSWERS_WITHIN_S).stdout
    except subprocess.CalledProcessError as error:
        raise SinklabError(f"{command[0]} failed: {_last_line(error.stderr)}") from error
    except subprocess.TimeoutExpired as error:
        raise SinklabError(f"{command[0]} did not respond within {ANSWERS_WITHIN_S} seconds") from error


def _last_line(text: str) -> str:
    """Return the last line of a command's output that is not blank; it usually names the error."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no message"
