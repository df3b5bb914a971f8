"""An observer of a job that interrupts it."""

from sinklab.jobs import JobEvent


class Stops:
    """Raises KeyboardInterrupt after `after` finished steps; records the started steps."""

    def __init__(self, after: int | None = None) -> None:
        self.started: list[str] = []
        self._left = after

    def __call__(self, event: JobEvent) -> None:
        if event.kind == "started":
            self.started.append(event.step)
        if event.kind == "finished" and self._left is not None:
            self._left -= 1
            if not self._left:
                raise KeyboardInterrupt
