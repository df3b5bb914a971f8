"""How far a preparation has come: one line per finished part, with the checksums of what the part added.

A line is written after the ids it stands for. Whoever goes on verifies the ids of every line against its checksum and
the text against its fingerprint; from the first difference on, work is done again. So neither a process killed
anywhere, nor a machine that lost power, nor text that has changed behind its name leaves a trace in the result.
"""

import hashlib
from pathlib import Path

from pydantic import ValidationError

from sinklab.data.packing import SplitState
from sinklab.data.shards import Share
from sinklab.files import append_line, write_text
from sinklab.schema import Part

FILE = "journal.jsonl"


class Entry(Part):
    """The state after one part: everything is counted from the start of the text.

    Attributes:
        documents: of the text that are in the shards.
        text_bytes, text_sha256: of these documents, see `corpora.Fingerprint`.
        shares: of the voices of a mix.
    """

    documents: int
    text_bytes: int
    text_sha256: str
    train: SplitState
    valid: SplitState
    shares: dict[str, Share]


class Journal:
    """The lines of a folder.

    Attributes:
        entries: whole lines whose ids are in the shards as they were written.
    """

    def __init__(self, folder: Path, token_bytes: int) -> None:
        self._path = folder / FILE
        lines = _lines(self._path)
        sound = min(
            _sound(folder / "train.bin", [line.train for line in lines], token_bytes),
            _sound(folder / "valid.bin", [line.valid for line in lines], token_bytes),
        )
        self.entries = lines[:sound]

    def keep(self, count: int) -> Entry | None:
        """Forget all but the first `count` entries; returns the last one kept."""
        self.entries = self.entries[:count]
        write_text(self._path, "".join(f"{entry.model_dump_json()}\n" for entry in self.entries))
        return self.entries[-1] if self.entries else None

    def add(self, entry: Entry) -> None:
        """Record a finished part; its ids have been written.

        Raises:
            SinklabError: the disk is full.
        """
        append_line(self._path, entry.model_dump_json())


def _lines(path: Path) -> list[Entry]:
    """The lines up to the first torn one."""
    entries = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            entries.append(Entry.model_validate_json(line))
        except ValidationError:
            break
    return entries


def _sound(path: Path, sides: list[SplitState], token_bytes: int) -> int:
    """How many parts, from the first one on, stand in the file as they were written."""
    if not path.exists():
        return 0
    before = 0
    with path.open("rb") as file:
        for index, side in enumerate(sides):
            content = file.read((side.tokens - before) * token_bytes)
            before = side.tokens
            if hashlib.sha256(content).hexdigest() != side.sha256:
                return index
    return len(sides)
