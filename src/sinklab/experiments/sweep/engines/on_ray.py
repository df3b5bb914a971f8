"""Engine that trains runs as tasks of an existing Ray cluster.

If a node dies, Ray restarts the node's tasks elsewhere (`retries`), and each run resumes from its newest checkpoint. A
worker that receives SIGTERM or SIGUSR1 saves a checkpoint and exits; Ray treats this as a crash and retries the task.
Tasks end with the command that submitted them; the same command resumes their runs.
"""

# pyright: reportMissingImports=false
# Ray is an optional dependency that the extra `dev` does not contain.

import logging
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from sinklab.errors import InputError
from sinklab.experiments.sweep.engine import Event, MetricsTail, PlannedRun
from sinklab.experiments.sweep.engines.remote import stop_file, train_remotely
from sinklab.extras import require_extra
from sinklab.schema import Part
from sinklab.signals import CALL_AGAIN, PreemptedError

if TYPE_CHECKING:
    from ray import ObjectRef

ANSWERS_WITHIN_S = 10.0


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


class RayEngine:
    """Engine that trains runs as tasks of a Ray cluster.

    Args:
        folder: folder for stop files and logs, on a file system that all nodes share.

    Raises:
        InputError: if Ray, an optional dependency, is not installed, or no connection to the cluster is possible.
    """

    def __init__(self, folder: Path, options: RayOptions) -> None:
        self._folder, self._options = folder.resolve(), options
        self._tasks: dict[ObjectRef[Event], MetricsTail] = {}
        self._stopping = False
        _connect(options.address)
        self._folder.mkdir(parents=True, exist_ok=True)

    def room(self) -> int:
        """Return `sys.maxsize`, as Ray queues tasks."""
        return sys.maxsize

    def submit(self, runs: Sequence[PlannedRun]) -> None:
        """Submit a Ray task for each run; stop files of earlier calls are removed."""
        import ray

        options = self._options
        task = ray.remote(train_in_task)
        environment = {key: value for key, value in os.environ.items() if key.startswith("SINKLAB_")}
        given = {
            "num_cpus": options.cpus,
            "num_gpus": options.gpus,
            "memory": None if options.memory_gb is None else round(options.memory_gb * 2**30),
            "max_retries": options.retries,
        }
        for run in runs:
            stop_file(self._folder, run).unlink(missing_ok=True)
            arguments = (run, self._folder, options.cpus, Path.cwd(), environment)
            submitted = task.options(name=run.name, **given).remote(*arguments)
            self._tasks[submitted] = MetricsTail(run)

    def events(self, timeout: float) -> Sequence[Event]:
        """Return new evaluations, read from the run directories, and the last event of at most one ended task."""
        import ray

        if not self._tasks:
            return []
        ended, _ = ray.wait(list(self._tasks), num_returns=1, timeout=timeout)
        found = [row for tail in self._tasks.values() for row in tail.rows()]
        return found + [self._outcome(task, self._tasks.pop(task).run) for task in ended]

    def stop(self) -> None:
        """Request that all runs save a checkpoint and stop; queued runs stop as soon as they start."""
        self._stopping = True
        for tail in self._tasks.values():
            stop_file(self._folder, tail.run).touch()

    def close(self) -> None:
        """Disconnect from the cluster, which ends this command's tasks."""
        import ray

        ray.shutdown()

    def _outcome(self, task: "ObjectRef[Event]", run: PlannedRun) -> Event:
        import ray
        from ray.exceptions import RayError

        try:
            event = ray.get(task)
        except RayError as error:
            reason = str(error).strip().partition("\n")[0]
            again = "run the same command again to resume"
            return Event(run.name, "failed", message=f"{type(error).__name__}: {reason}; {again}")
        if event.kind == "stopped" and not self._stopping:
            return Event(run.name, "busy", event.step, message="another call has stopped it")
        return event


def train_in_task(run: PlannedRun, folder: Path, threads: int, working: Path, environment: Mapping[str, str]) -> Event:
    """Main function of a Ray task: train a run and return its last event.

    The working directory and environment variables of the process are changed to those of the command. On SIGTERM or
    SIGUSR1, the run saves a checkpoint and the process exits with status 75, so that Ray retries the task.

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


def _connect(address: str) -> None:
    require_extra("cluster", ("ray",), "--engine ray")
    import ray

    where = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
    try:
        host, _, port = where.rpartition("://")[2].rpartition(":")
        if port.isdigit():  # without a connection, Ray would retry for minutes, then end the process
            socket.create_connection((host.strip("[]"), int(port)), ANSWERS_WITHIN_S).close()
        ray.init(where, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise InputError(
            f"--engine ray: cannot connect to a cluster at {where} ({reason}); start one with ray start --head, or set "
            "--engine-option address=HOST:PORT"
        ) from error
