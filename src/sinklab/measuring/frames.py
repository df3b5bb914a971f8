"""A measurement as plain columns: for a data frame, as CSV, as Parquet. Positions, layers and heads count from 1.

| table | a row for | columns |
|---|---|---|
| importance | every layer, head and position | layer, head, position, importance |
| positions | every position | position, sink_rate, and sink_rate_eps_X for every other threshold (percent) |
| layers | every attention layer | layer, importance_first, hidden_norm_ratio (after the block), .. |

What the model does not have is left out. Where a mask makes a difference, each importance and rate has a `_visible`
beside it (visible.py).
"""

import csv
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from sinklab.errors import InputError
from sinklab.files import written_aside
from sinklab.outputs import check_results

if TYPE_CHECKING:
    from sinklab.measuring.measurement import Measurement

Columns = dict[str, np.ndarray]
TableName = Literal["importance", "positions", "layers"]
FRAMES = {"pandas": "DataFrame", "polars": "DataFrame", "pyarrow": "table"}  # in order of preference


def columns(measurement: "Measurement", table: str = "importance") -> Columns:
    """The columns of one of the tables above, all of one length.

    Raises:
        InputError: there is no such table.
    """
    if table not in TABLES:
        raise InputError(f"there is no table {table!r}: choose from {', '.join(TABLES)}")
    found = TABLES[table](measurement)
    return {name: np.asarray(values) for name, values in found.items() if values is not None}


def data_frame(measurement: "Measurement", table: str = "importance") -> Any:
    """The table as a frame of pandas, polars or pyarrow, whichever is installed.

    Raises:
        InputError: none of them is, or there is no such table.
    """
    found = columns(measurement, table)
    for package, kind in FRAMES.items():
        if find_spec(package):
            return getattr(import_module(package), kind)(found)
    raise InputError("a data frame needs pandas, polars or pyarrow, and none is installed: pip install pandas")


def write_csv(measurement: "Measurement", path: Path, table: str = "importance") -> None:
    """The table as comma-separated values under a line of names, whole or not at all.

    Raises:
        InputError: there is no such table.
        SinklabError: the file cannot be written.
    """
    found = columns(measurement, table)
    with written_aside(path) as aside, aside.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(found)
        lines.writerows(zip(*(values.tolist() for values in found.values()), strict=True))


def write_parquet(measurement: "Measurement", path: Path, table: str = "importance") -> None:
    """The table as a Parquet file, whole or not at all.

    Raises:
        InputError: pyarrow is not installed, or there is no such table.
        SinklabError: the file cannot be written.
    """
    check_parquet()
    arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    made = arrow.table(columns(measurement, table))
    with written_aside(path) as aside:
        parquet.write_table(made, aside)


def check_parquet() -> None:
    """Refuse to promise what cannot be written.

    Raises:
        InputError: pyarrow is not installed.
    """
    if not find_spec("pyarrow"):
        raise InputError("Parquet needs pyarrow, which is not installed: pip install pyarrow, or take csv")


def _importance(m: "Measurement") -> Mapping[str, Any]:
    layer_LHT, head_LHT, position_LHT = np.indices(m.importance.shape) + 1
    return {
        "layer": layer_LHT.ravel(),
        "head": head_LHT.ravel(),
        "position": position_LHT.ravel(),
        "importance": m.importance.ravel(),
        "importance_visible": None if m.importance_visible is None else m.importance_visible.ravel(),
    }


def _positions(m: "Measurement") -> Mapping[str, Any]:
    found: dict[str, Any] = {"position": np.arange(1, m.length + 1), "sink_rate": m.sink_rate}
    found["sink_rate_visible"] = m.sink_rate_visible
    for eps in list(m.sink_rates or {})[1:]:
        found[f"sink_rate_eps_{eps}"] = (m.sink_rates or {})[eps]
        found[f"sink_rate_visible_eps_{eps}"] = (m.sink_rates_visible or {}).get(eps)
    return found


def _layers(m: "Measurement") -> Mapping[str, Any]:
    hidden = m.hidden_norm_ratio or []
    return {
        "layer": np.arange(1, m.layers + 1),
        "importance_first": m.importance[:, :, 0].mean(1),
        "importance_first_visible": None if m.importance_visible is None else m.importance_visible[:, :, 0].mean(1),
        "importance_bias": None if m.importance_bias is None else m.importance_bias.mean(1),
        "row_sum": None if m.row_sums is None else m.row_sums.mean(1),
        "hidden_norm_ratio": hidden[1:] if len(hidden) == m.layers + 1 else None,
        "key_norm_ratio": m.key_norm_ratio,
        "value_norm_ratio": m.value_norm_ratio,
    }


TABLES: dict[str, Callable[["Measurement"], Mapping[str, Any]]] = {
    "importance": _importance,
    "positions": _positions,
    "layers": _layers,
}
WRITERS: dict[str, Callable[["Measurement", Path, str], None]] = {"csv": write_csv, "parquet": write_parquet}


def check_formats(formats: Sequence[str], out: Path | None, one: bool) -> None:
    """Refuse, before anything is measured, tables that could not be written.

    Args:
        formats: of `WRITERS`.
        out: the folder that is to hold them.
        one: whether it is a single measurement.

    Raises:
        InputError: there is no folder, there are many measurements, pyarrow is not installed, or a file is in the way.
    """
    if not formats:
        return
    if not one:
        raise InputError("--format writes the tables of one MODEL: leave it out with --by-domain and --family")
    if out is None:
        raise InputError(f"--format {formats[0]} needs a directory to write to: give --out DIR")
    if "parquet" in formats:
        check_parquet()
    check_results(out, [f"{table}.{kind}" for kind in formats for table in TABLES])


def write_tables(measurement: "Measurement", folder: Path, formats: Sequence[str]) -> None:
    """Every table in every format, as `FOLDER/importance.csv` and so on.

    Raises:
        InputError: pyarrow is not installed.
        SinklabError: a file cannot be written.
    """
    for kind in formats:
        for table in TABLES:
            WRITERS[kind](measurement, folder / f"{table}.{kind}", table)
