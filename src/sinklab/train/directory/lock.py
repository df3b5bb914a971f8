"""One trainer per run directory. The lock goes with the process, however it ends; reading needs none."""

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import IO

from sinklab.errors import SinklabError
from sinklab.files import is_at

LOCK = "lock"
LOOKS = 3
SHOWS_WITHIN_S = 60  # a network file system remembers for so long that a file was not there


class HeldError(SinklabError):
    """Another process holds the run directory."""


def lock_run(directory: Path) -> IO[str]:
    """Hold the run directory, which is made where it is not there, until the returned file is closed.

    Raises:
        HeldError: another process is training there.
        SinklabError: the directory cannot be written or locked.
    """
    while True:
        file = _locked(directory)
        if is_at(file, directory / LOCK):  # and was not removed by `leave` before it was locked
            break
        file.close()
    with contextlib.suppress(OSError):  # on a full disk: held all the same, by nobody in particular
        os.ftruncate(file.fileno(), 0)
        os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        os.fsync(file.fileno())  # a network file system shows it to other machines only then
    return file


def holder(directory: Path) -> str:
    """Who holds the run directory or held it last, nothing where that cannot be told."""
    try:
        with (directory / LOCK).open(encoding="utf-8") as file:
            return file.readline(200).strip()
    except OSError:
        return ""


def sees(directory: Path, said: str) -> bool:
    """Whether the holder is who others say; what another machine has written may take a while to show."""
    end = time.monotonic() + SHOWS_WITHIN_S
    while holder(directory) != said and time.monotonic() < end:
        time.sleep(0.2)
    return holder(directory) == said


def is_held(directory: Path) -> bool:
    """Whether a process trains in the run directory, as far as that can be seen from here."""
    import fcntl

    try:
        with (directory / LOCK).open(encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def leave(directory: Path, is_new: bool) -> None:
    """Remove the lock, which the caller holds, where nothing else is in the directory; a new directory goes, too."""
    with contextlib.suppress(OSError):  # also where the directory has gone meanwhile
        if [path.name for path in directory.iterdir()] == [LOCK]:
            (directory / LOCK).unlink()
            if is_new:
                directory.rmdir()


def _locked(directory: Path) -> IO[str]:
    import fcntl

    path = directory / LOCK
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise SinklabError(f"cannot write {path}: {error.strerror or error}. Choose another --out.") from error
    try:
        for _ in range(LOOKS):  # who only looks (`is_held`) is gone by the next time
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return file
            time.sleep(0.02)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise HeldError(
            f"{directory} is being trained by {holder(directory) or 'another process'}: wait until it has ended, "
            "stop it with kill (it saves first), or choose another --out"
        ) from error
    except OSError as error:
        file.close()
        raise SinklabError(
            f"cannot lock {path}: {error.strerror or error}. Choose an --out on a file system with locks."
        ) from error
    return file
