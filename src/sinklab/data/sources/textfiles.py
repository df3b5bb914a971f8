"""Texts of files: plain text, and rows (`rows.py`) with text or a conversation.

- .txt and .md: a line `<|endoftext|>` ends a document. A document of a file without such a line ends at the first blank
  line after 8,192 characters, or at any line after 65,536, so that a book can be split into training and validation.
- other formats: every row is a document (`row_text`).

Documents without text are skipped; rows among them are counted (`ReadCounts`).
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from sinklab.data.sources.rows import FORMATS, ROWS, TEXT, is_compressed, kind_of, read_rows, readable
from sinklab.errors import InputError, require_extra

Message = dict[str, Any]  # role, content (a string or None), and for example tool_calls


class ChatText(str):
    """Text of a conversation that a chat template has written, with the special tokens that it needs."""

    __slots__ = ()


Render = Callable[[list[Message], str], str]  # (conversation, "file, line N") -> text

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "system": "system",
    "tool": "tool",
    "function_response": "tool",
    "observation": "tool",
}
"""Roles by the speaker of a message with `from` and `value`, as in ShareGPT."""

NEEDED = '"text", "content", "prompt" with "completion", "messages" or "conversations"'
_SEPARATOR = "<|endoftext|>"
_PIECE = 8 * 1024  # characters after which a blank line ends a document
_LONGEST = 8 * _PIECE  # characters after which any line ends a document; longer lines are read in pieces of this size


@dataclass
class ReadCounts:
    """Number of rows that were read from files or datasets, and of those that were skipped because they have no text.

    Texts are read lazily, so the counts may be smaller than those of the whole text.
    """

    rows: int = 0
    skipped: int = 0

    def notes(self) -> list[str]:
        """Return a list with a note on the skipped rows; empty if there are none."""
        if not self.skipped:
            return []
        have = "has no text and was" if self.skipped == 1 else "have no text and were"
        return [f"{self.skipped:,} of the {self.rows:,} rows that were read {have} skipped"]


def expanded(name: str) -> Path:
    """Expand `~` or `~USER` at the start of a path; unlike `Path.expanduser`, keep a path with an unknown USER."""
    return Path(os.path.expanduser(name))


def is_plain(path: Path) -> bool:
    """Return True for a .txt or .md file, compressed or not, which has no rows."""
    return kind_of(path) in TEXT


def text_files(path: Path) -> list[Path]:
    """Return the file at `path`, or the text files below the folder at `path`, sorted.

    Of a folder, .md and .json files are read only if it has no others, because they usually describe the others; .arrow
    files (of `datasets`) only if it has none of the formats in `rows.py`. Of a file with and without compression, only
    the latter is read.

    Raises:
        InputError: if the path does not exist, is a folder without text files, or is a file that neither sinklab nor
            `datasets`, if it is installed, can open.
    """
    if path.is_dir():
        found = _files_below(path)[0]
        if not found:
            raise InputError(f"folder {path} contains no text file ({FORMATS})")
        return found
    if not path.exists():
        raise InputError(
            f"no text at {path}: pass a {FORMATS} file (also .gz, .zst, .bz2 or .xz), a folder of them, stdlib, "
            "site-packages, stdlib+site-packages, hf:NAME[:CONFIG[:SPLIT]] or synthetic:NAME"
        )
    if not path.is_file():
        raise InputError(f"{path} is neither a file nor a folder")
    if kind_of(path) not in (*TEXT, *ROWS):
        require_extra("data", ("datasets",), f"{path} is not a {FORMATS} file, and opening it")
    return [path]


def notes_on_folder(path: Path) -> list[str]:
    """Return a list with a note that names the files of a folder of texts that are not read; empty if all are."""
    unread = [file.relative_to(path).as_posix() for file in _files_below(path)[1]] if path.is_dir() else []
    if not unread:
        return []
    shown = ", ".join(unread[:5]) + (f" and {len(unread) - 5:,} more" if len(unread) > 5 else "")
    return [f"not read in {path}: {shown}"]


def _files_below(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the files in and below a folder that are read, and the others; hidden files are in neither."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not _is_hidden(path.relative_to(folder)))
    groups = [{*TEXT, *ROWS} - {".md", ".json"}, {".arrow"}, {".md", ".json"}]
    read = next(filter(None, ([file for file in files if kind_of(file) in group] for group in groups)), [])
    read = [file for file in read if not (is_compressed(file) and file.with_suffix("") in read)]
    read = [file for file in read if not (file.suffix == ".arrow" and file.name.startswith("cache-"))]
    return read, sorted({*files} - {*read})


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def plain_conversation(messages: list[Message], where: str) -> str:
    """Render messages as lines `role: content`; `where` is not used."""
    return "\n".join(f"{message['role']}: {message['content'] or ''}" for message in messages)


def read_documents(path: Path, render: Render = plain_conversation, counts: ReadCounts | None = None) -> Iterator[str]:
    """Yield the non-empty documents of one file.

    Args:
        render: function that renders a conversation as text.
        counts: counts to which the rows of the file are added.

    Raises:
        InputError: if the file cannot be read, has another encoding than UTF-8, is malformed, or has rows but none with
            text; `render` may also raise it.
    """
    if is_plain(path):
        with readable(path) as file:
            yield from (text for text in _txt_documents(file) if text.strip())
        return
    yield from texts_of_rows(read_rows(path), str(path), render, ReadCounts() if counts is None else counts)


def texts_of_rows(rows: Iterator[tuple[Any, str]], source: str, render: Render, counts: ReadCounts) -> Iterator[str]:
    """Yield the texts of rows, and count rows; see `row_text` for errors.

    Args:
        rows: rows and their places.
        source: name of the source in the error message.

    Raises:
        InputError: after the last row, if there are rows and none has text.
    """
    first, found = None, False
    for row, where in rows:
        text = row_text(row, where, render)
        counts.rows += 1
        if text.strip():
            found = True
            yield text
        else:
            counts.skipped += 1
            first = first or (row,)
    if first is not None and not found:
        keys = f"the keys {', '.join(map(str, first[0]))[:200]}" if isinstance(first[0], dict) else "no keys"
        raise InputError(f"{source} contains no text: no row has {NEEDED} with text; its first row has {keys}")


def read_pieces(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield the pieces of a .txt or .md file, each with a flag that is True at the end of a document.

    A document ends at a separator (a line `<|endoftext|>`) or at the end of the file. Text before the first separator
    is split like a file without separators, so that a long file is read only as needed. Empty pieces are included.

    Raises:
        InputError: if the file cannot be read, or has another encoding than UTF-8.
    """
    with readable(path) as file:
        yield from _txt_pieces(file, separated=False)


