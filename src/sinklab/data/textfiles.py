"""Texts of files: plain text, and rows with text or a conversation.

- .txt and .md: a line `<|endoftext|>` ends a document. A document of a file without such a line ends at the first blank
  line after 8,192 characters, or at any line after 65,536, so that a book can be split into training and validation.
- other formats: every row is a document (`row_text`). A row is a dict of column names and values; in a JSON file it may
  be any JSON value.

Documents without text are skipped; rows among them are counted (`ReadCounts`). Compressed files are opened by the
standard library (and its backport for .zst), CSV by the module csv, Parquet by polars, and formats that are not listed
here by `datasets`. Files are read lazily, except for .json files that are one JSON value.
"""

import bz2
import codecs
import csv
import gzip
import importlib
import io
import json
import lzma
import os
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from sinklab.errors import InputError, cause, require_extra
from sinklab.files import parse_json

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

TEXT = (".txt", ".md")
ROWS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
FORMATS = ".txt, .md, .jsonl, .json, .csv, .tsv or .parquet"
KEYS = ("text", "messages", "conversations", "content", "prompt", "completion")
"""Keys of a row that may contain its text, see `row_text`."""

_HEAD = 2**16  # bytes at the start of a file in which its encoding is recognised
_ROWS_AT_ONCE = 1000  # of a Parquet file
_MARKS = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32"}  # before UTF-16: FF FE 00 00 begins with FF FE
_MARKS |= {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}


_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": zstd.open}
_DAMAGED = (EOFError, zlib.error, lzma.LZMAError, zstd.ZstdError)


def is_compressed(path: Path) -> bool:
    """Return True if the name of a file ends in .gz, .bz2, .xz or .zst."""
    return path.suffix.lower() in _OPENERS


def kind_of(path: Path) -> str:
    """Return the suffix of a file in lower case, without that of a compression: `.jsonl` for a.JSONL.gz."""
    return (path.with_suffix("") if is_compressed(path) else path).suffix.lower()


def without_kind(path: Path) -> Path:
    """Return a path without the suffixes of its format and compression: `sub/a` for sub/a.jsonl.gz."""
    return (path.with_suffix("") if is_compressed(path) else path).with_suffix("")


@contextmanager
def readable(path: Path, newline: str | None = None) -> Iterator[TextIO]:
    """Open a text file, decompressed and decoded, for reading in a `with` block.

    The encoding is UTF-8, or UTF-16 or UTF-32 if the file begins with the byte order mark.

    Raises:
        InputError: if the file cannot be read or decompressed, or has another encoding.
    """
    opened = _OPENERS.get(path.suffix.lower(), open)
    try:
        with opened(path, "rb") as file:
            encoding = _encoding(file.read(_HEAD), path)
        with opened(path, "rb") as file, io.TextIOWrapper(file, encoding=encoding, newline=newline) as text:
            yield text
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text ({error.reason}): convert or remove it") from error
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except _DAMAGED as error:
        raise InputError(f"cannot read {path}: it is damaged ({cause(error)})") from error


def _encoding(head: bytes, path: Path) -> str:
    """Return the encoding of a text file by its first bytes; NUL bytes in a text without BOM raise InputError."""
    for mark, encoding in _MARKS.items():
        if head.startswith(mark):
            return encoding
    if b"\0" not in head:
        return "utf-8-sig"
    raise InputError(
        f"{path} contains NUL characters: it is damaged, not text, or UTF-16 without a byte order mark, which has to "
        "be converted to UTF-8 (iconv -f UTF-16LE -t UTF-8)"
    )


