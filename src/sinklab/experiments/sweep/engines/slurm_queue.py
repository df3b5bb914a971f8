"""What Slurm's own commands say of its queue. They are there wherever Slurm is; `sacct` needs a data base as well."""

# pyright: reportMissingImports=false
# It is an extra, which `dev` leaves out.

import os
import shutil
import subprocess
from pathlib import Path

from sinklab.errors import InputError, SinklabError
from sinklab.extras import install_command

ENDED = ("", "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED")
ENDED += ("REVOKED", "TIMEOUT")
"""States of a job that does not come back; empty for one that the queue no longer knows."""

ANSWERS_WITHIN_S = 60


def require_cluster() -> None:
    """Refuse where no jobs can be submitted.

    Raises:
        InputError: submitit or Slurm is not installed here, or no cluster answers.
    """
    try:
        import submitit  # noqa: F401
    except ImportError as error:
        raise InputError(f"--engine slurm: submitit is not installed: {install_command('cluster')}") from error
    for command in ("sbatch", "srun", "squeue", "scancel"):
        if shutil.which(command) is None:
            raise InputError(
                f"--engine slurm: {command} is not on the PATH; call sinklab where the cluster takes jobs from"
            )
    try:
        _ask("squeue", "--me", "--noheader")
    except SinklabError as error:
        where = os.environ.get("SLURM_CONF", "not set")
        raise InputError(f"--engine slurm: no cluster answers ({error}); SLURM_CONF is {where}") from error


def states(folder: Path) -> dict[str, str]:
    """The states of jobs of this folder, those that ended in the last minutes included, by their ids.

    Raises:
        SinklabError: nobody answers.
    """
    listed = _ask("squeue", "--me", "--array", "--noheader", "--states=all", "--format=%i|%T|%k")
    jobs = (line.split("|", 2) for line in listed.splitlines())
    return {job: state for job, state, comment in jobs if comment == str(folder)}


def cancel(*arguments: str) -> None:
    """Call scancel; jobs that have ended meanwhile are no error."""
    subprocess.run(["scancel", "--quiet", *arguments], capture_output=True, check=False)


def _ask(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=ANSWERS_WITHIN_S).stdout
    except subprocess.CalledProcessError as error:
        raise SinklabError(f"{command[0]} says: {last_line(error.stderr)}") from error
    except subprocess.TimeoutExpired as error:
        raise SinklabError(f"{command[0]} has said nothing for {ANSWERS_WITHIN_S} seconds") from error


def last_line(text: str) -> str:
    """Of what a command has said, the line in which it says why."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "nothing"
