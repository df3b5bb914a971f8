"""File locks: one training process per run directory, one writer per document. Readers need no lock.

A lock is released when its process ends.
"""

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from sinklab.errors import SinklabError
from sinklab.files import is_at

LOCK = "lock"
TRIES = 4
SHOWS_WITHIN_S = 60  # a network file system may cache the absence of a file for this long


class HeldError(SinklabError):
    """The run directory or document is locked by another process."""


def lock_run(directory: Path) -> IO[str]:
    """Lock the run directory until the returned file is closed. A missing directory is created.

    Raises:
        HeldError: if another process holds the lock.
        SinklabError: if the directory cannot be written or locked.
    """
    return _lock(directory / LOCK, "trained", "stop it with kill (it saves first), ")


@contextlib.contextmanager
def one_writer(path: Path | None) -> Iterator[None]:
    """Lock the document at `path` against other writers in the `with` block.

    At the end the lock file is removed, and so is the directory if this call created it and it is empty. The lock does
    not prevent training in the same directory.

    Args:
        path: document to be written; None: no lock.

    Raises:
        HeldError: if another process is writing the document.
        SinklabError: if the directory cannot be written or locked.
    """
    if path is None:
        yield
        return
    lock, is_new = path.with_name(f"{path.stem}.{LOCK}"), not path.parent.exists()
    with _lock(lock, "written to", ""):
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # the directory may have been removed
                lock.unlink()
                if is_new:
                    path.parent.rmdir()


def is_held(directory: Path) -> bool:
    """Return True if a process holds the lock of `lock_run`; locks held on other machines may be undetectable."""
    import fcntl

    try:
        with (directory / LOCK).open(encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def holder(directory: Path, name: str = LOCK) -> str:
    """Return the process and host that hold or last held the lock file `name`, as recorded in it; empty if unknown."""
    try:
        with (directory / name).open(encoding="utf-8") as file:
            return file.readline(200).strip()
    except OSError:
        return ""


def wait_for_holder(directory: Path, expected: str) -> bool:
    """Wait up to 60 s, for network file systems, until the lock file contains `expected`; return True if it does."""
    end = time.monotonic() + SHOWS_WITHIN_S
    while holder(directory) != expected and time.monotonic() < end:
        time.sleep(0.2)
    return holder(directory) == expected


def remove_if_empty(directory: Path, is_new: bool) -> None:
    """Remove the caller's lock file if the directory has no other files; then remove the directory if `is_new`."""
    with contextlib.suppress(OSError):  # the directory may have been removed
        if [path.name for path in directory.iterdir()] == [LOCK]:
            (directory / LOCK).unlink()
            if is_new:
                directory.rmdir()


def _lock(path: Path, use: str, remedy: str) -> IO[str]:
    """Lock the file at `path`, write process and host into it, and return the open file."""
    import fcntl

    for attempt in range(TRIES):  # `is_held` locks briefly, and the file may be removed before it is locked
        time.sleep(0.02 * (attempt > 0))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("a+", encoding="utf-8")
        except OSError as error:
            raise SinklabError(f"cannot write {path}: {error.strerror or error}. Choose another --out.") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            continue
        except OSError as error:
            file.close()
            raise SinklabError(
                f"cannot lock {path}: {error.strerror or error}. Choose an --out on a file system that supports flock."
            ) from error
        if not is_at(file, path):
            file.close()
            continue
        with contextlib.suppress(OSError):  # the lock is held even if the disk is full
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            os.fsync(file.fileno())  # needed for other machines on a network file system
        return file
    raise HeldError(
        f"{path.parent} is being {use} by {holder(path.parent, path.name) or 'another process'}: wait until it has "
        f"ended, {remedy}or choose another --out"
    )
