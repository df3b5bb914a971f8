"""Engines that train runs as jobs of a Slurm cluster (by submitit) or as tasks of an existing Ray cluster.

They communicate with the runs through a folder on a file system that all machines share:

HASH.stop    requests that the run save a checkpoint and stop
HASH.log     a line per start, evaluation and end, with time (UTC), machine and process
HASH.job     id of the run's Slurm job; a later call follows this job instead of submitting another one

On SIGTERM and SIGUSR1 a run saves a checkpoint and exits with status 75 (`signals.CALL_AGAIN`).

| event | signal to the run | effect on its Slurm job |
|---|---|---|
| preemption, `scontrol requeue` | SIGTERM; after KillWait, SIGKILL | requeued by Slurm (`--requeue`) |
| loss of a node | none | requeued by Slurm; the run resumes from its newest checkpoint |
| the time limit is near | SIGUSR1 (`--signal`) | exits with status 75; requeued by the script |
| `scancel` | SIGTERM; after KillWait, SIGKILL | cancelled, because the script receives SIGTERM, too |
| the sweep is stopped | none; `HASH.stop` exists | exits with status 0; a pending job is cancelled |

submitit's own mechanism (SIGUSR2 and `checkpoint()`) is not used, because it saves within a signal handler, during an
update. Slurm jobs keep running if the command is killed. Ray restarts tasks whose node or process died (`retries`), and
ends the tasks of a command with it; the same command resumes their runs.
"""

# submitit and Ray are optional dependencies that the extra `dev` does not contain.

import logging
import os
import shutil
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field, ValidationError

from sinklab.errors import InputError, SinklabError, cause, require_extra
from sinklab.experiments.sweep.engine import Engine, Event, MetricsTail, PlannedRun
from sinklab.experiments.sweep.local import LocalEngine
from sinklab.files import append_line, write_text
from sinklab.schema import Part
from sinklab.signals import CALL_AGAIN, PREEMPTING, PreemptedError, stop_on_signals
from sinklab.train.lock import SHOWS_WITHIN_S

LARGEST_ARRAY = 1000  # jobs; Slurm's default limit
SAVES_WITHIN_S = 120  # between SIGUSR1, which requests a checkpoint, and the time limit of a Slurm job
UNHANDLED = [128 + number for number in PREEMPTING]  # status of a process killed by the signal before it handles it
REQUEUE = [
    "status=$?",
    f'case $status in {"|".join(map(str, [CALL_AGAIN, *UNHANDLED]))}) scontrol requeue "$SLURM_JOB_ID" ;; esac',
    "exit $status",
]
AGAIN = "run the same command again to resume"


