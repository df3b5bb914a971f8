"""Figures of what was measured with --details, as the statistics declare them; secondary sinks have a table as well."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np

from sinklab.measuring.measurement import Measurement
from sinklab.measuring.statistics.details import STATISTICS, Details
from sinklab.measuring.statistics.secondary import ALIGNED, ENOUGH, FIRST_FEW
from sinklab.measuring.statistics.shown import (
    BlockLines,
    BucketLines,
    HeadMap,
    Heatmap,
    MatrixMap,
    PositionMap,
    SequenceLines,
    Shown,
)
from sinklab.report import heatmaps, lines
from sinklab.report.data import ReportData, ReportedRun
from sinklab.report.figure import ColourScale, Figure
from sinklab.report.heatmaps import Named, side_by_side
from sinklab.report.importance_figures import SHOWN_POSITIONS
from sinklab.report.summary import by_key
from sinklab.report.tables import layers_table, secondary_table
from sinklab.tables import Table, TableColumn, names

MAP_CELLS = 64  # larger maps are thinned: every cell is an element of the page
FIRST = ("angles-cosine", "angles-norms", "angles-heads", "value-ratio")  # why a sink has large logits, what it gives
LAST = ("secondary", "map-attention", "map-cosine", "map-norms")


def details_figures(data: ReportData, width: int | str) -> list[Figure]:
    """In reading order: those above first and last, between them the others as their statistics are registered."""
    small = width if width == "container" else 300
    declared: dict[str, list[tuple[str, Shown]]] = {}
    for name, statistic in STATISTICS.items():
        for shown in statistic.figures:
            declared.setdefault(shown.key, []).append((name, shown))
    drawn = {key: figure for key, parts in declared.items() if (figure := _figure(data, parts, width, small))}
    if "angles-cosine" in drawn:
        drawn["angles-cosine"] = replace(
            drawn["angles-cosine"], table=layers_table([(data.label(run), one) for run, one, _ in data.detailed])
        )
    if secondary := _secondary(data, small):
        drawn["secondary"] = secondary
    between = [key for key in drawn if key not in FIRST + LAST]
    return [drawn[key] for key in (*FIRST, *between, *LAST) if key in drawn]


def _figure(data: ReportData, parts: list[tuple[str, Shown]], width: int | str, small: int | str) -> Figure | None:
    """What statistics declare under one key, each by its name; None where no measurement has them."""
    name, shown = parts[0]
    if not _found(data, name):
        return None
    match shown:
        case HeadMap():
            return _heads(data, name, shown, small)
        case PositionMap():
            return _positions(data, name, shown, small)
        case MatrixMap():
            return _matrices(data, name, shown, small)
        case BlockLines():
            return _blocks(data, name, shown, width)
        case SequenceLines():
            return _sequences(data, name, shown, small)
        case _:
            return _buckets(data, [(one, part) for one, part in parts if isinstance(part, BucketLines)], width)


def _found(data: ReportData, name: str) -> list[tuple[ReportedRun, Measurement, Details, np.ndarray]]:
    """Every run that has the statistic, with its array."""
    found = [(run, measured, details, getattr(details, name)) for run, measured, details in data.detailed]
    return [one for one in found if one[-1] is not None and one[-1].size]


def _heads(data: ReportData, name: str, shown: HeadMap, width: int | str) -> Figure:
    maps = [(data.label(run), array[..., 0] if array.ndim == 3 else array) for run, _, _, array in _found(data, name)]
    caption = shown.caption
    if shown.uniform:
        lengths = sorted({measured.length for _, measured, _ in data.detailed})
        means = ", ".join(f"{shown.uniform(length):.2f} for T = {length}" for length in lengths)
        caption += f" Attention that is uniform over all keys has {means}."
    return side_by_side(shown.key, shown.title, caption, maps, _scale(shown, maps), width)


def _positions(data: ReportData, name: str, shown: PositionMap, width: int | str) -> Figure:
    """Means over heads of the first positions."""
    maps = [
        (data.label(run), (array.mean(1) if array.ndim == 3 else array)[:, :SHOWN_POSITIONS])
        for run, _, _, array in _found(data, name)
    ]
    rows = heatmaps.BLOCKS if STATISTICS[name].axes == "MT" else heatmaps.LAYERS
    sides = (rows, heatmaps.POSITIONS)
    return side_by_side(shown.key, shown.title, shown.caption, maps, _scale(shown, maps), width, *sides)


def _matrices(data: ReportData, name: str, shown: MatrixMap, width: int | str) -> Figure:
    maps: list[Named] = []
    for run, _, details, array_PTT in _found(data, name):
        for (layer, head), map_TT in zip(details.maps, array_PTT, strict=True):
            later = np.triu(np.ones_like(map_TT, dtype=bool), 1)
            thin = heatmaps.pooled(np.where(later, np.nan, map_TT), MAP_CELLS)
            maps.append((f"{data.label(run)}: layer {layer}, head {head}", thin))
    thinned = any(measured.length > MAP_CELLS for _, measured, _ in data.detailed)
    how = "; maps of long sequences are thinned by means over squares of positions, which the axes count."
    caption = shown.caption + (how if thinned else ".")
    sides = (heatmaps.QUERIES, heatmaps.KEYS)
    return side_by_side(shown.key, shown.title, caption, maps, _scale(shown, maps), width, *sides, height=260)


def _scale(shown: Heatmap, maps: list[Named]) -> ColourScale:
    return heatmaps.scale_over(shown.what, [matrix for _, matrix in maps], shown.diverging)


def _blocks(data: ReportData, name: str, shown: BlockLines, width: int | str) -> Figure | None:
    rows = lines.first_and_rest((run.cell, array_MT) for run, _, _, array_MT in _found(data, name))
    if not rows:
        return None
    chart = lines.by_layer(rows, data.cells, "After block (0 is the embedding)", shown.what, width)
    return Figure(shown.key, shown.title, shown.caption, [chart])


def _sequences(data: ReportData, name: str, shown: SequenceLines, width: int | str) -> Figure:
    """A value of whole sequences by block, and beside it what goes with the first token there."""
    found = _found(data, name)
    after, layer = "After block (0 is the embedding)", "Layer"
    sinks = [(run.cell, 100 * (one.importance_first > one.eps).mean((0, 2))) for run, one, _, _ in found]
    norms = [(run.cell, np.array(one.hidden_norm_ratio or ())) for run, one, _, _ in found]
    drawn = [
        lines.by_layer(rows, data.cells, at, title, width, title)
        for title, at, of_runs in (
            (shown.what, after, [(run.cell, array_M) for run, _, _, array_M in found]),
            ("Norm of the first token over the others'", after, norms),
            ("Sink₁ of the layer (percent of heads)", layer, sinks),
        )
        if (rows := lines.means(of_runs, first_layer=int(at == layer)))
    ]
    return Figure(shown.key, shown.title, shown.caption, drawn, small=True)


def _buckets(data: ReportData, parts: list[tuple[str, BucketLines]], width: int | str) -> Figure:
    """A line for each of the statistics."""
    rows = [row for name, part in parts for row in _bucket_rows(data, name, part.series)]
    shown = parts[0][1]
    chart = lines.by_bucket(rows, data.cells, shown.x_title, shown.y_title, width, shown.logarithmic)
    return Figure(shown.key, shown.title, shown.caption, [chart], table=_bucket_table(rows, shown.bucket))


def _bucket_rows(data: ReportData, name: str, series: str) -> list[dict[str, Any]]:
    collected = by_key(
        ((run.cell, start, str(start) if end - start == 1 else f"{start}..{end - 1}"), float(share))
        for run, measured, details, shares_LHX in _found(data, name)
        for (start, end), share in zip(_buckets_of(name, measured, details), shares_LHX.mean((0, 1)), strict=True)
    )
    return [
        {"cell": cell, "where": series, "bucket": called, "order": start, "value": fmean(shares)}
        for (cell, start, called), shares in collected.items()
    ]


def _buckets_of(name: str, measured: Measurement, details: Details) -> Iterator[tuple[int, int]]:
    """First of each bucket, and first of the next."""
    if STATISTICS[name].axes == "LHQ":
        return pairwise([*details.queries, measured.length + 1])
    return pairwise([*details.distances, measured.length])


def _bucket_table(rows: list[dict[str, Any]], title: str) -> Table:
    """One line per bucket, one column per cell and series."""
    series = list(dict.fromkeys((row["cell"], row["where"]) for row in rows))
    values = {(row["cell"], row["where"], row["bucket"]): row["value"] for row in rows}
    buckets = dict.fromkeys(row["bucket"] for row in sorted(rows, key=lambda row: row["order"]))
    columns = [*names(title), *(TableColumn(cell, where, ".4f") for cell, where in series)]
    return Table("", columns, [[bucket, *(values.get((*one, bucket)) for one in series)] for bucket in buckets])


def _secondary(data: ReportData, width: int | str) -> Figure | None:
    table = secondary_table([(data.label(run), one) for run, one, _ in data.detailed])
    if table is None:
        return None
    shown = HeadMap(
        "secondary",
        "Sinks other than the first token",
        f"Percent of sequences in which a head has an importance above ε = {data.runs[0].eps:g} at some position past "
        f"the first {FIRST_FEW} and in the first half of the sequence. The numbers below name the strongest "
        f"such tokens from position 2 to where half of the queries, or {ENOUGH} of them, are left, and those whose "
        f"hidden state has a cosine above {ALIGNED:g} with the first token's where that stands out.",
        "percent of sequences",
    )
    return replace(_heads(data, "secondary", shown, width), table=table)
