"""Locks: one trainer per run directory, one writer per document. A lock ends with its process; reading needs none."""

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
LOOKS = 3
SHOWS_WITHIN_S = 60  # a network file system remembers for so long that a file was not there


class HeldError(SinklabError):
    """Another process holds the run directory, or writes the document."""


def lock_run(directory: Path) -> IO[str]:
    """Hold the run directory, which is made where it is not there, until the returned file is closed.

    Raises:
        HeldError: another process is training there.
        SinklabError: the directory cannot be written or locked.
    """
    return _lock(directory, LOCK, "trained", "stop it with kill (it saves first), ")


@contextlib.contextmanager
def one_writer(path: Path | None) -> Iterator[None]:
    """Within it no other process writes the document at `path`, which several steps of work go into.

    The lock beside it is removed at the end, and so is a directory that was made for it and is empty. It is not that of
    a run: what is written beside a run keeps nobody from training it.

    Args:
        path: None where nothing is written.

    Raises:
        HeldError: another process writes it.
        SinklabError: the directory cannot be written or locked.
    """
    if path is None:
        yield
        return
    is_new = not path.parent.exists()
    with _lock(path.parent, _beside(path), "written to", ""):
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # also where the directory has gone meanwhile
                (path.parent / _beside(path)).unlink()
                if is_new:
                    path.parent.rmdir()


def is_written(path: Path) -> bool:
    """Whether another process writes the document, as far as that can be seen from here."""
    return _is_locked(path.parent / _beside(path))


def _beside(path: Path) -> str:
    return f"{path.stem}.{LOCK}"


def _lock(directory: Path, name: str, use: str, remedy: str) -> IO[str]:
    """Hold a file of a directory, and say in it who does."""
    while True:
        file = _locked(directory, name, use, remedy)
        if is_at(file, directory / name):  # and was not removed before it was locked
            break
        file.close()
    with contextlib.suppress(OSError):  # on a full disk: held all the same, by nobody in particular
        os.ftruncate(file.fileno(), 0)
        os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        os.fsync(file.fileno())  # a network file system shows it to other machines only then
    return file


def holder(directory: Path, name: str = LOCK) -> str:
    """Who holds the run directory or held it last, nothing where that cannot be told."""
    try:
        with (directory / name).open(encoding="utf-8") as file:
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
    return _is_locked(directory / LOCK)


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


def leave(directory: Path, is_new: bool) -> None:
    """Remove the lock, which the caller holds, where nothing else is in the directory; a new directory goes, too."""
    with contextlib.suppress(OSError):  # also where the directory has gone meanwhile
        if [path.name for path in directory.iterdir()] == [LOCK]:
            (directory / LOCK).unlink()
            if is_new:
                directory.rmdir()


def _locked(directory: Path, name: str, use: str, remedy: str) -> IO[str]:
    import fcntl

    path = directory / name
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
            f"{directory} is being {use} by {holder(directory, name) or 'another process'}: wait until it has ended, "
            f"{remedy}or choose another --out"
        ) from error
    except OSError as error:
        file.close()
        raise SinklabError(
            f"cannot lock {path}: {error.strerror or error}. Choose an --out on a file system with locks."
        ) from error
    return file