class ClusterEngine(ABC):
    """Base class of the engines: runs by name, each with its job, and their events.

    Args:
        folder: shared folder for stop files and logs; created.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.jobs: dict[str, tuple[MetricsTail, Any]] = {}
        self.stopping = False

    def room(self) -> int:
        """Return `sys.maxsize`, as clusters queue their jobs."""
        return sys.maxsize

    def events(self, timeout: float) -> Sequence[Event]:
        """Return new evaluations, read from the run directories, and the last events of runs that have ended."""
        end = time.monotonic() + timeout
        while True:
            found = [row for tail, _ in self.jobs.values() for row in tail.rows()]
            for name, (tail, job) in list(self.jobs.items()):
                if (event := self.end_of(tail.run, job)) is not None:
                    del self.jobs[name]
                    by_another = event.kind == "stopped" and not self.stopping
                    message = "another call has stopped it"
                    found.append(Event(name, "busy", event.step, message=message) if by_another else event)
            if found or time.monotonic() >= end:
                return found
            time.sleep(0.1)

    @abstractmethod
    def end_of(self, run: PlannedRun, job: Any) -> Event | None:
        """Return the last event of a run; None if its job has not ended."""

    def stop(self) -> None:
        """Request that all runs save a checkpoint and stop; queued runs stop as soon as they start."""
        self.stopping = True
        for tail, _ in self.jobs.values():
            stop_file(self.folder, tail.run).touch()

    def close(self) -> None:  # noqa: B027
        """Do nothing; submitted jobs keep running."""


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


class SlurmEngine(ClusterEngine):
    """Engine that trains runs as jobs of a Slurm cluster, submitted as job arrays.

    Raises:
        InputError: if submitit or Slurm is not installed here, or no cluster answers.
    """

    def __init__(self, folder: Path, options: SlurmOptions) -> None:
        require_extra("cluster", ("submitit",), "--engine slurm")
        if missing := [name for name in ("sbatch", "srun", "squeue") if shutil.which(name) is None]:
            raise InputError(
                f"--engine slurm: {missing[0]} is not on the PATH; run sinklab where jobs can be submitted"
            )
        if _queue() is None:
            where = os.environ.get("SLURM_CONF", "not set")
            raise InputError(f"--engine slurm: no cluster answers squeue; SLURM_CONF is {where}")
        from submitit import SlurmExecutor

        super().__init__(folder)
        self._options, self._polled = options, 0.0
        self._queue: set[str] | None = None
        self._missing: dict[str, float] = {}  # when a job without a result was first missing in the queue
        self._executor = SlurmExecutor(self.folder)
        self._executor.update_parameters(
            job_name="sinklab",
            **options.model_dump(include={"partition", "account", "qos"}),
            cpus_per_task=options.cpus,
            srun_args=[f"--cpus-per-task={options.cpus}"],  # not inherited from sbatch since Slurm 22.05
            time=round(options.hours * 60),
            array_parallelism=options.at_once or LARGEST_ARRAY,
            additional_parameters={"requeue": True, "signal": f"USR1@{SAVES_WITHIN_S}"},
            teardown=REQUEUE,
            **({} if options.memory_gb is None else {"mem": f"{round(options.memory_gb * 1024)}M"}),
            **({"gpus_per_node": options.gpus} if options.gpus else {}),
        )

    def submit(self, runs: Sequence[PlannedRun]) -> None:
        """Submit the runs as job arrays, or follow the jobs of earlier calls that are still in the queue.

        Raises:
            SinklabError: if the cluster rejects the jobs.
        """
        from submitit import SlurmJob
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        queue, new = _queue() or set(), []
        for run in runs:
            stop_file(self.folder, run).unlink(missing_ok=True)
            file = self.folder / f"{run.hash}.job"
            if file.exists() and (job := file.read_text(encoding="utf-8")) in queue:
                self.jobs[run.name] = MetricsTail(run), SlurmJob(self.folder, job)
            else:
                new.append(run)
        for chunk in (new[first : first + LARGEST_ARRAY] for first in range(0, len(new), LARGEST_ARRAY)):
            try:
                jobs = self._executor.submit_array(
                    [partial(train_in_job, run, self.folder, self._options.cpus) for run in chunk]
                )
            except (FailedJobError, FailedSubmissionError) as error:
                raise SinklabError(f"the cluster rejected the jobs: {str(error).strip().splitlines()[-1]}") from error
            for run, job in zip(chunk, jobs, strict=True):
                write_text(self.folder / f"{run.hash}.job", job.job_id)
                self.jobs[run.name] = MetricsTail(run), job
        self._polled = 0.0

    def end_of(self, run: PlannedRun, job: Any) -> Event | None:
        """Return the event that the job has saved as its result; else, if its job left the queue, failed or stopped."""
        if job.paths.result_pickle.exists():
            with suppress(Exception):  # raised again by submitit if the job failed
                return job.result()
        if time.monotonic() - self._polled >= self._options.poll_seconds:
            self._queue, self._polled = _queue(), time.monotonic()
        if self._queue is None or job.job_id in self._queue:
            self._missing.pop(job.job_id, None)
            return None
        if self.stopping:
            return Event(run.name, "stopped")
        since = self._missing.setdefault(job.job_id, time.monotonic())
        if time.monotonic() - since < SHOWS_WITHIN_S:  # network file systems may show the result late
            return None
        message = f"job {job.job_id} ended without a result; its output is in {job.paths.stderr}; {AGAIN}"
        return Event(run.name, "failed", message=message)

    def stop(self) -> None:
        """Request that all runs save a checkpoint and stop, and cancel pending jobs."""
        super().stop()
        if ids := [job.job_id for _, job in self.jobs.values()]:
            subprocess.run(["scancel", "--quiet", "--state=PENDING", *ids], capture_output=True, check=False)
        self._polled = 0.0


def _queue() -> set[str] | None:
    """Return the ids of this user's Slurm jobs that have not ended; None if Slurm does not answer.

    submitit would ask `sacct`, which needs a database that not every cluster has.
    """
    command = ["squeue", "--me", "--array", "--noheader", "--format=%i"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if found.returncode else set(found.stdout.split())


class RayOptions(Part):
    """Address of the Ray cluster, and resources per run.

    Attributes:
        address: HOST:PORT, ray://HOST:PORT, or auto: the address in RAY_ADDRESS or, if this variable is not set, the
            cluster of this machine.
        cpus: number of cores and of PyTorch's CPU threads of a run.
        gpus: number of GPUs of a run; with several GPUs, torchrun trains it.
        memory_gb: memory to reserve for a run, GB (2**30 bytes); default: no reservation.
        retries: maximum number of restarts of a run after the death of a node or process.
    """

    address: str = "auto"
    cpus: int = Field(default=1, ge=1)
    gpus: int = Field(default=0, ge=0)
    memory_gb: float | None = Field(default=None, gt=0)
    retries: int = Field(default=10, ge=0)


class RayEngine(ClusterEngine):
    """Engine that trains runs as tasks of a Ray cluster.

    Raises:
        InputError: if Ray, an optional dependency, is not installed, or no connection to the cluster is possible.
    """

    def __init__(self, folder: Path, options: RayOptions) -> None:
        require_extra("cluster", ("ray",), "--engine ray")
        import ray

        auto = options.address == "auto"
        where = os.environ.get("RAY_ADDRESS", options.address) if auto else options.address
        try:
            host, _, port = where.rpartition("://")[2].rpartition(":")
            if port.isdigit():  # without a connection, Ray would retry for minutes, then end the process
                socket.create_connection((host.strip("[]"), int(port)), 10.0).close()
            ray.init(where, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, ValueError, RuntimeError) as error:
            raise InputError(
                f"--engine ray: cannot connect to a cluster at {where} ({cause(error)}); start one with ray start "
                "--head, or set --engine-option address=HOST:PORT"
            ) from error
        super().__init__(folder)
        self._options = options

    def submit(self, runs: Sequence[PlannedRun]) -> None:
        """Submit a Ray task for each run."""
        import ray

        options = self._options
        environment = {key: value for key, value in os.environ.items() if key.startswith("SINKLAB_")}
        for run in runs:
            stop_file(self.folder, run).unlink(missing_ok=True)
            task = ray.remote(train_in_task).options(
                name=run.name,
                num_cpus=options.cpus,
                num_gpus=options.gpus,
                memory=None if options.memory_gb is None else round(options.memory_gb * 2**30),
                max_retries=options.retries,
            )
            job = task.remote(run, self.folder, options.cpus, Path.cwd(), environment)
            self.jobs[run.name] = MetricsTail(run), job

    def end_of(self, run: PlannedRun, job: Any) -> Event | None:
        """Return the result of a task; `failed` if Ray has given it up."""
        import ray
        from ray.exceptions import RayError

        if not ray.wait([job], timeout=0)[0]:
            return None
        try:
            return ray.get(job)
        except RayError as error:
            return Event(run.name, "failed", message=f"{type(error).__name__}: {cause(error)}; {AGAIN}")

    def close(self) -> None:
        """Disconnect from the cluster, which ends this command's tasks."""
        import ray

        ray.shutdown()


