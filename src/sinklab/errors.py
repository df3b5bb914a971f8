"""Exceptions of sinklab, with the exit status of the command that raises them."""

from typing import Any


class SinklabError(Exception):
    """The work could not be finished (exit status 1). The message says what happened and what to do.

    Attributes:
        said_elsewhere: another process of the same command prints the same error.
    """

    exit_status = 1
    said_elsewhere = False


class InputError(SinklabError, ValueError):
    """The user's input cannot be used (exit status 2). The message says what is wrong, where, and what is right."""

    exit_status = 2


class UnsavedError(SinklabError):
    """A result could not be saved (exit status 1).

    Attributes:
        result: the unsaved result, which is still printed.
    """

    def __init__(self, message: str, result: Any) -> None:
        super().__init__(message)
        self.result = result


class LostProcessError(SinklabError):
    """One of several processes was lost or has failed (exit status 1)."""


class StoppedError(SinklabError):
    """Training was asked to stop during work that is repeated when it is resumed (exit status 1)."""


_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation of Python or PyTorch failed; PyTorch has no exception type for the CPU's."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def cause(error: BaseException) -> str:
    """Another library's message in one line: its first line, and the next one after a colon at the end."""
    message = ""
    for line in filter(None, map(str.strip, str(error).splitlines())):
        message = f"{message} {line}".strip()
        if not line.endswith(":"):
            break
    return message or type(error).__name__
