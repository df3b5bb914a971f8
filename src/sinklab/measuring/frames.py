"""Export the tables of a measurement (`Measurement.columns`) to data frames, CSV and Parquet."""

import csv
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from sinklab.errors import InputError
from sinklab.files import TABLE, check_file, check_results, written_aside

Columns = dict[str, np.ndarray]
TableName = Literal["importance", "positions", "layers"]
TABLES: tuple[TableName, ...] = get_args(TableName)
FRAMES = {"pandas": "DataFrame", "polars": "DataFrame", "pyarrow": "table"}  # in order of preference


def data_frame(columns: Columns) -> Any:
    """Return columns of equal length as a data frame of the first installed package of pandas, polars and pyarrow.

    Raises:
        InputError: if none of the three is installed.
    """
    for package, kind in FRAMES.items():
        if find_spec(package):
            return getattr(import_module(package), kind)(columns)
    raise InputError("a data frame needs pandas, polars or pyarrow, and none is installed: pip install pandas")


def write_csv(columns: Columns, path: Path) -> None:
    """Write columns as comma-separated values with a header, atomically; an earlier table at the path is replaced.

    Raises:
        InputError: see `check_file`, for example if the file exists and is not a table written by sinklab.
        SinklabError: if the file cannot be written.
    """
    check_file(path, TABLE)
    with written_aside(path) as aside, aside.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(columns)
        lines.writerows(zip(*(values.tolist() for values in columns.values()), strict=True))


def write_parquet(columns: Columns, path: Path) -> None:
    """Write columns as a Parquet file, atomically; an earlier table at the path is replaced.

    Raises:
        InputError: if pyarrow is not installed; see also `check_file`.
        SinklabError: if the file cannot be written.
    """
    check_parquet()
    check_file(path, TABLE)
    arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    made = arrow.table(columns)
    with written_aside(path) as aside:
        parquet.write_table(made, aside)


def check_parquet() -> None:
    """Check that Parquet can be written.

    Raises:
        InputError: if pyarrow is not installed.
    """
    if not find_spec("pyarrow"):
        raise InputError("Parquet needs pyarrow, which is not installed: pip install pyarrow, or use CSV")


WRITERS: dict[str, Callable[[Columns, Path], None]] = {"csv": write_csv, "parquet": write_parquet}


def check_formats(formats: Sequence[str], out: Path | None, one: bool) -> None:
    """Check before measuring that the tables can be written; a no-op if no format is requested.

    Args:
        formats: requested formats, "csv" or "parquet".
        out: output folder of the tables; None if --out was not set.
        one: whether the command makes a single measurement.

    Raises:
        InputError: if `out` is None, the command makes several measurements, or Parquet is requested and pyarrow is not
            installed; see also `check_results`.
    """
    if not formats:
        return
    if not one:
        raise InputError("--format supports one measurement of one MODEL: leave it out for several measurements")
    if out is None:
        raise InputError(f"--format {formats[0]} needs an output directory: set --out DIR")
    if "parquet" in formats:
        check_parquet()
    check_results(out, [f"{table}.{kind}" for kind in formats for table in TABLES])


def write_tables(columns: Callable[[TableName], Columns], folder: Path, formats: Sequence[str]) -> None:
    """Write every table in every format, such as `FOLDER/importance.csv`.

    Args:
        columns: function from a table name to its columns (`Measurement.columns`).
        formats: requested formats, "csv" or "parquet".

    Raises:
        InputError, SinklabError: see `write_csv` and `write_parquet`.
    """
    for kind in formats:
        for table in TABLES:
            WRITERS[kind](columns(table), folder / f"{table}.{kind}")


def remove_tables(folder: Path) -> None:
    """Remove the tables of an earlier measurement from a folder; other files with the same names are kept."""
    for path in (folder / f"{table}.{kind}" for kind in WRITERS for table in TABLES):
        with suppress(InputError, OSError):
            check_file(path, TABLE)
            path.unlink()
