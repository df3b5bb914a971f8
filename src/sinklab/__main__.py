"""`sinklab` and `python -m sinklab`: the command line, which Ctrl-C ends without a word also while it is imported."""

import gc
import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130
OBJECTS = 20_000
"""New objects after which Python looks for garbage. With its own 700 that takes a tenth of the start of a command, as
imported modules stay."""


def main() -> None:
    """Run the command that the process was called with."""
    asked = signal.getsignal(signal.SIGINT)
    if asked is signal.default_int_handler:  # a job in the background ignores it
        signal.signal(signal.SIGINT, _leave)
    gc.set_threshold(OBJECTS)
    from sinklab.commands import app as cli

    try:
        signal.signal(signal.SIGINT, asked)
        cli.main()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
