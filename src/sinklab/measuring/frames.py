"""The tables of a measurement (`Measurement.columns`) for a data frame, as CSV and as Parquet."""

import csv
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from sinklab.errors import InputError
from sinklab.files import written_aside
from sinklab.outputs import check_results, check_table

Columns = dict[str, np.ndarray]
TableName = Literal["importance", "positions", "layers"]
TABLES: tuple[TableName, ...] = get_args(TableName)
FRAMES = {"pandas": "DataFrame", "polars": "DataFrame", "pyarrow": "table"}  # in order of preference


def data_frame(columns: Columns) -> Any:
    """Equally long columns as a data frame of pandas, polars or pyarrow, whichever is installed.

    Raises:
        InputError: none of the three is installed.
    """
    for package, kind in FRAMES.items():
        if find_spec(package):
            return getattr(import_module(package), kind)(columns)
    raise InputError("a data frame needs pandas, polars or pyarrow, and none is installed: pip install pandas")


def write_csv(columns: Columns, path: Path) -> None:
    """Columns as comma-separated values under a header, written atomically.

    Raises:
        InputError: there is a file that is not a table of ours.
        SinklabError: the file cannot be written.
    """
    check_table(path)
    with written_aside(path) as aside, aside.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(columns)
        lines.writerows(zip(*(values.tolist() for values in columns.values()), strict=True))


def write_parquet(columns: Columns, path: Path) -> None:
    """Columns as a Parquet file, written atomically.

    Raises:
        InputError: pyarrow is not installed, or there is a file that is not a table of ours.
        SinklabError: the file cannot be written.
    """
    check_parquet()
    check_table(path)
    arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    made = arrow.table(columns)
    with written_aside(path) as aside:
        parquet.write_table(made, aside)


def check_parquet() -> None:
    """Refuse Parquet before anything is measured.

    Raises:
        InputError: pyarrow is not installed.
    """
    if not find_spec("pyarrow"):
        raise InputError("Parquet needs pyarrow, which is not installed: pip install pyarrow, or take csv")


WRITERS: dict[str, Callable[[Columns, Path], None]] = {"csv": write_csv, "parquet": write_parquet}


def check_formats(formats: Sequence[str], out: Path | None, one: bool) -> None:
    """Refuse tables that could not be written, before anything is measured.

    Args:
        formats: of `WRITERS`.
        out: their folder.
        one: whether it is a single measurement.

    Raises:
        InputError: there is no folder, there are many measurements, pyarrow is not installed, or a file is in the way.
    """
    if not formats:
        return
    if not one:
        raise InputError("--format writes the tables of one MODEL: leave it out where there are many measurements")
    if out is None:
        raise InputError(f"--format {formats[0]} needs a directory to write to: give --out DIR")
    if "parquet" in formats:
        check_parquet()
    check_results(out, [f"{table}.{kind}" for kind in formats for table in TABLES])


def write_tables(columns: Callable[[TableName], Columns], folder: Path, formats: Sequence[str]) -> None:
    """Every table in every format, as `FOLDER/importance.csv` and so on.

    Args:
        columns: of each table, `Measurement.columns`.

    Raises:
        InputError: pyarrow is not installed.
        SinklabError: a file cannot be written.
    """
    for kind in formats:
        for table in TABLES:
            WRITERS[kind](columns(table), folder / f"{table}.{kind}")