def read_rows(path: Path, column: str | None = None) -> Iterator[tuple[Any, str]]:
    """Yield the rows of a file, each with its place ("FILE, line N" or "FILE, row N") for messages.

    Args:
        column: column that will be read, besides those of `KEYS`. Without it, a file whose rows are one message each
            (`MESSAGE_KEYS`) has one row, the list of these messages.

    Raises:
        InputError: if the file cannot be read or is malformed, or `datasets` is required and not installed.
    """
    if (kind := kind_of(path)) in (".jsonl", ".ndjson", ".json"):
        rows = _json_rows(path, kind == ".json", {*KEYS, column})
    elif kind in (".csv", ".tsv"):
        rows = _csv_rows(path, kind == ".tsv")
    else:
        keys = {*KEYS, *MESSAGE_KEYS, column}
        rows = _parquet_rows(path, keys) if kind == ".parquet" else _rows_of_datasets(path)
    return rows if column is not None else _joined_messages(rows, str(path))


def _joined_messages(rows: Iterator[tuple[Any, str]], file: str) -> Iterator[tuple[Any, str]]:
    """Yield one row, the list of all rows, if each of them is a message; otherwise the rows."""
    held: list[tuple[Any, str]] = []
    for row in rows:
        held.append(row)
        if not _is_message(row[0]):
            yield from held
            yield from rows
            return
    if held:
        yield [message for message, _ in held], file


def _is_message(row: Any) -> bool:
    speaker = (row.get("role") or row.get("from")) if isinstance(row, dict) else None
    return isinstance(speaker, str) and row.keys() <= MESSAGE_KEYS and speaker.lower() in {*ROLES, "developer"}


def _json_rows(path: Path, may_be_one_value: bool, keys: set[str | None]) -> Iterator[tuple[Any, str]]:
    """Yield the rows of a file of JSON lines, of a JSON array, or of an object that contains one.

    Args:
        may_be_one_value: whether the file may be one JSON object instead of one per line, as a .json file.
        keys: keys of a row that may contain its text.
    """
    with readable(path) as file:
        lines = ((number, line) for number, line in enumerate(file, start=1) if line.strip())
        first, second = next(lines, None), None
        if first is None:
            return
        is_one_value = False
        if may_be_one_value or first[1].lstrip().startswith("["):
            second = next(lines, None)
            try:
                parse_json(first[1])
                is_one_value = second is None
            except ValueError:
                is_one_value = True
        lines = chain(filter(None, (first, second)), lines)
        if is_one_value:
            value = _parsed("".join(line for _, line in lines), str(path))
            if isinstance(value, dict) and not value.keys() & keys:  # without text: its array, as in {"data": [..]}
                arrays = [member for member in value.values() if isinstance(member, list)]
                value = arrays[0] if len(arrays) == 1 else value
            for number, row in enumerate(value if isinstance(value, list) else [value], start=1):
                yield row, f"{path}, row {number}"
            return
        for number, line in lines:
            where = f"{path}, line {number}"
            yield _parsed(line, where, "; each line must be one JSON object"), where


def _parsed(text: str, where: str, otherwise: str = "") -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise InputError(f"{where}: not valid JSON ({error}){otherwise}") from error


def _csv_rows(path: Path, is_tsv: bool) -> Iterator[tuple[Any, str]]:
    """Yield the rows of a CSV file with a header; of , ; and tab, the most frequent in the header is the separator."""
    csv.field_size_limit(2**31 - 1)  # by default, a field of more than 131,072 characters is an error
    with readable(path, newline="") as file:
        header = file.readline()
        file.seek(0)
        reader = csv.DictReader(file, delimiter="\t" if is_tsv else max(",;\t", key=header.count), strict=True)
        try:
            for row in reader:
                where, names = f"{path}, line {reader.line_num}", len(reader.fieldnames or ())
                fields = len(row) + len(row[None]) - 1 if None in row else sum(one is not None for one in row.values())
                if fields != names:
                    raise InputError(
                        f"{where}: a row of {fields} fields under a header of {names}: put a text that contains the "
                        "separator in double quotes"
                    )
                yield row, where
        except csv.Error as error:
            raise InputError(f"{path}, line {reader.line_num}: not valid CSV ({error})") from error


