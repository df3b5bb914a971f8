"""Progress events of resumable jobs, passed to an observer such as the terminal display."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

EventKind = Literal["started", "advanced", "finished", "kept", "failed", "skipped", "noted"]


@dataclass(frozen=True)
class JobEvent:
    """Progress event of a job.

    Attributes:
        kind: "started" at the start of a step, and again when its total is known; "advanced" after completed units;
            "finished" or "failed" at its end; "kept" for a step finished by an earlier call; "skipped" for a step that
            is not applicable; "noted" for a note.
        step: name of the step; empty for a note on the job.
        done, total: numbers of completed and of all units of the step; `total` is None if unknown.
        text: current activity, short result, reason for a failure or skip, or note.
        seconds: duration of the step in seconds, for "finished".
    """

    kind: EventKind
    step: str = ""
    done: float = 0.0
    total: int | None = None
    text: str = ""
    seconds: float = 0.0


Observer = Callable[[JobEvent], None]


def ignore(event: JobEvent) -> None:
    """Observer that ignores events."""


class StepProgress:
    """Reports the progress of one step of a job to an observer."""

    def __init__(self, step: str, observe: Observer) -> None:
        self._step, self._observe = step, observe
        self._done, self._total = 0.0, None

    def begin(self, total: int | None = None, text: str = "", done: float = 0.0) -> None:
        """Report the start of the step with `done` completed units; call again when the total is known."""
        self._done, self._total = done, total
        self._observe(JobEvent("started", self._step, done, total, text))

    def advance(self, units: float = 1, text: str = "") -> None:
        """Report further completed units of the step."""
        self.reach(self._done + units, self._total, text)

    def note(self, text: str) -> None:
        """Report a note on the step."""
        self._observe(JobEvent("noted", self._step, self._done, self._total, text))

    def reach(self, done: float, total: int | None, text: str = "") -> None:
        """Report the number of completed units so far, and the total (None if unknown)."""
        self._done, self._total = done, total
        self._observe(JobEvent("advanced", self._step, done, total, text))
