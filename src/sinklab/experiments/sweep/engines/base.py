"""What a sweep asks of an engine, the place where its runs are trained: take a run, say how it ended, stop.

What the engine runs is `worker.train_cell`, once per run and in a process of its own, wherever that is. It leaves
everything that counts in the run directory, the record included; events are for who watches. The sweep itself
(`driving.py`) decides which run is next, and what is done about one that another process holds.
"""

from collections.abc import Sequence
from typing import Protocol

from sinklab.experiments.sweep.planned import Event, PlannedRun


class Engine(Protocol):
    """Where runs are trained. One process, that of the command, uses it from its main thread."""

    def room(self) -> int:
        """How many runs it would take now: free slots here, as many as there are for a queue that keeps them."""
        ...

    def submit(self, runs: Sequence[PlannedRun]) -> None:
        """Have runs trained, no more than there is room for; returns at once.

        Raises:
            SinklabError: they cannot be handed over, such as to a cluster that does not answer.
        """
        ...

    def events(self, timeout: float) -> Sequence[Event]:
        """What has been reported since the last call, in order; waits for the first, at most `timeout` seconds.

        The last event of every submitted run is one with `is_last`, also of one whose process was killed (`failed`,
        with the signal in its message). A `stopped` one that nobody asked to stop was preempted.
        """
        ...

    def stop(self) -> None:
        """Ask all runs to save and end; how each did is still to be heard. What has not begun ends as `stopped`."""
        ...

    def close(self) -> None:
        """Give back what the engine holds; it is not used afterwards. Runs that go on elsewhere are left alone."""
        ...