def train_in_job(run: PlannedRun, folder: Path, threads: int) -> Event:
    """Main function of a Slurm job, pickled by submitit: train a run and return its last event.

    If a signal stopped the run, the process exits with status 75, which requeues the job.
    """
    try:
        return train_remotely(run, folder, threads)
    except PreemptedError:
        sys.exit(CALL_AGAIN)


def train_in_task(run: PlannedRun, folder: Path, threads: int, working: Path, environment: Mapping[str, str]) -> Event:
    """Main function of a Ray task: train a run and return its last event.

    If a signal stopped the run, the process exits, which Ray treats as a crash and retries.

    Args:
        working: working directory of the command, to which relative paths in recipes refer.
        environment: environment variables of the command that begin with SINKLAB_.
    """
    os.chdir(working)
    os.environ.update(environment)
    try:
        return train_remotely(run, folder, threads)
    except PreemptedError:
        os._exit(CALL_AGAIN)


def stop_file(folder: Path, run: PlannedRun) -> Path:
    """Return the path of a run's stop file in an engine's shared folder."""
    return folder / f"{run.hash}.stop"


def train_remotely(run: PlannedRun, folder: Path, threads: int) -> Event:
    """Train a run in this process, with a log and a stop file in the shared folder; return the run's last event.

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
    polled, stop_exists = float("-inf"), False

    def should_stop() -> bool:
        """Return True after a signal, or if the stop file exists; look for the file at most once a second."""
        nonlocal polled, stop_exists
        if not stop_exists and time.monotonic() - polled >= 1.0:
            polled, stop_exists = time.monotonic(), stop.exists()
        return preempted() or stop_exists

    with stop_on_signals(*PREEMPTING) as preempted:
        ended = train_cell(run, threads, write, should_stop)
    write(ended)
    if ended.kind == "stopped" and not stop.exists():
        raise PreemptedError
    return ended


OptionsOfEngine = TypeVar("OptionsOfEngine", bound=Part)


def open_engine(name: str, jobs: int, sweep: Path, settings: Sequence[str] = ()) -> "Engine":
    """Create the execution engine with this name.

    Args:
        jobs: number of concurrent runs of the local engine; other engines ignore it.
        sweep: directory of the sweep, in which slurm and ray create a folder.
        settings: options of slurm or ray, as KEY=VALUE (`read_options`); the local engine has none.

    Raises:
        InputError: if an option is invalid, a dependency or command of the engine is missing, or no cluster answers.
    """
    if name == "local":
        if settings:
            raise InputError(
                f"--engine-option {settings[0]}: --engine local has no options; set --jobs for the number of "
                "concurrent runs, or choose --engine slurm or ray"
            )
        return LocalEngine(jobs)
    if name == "slurm":
        return SlurmEngine(sweep / name, read_options(SlurmOptions, name, settings))
    return RayEngine(sweep / name, read_options(RayOptions, name, settings))


def read_options(kind: type[OptionsOfEngine], engine: str, settings: Sequence[str]) -> OptionsOfEngine:
    """Return the options of an engine, parsed from KEY=VALUE; of a repeated key, the last value is used.

    Raises:
        InputError: if a key is unknown or a value invalid; the message lists all keys.
    """
    try:
        return kind.model_validate({key: value for key, _, value in (one.partition("=") for one in settings)})
    except ValidationError as error:
        known = ", ".join(kind.model_fields)
        raise InputError(
            f"--engine-option {' '.join(settings)}: {cause(error)}; --engine {engine} has the options {known}"
        ) from error
