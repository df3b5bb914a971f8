"""Lazy reading of data files: decompression, encodings, and the rows of JSON, CSV and Parquet files.

A row is a dict of column names and values; in a JSON file it may be any JSON value. Compressed files are opened by the
standard library (and its backport for .zst), CSV by the module csv, Parquet by polars, and formats that are not listed
here by `datasets`. Files are read lazily, except for .json files that are one JSON value.
"""

import bz2
import codecs
import csv
import gzip
import importlib
import io
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, TextIO
from unicodedata import category

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
    if (name := _wide_encoding(head)) is None:
        raise InputError(f"{path} contains NUL characters, so it is damaged or not text: remove them or the file")
    raise InputError(
        f"{path} contains NUL characters: it seems to be {name} without a byte order mark. Convert it to UTF-8, as in "
        f"iconv -f {name} -t UTF-8"
    )


def _wide_encoding(head: bytes) -> str | None:
    """Return the UTF-16 or UTF-32 in which the bytes have the fewest unassigned and control characters, if any."""
    if head.count(0) < len(head) / 10 and _decoded(head, "UTF-8"):
        return None
    texts = {name: _decoded(head, name) for name in ("UTF-32LE", "UTF-32BE", "UTF-16LE", "UTF-16BE")}

    def oddity(name: str) -> tuple[int, int]:
        odd = sum(category(one) in ("Cc", "Cn", "Co") and one not in "\t\n\r" for one in texts[name])
        return odd, -sum(map(str.isascii, texts[name]))

    return min((name for name, text in texts.items() if text and "\0" not in text), key=oddity, default=None)


def _decoded(head: bytes, encoding: str) -> str:
    """Decode the start of a text, up to an incomplete last character; empty if it has another encoding."""
    try:
        return codecs.getincrementaldecoder(encoding)().decode(head)
    except UnicodeDecodeError:
        return ""


def read_rows(path: Path) -> Iterator[tuple[Any, str]]:
    """Yield the rows of a file, each with its place ("FILE, line N" or "FILE, row N") for messages.

    Raises:
        InputError: if the file cannot be read or is malformed, or `datasets` is required and not installed.
    """
    if (kind := kind_of(path)) in (".jsonl", ".ndjson", ".json"):
        return _json_rows(path, kind == ".json")
    if kind in (".csv", ".tsv"):
        return _csv_rows(path, kind == ".tsv")
    return _parquet_rows(path) if kind == ".parquet" else _rows_of_datasets(path)


def _json_rows(path: Path, may_be_one_value: bool) -> Iterator[tuple[Any, str]]:
    """Yield the rows of a file of JSON lines, of a JSON array, or of an object that contains one.

    Args:
        may_be_one_value: whether the file may be one JSON object instead of one per line, as a .json file.
    """
    with readable(path) as file:
        lines = ((number, line) for number, line in enumerate(file, start=1) if line.strip())
        first, second = next(lines, None), None
        if first is None:
            return
        is_one_value = False
        if may_be_one_value or first[1].lstrip().startswith("["):
            second = next(lines, None)
            is_one_value = second is None or not _is_json(first[1])
        lines = chain(filter(None, (first, second)), lines)
        if is_one_value:
            yield from _rows_of_value(_parsed("".join(line for _, line in lines), str(path)), path)
            return
        for number, line in lines:
            where = f"{path}, line {number}"
            yield _parsed(line, where, "; each line must be one JSON object"), where


def _rows_of_value(value: Any, path: Path) -> Iterator[tuple[Any, str]]:
    """Yield the elements of an array; of an object without text, those of its array, as in {"data": [..]}."""
    if isinstance(value, dict) and not value.keys() & set(KEYS):
        arrays = [one for one in value.values() if isinstance(one, list)]
        value = arrays[0] if len(arrays) == 1 else value
    for number, row in enumerate(value if isinstance(value, list) else [value], start=1):
        yield row, f"{path}, row {number}"


def _is_json(text: str) -> bool:
    try:
        parse_json(text)
    except ValueError:
        return False
    return True


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


def _parquet_rows(path: Path) -> Iterator[tuple[Any, str]]:
    import polars

    try:
        compressed = _OPENERS.get(path.suffix.lower())
        content: Any = path
        if compressed is not None:
            with compressed(path, "rb") as file:
                content = io.BytesIO(file.read())
        table = polars.scan_parquet(content, glob=False)
        known = [name for name in table.collect_schema().names() if name in KEYS]
        table = table.select(known) if known else table.head(1)
        for start in range(0, table.select(polars.len()).collect().item(), _ROWS_AT_ONCE):
            rows = table.slice(start, _ROWS_AT_ONCE).collect().iter_rows(named=True)
            for number, row in enumerate(rows, start=start + 1):
                yield row, f"{path}, row {number}"
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
