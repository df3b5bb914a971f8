"""metrics.jsonl while a run writes it: a line per evaluation, written again where it goes or is changed meanwhile."""

import json
import logging
from pathlib import Path
from typing import Any

from sinklab.files import append_line, write_text

log = logging.getLogger(__name__)


class History:
    """What a run has written to metrics.jsonl. Of several processes the first alone has one that is used.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._text = ""

    def begin(self, rows: list[dict[str, Any]]) -> None:
        """Make the file hold these evaluations and no others."""
        self._text = "".join(json.dumps(row) + "\n" for row in rows)
        if self.path.exists() and not self._is_whole():
            write_text(self.path, self._text)

    def add(self, row: dict[str, Any]) -> None:
        """Append an evaluation, and see it on the disk.

        Raises:
            SinklabError: the file cannot be written.
        """
        self.keep()
        line = json.dumps(row)
        append_line(self.path, line)
        self._text += line + "\n"

    def keep(self) -> None:
        """Write the file again where it is not what was written: nothing that was evaluated is lost.

        Raises:
            SinklabError: it cannot be written, or its folder has gone.
        """
        if not self._text or self._is_whole() or not self.path.parent.is_dir():
            return
        how = "has been changed" if self.path.exists() else "is gone"
        log.warning("%s %s since it was written: it is written again, with all evaluations", self.path, how)
        write_text(self.path, self._text)

    def _is_whole(self) -> bool:
        try:
            return self.path.read_bytes() == self._text.encode()
        except OSError:
            return False
