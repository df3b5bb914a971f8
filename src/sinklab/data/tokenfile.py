"""The token ids of a shard, read by position and watched for changes while they are in use.

A memory map would do, were it not for faults: where a file is cut short under it, or its disk fails, reading the map
ends the process without a word (SIGBUS). A read by position fails with a reason. What it does not see, other bytes of
the same number in the same place, shows in the file's times, which cost nothing to look at; only where they differ are
the bytes compared with their checksum.
"""

import hashlib
import os
import weakref
from pathlib import Path

import numpy as np

from sinklab.errors import SinklabError


class TokenFile:
    """A flat file of token ids. It stays open, so that it may be renamed or deleted while it is in use.

    Args:
        path: of the file.
        dtype: of the ids in it.
        tokens: how many there must be.
        sha256: of its bytes, in hexadecimal.
        remedy: a sentence that says how to make the file again.

    Raises:
        SinklabError: it is missing, unreadable or of another size.
    """

    def __init__(self, path: Path, dtype: np.dtype, tokens: int, sha256: str, remedy: str) -> None:
        self.path, self.dtype = path, dtype
        self._tokens, self._sha256, self._remedy = tokens, sha256, remedy
        if not path.is_file():
            raise SinklabError(f"{path} is missing. {remedy}")
        try:
            self._file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise self._unreadable(error) from error
        weakref.finalize(self, os.close, self._file)
        self._state = self._look()

    def __len__(self) -> int:
        return self._tokens

    def __getitem__(self, where: int | slice) -> np.ndarray:
        """The ids at a position, as a scalar, or in a slice without a step, (tokens,); read anew every time.

        Raises:
            IndexError: the position lies outside.
            SinklabError: the file has been cut short or its disk fails.
        """
        if not isinstance(where, slice):
            where = range(self._tokens)[where]
            return self[where : where + 1][0]
        start, stop, step = where.indices(self._tokens)
        if step != 1:
            raise IndexError(f"ids are read in their order: a step of {step} is not possible")
        width = self.dtype.itemsize
        return np.frombuffer(self._read(start * width, max(stop - start, 0) * width), self.dtype)

    def verify(self) -> None:
        """Compare the bytes with their checksum.

        Raises:
            SinklabError: they differ, or cannot be read.
        """
        try:
            with open(self._file, "rb", closefd=False) as file:
                file.seek(0)
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise self._unreadable(error) from error
        if found != self._sha256:
            raise SinklabError(f"{self.path} is corrupted: its checksum is not the one recorded. {self._remedy}")

    def check_unchanged(self) -> None:
        """Make sure that everything read so far was what had been written, as far as size and times of the file tell.

        A file that was only touched, renamed or deleted is unchanged. Bytes that were changed and changed back between
        two calls, and those that the disk itself has spoiled, are not noticed.

        Raises:
            SinklabError: the file has been changed, or cannot be read.
        """
        state = self._look()
        if state != self._state:
            self.verify()
            self._state = state

    def _look(self) -> tuple[int, int]:
        """When the file was last changed, in two ways, in nanoseconds; its size is checked."""
        try:
            status = os.fstat(self._file)
        except OSError as error:
            raise self._unreadable(error) from error
        self._check_size(status.st_size)
        return status.st_mtime_ns, status.st_ctime_ns

    def _read(self, offset: int, size: int) -> bytes:
        content = b""
        while len(content) < size:
            try:
                more = os.pread(self._file, size - len(content), offset + len(content))
            except OSError as error:
                raise self._unreadable(error) from error
            if not more:
                raise SinklabError(
                    f"{self.path} was cut short while it was in use: it ends before byte {offset + size:,} of "
                    f"{len(self) * self.dtype.itemsize:,}. Put it back as it was, or: {self._remedy}"
                )
            content += more
        return content

    def _check_size(self, size: int) -> None:
        if size != (expected := self._tokens * self.dtype.itemsize):
            raise SinklabError(f"{self.path} has {size:,} bytes where {expected:,} were written. {self._remedy}")

    def _unreadable(self, error: OSError) -> SinklabError:
        return SinklabError(
            f"{self.path} cannot be read: {error.strerror or error}. Make it readable, or: {self._remedy}"
        )
