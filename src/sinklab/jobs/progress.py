"""Progress of a job as events: a job calls one observer, and the terminal displays the events."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

EventKind = Literal["started", "advanced", "finished", "kept", "failed", "skipped", "noted"]


@dataclass(frozen=True)
class JobEvent:
    """An event of a job.

    Attributes:
        kind: "started" at the start of a step, and again once its units are known; "kept" for a step finished by an
            earlier call, "skipped" for one that does not apply, "noted" for a remark.
        step: name of the step.
        done, total: units done, and their total number, None while unknown.
        text: the result in a few words, the reason for a failure or skip, or the remark.
        seconds: duration of a finished step.
    """

    kind: EventKind
    step: str = ""
    done: float = 0.0
    total: int | None = None
    text: str = ""
    seconds: float = 0.0


Observer = Callable[[JobEvent], None]


def ignore(event: JobEvent) -> None:
    """An observer that reports nothing."""


class StepProgress:
    """Reports the units of one step to an observer."""

    def __init__(self, step: str, observe: Observer) -> None:
        self._step, self._observe = step, observe
        self._done, self._total = 0.0, None

    def begin(self, total: int | None = None, text: str = "", done: float = 0.0) -> None:
        """Start the step, which has `total` units."""
        self._done, self._total = done, total
        self._observe(JobEvent("started", self._step, done, total, text))

    def advance(self, units: float = 1, text: str = "") -> None:
        """Report further units."""
        self.reach(self._done + units, self._total, text)

    def note(self, text: str) -> None:
        """Report a remark."""
        self._observe(JobEvent("noted", self._step, self._done, self._total, text))

    def reach(self, done: float, total: int | None, text: str = "") -> None:
        """Report the units done so far."""
        self._done, self._total = done, total
        self._observe(JobEvent("advanced", self._step, done, total, text))
