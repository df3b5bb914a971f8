"""Signal handling: stop requests, and the exit status of an interrupted command.

A signal raises an exception in most commands. Training instead polls a stop request, finishes the update and saves a
checkpoint.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells and Typer (128 + SIGINT)."""

CALL_AGAIN = 75
"""Exit status after SIGTERM or SIGUSR1 (EX_TEMPFAIL in sysexits.h). The same command resumes, or starts over."""

PREEMPTING = (signal.SIGTERM, signal.SIGUSR1)


class PreemptedError(BaseException):
    """A command was stopped by SIGTERM or SIGUSR1.

    Like KeyboardInterrupt, it is not a subclass of Exception, so `except Exception` does not catch it.
    """


class StopRequest:
    """Flag that the signal handler `handle` sets. Calling an instance returns whether a stop was requested."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._by = 0

    def __call__(self) -> bool:
        return self._asked.is_set()

    @property
    def exit_status(self) -> int:
        """Exit status of a stopped command: 130 after Ctrl-C, else 75 (also if only another process got the signal)."""
        return INTERRUPTED if self._by == signal.SIGINT else CALL_AGAIN

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Set the flag; the signal handler of `stop_on_signals`.

        Raises:
            KeyboardInterrupt: on Ctrl-C if the flag is already set.
        """
        if self._asked.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._by = self._by or number
        self._asked.set()


@contextmanager
def stop_on_signals(*numbers: int) -> Iterator[StopRequest]:
    """Set the yielded StopRequest on signals (by default SIGINT, SIGTERM and SIGUSR1) in the `with` block."""
    request = StopRequest()
    with _handled(numbers or (signal.SIGINT, *PREEMPTING), request.handle):
        yield request


@contextmanager
def left_on_signals() -> Iterator[None]:
    """Make SIGTERM and SIGUSR1 raise PreemptedError in the main thread, as SIGINT raises KeyboardInterrupt.

    Python drops exceptions that are raised in callbacks of the garbage collector or of weak references. If it drops a
    PreemptedError, the process sends itself SIGTERM after 10 ms; for a KeyboardInterrupt, SIGINT.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        raise PreemptedError

    dropped = sys.unraisablehook

    def send_again(what: "sys.UnraisableHookArgs") -> None:
        if issubclass(what.exc_type, KeyboardInterrupt | PreemptedError):
            number = signal.SIGINT if issubclass(what.exc_type, KeyboardInterrupt) else signal.SIGTERM
            threading.Timer(0.01, os.kill, (os.getpid(), number)).start()
        else:
            dropped(what)

    sys.unraisablehook = send_again
    try:
        with _handled(PREEMPTING, leave):
            yield
    finally:
        sys.unraisablehook = dropped


_KEPT = threading.Event()  # not an attribute of the exception, as Typer replaces Ctrl-C by an exit status


@contextmanager
def keeping_what_is_finished(saves: bool = True) -> Iterator[None]:
    """If the `with` block raises an exception and `saves` is True, mark the interrupted work as resumable."""
    try:
        yield
    except BaseException:
        if saves:
            _KEPT.set()
        raise


def was_kept() -> bool:
    """Return whether the last interrupted work was marked as resumable, and clear the mark."""
    kept = _KEPT.is_set()
    _KEPT.clear()
    return kept


def ignore_signals() -> None:
    """Ignore SIGINT, SIGTERM and SIGUSR1 from now on, in a process that is already stopping."""
    for number in (signal.SIGINT, *PREEMPTING):
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def _handled(numbers: Iterable[int], handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
