"""Files: atomic writes, parsing of untrusted JSON and YAML, searched folders, hashes, and the cache folder.

For an atomic write, a temporary file is written, flushed to the disk and renamed.

Checks before output files are replaced: only files written by sinklab, and empty files, may be replaced.

Files written by sinklab are recognised by their content: JSON documents by their keys, tables by their first columns,
measurement.npz by the name of an array, pages and charts by a marker text.
"""

import errno
import gzip
import hashlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import yaml

from sinklab.errors import InputError, SinklabError, cause

if TYPE_CHECKING:
    from pydantic import BaseModel

REPORT = "report.html"
TABLE, CHART = "table", "chart"
REPORT_MARK = '<p class="kicker">sinklab report</p>'
CHART_MARK = b"drawn by sinklab"
MARKS = {REPORT: REPORT_MARK.encode(), CHART: CHART_MARK, "measurement.npz": b"importance.npy"}
MIB = 2**20  # marks are searched for in the first and the last MiB of a file

RUNS = Path("runs")
"""Default folder of run directories and of other results."""
RECIPE = "recipe.yaml"
MEASUREMENT = ("measurement.json", "measurement.npz")
KEYS = {
    "measurement.json": {"schema", "sink_rate"},
    "request.json": {"model", "dtype", "inputs"},
    "domains.json": {"schema", "domains"},
    "comparison.json": {"schema", "rows"},
    "checkpoints.json": {"schema", "checkpoints"},
    "assessment.json": {"schema", "asked", "skipped"},
    "parity.json": {"schema", "server", "prompts"},
    "evaluation.json": {"schema", "lm_eval", "tasks"},
    "summary.json": {"cells", "claims"},
    "sft.json": {"schema", "asked", "conversations"},
}

TABLES = {  # first columns of each table
    "importance": ("layer", "head", "position", "importance"),
    "positions": ("position", "sink_rate"),
    "layers": ("layer", "importance_first"),
    "heads": ("layer", "head", "sink_rate"),
}


def check_results(folder: Path, names: Sequence[str]) -> None:
    """Check that a folder is writable, and that its files with these names are empty or were written by sinklab.

    Args:
        folder: output folder. If it does not exist, it is created for the check and removed again.
        names: names of the output files: keys of KEYS, "measurement.npz", "report.html", and keys of TABLES with .csv
            or .parquet.

    Raises:
        InputError: if a check fails, or if `names` contains files of a measurement and the folder is a run directory.
            The message names the file or folder.
    """
    check_writable(folder)
    if (folder / RECIPE).exists() and set(names) & set(MEASUREMENT):
        raise InputError(f"{folder} is a run directory, where the run saves its own measurement: choose another --out")
    for name in names:
        check_file(folder / name, TABLE if name.endswith((".csv", ".parquet")) else name)


def check_file(path: Path, kind: str) -> None:
    """Check that `path` does not exist, is empty, or is a file of this kind written by sinklab.

    Args:
        kind: a key of KEYS or MARKS, or TABLE (CSV or Parquet).

    Raises:
        InputError: see `target_of`, and if the path is another file or cannot be read. The message names the path.
    """
    target = target_of(path)
    try:
        ours = not target.exists() or not target.stat().st_size or _is_ours(target, kind)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}. Choose another --out") from error
    if not ours:
        raise InputError(
            f"{path} exists and was not written by sinklab as a file of this kind, so it is not replaced: choose "
            "another --out, or move it away"
        )


def _is_ours(path: Path, kind: str) -> bool:
    if kind in KEYS:
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            return False
        return isinstance(document, dict) and KEYS[kind] <= document.keys()
    with path.open("rb") as file:
        start = file.read(MIB)
        file.seek(max(0, path.stat().st_size - MIB))
        end = file.read()
    if kind in MARKS:
        return MARKS[kind] in start or MARKS[kind] in end
    headers = [[name.encode() for name in names] for names in TABLES.values()]
    is_parquet = end.endswith(b"PAR1") and any(all(name in end for name in names) for names in headers)
    return is_parquet or start.startswith(tuple(b",".join(names) for names in headers))


