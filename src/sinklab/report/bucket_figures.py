"""Figures of the attention by buckets: how far back it goes, and what the sink gets as the sequence goes on."""

from collections.abc import Callable
from statistics import fmean
from typing import Any

import numpy as np

from sinklab.measuring.statistics.details import Details
from sinklab.report import lines
from sinklab.report.data import ReportData
from sinklab.report.figure import DataTable, Figure


def by_distance(data: ReportData, width: int | str) -> Figure:
    """The share of the attention by distance; some run has details."""
    caption = (
        "How far back attention goes: the share of a query's attention on keys so many tokens before it, mean over "
        "queries, layers, heads and seeds. The shares add up to one, less what is on a bias. Few queries have keys far "
        "back; what they pay to a sink stands at the right."
    )
    rows = _bucket_rows(data, lambda d: d.by_distance, lambda d: d.distances, "attention", to_length=-1)
    chart = lines.by_bucket(rows, data.cells, "Distance (tokens back; 0 is the query itself)", "Share", width)
    return Figure("by-distance", "How far back attention goes", caption, [chart], table=_bucket_table(rows, "Distance"))


def by_query(data: ReportData, width: int | str) -> Figure:
    """The shares of the first and of an average other token by query; some run has details."""
    caption = (
        "What a query pays to the first token (solid) and to an average other token before it (dashed), by where the "
        "query stands, mean over layers, heads and seeds. Without a sink both fall together."
    )
    rows = _bucket_rows(data, lambda d: d.first_by_query, lambda d: d.queries, "first token")
    rows += _bucket_rows(data, lambda d: d.rest_by_query, lambda d: d.queries, "an average other token")
    chart = lines.by_bucket(rows, data.cells, "Position of the query", "Share of its attention", width, True)
    return Figure(
        "by-query", "The sink as the sequence goes on", caption, [chart], table=_bucket_table(rows, "Queries")
    )


def _bucket_rows(
    data: ReportData,
    shares: Callable[[Details], np.ndarray],
    buckets: Callable[[Details], list[int]],
    where: str,
    to_length: int = 0,
) -> list[dict[str, Any]]:
    """One row per cell and bucket; the last bucket ends at the sequence's length plus `to_length`."""
    collected: dict[tuple[str, int, str], list[float]] = {}
    for run, measured, details in data.detailed:
        starts, end_of_all = buckets(details), measured.length + to_length + 1
        mean_shares = shares(details).mean((0, 1))
        for start, end, share in zip(starts, [*starts[1:], end_of_all], mean_shares, strict=True):
            called = str(start) if end - start == 1 else f"{start}..{end - 1}"
            collected.setdefault((run.cell, start, called), []).append(float(share))
    return [
        {"cell": cell, "where": where, "bucket": called, "order": start, "value": fmean(shares)}
        for (cell, start, called), shares in collected.items()
    ]


def _bucket_table(rows: list[dict[str, Any]], title: str) -> DataTable:
    """One line per bucket, one column per cell and place."""
    series = list(dict.fromkeys((row["cell"], row["where"]) for row in rows))
    values = {(row["cell"], row["where"], row["bucket"]): row["value"] for row in rows}
    buckets = dict.fromkeys(row["bucket"] for row in sorted(rows, key=lambda row: row["order"]))
    lines_of_text = [
        [bucket, *(f"{values[(*one, bucket)]:.4f}" if (*one, bucket) in values else "–" for one in series)]
        for bucket in buckets
    ]
    return DataTable([title, *(f"{cell}: {where}" for cell, where in series)], lines_of_text)
