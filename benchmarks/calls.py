"""Call stack of `sinklab measure` at the first forward pass of the model, and the files that run before and after it.

    python -m benchmarks.calls RUN --inputs random --sequences 8

The arguments are those of `sinklab measure`, which runs in this process under `sys.setprofile`. Prints the functions of
sinklab on the stack at the first forward pass, the total number of functions on it, and the files of sinklab with
functions that run before and after it. Functions that run while a module is imported do not count.
"""

import contextlib
import inspect
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn

import sinklab
from sinklab.commands.app import main as command_line

ROOT = Path(sinklab.__file__).parent


class Calls:
    """Profile function that records files of sinklab and the stack of calls at the first forward pass.

    Attributes:
        before, after: files that run before and after this pass, relative to the package; a file may be in both.
        stack: functions at the first forward pass, outermost call first, as (file, function); empty before it.
    """

    def __init__(self) -> None:
        self.before: dict[str, None] = {}
        self.after: dict[str, None] = {}
        self.stack: list[tuple[str, str]] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call":
            return
        files = self.after if self.stack else self.before
        if (file := _own(code.co_filename)) and file not in files and not _while_importing(frame):
            files[file] = None
        if not self.stack and code.co_name == "forward" and isinstance(frame.f_locals.get("self"), nn.Module):
            self.stack = [(one.f_code.co_filename, one.f_code.co_qualname) for one in _frames(frame)][::-1]


def _own(filename: str) -> str | None:
    return str(Path(filename).relative_to(ROOT)) if filename.startswith(f"{ROOT}/") else None


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None and frame.f_code is not main.__code__:
        yield frame
        frame = frame.f_back


def _while_importing(frame: FrameType) -> bool:
    """Return whether the body of a module or class, which has no fast local variables, is among the callers."""
    return any(not one.f_code.co_flags & inspect.CO_OPTIMIZED for one in _frames(frame))


def main() -> None:
    sys.argv[1:1] = ["measure"]
    calls = Calls()
    with contextlib.redirect_stdout(io.StringIO()):
        sys.setprofile(calls)
        try:
            command_line()
        except SystemExit as leaving:
            if leaving.code:
                raise
        finally:
            sys.setprofile(None)
    own = [(file, function) for path, function in calls.stack if (file := _own(path))]
    print(f"first forward pass: {len(own)} functions of sinklab on the stack, {len(calls.stack)} in all")
    for file, function in own:
        print(f"  {function:55} {file}")
    for name, files in (("before", calls.before), ("after", calls.after)):
        print(f"{len(files)} files {name} it: {', '.join(files)}")
    print(f"{len({**calls.before, **calls.after})} files in all")


if __name__ == "__main__":
    main()
