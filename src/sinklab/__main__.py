"""`sinklab` and `python -m sinklab`: the command line. Ctrl-C ends it without a traceback, also during imports."""

import gc
import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130
OBJECTS = 20_000
"""New objects between garbage collections. Python's 700 would use a tenth of a command's start, as imported modules
stay."""


def main() -> None:
    """Run the command of the process's arguments."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # a job in the background ignores it
        signal.signal(signal.SIGINT, _leave)
    gc.set_threshold(OBJECTS)
    from sinklab.commands import app as cli

    try:
        signal.signal(signal.SIGINT, before)
        cli.main()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
