"""The run table: numbers of runs as one tidy frame, with a row per cell, seed, step and metric.

Tables, training curves and headlines are made of this frame: `over_seeds` averages its values over the runs of a cell.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import polars as pl

from sinklab.measuring.registry import Evaluation
from sinklab.report.data import ReportedRun

SCHEMA = {
    "cell": pl.String,
    "seed": pl.Int64,
    "run": pl.String,
    "step": pl.Int64,
    "metric": pl.String,
    "value": pl.Float64,
}


def run_table(
    runs: Iterable[ReportedRun],
    final: Mapping[str, Callable[[ReportedRun], float | None]],
    by_step: Mapping[str, Callable[[Evaluation], float | None]] | None = None,
) -> pl.DataFrame:
    """Return the numbers of runs as a frame with the columns of `SCHEMA`; unknown numbers have no row.

    Args:
        final: functions from a run to its number, by metric; their rows have no step.
        by_step: functions from an evaluation to its number, by metric.
    """
    rows = []
    for run in runs:
        about = (run.cell, run.seed, str(run.path))
        rows += [(*about, None, metric, read(run)) for metric, read in final.items()]
        rows += [
            (*about, one.step, metric, read(one)) for one in run.history for metric, read in (by_step or {}).items()
        ]
    return pl.DataFrame(rows, SCHEMA, orient="row").drop_nulls("value")


DEVIATION = pl.when(pl.col("value").is_finite().all()).then(pl.col("value").std())
"""Sample standard deviation of the values of a group; None for a single value and for infinite ones."""


def over_seeds(table: pl.DataFrame, *by: str, **more: pl.Expr) -> list[dict[str, Any]]:
    """Group a frame by columns and summarise `value` over the runs, in order of appearance.

    Returns:
        A row per group: the columns, mean (`value`), minimum (`low`), maximum (`high`) and number (`runs`) of the
        values, and the numbers of `more`.
    """
    value = pl.col("value")
    found = table.group_by(by, maintain_order=True)
    return found.agg(value.mean(), low=value.min(), high=value.max(), runs=pl.len(), **more).to_dicts()


def averaged(fields: Sequence[str], values: Iterable[Sequence[Any]]) -> list[dict[str, Any]]:
    """Summarise numbers by key, as `over_seeds`; `values` are tuples of the values of `fields`, and a number."""
    rows = [*values]
    table = pl.DataFrame(rows, [*fields, "value"], orient="row", infer_schema_length=None)
    return over_seeds(table.drop_nulls("value"), *fields) if rows else []


def by_layer(arrays: Iterable[tuple[str, str, Iterable[float]]], first: int = 0) -> list[dict[str, Any]]:
    """Average values by layer over runs, as `averaged`, with the keys `cell`, `where` and `layer`.

    Args:
        arrays: triples of cell, name of the series, and values by layer or block; infinite values are left out.
        first: number of the first layer or block.
    """
    return averaged(
        ("cell", "where", "layer"),
        (
            (cell, where, layer, float(value))
            for cell, where, array in arrays
            for layer, value in enumerate(array, first)
            if math.isfinite(value)
        ),
    )
