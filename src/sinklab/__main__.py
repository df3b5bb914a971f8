"""`sinklab` and `python -m sinklab`: the command line, which Ctrl-C ends without a word also while it is imported."""

import gc
import os
import signal
import sys
from types import FrameType

from sinklab.imports import once_imported

INTERRUPTED = 130


def main() -> None:
    """Run the command that the process was called with."""
    asked = signal.getsignal(signal.SIGINT)
    if asked is signal.default_int_handler:  # a job in the background ignores it
        signal.signal(signal.SIGINT, _leave)
    gc.disable()  # what is imported stays: looking for garbage in it is a tenth of the time until a model is loaded
    once_imported("torch", _collect_from_here)
    from sinklab.commands import app as cli

    try:
        signal.signal(signal.SIGINT, asked)
        cli.main()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _collect_from_here() -> None:
    gc.freeze()
    gc.enable()


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
