"""Exceptions of sinklab and their exit statuses.

Extras: optional packages, and the shell commands that install them.

sinklab is not on a package index, so pip cannot find its extras by name.
"""

import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

from pydantic import ValidationError


class SinklabError(Exception):
    """Base class of errors that end a command (usually exit status 1). The message says what happened and what to do.

    Attributes:
        printed_elsewhere: True if another process of the command prints the error, so that this process does not.
    """

    exit_status = 1
    printed_elsewhere = False


class InputError(SinklabError, ValueError):
    """Invalid user input (exit status 2). The message says what is wrong, where it is, and what is valid."""

    exit_status = 2


class UnsavedError(SinklabError):
    """A result could not be saved (exit status 1).

    Attributes:
        result: the unsaved result, so that the caller can still print it.
    """

    def __init__(self, message: str, result: Any) -> None:
        super().__init__(message)
        self.result = result


class StoppedError(SinklabError):
    """A stop of the training was requested.

    `Trainer.train` catches this error and saves a checkpoint. If it reaches the caller, the interrupted work was not
    saved, and the same command repeats it.
    """


@contextmanager
def named_arguments(*known: str) -> Iterator[None]:
    """Decorate a function that is called in Python: messages of its errors name its arguments instead of options.

    "--stream-length 9" becomes "`stream_length=9`"; options that are not arguments are kept.

    Args:
        known: names of the arguments.
    """
    arguments = {one.removesuffix("s"): one for one in known} | {one.replace("_", "-"): one for one in known}
    arguments |= {"bos": "bos=True", "no-bos": "bos=False", "keep": "kept"}

    def argument(option: re.Match[str]) -> str:
        name, value = option["name"], option["value"]
        return f"`{arguments[name]}{f'={value}' if value else ''}`" if name in arguments else option[0]

    try:
        yield
    except SinklabError as error:
        pattern = r"--(?P<name>[a-z][a-z-]*)(?: (?P<value>\d[\d.]*\b|'[^']*'))?"
        error.args = (re.sub(pattern, argument, str(error)), *error.args[1:])
        raise


_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` reports a failed allocation of CPU or GPU memory.

    PyTorch raises plain RuntimeErrors on a CPU and from cuBLAS, which are recognised by their message.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def cause(error: BaseException) -> str:
    """Return the first line of another library's error message, or the error's type name if there is no message.

    If a line ends with a colon, the next line is appended. Empty lines are skipped. For a ValidationError, it is the
    name and the error of the first invalid field; for a document of another schema version, that version and the one
    that is read.
    """
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        if first["loc"] == ("schema",) and (expected := first.get("ctx", {}).get("expected")):
            return f"schema version {first['input']!r}; this version of sinklab reads {expected}"
        return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
    message = ""
    for line in filter(None, map(str.strip, str(error).splitlines())):
        message = f"{message} {line}".strip()
        if not line.endswith(":"):
            break
    return message or type(error).__name__


def install_command(extra: str) -> str:
    """Return the shell command that installs the packages of an extra for the current Python.

    If sinklab is not installed as a package, the command installs sinklab's checkout with the extra, and is followed by
    the words "in the checkout of sinklab".

    Args:
        extra: name of an extra in pyproject.toml, such as "sft".
    """
    pip = [sys.executable, "-m", "pip", "install"]
    try:
        needed = [one.partition(";") for one in distribution("sinklab").requires or ()]
    except PackageNotFoundError:  # sinklab is imported from its source
        return shlex.join([*pip, "-e", f".[{extra}]"]) + " in the checkout of sinklab"
    return shlex.join([*pip, *(name for name, _, when in needed if re.search(rf"extra == (['\"]){extra}\1", when))])


def require_extra(extra: str, packages: Sequence[str], purpose: str) -> None:
    """Check that packages of an extra are installed.

    Args:
        purpose: what needs the packages, the first words of the message, such as "instruction tuning".

    Raises:
        InputError: if a package is not installed; the message contains the install command.
    """
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        name = missing[0].replace("_", "-")
        raise InputError(f"{purpose} needs the package {name}, which is not installed: {install_command(extra)}")