def _parquet_rows(path: Path, keys: set[str | None]) -> Iterator[tuple[Any, str]]:
    """Yield the rows of a Parquet file; the values of columns that are not in `keys` are None."""
    import polars

    try:
        compressed = _OPENERS.get(path.suffix.lower())
        content: Any = path
        if compressed is not None:
            with compressed(path, "rb") as file:
                content = io.BytesIO(file.read())
        table = polars.scan_parquet(content, glob=False)
        names = table.collect_schema().names()
        known = [name for name in names if name in keys]
        table = table.select(known) if known else table.head(1)
        for start in range(0, table.select(polars.len()).collect().item(), _ROWS_AT_ONCE):
            rows = table.slice(start, _ROWS_AT_ONCE).collect().iter_rows(named=True)
            for number, row in enumerate(rows, start=start + 1):
                yield dict.fromkeys(names) | row, f"{path}, row {number}"
    except (polars.exceptions.PolarsError, polars.exceptions.PanicException, OSError, *_DAMAGED) as error:
        raise InputError(f"cannot read {path} as Parquet: {cause(error)}") from error


def _rows_of_datasets(path: Path) -> Iterator[tuple[Any, str]]:
    require_extra("data", ("datasets",), f"{path} is not a {FORMATS} file, and opening it")
    datasets: Any = importlib.import_module("datasets")
    try:
        # of a folder that `save_to_disk` wrote, load_dataset reads the files only as the format "arrow"
        place = ("arrow", str(path)) if path.suffix == ".arrow" else (str(path.parent), path.name)
        rows = datasets.load_dataset(place[0], data_files=[place[1]], split="train", streaming=True)
        for number, row in enumerate(rows, start=1):
            yield row, f"{path}, row {number}"
    except Exception as error:  # its errors share no base class
        raise InputError(f"{path} is not a {FORMATS} file, and `datasets` cannot open it: {cause(error)}") from error


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
MESSAGE_KEYS = {"role", "content", "from", "value", "name", "tool_calls", "tool_call_id"}

NEEDED = '"text", "content", "prompt" with "completion", "messages" or "conversations"'
_SEPARATOR = "<|endoftext|>"
_PIECE = 8 * 1024  # characters after which a blank line ends a document
_LONGEST = 8 * _PIECE  # characters after which any line ends a document; longer lines are read in pieces of this size


@dataclass
class ReadCounts:
    """Number of rows that were read from files or datasets, and of those that were skipped because they have no text.

    `short` is the number of documents that are shorter than a sequence, if the text is cut into sequences. Texts are
    read lazily, so the counts may be smaller than those of the whole text.
    """

    rows: int = 0
    skipped: int = 0
    short: int = 0

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
    files (of `datasets`) only if it has none of the formats of `FORMATS`. Of a file with and without compression, only
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
    inside = ((path, path.relative_to(folder).parts) for path in folder.rglob("*") if path.is_file())
    files = sorted(path for path, parts in inside if not any(part.startswith(".") for part in parts))
    groups = [{*TEXT, *ROWS} - {".md", ".json"}, {".arrow"}, {".md", ".json"}]
    read = next(filter(None, ([file for file in files if kind_of(file) in group] for group in groups)), [])
    read = [file for file in read if not (is_compressed(file) and file.with_suffix("") in read)]
    read = [file for file in read if not (file.suffix == ".arrow" and file.name.startswith("cache-"))]
    return read, sorted({*files} - {*read})


@contextmanager
def given_text(text: str | Path | Sequence[Any] | None) -> Iterator[Path | None]:
    """Yield the path or name of a text; a list of documents (strings, messages or rows) is in a temporary file.

    Raises:
        InputError: if `text` is a document and not a list of documents. In errors of the block, the list is `text`.
    """
    if isinstance(text, str) and (len(text) > 255 or any(map(str.isspace, text))) and not os.path.exists(text):
        raise InputError(f"no text at {text[:40]!r}: pass documents as a list, such as text=[..]")
    if text is None or isinstance(text, str | Path):
        yield None if text is None else Path(text)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "documents.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in text), "utf-8")
        try:
            yield path
        except InputError as error:
            named = str(error).replace(f"{path}, line", "`text`, document").replace(str(path), "`text`")
            raise InputError(named) from error


