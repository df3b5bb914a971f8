"""Checks before output files are overwritten: only files written by sinklab, and empty files, may be replaced.

Files written by sinklab are recognised by their content: documents by their keys, tables by their first columns,
measurement.npz by the name of an array, pages and charts by a marker text.
"""

import json
import os
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from sinklab.errors import InputError

REPORT = "report.html"
REPORT_MARK = '<p class="kicker">sinklab report</p>'  # in the first MIB bytes
CHART_MARK = b"drawn by sinklab"  # in the last TAIL bytes
MIB, TAIL = 2**20, 2**8

RUN = "recipe.yaml"
MEASUREMENT = ("measurement.json", "measurement.npz")
KEYS = {
    "measurement.json": {"schema", "sink_rate"},
    "request.json": {"model", "dtype", "inputs"},
    "domains.json": {"schema", "domains"},
    "comparison.json": {"schema", "rows"},
    "families.json": {"schema", "models"},
    "checkpoints.json": {"schema", "checkpoints"},
    "assessment.json": {"schema", "asked", "skipped"},
    "evaluation.json": {"schema", "lm_eval", "tasks"},
    "summary.json": {"cells", "claims"},
    "sft.json": {"schema", "asked", "conversations"},
}

TABLES = {  # first columns of each table
    "importance": ("layer", "head", "position", "importance"),
    "positions": ("position", "sink_rate"),
    "layers": ("layer", "importance_first"),
}

IsOurs = Callable[[Path], bool]


def check_results(folder: Path, names: Sequence[str]) -> None:
    """Check that a folder is writable and that existing files with these names were written by sinklab.

    Args:
        folder: created for the check if it does not exist, and removed again.
        names: keys of KEYS, "measurement.npz", "report.html", and keys of TABLES with .csv or .parquet.

    Raises:
        InputError: if a check fails, or `names` has a measurement and the folder is a run directory; the message names
            the file or folder.
    """
    _check_writable(folder)
    if (folder / RUN).exists() and set(names) & set(MEASUREMENT):
        raise InputError(f"{folder} is a run directory, where the run saves its own measurement: choose another --out")
    check_files(folder, names)


def check_files(folder: Path, names: Sequence[str]) -> None:
    """Check that existing files with these names were written by sinklab or are empty.

    Args:
        names: file names as in `check_results`.

    Raises:
        InputError: if a file was not written by sinklab, is not a regular file or cannot be read; the message names it.
    """
    for name in names:
        _check_ours(folder / name, _recognition(name))


def _recognition(name: str) -> IsOurs:
    if name in KEYS:
        return partial(_has_keys, KEYS[name])
    return {REPORT: _is_page, "measurement.npz": _is_arrays}.get(name) or _is_table


def check_report(path: Path) -> None:
    """Check that `path` does not exist, or is empty or a report written by sinklab.

    Raises:
        InputError: if the path is another file, not a regular file, or cannot be read.
    """
    _check_ours(path, _is_page)


def check_table(path: Path) -> None:
    """Check that `path` does not exist, or is empty or a table written by sinklab (CSV or Parquet).

    Raises:
        InputError: if the path is another file, not a regular file, or cannot be read.
    """
    _check_ours(path, _is_table)


def check_chart(path: Path) -> None:
    """Check that `path` does not exist, or is empty or a chart written by sinklab.

    Raises:
        InputError: if the path is another file, not a regular file, or cannot be read.
    """
    _check_ours(path, _is_chart)


def target_of(path: Path) -> Path:
    """Return the path of the file that symbolic links lead to, which need not exist.

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


def _check_ours(path: Path, is_ours: IsOurs) -> None:
    target = target_of(path)
    try:
        ours = not target.exists() or not target.stat().st_size or is_ours(target)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}. Choose another --out") from error
    if not ours:
        raise InputError(
            f"{path} exists and was not written by sinklab as a file of this kind, so it is not replaced: choose "
            "another --out, or move it away"
        )


def _check_writable(folder: Path) -> None:
    made: list[Path] = []
    try:
        made += [parent for parent in (folder, *folder.parents) if not parent.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".sinklab", dir=folder)
        os.close(handle)
        Path(name).unlink()
    except OSError as error:
        no_folder = isinstance(error, FileExistsError | NotADirectoryError)
        why = "it, or a folder above it, is a file" if no_folder else error.strerror or error
        raise InputError(f"cannot write into {folder}: {why}. Choose another --out") from error
    finally:
        for parent in made:
            if parent.is_dir():
                parent.rmdir()


def _kind(path: Path) -> str:
    if path.is_dir():
        return "a folder"
    return "a pipe" if path.is_fifo() else "a socket" if path.is_socket() else "a device"


def _is_page(path: Path) -> bool:
    with path.open("rb") as file:
        return REPORT_MARK.encode() in file.read(MIB)


def _is_chart(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        return CHART_MARK in file.read()


def _is_arrays(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as file:
            return "importance.npy" in file.namelist()
    except (zipfile.BadZipFile, ValueError):
        return False


def _is_table(path: Path) -> bool:
    tables = [[name.encode() for name in names] for names in TABLES.values()]
    with path.open("rb") as file:
        if file.readline(MIB).startswith(tuple(b",".join(names) for names in tables)):
            return True
        file.seek(max(0, path.stat().st_size - MIB))
        end = file.read()  # a Parquet file has its schema at the end
    return end.endswith(b"PAR1") and any(all(name in end for name in names) for names in tables)


def _has_keys(keys: set[str], path: Path) -> bool:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and keys <= document.keys()