def row_text(row: Any, where: str, render: Render) -> str:
    """Return the text of a row of a file or dataset; empty if it has none.

    The text is that of `text`, the rendered conversation (`conversation_of`), that of `content`, or `prompt` followed
    by `completion`. A row that is a string is a text itself.

    Raises:
        InputError: if a message of a conversation is malformed; the error message begins with `where`, the name of the
            row. `render` may also raise it.
    """
    fields = row if isinstance(row, dict) else {"text": row}
    prompt, completion = fields.get("prompt"), fields.get("completion")
    if isinstance(fields.get("text"), str):
        text = fields["text"]
    elif messages := conversation_of(fields, where):
        text = render(messages, where)
    elif isinstance(fields.get("content"), str):
        text = fields["content"]
    elif isinstance(prompt, str) and isinstance(completion, str):
        text = prompt + completion
    else:
        text = ""
    kind = type(text)  # `ChatText` if a chat template wrote it
    return kind(text.encode("utf-8", errors="replace").decode("utf-8"))  # JSON strings may contain lone surrogates


def conversation_of(row: Any, where: str) -> list[Message]:
    """Return the messages of a row; an empty list if it has none, or all are empty.

    The messages are `messages`, `conversations`, or `prompt` followed by `completion`, if these are lists of objects
    with `role` and `content`, or with `from` and `value` (`ROLES`). The content may be a list of parts, whose texts are
    joined, or null.

    Raises:
        InputError: if a message is malformed, its speaker is unknown, or a part is not text.
    """
    if not isinstance(row, dict):
        return []
    found, prompt, completion = row.get("messages"), row.get("prompt"), row.get("completion")
    if not isinstance(found, list):
        found = row.get("conversations")
    if not isinstance(found, list):
        found = [*prompt, *completion] if isinstance(prompt, list) and isinstance(completion, list) else []
    messages = [_message(message, where) for message in found]
    return messages if any(message["content"] or message.get("tool_calls") for message in messages) else []


def _message(message: Any, where: str) -> Message:
    message = message if isinstance(message, dict) else {}
    known = {key: value for key, value in message.items() if key not in ("from", "value")}
    if isinstance(message.get("from"), str):
        if message["from"].lower() not in ROLES:
            raise InputError(f"{where}: a message is from {message['from']!r}; known are {', '.join(ROLES)}")
        known = {"role": ROLES[message["from"].lower()], "content": message.get("value"), **known}
    content = known.setdefault("content", None if message.get("tool_calls") else 0)
    if isinstance(content, list):
        known["content"] = content = "".join(_part(part, where) for part in content)
    if not isinstance(known.get("role"), str) or not isinstance(content, str | None):
        raise InputError(f'{where}: each message needs "role" and "content", a string, a list of texts or null')
    return known


def _part(part: Any, where: str) -> str:
    text = part.get("text") if isinstance(part, dict) else part
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, dict) else part
        raise InputError(f"{where}: a part of a message is of type {str(kind)[:40]!r}; only text can be read")
    return text


def read_conversations(path: Path, counts: ReadCounts | None = None) -> Iterator[tuple[list[Message], str]]:
    """Yield the conversations of a file with rows, each with its place ("FILE, line N") for error messages.

    Args:
        counts: counts to which the rows of the file are added; rows without a conversation are skipped.

    Raises:
        InputError: if the file does not exist or has no rows, cannot be read, or no row is a conversation; see also
            `conversation_of`.
    """
    if not path.is_file() or is_plain(path):
        raise InputError(
            f'{path} does not exist or has no rows: pass a .jsonl, .json or .parquet file whose rows have "messages"'
        )
    counts = ReadCounts() if counts is None else counts
    found = False
    for row, where in read_rows(path):
        messages = conversation_of(row, where)
        counts.rows += 1
        counts.skipped += not messages
        if messages:
            found = True
            yield messages, where
    if counts.rows and not found:
        raise InputError(f'{path}: no row has a conversation, "messages" or "conversations" with text')


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
