"""Exceptions of sinklab, with the exit status of the command that raises them."""

from typing import Any


class SinklabError(Exception):
    """The work could not be finished (exit status 1). The message says what happened and what to do.

    Attributes:
        said_elsewhere: another process of the same command has the same error and tells the user.
    """

    exit_status = 1
    said_elsewhere = False


class InputError(SinklabError, ValueError):
    """What the user gave cannot be used (exit status 2). The message says what is wrong, where, what is right."""

    exit_status = 2


class UnsavedError(SinklabError):
    """A result is there and could not be saved (exit status 1).

    Attributes:
        result: what commands print all the same.
    """

    def __init__(self, message: str, result: Any) -> None:
        super().__init__(message)
        self.result = result


class LostProcessError(SinklabError):
    """One of several processes is gone or has failed (exit status 1)."""


class StoppedError(SinklabError):
    """Training was asked to stop in the middle of something that is made anew when it is continued (exit status 1)."""


_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python or PyTorch could not have the memory it asked for; PyTorch has no type for the CPU's."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def cause(error: BaseException) -> str:
    """What another library's error says, in a line: the first, and the next one after a colon at its end."""
    said = ""
    for line in filter(None, map(str.strip, str(error).splitlines())):
        said = f"{said} {line}".strip()
        if not line.endswith(":"):
            break
    return said or type(error).__name__
