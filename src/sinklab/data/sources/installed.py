"""The embedded corpus: source files of the Python installation.

`stdlib` is the standard library's sources (its own tests included, where they are installed) and documentation:
the language reference that `pydoc` carries, and the .rst and .txt files beside the code. `site-packages` is the
sources, stubs and notes of the installed packages.

The order is that of the SHA-256 of the relative path: fixed on every machine, and a limit on the amount of text
takes an even sample instead of the first letters of the alphabet. Copies of a file and files that are not UTF-8
are left out.
"""

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sinklab.errors import InputError

CORPORA = ("stdlib", "site-packages")
_SUFFIXES = {"stdlib": (".py", ".rst", ".txt"), "site-packages": (".py", ".pyi", ".md", ".rst", ".txt")}
_FOLDERS = {"stdlib": ("stdlib",), "site-packages": ("purelib", "platlib")}
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__"}
_TOPICS = Path("pydoc_data", "topics.py")


@dataclass(frozen=True)
class InstalledText:
    """A piece of an installed corpus: a file, or a topic of pydoc's reference (then `text` is set)."""

    name: str
    path: Path
    size: int
    text: str | None = None


def installed_names(source: str) -> list[str] | None:
    """`stdlib+site-packages` as its parts, None when `source` is something else."""
    names = source.split("+")
    return names if all(name in CORPORA for name in names) else None


def entries(names: list[str]) -> list[InstalledText]:
    """Everything in the named corpora, in the fixed order.

    Raises:
        InputError: this Python has no such files (a zipped or stripped installation).
    """
    found = {entry.name: entry for name in names for entry in _below(name)}
    if not found:
        raise InputError(
            f"this Python ({sys.prefix}) has no readable sources for {'+'.join(names)}: give a .txt or .jsonl file"
        )
    return sorted(found.values(), key=lambda entry: hashlib.sha256(entry.name.encode()).digest())


def installed_documents(names: list[str]) -> Iterator[str]:
    """The texts of `entries`, without copies, empty files and files that are not UTF-8."""
    seen: set[bytes] = set()
    for entry in entries(names):
        text = entry.text if entry.text is not None else _utf8(entry.path)
        if text is None or not text.strip():
            continue
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        if digest not in seen:
            seen.add(digest)
            yield text


def _below(corpus: str) -> Iterator[InstalledText]:
    for folder in sorted({sysconfig.get_path(name) for name in _FOLDERS[corpus]}):
        for parent, folders, files in os.walk(folder):
            folders[:] = [name for name in folders if name not in _LEFT_OUT]
            for file in files:
                path = Path(parent, file)
                inside = path.relative_to(folder)
                if corpus == "stdlib" and inside == _TOPICS:
                    yield from _topics(path)
                elif path.suffix in _SUFFIXES[corpus] and path.is_file():
                    yield InstalledText(f"{corpus}/{inside.as_posix()}", path, path.stat().st_size)


def _topics(path: Path) -> Iterator[InstalledText]:
    from pydoc_data.topics import topics

    for name, text in topics.items():
        yield InstalledText(f"stdlib/{_TOPICS.as_posix()}/{name}", path, len(text.encode()), text)


def _utf8(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return None
