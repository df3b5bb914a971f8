"""Streaming readers of .txt and .jsonl files. Errors name the file and, for a row of .jsonl, the line.

- .jsonl: every row is a document: its `text`, or its `messages` (role and content), by default one line per message.
- .txt: a line `<|endoftext|>` ends a document. A document of a file without such a line ends at the first blank line
  after 8,192 characters, or at any line after 65,536, so that a book can be split into training and validation.

Documents without text are skipped.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from sinklab.errors import InputError
from sinklab.files import parse_json

Message = dict[str, str]  # role and content


class ChatText(str):
    """Text of a conversation that a chat template has written, with the special tokens that it needs."""

    __slots__ = ()


Render = Callable[[list[Message], str], str]  # (conversation, "file, line N") -> text

SUFFIXES = (".txt", ".jsonl")
_SEPARATOR = "<|endoftext|>"
_PIECE = 8 * 1024  # characters after which a blank line ends a document
_LONGEST = 8 * _PIECE  # characters after which any line ends a document; longer lines are read in pieces of this size


def expanded(name: str) -> Path:
    """Expand `~` or `~USER` at the start of a path; unlike `Path.expanduser`, keep a path with an unknown USER."""
    return Path(os.path.expanduser(name))


def text_files(path: Path) -> list[Path]:
    """Return the file at `path`, or the .txt and .jsonl files below the folder at `path`, sorted.

    Raises:
        InputError: if the path does not exist, or is neither a .txt or .jsonl file nor a folder that contains one.
    """
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
        if not found:
            raise InputError(f"folder {path} contains no .txt or .jsonl file")
        return found
    if not path.exists():
        raise InputError(
            f"no text at {path}: pass a .txt or .jsonl file, a folder of them, stdlib, site-packages, "
            "stdlib+site-packages, hf:NAME[:CONFIG[:SPLIT]] or synthetic:NAME"
        )
    if path.suffix.lower() not in SUFFIXES or not path.is_file():
        raise InputError(f"{path} is not a .txt or .jsonl file")
    return [path]


def plain_conversation(messages: list[Message], where: str) -> str:
    """Render messages as lines `role: content`; `where` is not used."""
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


def read_documents(path: Path, render: Render = plain_conversation) -> Iterator[str]:
    """Yield the non-empty documents of one .txt or .jsonl file.

    Args:
        render: function that renders `messages` as text.

    Raises:
        InputError: if the file cannot be read, is not UTF-8, or a row is malformed; `render` may also raise it.
    """
    with _readable(path) as file:
        jsonl = path.suffix.lower() == ".jsonl"
        texts = (row_text(row, where, render) for row, where in _rows(file, path))
        for text in texts if jsonl else _txt_documents(file):
            if text.strip():
                yield text


def read_pieces(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield the pieces of a .txt file, each with a flag that is True at the end of a document.

    A document ends at a separator (a line `<|endoftext|>`) or at the end of the file. Text before the first separator
    is split like a file without separators, so that a long file is read only as needed. Empty pieces are included.

    Raises:
        InputError: if the file cannot be read, or is not UTF-8.
    """
    with _readable(path) as file:
        yield from _txt_pieces(file, separated=False)


@contextmanager
def _readable(path: Path) -> Iterator[TextIO]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            yield file
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text ({error.reason}): convert or remove it") from error
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error


def row_text(row: Any, where: str, render: Render) -> str:
    """Return the text of a row of a .jsonl file or dataset: its `text`, or its rendered `messages`.

    Raises:
        InputError: if the row has neither, or a message lacks role or content; the message begins with `where`, the
            name of the row.
    """
    if isinstance(row, dict) and isinstance(row.get("text"), str):
        text = row["text"]
    elif isinstance(row, dict) and isinstance(row.get("messages"), list):
        text = render([_message(message, where) for message in row["messages"]], where)
    else:
        raise InputError(f'{where}: a row needs "text" (a string) or "messages" (objects with role and content)')
    kind = type(text)  # `ChatText` if a chat template wrote it
    return kind(text.encode("utf-8", errors="replace").decode("utf-8"))  # JSON strings may contain lone surrogates


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
        raise InputError(f'{where}: each message needs "role" and "content", both strings')
    return message


def read_conversations(path: Path) -> Iterator[tuple[list[Message], str]]:
    """Yield the conversations of a .jsonl file, each with its location ("FILE, line N") for error messages.

    Raises:
        InputError: if the file does not exist or is not .jsonl, cannot be read, is not UTF-8, or a row is not a
            conversation.
    """
    if path.suffix.lower() != ".jsonl" or not path.is_file():
        raise InputError(
            f'{path} does not exist or is not a .jsonl file: pass a .jsonl file whose rows have "messages"'
        )
    with _readable(path) as file:
        for row, where in _rows(file, path):
            if not isinstance(row, dict) or not isinstance(row.get("messages"), list):
                raise InputError(f'{where}: a row needs "messages", a list of objects with role and content')
            yield [_message(message, where) for message in row["messages"]], where


def _rows(file: TextIO, path: Path) -> Iterator[tuple[Any, str]]:
    """Yield the parsed rows of a .jsonl file, each with its location ("FILE, line N"); blank lines are skipped."""
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = parse_json(line)
        except ValueError as error:
            raise InputError(f"{where}: not valid JSON ({error}); each line must be one JSON object") from error
        yield row, where


def _txt_documents(file: TextIO) -> Iterator[str]:
    separated = any(line.strip() == _SEPARATOR for line in iter(lambda: file.readline(_LONGEST), ""))
    file.seek(0)
    return (piece for piece, _ in _txt_pieces(file, separated))


def _txt_pieces(file: TextIO, separated: bool) -> Iterator[tuple[str, bool]]:
    lines: list[str] = []
    length = 0
    while line := file.readline(_LONGEST):
        ends = line.strip() == _SEPARATOR
        separated = separated or ends
        if not ends:
            lines.append(line)
            length += len(line)
        blank = length >= _PIECE and not line.strip()
        if ends or (not separated and (blank or length >= _LONGEST)):
            yield "".join(lines), ends
            lines, length = [], 0
    yield "".join(lines), True
