"""One trainer per run directory. The lock goes with the process, however it ends; reading needs none."""

import contextlib
import os
import socket
from pathlib import Path
from typing import IO

from sinklab.errors import SinklabError


def lock_run(directory: Path) -> IO[str]:
    """Hold the run directory until the returned file is closed.

    Raises:
        SinklabError: another process is training there, or the directory cannot be written or locked.
    """
    import fcntl

    path = directory / "lock"
    try:
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise SinklabError(f"cannot write {path}: {error.strerror or error}. Choose another --out.") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise SinklabError(
            f"{directory} is being trained by {holder}: wait until it has ended, stop it with kill (it saves first), "
            "or choose another --out"
        ) from error
    except OSError as error:
        file.close()
        raise SinklabError(
            f"cannot lock {path}: {error.strerror or error}. Choose an --out on a file system with locks."
        ) from error
    with contextlib.suppress(OSError):  # on a full disk: held all the same, by nobody in particular
        os.ftruncate(file.fileno(), 0)
        os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return file
