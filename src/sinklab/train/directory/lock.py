"""Locks: one trainer per run directory, one writer per document. A lock ends with its process; readers need none."""

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
SHOWS_WITHIN_S = 60  # a network file system caches for so long that a file does not exist


class HeldError(SinklabError):
    """Another process trains in the run directory, or writes the document."""


def lock_run(directory: Path) -> IO[str]:
    """Lock the run directory, which is created where it is missing, until the returned file is closed.

    Raises:
        HeldError: another process is training there.
        SinklabError: the directory cannot be written or locked.
    """
    return _lock(directory / LOCK, "trained", "stop it with kill (it saves first), ")


@contextlib.contextmanager
def one_writer(path: Path | None) -> Iterator[None]:
    """Within it no other process writes the document at `path`.

    The lock beside it is removed at the end, and so is a directory that was created for it and is empty. It is not the
    lock of a run: a document beside a run does not keep others from training it.

    Args:
        path: None if nothing is written.

    Raises:
        HeldError: another process writes it.
        SinklabError: the directory cannot be written or locked.
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


def is_written(path: Path) -> bool:
    """Whether another process that this machine can see writes the document."""
    return _is_locked(path.with_name(f"{path.stem}.{LOCK}"))


def is_held(directory: Path) -> bool:
    """Whether a process that this machine can see trains in the run directory."""
    return _is_locked(directory / LOCK)


def holder(directory: Path, name: str = LOCK) -> str:
    """The process that has or last had the lock of the run directory; empty if not known."""
    try:
        with (directory / name).open(encoding="utf-8") as file:
            return file.readline(200).strip()
    except OSError:
        return ""


def sees(directory: Path, expected: str) -> bool:
    """Whether the holder is `expected`; a file that another machine wrote may become visible only after a while."""
    end = time.monotonic() + SHOWS_WITHIN_S
    while holder(directory) != expected and time.monotonic() < end:
        time.sleep(0.2)
    return holder(directory) == expected


def leave(directory: Path, is_new: bool) -> None:
    """Remove the lock, which the caller holds, where the directory has no other file; a new directory, too."""
    with contextlib.suppress(OSError):  # the directory may have been removed
        if [path.name for path in directory.iterdir()] == [LOCK]:
            (directory / LOCK).unlink()
            if is_new:
                directory.rmdir()


def _is_locked(path: Path) -> bool:
    import fcntl

    try:
        with path.open(encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _lock(path: Path, use: str, remedy: str) -> IO[str]:
    """Lock a file, and write into it which process has done so."""
    import fcntl

    for attempt in range(TRIES):  # `_is_locked` locks for a moment; a file may be removed before it is locked
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
                f"cannot lock {path}: {error.strerror or error}. Choose an --out on a file system with locks."
            ) from error
        if not is_at(file, path):
            file.close()
            continue
        with contextlib.suppress(OSError):  # a full disk: locked all the same
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            os.fsync(file.fileno())  # a network file system shows it to other machines only then
        return file
    raise HeldError(
        f"{path.parent} is being {use} by {holder(path.parent, path.name) or 'another process'}: wait until it has "
        f"ended, {remedy}or choose another --out"
    )
