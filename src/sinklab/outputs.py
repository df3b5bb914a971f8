"""Checks before output files are replaced: only files written by sinklab, and empty files, may be replaced.

Files written by sinklab are recognised by their content: JSON documents by their keys, tables by their first columns,
measurement.npz by the name of an array, pages and charts by a marker text.
"""

import json
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from sinklab.errors import InputError

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