def plain_conversation(messages: list[Message], where: str) -> str:
    """Render messages as lines `role: content`; `where` is not used."""
    return "\n".join(f"{message['role']}: {message['content'] or ''}" for message in messages)


def read_documents(
    path: Path, render: Render = plain_conversation, counts: ReadCounts | None = None, column: str | None = None
) -> Iterator[str]:
    """Yield the non-empty documents of one file.

    Args:
        render: function that renders a conversation as text.
        counts: counts to which the rows of the file are added.
        column: column of the text; None for `KEYS` (`row_text`).

    Raises:
        InputError: if the file cannot be read, has another encoding than UTF-8, is malformed, or has rows but none with
            text, or no rows and `column` is not None; `render` may also raise it.
    """
    if is_plain(path):
        if column is not None:
            raise InputError(f"{path} is plain text without columns: leave the column out")
        with readable(path) as file:
            separated = any(line.strip() == _SEPARATOR for line in iter(lambda: file.readline(_LONGEST), ""))
            file.seek(0)
            yield from (text for text, _ in _txt_pieces(file, separated) if text.strip())
        return
    yield from texts_of_rows(read_rows(path, column), str(path), render, counts, column)


def texts_of_rows(
    rows: Iterator[tuple[Any, str]], source: str, render: Render, counts: ReadCounts | None, column: str | None = None
) -> Iterator[str]:
    """Yield the texts of rows, and count rows; see `row_text` for errors.

    Args:
        rows: rows and their places.
        source: name of the source in the error message.

    Raises:
        InputError: after the last row, if there are rows and none has text.
    """
    first, found, counts = None, False, ReadCounts() if counts is None else counts
    for row, where in rows:
        text = row_text(row, where, render, column)
        counts.rows += 1
        if text.strip():
            found = True
            yield text
        else:
            counts.skipped += 1
            first = first or (row,)
    if first is not None and not found:
        keys = f"the keys {', '.join(map(str, first[0]))[:200]}" if isinstance(first[0], dict) else "no keys"
        raise InputError(
            f"{source} contains no text: no row has {NEEDED if column is None else repr(column)} with text; its first "
            f"row has {keys}: name the one to read with --column NAME (in a recipe data.column), or rename it to "
            "text"
        )


def read_pieces(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield the pieces of a .txt or .md file, each with a flag that is True at the end of a document.

    A document ends at a separator (a line `<|endoftext|>`) or at the end of the file. Text before the first separator
    is split like a file without separators, so that a long file is read only as needed. Empty pieces are included.

    Raises:
        InputError: if the file cannot be read, or has another encoding than UTF-8.
    """
    with readable(path) as file:
        yield from _txt_pieces(file, separated=False)


def row_text(row: Any, where: str, render: Render, column: str | None = None) -> str:
    """Return the text of a row of a file or dataset; empty if it has none.

    The text is that of `column`, a text or messages. Without it, it is that of `text`, the rendered conversation
    (`conversation_of`), that of `content`, or `prompt` followed by `completion`; an empty one is passed over. A row
    that is a string is a text itself, and a list a conversation.

    Raises:
        InputError: if a message of a conversation is malformed; the error message begins with `where`, the name of the
            row. `render` may also raise it.
    """
    fields = row if isinstance(row, dict) else {}
    if column is not None or not isinstance(row, dict):
        value = row if column is None else fields.get(column)
        fields = {"messages" if isinstance(value, list) else "text": value}
    prompt, completion = fields.get("prompt"), fields.get("completion")
    if isinstance(fields.get("text"), str) and fields["text"].strip():
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

    The messages are a row that is a list, or `messages`, `conversations`, or `prompt` followed by `completion`, if
    these are lists of objects with `role` and `content`, or with `from` and `value` (`ROLES`). The content may be a
    list of parts, whose texts are joined, or null.

    Raises:
        InputError: if a message is malformed, its speaker is unknown, or a part is not text.
    """
    row = {"messages": row} if isinstance(row, list) else row
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
