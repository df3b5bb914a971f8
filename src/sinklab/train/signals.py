"""Signals as requests: finish the update, save, stop, and end with a status that says whether to call again."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells and Typer report it."""

CALL_AGAIN = 75
"""Exit status after SIGTERM or SIGUSR1 (EX_TEMPFAIL of sysexits.h): saved, and the same command continues."""


class PreemptedError(Exception):
    """A signal other than Ctrl-C has stopped the work; what was reached is saved."""


class StopRequest:
    """Whether a signal has asked this process to stop. Calling it tells."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._by = 0

    def __call__(self) -> bool:
        return self._asked.is_set()

    @property
    def exit_status(self) -> int:
        """Of a command that stopped: 130 after Ctrl-C, else 75, also where another process was the one asked."""
        return INTERRUPTED if self._by == signal.SIGINT else CALL_AGAIN

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The signal handler. A second Ctrl-C ends at once.

        Raises:
            KeyboardInterrupt: at the second Ctrl-C.
        """
        if self._asked.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._by = self._by or number
        self._asked.set()


@contextmanager
def stop_on_signals(*numbers: int) -> Iterator[StopRequest]:
    """Within it, the first of these signals (SIGINT, SIGTERM and SIGUSR1 unless given) is a request to stop."""
    request = StopRequest()
    wanted = numbers or (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, request.handle) for number in wanted}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