def target_of(path: Path) -> Path:
    """Return `path` with all symbolic links resolved. The file need not exist.

    Raises:
        InputError: if the path exists and is not a regular file, its links are circular, or it cannot be accessed.
    """
    try:
        target = path.resolve()
        kind = _kind(target) if target.exists() and not target.is_file() else None
    except (OSError, RuntimeError) as error:  # RuntimeError: circular links
        raise InputError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error
    if kind:
        raise InputError(f"{path} is {kind} and not a file: choose another path")
    return target


def check_writable(folder: Path) -> None:
    """Check that files can be written into a folder. If it does not exist, it is created and removed again.

    Raises:
        InputError: if they cannot; the message names the folder.
    """
    made: list[Path] = []
    try:
        made += [parent for parent in (folder, *folder.parents) if not parent.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        no_folder = isinstance(error, FileExistsError | NotADirectoryError)
        why = "it, or a folder above it, is a file" if no_folder else error.strerror or error
        raise InputError(f"cannot write into {folder}: {why}. Choose another folder") from error
    finally:
        for parent in made:
            with suppress(OSError):  # it was not created, or another process has written into it
                parent.rmdir()


def _kind(path: Path) -> str:
    if path.is_dir():
        return "a folder"
    return "a pipe" if path.is_fifo() else "a socket" if path.is_socket() else "a device"


T = TypeVar("T")
AnyModel = TypeVar("AnyModel", bound="BaseModel")

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # full disk, exceeded quota, file above the size limit


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Yield the path of an empty temporary file, which replaces `path` at the end of the `with` block.

    If the block raises an exception, the temporary file is removed and `path` is unchanged. Missing parent folders are
    created. If `path` is a symbolic link, its target is replaced and the link is kept. The new file has the permissions
    of the replaced file; if there was none, the umask determines them.

    Raises:
        SinklabError: if the file cannot be written, such as on a full disk, or the block raises an OSError.
    """
    target = target_of(path)
    aside = beside(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        aside.touch(exist_ok=False)
        yield aside
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, aside)
        aside.replace(target)
    except OSError as error:
        remedy = "free some space and run the same command again, or choose" if error.errno in DISK_FULL else "choose"
        raise SinklabError(
            f"cannot write {path}: {error.strerror or error}. An earlier file there is untouched; "
            f"{remedy} another output path."
        ) from error
    finally:
        with suppress(OSError):  # its folder may be a file
            aside.unlink(missing_ok=True)


def beside(target: Path) -> Path:
    """Return a random hidden path in the folder of `target`, for a temporary file or folder that is to replace it."""
    return target.parent / f".{target.name[:60]}.{secrets.token_hex(4)}"


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically."""
    with written_aside(path) as aside:
        aside.write_text(text, encoding="utf-8")


def write_gzip(path: Path, text: str) -> None:
    """Write `text` to `path` atomically, compressed with gzip. Equal texts give identical files."""
    with written_aside(path) as aside:
        aside.write_bytes(gzip.compress(text.encode(), mtime=0))


def write_json(path: Path, document: Any) -> None:
    """Write `document` to `path` as indented JSON, atomically.

    Raises:
        ValueError: if the document contains NaN or an infinite number.
    """
    write_text(path, json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def parse_json(text: str) -> Any:
    """Parse untrusted text like `json.loads`.

    Raises:
        ValueError: if the text is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # in C: ten times as fast
    """Loader that raises an error if a mapping repeats a key; PyYAML would use the last value.

    Merge keys (`<<`) are errors too, since PyYAML does not tell the keys that they add from repeated ones.
    """

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set[str]()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                message = "merge keys (<<) are not supported: write the keys out"
                raise yaml.constructor.ConstructorError(None, None, message, key.start_mark)
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    message = f"the key {key.value} is repeated"
                    raise yaml.constructor.ConstructorError(None, None, message, key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    """Parse text like `yaml.safe_load`.

    Raises:
        ValueError: if the text is not YAML, repeats a key, or has a merge key.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        where = mark and problem and f"{problem}, line {mark.line + 1}, column {mark.column + 1}"
        raise ValueError(where or cause(error)) from error


def read_mapping(path: Path, remedy: str) -> dict[str, Any]:
    """Read a mapping from a JSON file (`.json`) or a YAML file.

    Args:
        remedy: what the user can do about a damaged file; the end of the error message.

    Raises:
        InputError: if the file is missing (see `if_present`), cannot be read or does not contain a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
        # JSON is not parsed as YAML, because YAML reads 1e-05 as a string.
        document = parse_json(text) if path.suffix == ".json" else parse_yaml(text)
        if not isinstance(document, dict):
            raise ValueError("it must contain a mapping of keys to values")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or cause(error)
        raise InputError(f"{path} cannot be read ({why}): {remedy}") from error
    return document


def read_document(kind: type[AnyModel], path: Path, remedy: str) -> AnyModel:
    """Read a document of a pydantic model from a JSON or YAML file; see `read_mapping` for arguments.

    Raises:
        InputError: if the file is missing, cannot be read, is damaged or has another schema version.
    """
    document = read_mapping(path, remedy)
    try:
        return kind.model_validate(document)
    except ValueError as error:
        raise InputError(f"{path} cannot be read ({cause(error)}): {remedy}") from error


def if_present(read: Callable[[], T]) -> T | None:
    """Call `read`, which calls `read_mapping` or `read_document`; return None if there is no such file."""
    try:
        return read()
    except InputError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise


def append_line(path: Path, line: str) -> None:
    """Append a line to a text file and flush it to the disk. The file is created if it does not exist.

    Raises:
        SinklabError: if the line cannot be written, such as on a full disk; an incomplete last line may remain.
    """
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        remedy = "Free some space" if error.errno in DISK_FULL else "Make it a writable file"
        raise SinklabError(
            f"cannot write {path}: {error.strerror or error}. {remedy}, then run the same command again."
        ) from error


def is_full(error: BaseException) -> bool:
    """Return whether an error or one of its causes reports a full disk, an exceeded quota or the file size limit."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in DISK_FULL:
            return True
        if any(os.strerror(number) in str(seen) for number in DISK_FULL):  # raised by another library or process
            return True
        seen = seen.__cause__
    return False


def folders_with(
    top: Path, holds: Callable[[list[str]], bool], on_error: Callable[[OSError], None] | None = None
) -> Iterator[Path]:
    """Yield the folders whose file names satisfy `holds`: `top` itself, or else those below it, sorted by name.

    Subfolders of the yielded folders, symbolic links and hidden folders are not searched.

    Args:
        on_error: callback for a folder that is missing or cannot be read; by default, the folder is skipped.
    """
    for name, children, files in os.walk(top, onerror=on_error):
        if found := holds(files):
            yield Path(name)
        children[:] = [] if found else sorted(child for child in children if not child.startswith("."))


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal. Raises OSError if the file cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_at(file: IO[Any], path: Path) -> bool:
    """Return whether an open file is still the file at `path`, so that a lock on it excludes other processes."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def cache_folder() -> Path:
    """Return sinklab's cache folder: SINKLAB_CACHE if it is set, else ~/.cache/sinklab.

    Raises:
        InputError: if the path begins with `~` and there is no such home directory.
    """
    named = os.environ.get("SINKLAB_CACHE") or "~/.cache/sinklab"
    try:
        return Path(named).expanduser()
    except RuntimeError as error:
        raise InputError(f"{named}: there is no such home directory; set SINKLAB_CACHE to a folder") from error
