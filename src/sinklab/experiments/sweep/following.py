"""How far a run is that another process trains, read from its directory."""

from pathlib import Path
from typing import Any

from sinklab.errors import SinklabError
from sinklab.train.directory.history import read_metrics


class Follower:
    """The evaluations of a run, each once. A run that is continued and repeats some is not followed back.

    Args:
        directory: of the run, which may not be there yet.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / "metrics.jsonl"
        self._size, self._step = -1, -1

    def new_rows(self) -> list[dict[str, Any]]:
        """The evaluations since the last call; none while the file cannot be read."""
        try:
            size = self._path.stat().st_size
            if size == self._size:
                return []
            rows = [row for row in read_metrics(self._path) if row["step"] > self._step]
        except (OSError, SinklabError):
            return []
        self._size = size
        self._step = max([self._step, *(row["step"] for row in rows)])
        return rows
