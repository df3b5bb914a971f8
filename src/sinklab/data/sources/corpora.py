"""Text by the name of its source, as a stream of documents, and the two ways to tell texts apart.

`Fingerprint` says what was read: SHA-256 over all documents in order. `identity` says, without reading, whether
it would be the same again: names, sizes and times of files, the Python version and the list of what is installed.
"""

import hashlib
import json
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self

from sinklab.data.sources.hub import PREFIX, hub_documents
from sinklab.data.sources.installed import entries, installed_documents, installed_names
from sinklab.data.sources.synthetic import VERSION, parse, synthetic_documents
from sinklab.data.sources.textfiles import Render, plain_conversation, read_documents, text_files
from sinklab.errors import InputError


class Fingerprint:
    """SHA-256 over documents in order, each with its length, so that where they are cut matters too.

    Attributes:
        documents, text_bytes: added so far.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.text_bytes = 0
        self.documents = 0

    def add(self, document: str) -> None:
        """Take in the next document."""
        encoded = document.encode()
        self._hash.update(len(encoded).to_bytes(8, "little"))
        self._hash.update(encoded)
        self.text_bytes += len(encoded)
        self.documents += 1

    def hexdigest(self) -> str:
        """The SHA-256 (hexadecimal) of what was added so far."""
        return self._hash.hexdigest()

    def copy(self) -> Self:
        """Another one that goes on from here."""
        other = type(self)()
        other._hash, other.text_bytes, other.documents = self._hash.copy(), self.text_bytes, self.documents
        return other


def fingerprint(documents: Iterable[str]) -> str:
    """The SHA-256 (hexadecimal) of the documents in order: equal for equal texts, wherever they came from."""
    total = Fingerprint()
    for document in documents:
        total.add(document)
    return total.hexdigest()


def documents(source: str, *, limit_bytes: int | None = None, render: Render = plain_conversation) -> Iterator[str]:
    """The documents of a source in their fixed order, one at a time, none of them empty.

    Args:
        source: as `DataConfig.source`, except that a prepared directory has no documents any more.
        limit_bytes: stop after this much UTF-8 text; the last document is cut there.
        render: writes `messages` as text.

    Raises:
        InputError: the source is missing, empty or malformed (with the file and the line).
    """
    texts = _all_documents(source, render)
    found = False
    if limit_bytes is not None:
        texts = (text for _, text in cut((("", text) for text in texts), limit_bytes))
    for text in texts:
        found = True
        yield text
    if not found:
        raise InputError(f"source {source} holds no text: every document in it is empty")


def total_bytes(source: str) -> int | None:
    """About how much text there is, from the sizes of files; None where only reading would tell."""
    if names := installed_names(source):
        return sum(entry.size for entry in entries(names))
    if source.startswith(PREFIX) or parse(source):
        return None
    return sum(path.stat().st_size for path in text_files(Path(source).expanduser()))


def identity(source: str) -> str:
    """A SHA-256 that changes when the text behind `source` may have changed. Nothing is read.

    For `hf:` it is the name only: a dataset changed on the hub is not noticed.
    """
    if names := installed_names(source):
        listing = [[entry.name, entry.size] for entry in entries(names)]
        state: list[object] = [source, platform.python_version(), listing]
    elif source.startswith(PREFIX):
        state = [source]
    elif request := parse(source):
        state = [source, VERSION, repr(request)]
    else:
        files = text_files(Path(source).expanduser())
        state = [[str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns] for p in files]
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()


def _all_documents(source: str, render: Render) -> Iterator[str]:
    if names := installed_names(source):
        yield from installed_documents(names)
    elif source.startswith(PREFIX):
        yield from hub_documents(source, render)
    elif request := parse(source):
        yield from synthetic_documents(request)
    else:
        for path in text_files(Path(source).expanduser()):
            yield from read_documents(path, render)


def cut(documents: Iterable[tuple[str, str]], limit_bytes: int) -> Iterator[tuple[str, str]]:
    """The first `limit_bytes` of UTF-8 text of named documents; the last one is cut there."""
    left = limit_bytes
    for name, text in documents:
        encoded = text.encode()
        if len(encoded) < left:
            left -= len(encoded)
            yield name, text
            continue
        if rest := encoded[:left].decode(errors="ignore"):
            yield name, rest
        return
