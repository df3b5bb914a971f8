"""Figures of measurements: importance by head, layer and position, raw scores, norms, mixing and detailed statistics.

The module also prepares the attention maps of --explore, which `templates/explore.js` draws.
"""

import base64
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import torch

from sinklab.assessing.parts.heads import Heads
from sinklab.attention import importance as metrics
from sinklab.errors import InputError
from sinklab.measuring.findings import Explored
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.statistics import statistic_base as plot_specs
from sinklab.measuring.statistics.details import STATISTICS, Details
from sinklab.measuring.statistics.secondary import ALIGNED, ENOUGH, FIRST_FEW, STANDS_OUT
from sinklab.measuring.statistics.statistic_base import BucketLines, Heatmap, PlotSpec
from sinklab.report import charts, html
from sinklab.report import html as theme
from sinklab.report.charts import ChartRows, ColourScale, Drawing, Figure
from sinklab.report.data import ReportData, ReportedRun, averaged, by_layer
from sinklab.report.result_tables import layers_table, mixing_table, secondary_table
from sinklab.tables import NO_SINK, SINK_1, PlotAxis, Table, TableColumn, counted, names

SHOWN_POSITIONS = 64
CHARTS = {
    "heads": "importance-heads",
    "layers": "importance-layers",
    "positions": "importance-positions",
    "norms": "norms-first",
}
"""Figure keys by the names that `chart` accepts."""
NOTEBOOK_WIDTH = 480
DECIMALS = 4
"""Number of decimals to which importance is rounded in the data of explored heads."""
VISIBLE = "visible queries"
AFTER_BLOCK = "After block (0 is the embedding)"
MAP_CELLS = 64  # maximum number of rows of a map; larger maps are downsampled, because every entry is an SVG element
FIRST = ("angles-cosine", "angles-norms", "angles-heads", "value-ratio")  # keys of the first figures
LAST = ("secondary", "map-attention", "map-cosine", "map-norms")


def importance_figures(data: ReportData) -> list[Figure]:
    """Draw the figures of importance, raw scores, norms and mixing that have data, in page order."""
    made = (one(data) for one in (_by_head, _by_layer, _by_position, _row_sums, _norms, _mixing))
    return [figure for figure in made if figure is not None]


def _by_head(data: ReportData) -> Figure | None:
    found: list[tuple[str, float, np.ndarray | None]] = []
    for run, one in data.measured:
        label, visible = data.label(run), one.importance_visible
        found.append((f"{label}: first token", one.eps, one.importance[:, :, 0]))
        found.append((f"{label}: first token, {VISIBLE}", one.eps, None if visible is None else visible[:, :, 0]))
        found.append((f"{label}: added sink", one.eps, one.importance_bias))
    maps = [(name, eps, matrix) for name, eps, matrix in found if matrix is not None]
    if not maps:
        return None
    lengths = sorted({measured.length for _, measured in data.measured})
    firsts = [(length, float(uniform_importance(length)[0])) for length in lengths]
    uniform = " and ".join(f"{first:.3f} at T = {length}" for length, first in firsts)
    about = html.caption("importance_heads", uniform=uniform, visible=data.has_visible)
    highest = _importance_scale([matrix for _, _, matrix in maps], data)
    scale = replace(highest, references=tuple(first for _, first in firsts))
    drawn = [charts.heatmap(matrix, replace(scale, outlined=eps), name) for name, eps, matrix in maps]
    return Figure("importance-heads", "Sink by head", about, drawn, replace(scale, outlined=maps[0][1]), small=True)


def _by_layer(data: ReportData) -> Figure | None:
    found = data.arrays(lambda m: m.importance)
    visible = [(f"{label}, {VISIBLE}", array) for label, array in data.arrays(lambda m: m.importance_visible)]
    if not found:
        return None
    maps = [(label, array.mean(1)[:, :SHOWN_POSITIONS]) for label, array in [*found, *visible]]
    uniform = [uniform_importance(array.shape[2])[:SHOWN_POSITIONS] for _, array in found] + [None] * len(visible)
    about = html.caption(
        "importance_layers", positions=max(matrix.shape[1] for _, matrix in maps), visible=data.has_visible
    )
    scale = _importance_scale([matrix for _, matrix in maps], data)
    drawn = [
        charts.heatmap(matrix, scale, name, columns=charts.POSITIONS, lowest=lowest)
        for (name, matrix), lowest in zip(maps, uniform, strict=True)
    ]
    return Figure("importance-layers", "Importance by layer and position", about, drawn, scale, small=True)


def uniform_importance(length: int) -> np.ndarray:
    """Return the importance of every position under uniform causal attention, shape (length,)."""
    return metrics.uniform_importance(torch.tensor([length]), length)[0].numpy()


def _importance_scale(maps: list[np.ndarray], data: ReportData) -> ColourScale:
    """Return the colour scale of importance, from 0 to the greater of the maximum (rounded up to 0.1) and all ε.

    With a smaller upper end, a model without a sink would be drawn in strong colours.
    """
    highest = max(float(matrix.max()) for matrix in maps)
    return ColourScale("importance", 0, max(*(run.eps for run in data.runs), math.ceil(highest * 10) / 10))


def _by_position(data: ReportData) -> Figure | None:
    rows = averaged(
        ("cell", "position"),
        (
            (run.cell, position, float(value))
            for run, measured in data.measured
            for position, value in enumerate(measured.importance.mean((0, 1))[:SHOWN_POSITIONS], start=1)
        ),
    )
    if not rows:
        return None
    shown = max(row["position"] for row in rows)
    about = html.caption("importance_positions", positions=shown)
    uniform = [
        {"of": f"uniform attention, T = {length}", "position": k + 1, "value": float(value)}
        for length in sorted({measured.length for _, measured in data.measured})
        for k, value in enumerate(uniform_importance(length)[:shown])
    ]
    ticks = [1, *range(8, shown + 1, 8)] if shown > 12 else list(range(1, shown + 1))
    title = "Position of the key (the first token is 1)"
    x = PlotAxis(title, "position", "position", domain=(1, shown), whole=True, precision="d", ticks=ticks)
    least, scale = max(run.eps for run in data.runs), "log" if all(row["value"] > 0 for row in rows) else "linear"
    title = "Importance (mean attention received)"
    y = PlotAxis(title, "value", "importance", at_least=least, precision=".4f", scale=scale, format="~g")
    chart = charts.lines(rows, x, y, order=data.cells, curves=uniform, tips=[("runs", "runs", "d")])
    return Figure("importance-positions", "Attention received by position", about, [chart])


def _row_sums(data: ReportData) -> Figure | None:
    maps = data.arrays(lambda m: m.row_sums)
    if not maps:
        return None
    about = html.caption("row_sums")
    scale = charts.scale_over("row sum", [matrix for _, matrix in maps])
    return charts.heatmaps("row-sums", "Sum of raw scores", about, maps, scale)


def _norms(data: ReportData) -> Figure | None:
    drawn = []
    for title, name in (("Hidden states", "hidden"), ("Keys", "key"), ("Values", "value"), ("Gradients", "gradient")):
        found = [(run.cell, getattr(measured, f"{name}_norm")) for run, measured in data.measured]
        known = [(cell, norms) for cell, norms in found if norms is not None]
        if rows := _first_and_rest(known, first_layer=int(name != "hidden")):
            drawn.append(_layer_lines(rows, data.cells, AFTER_BLOCK if name == "hidden" else "Layer", "Norm", title))
    if not drawn:
        return None
    about = html.caption("norms_first", gradients=any(m.gradient_norm is not None for _, m in data.measured))
    return Figure("norms-first", "Hidden states, keys and values of the first token", about, drawn, small=True)


def _mixing(data: ReportData) -> Figure | None:
    found = [(run.cell, mixing) for run, measured in data.measured if (mixing := measured.mixing)]
    series = [(cell, "unchanged model", one.spread[1:]) for cell, one in found]
    series += [(cell, "first key hidden", one.spread_without_first[1:]) for cell, one in found]
    rows = by_layer(series, 1)
    if not rows:
        return None
    positions = " or ".join(map(str, sorted({one.position for _, one in found})))
    about = html.caption("mixing", positions=positions)
    chart = _layer_lines(rows, data.cells, "After block", "Relative change")
    table = mixing_table([(data.label(run), one) for run, one in data.measured])
    return Figure("mixing", "Spread of a change of one token", about, [chart], table=table)


def details_figures(data: ReportData) -> list[Figure]:
    """Draw the figures of --details and --map that have data.

    Figures with keys in `FIRST` are first, those in `LAST` last, and the others in the order of the statistics.
    """
    specs: dict[str, list[tuple[str, PlotSpec]]] = {}
    for name, statistic in STATISTICS.items():
        for spec in statistic.figures:
            specs.setdefault(spec.key, []).append((name, spec))
    drawn = {key: figure for key, parts in specs.items() if (figure := _figure(data, parts))}
    if "angles-cosine" in drawn:
        table = layers_table([(data.label(run), one) for run, one, _ in data.detailed])
        drawn["angles-cosine"] = replace(drawn["angles-cosine"], table=table)
    if table := secondary_table([(data.label(run), one) for run, one, _ in data.detailed]):
        spec = plot_specs.HeadMap(
            "secondary",
            "Sinks other than the first token",
            html.caption(
                "secondary", few=FIRST_FEW, eps=data.eps, enough=ENOUGH, aligned=ALIGNED, stands_out=f"{STANDS_OUT:g}"
            ),
            "percent of sequences",
        )
        drawn["secondary"] = replace(_heatmaps(data, "secondary", spec), table=table)
    between = [key for key in drawn if key not in FIRST + LAST]
    return [drawn[key] for key in (*FIRST, *between, *LAST) if key in drawn]


def _figure(data: ReportData, parts: list[tuple[str, PlotSpec]]) -> Figure | None:
    """Draw the figure of the (name, declaration) pairs that share a figure key; None if there is nothing to draw."""
    name, spec = parts[0]
    found = _found(data, name)
    if not any(_found(data, one) for one, _ in parts):
        return None
    match spec:
        case Heatmap():
            return _heatmaps(data, name, spec)
        case plot_specs.BlockLines():
            of_layers = STATISTICS[name].axes == "LHT"
            arrays = ((run.cell, array.mean(1) if of_layers else array) for run, _, _, array in found)
            rows = _first_and_rest(arrays, first_layer=int(of_layers))
            chart = _layer_lines(rows, data.cells, "Layer" if of_layers else AFTER_BLOCK, spec.what)
            return Figure(spec.key, spec.title, spec.caption, [chart]) if rows else None
        case plot_specs.SequenceLines():
            panels = [
                (spec.what, AFTER_BLOCK, [(run.cell, "mean", array_M) for run, _, _, array_M in found]),
                (
                    "Norm ratio of the first token",
                    AFTER_BLOCK,
                    [(run.cell, "mean", one.hidden_norm_ratio or ()) for run, one, *_ in found],
                ),
                (
                    f"{SINK_1} of the layer (percent of heads)",
                    "Layer",
                    [(run.cell, "mean", one.sink_rate_of_heads().mean(1)) for run, one, *_ in found],
                ),
            ]
            drawn = [
                _layer_lines(rows, data.cells, at, title, title)
                for title, at, arrays in panels
                if (rows := by_layer(arrays, int(at == "Layer")))
            ]
            return Figure(spec.key, spec.title, spec.caption, drawn, small=True)
        case _:
            return _buckets(data, [(one, part) for one, part in parts if isinstance(part, BucketLines)])


def _found(data: ReportData, name: str) -> list[tuple[ReportedRun, Measurement, Details, np.ndarray]]:
    """Return (run, measurement, details, array) for each run with a non-empty array of the statistic."""
    found = [(run, measured, details, getattr(details, name)) for run, measured, details in data.detailed]
    return [one for one in found if one[-1] is not None and one[-1].size]


def _heatmaps(data: ReportData, name: str, spec: Heatmap) -> Figure:
    """Draw a statistic as a heatmap per run, or per chosen head of a run; heatmaps by position are means over heads."""
    found, caption = _found(data, name), spec.caption
    lengths = sorted({measured.length for _, measured, _ in data.detailed})
    sides, height = (charts.LAYERS, charts.HEADS), None
    match spec:
        case plot_specs.MatrixMap():
            how = "; maps of long sequences are averaged over blocks of positions, and the axes number these blocks."
            caption += how if lengths[-1] > MAP_CELLS else "."
            sides, height = (charts.QUERIES, charts.KEYS), 260
            maps = []
            for run, _, details, array in found:
                for (layer, head), map_TT in zip(details.maps, array, strict=True):
                    earlier = np.where(np.tri(len(map_TT), dtype=bool), map_TT, np.nan)
                    title = f"{data.label(run)}: layer {layer}, head {head}"
                    maps.append((title, charts.pooled(earlier, MAP_CELLS)))
        case plot_specs.PositionMap():
            sides = (charts.BLOCKS if STATISTICS[name].axes == "MT" else charts.LAYERS, charts.POSITIONS)
            means = [(run, array.mean(1) if array.ndim == 3 else array) for run, _, _, array in found]
            maps = [(data.label(run), array[:, :SHOWN_POSITIONS]) for run, array in means]
        case _:
            maps = [(data.label(run), array[..., 0] if array.ndim == 3 else array) for run, _, _, array in found]
    if isinstance(spec, plot_specs.HeadMap) and spec.uniform:
        uniform = ", ".join(f"{spec.uniform(length):.2f} for T = {length}" for length in lengths)
        caption += f" Uniform attention over all tokens up to the query gives {uniform}."
    scale = charts.scale_over(spec.what, [matrix for _, matrix in maps], spec.diverging)
    return charts.heatmaps(spec.key, spec.title, caption, maps, scale, *sides, height=height)


def _buckets(data: ReportData, parts: list[tuple[str, BucketLines]]) -> Figure:
    """Draw a line chart of statistics by bucket of distances or query positions, with the values in a table."""
    rows = [row for name, part in parts for row in _bucket_rows(data, name, part.series)]
    spec = parts[0][1]
    drawn = [row for row in rows if not spec.logarithmic or row["value"] > 0]
    x = PlotAxis(spec.x_title, "bucket", order=_bucket_order(drawn))
    scale = "log" if spec.logarithmic else "linear"
    y = PlotAxis(spec.y_title, "value", "value", scale=scale, format="~g", precision=".4f")
    dashes = [part.series for _, part in parts]
    chart = charts.lines(drawn, x, y, order=data.cells, dash="where", dashes=dashes, height=charts.SHORT)
    series = list(dict.fromkeys((row["cell"], row["where"]) for row in rows))
    values = {(row["cell"], row["where"], row["bucket"]): row["value"] for row in rows}
    columns = [*names(spec.bucket), *(TableColumn(cell, where, ".4f") for cell, where in series)]
    numbers = [[bucket, *(values.get((*one, bucket)) for one in series)] for bucket in _bucket_order(rows)]
    return Figure(spec.key, spec.title, spec.caption, [chart], table=Table("", columns, numbers))


def _bucket_order(rows: ChartRows) -> list[str]:
    return list(dict.fromkeys(row["bucket"] for row in sorted(rows, key=lambda row: row["order"])))


def _bucket_rows(data: ReportData, name: str, series: str) -> list[dict[str, Any]]:
    """Return a statistic by cell and bucket, averaged over layers, heads and the cell's runs."""
    shares: list[tuple[str, str, str, int, float]] = []
    for run, measured, details, shares_LHX in _found(data, name):
        of_queries = STATISTICS[name].axes == "LHQ"
        starts = [*details.queries, measured.length + 1] if of_queries else [*details.distances, measured.length]
        for (start, end), share in zip(pairwise(starts), shares_LHX.mean((0, 1)), strict=True):
            bucket = str(start) if end - start == 1 else f"{start}..{end - 1}"
            shares.append((run.cell, series, bucket, start, float(share)))
    return averaged(("cell", "where", "bucket", "order"), shares)


def _first_and_rest(arrays: Iterable[tuple[str, np.ndarray]], first_layer: int = 0) -> ChartRows:
    """Return the value at the first position and the mean over the others, by cell and layer, averaged over runs.

    Args:
        arrays: pairs of cell and array (layers, positions), one per run; arrays with a single position are omitted.
        first_layer: number of the layer or block of the first row.
    """
    known = [(cell, array_LT) for cell, array_LT in arrays if array_LT.shape[1] > 1]
    series = [(cell, "first token", array_LT[:, 0]) for cell, array_LT in known]
    return by_layer(
        [*series, *((cell, "the others", array_LT[:, 1:].mean(1)) for cell, array_LT in known)], first_layer
    )


def _layer_lines(rows: ChartRows, cells: Sequence[str], at: str, y_title: str, title: str | None = None) -> Drawing:
    """Draw the `value` of rows by layer, with a line per cell and `where`."""
    x, y = charts.layer_axis(rows, at), PlotAxis(y_title, "value", "value", scale="auto", precision=".4f")
    return charts.lines(rows, x, y, order=cells, dash="where", height=charts.SHORT, title=title)


def chart(measurement: Measurement, what: str = "heads") -> Any:
    """Return a figure of the report as an Altair chart for a notebook.

    Args:
        what: "heads", "layers", "positions" or "norms".

    Raises:
        InputError: if `what` is none of these, or is "norms" for sequences of one token or without norms.
    """
    if what not in CHARTS:
        raise InputError(f"unknown chart {what!r}: choose from {', '.join(CHARTS)}")
    data = ReportData([Path()], [ReportedRun.of(measurement)])
    figures = {figure.key: figure for figure in importance_figures(data)}
    if CHARTS[what] not in figures:
        raise InputError(
            "the norms chart compares positions, but the sequences have one token, or no norms were recorded: choose "
            f"{', '.join(list(CHARTS)[:3])}"
        )
    figure = figures[CHARTS[what]]
    width = charts.SMALL if figure.small else NOTEBOOK_WIDTH
    drawn = [one.properties(width=width) for one in figure.charts]
    config = theme.on_paper()
    config["legend"].pop("layout")  # rejected by Altair's validation
    return (drawn[0] if len(drawn) == 1 else alt.vconcat(*drawn)).configure(**config)


@dataclass(frozen=True)
class Tile:
    """A number or a few words at the top of a page, with its name and an explanation."""

    name: str
    value: str
    about: str


def tiles(data: ReportData) -> list[Tile]:
    """Return four tiles about the only measured model of a report; empty for other reports.

    They have the share of heads with the sink, its layers, its token, and the loss of streaming without first tokens.
    """
    if len(data.runs) != 1 or not data.measured or data.sweeps or data.runs[0].trained:
        return []
    [(_, one)] = data.measured
    above_L = (one.importance[:, :, 0] > one.eps).sum(1)
    shown = [f"{layer + 1}" for layer in np.argsort(-above_L, kind="stable")[:3] if above_L[layer]]
    most = f", most of them in layer{'s' * (len(shown) > 1)} {', '.join(shown)}" if shown else ""
    without = next((found for found in one.ablations or () if found.name == "no_bos"), None)
    token = "BOS" if one.bos else "any first token"
    about = "the sequences do not begin with BOS" if not one.bos else "or any first token? See --ablate no_bos"
    if without is not None:
        token = "any first token" if without.sink_rate_after >= NO_SINK else "only BOS"
        about = f"without BOS, {without.sink_rate_after:.1f} % of heads"
    lost = [part for found in data.assessed for part in found.results.values() if part.name == "streaming"]
    costs = [row.added for part in lost for row in part.rows() if row.lost and row.added is not None]
    streams = Tile("Streaming", "not assessed", "run sinklab assess MODEL --quick")
    if costs:
        streams = Tile("Streaming", f"{max(costs):+.2f} nats", "loss per token without the first tokens in the cache")
    return [
        Tile(
            "Sink rate",
            f"{one.sink_rate[0]:.0f} %",
            f"of heads give the first token over ε = {one.eps:g} of their attention, "
            f"in {one.sequences} x {one.length} tokens",
        ),
        Tile("Layers", f"{(above_L > 0).sum()} of {one.layers}", f"have such heads{most}"),
        Tile("Sink on", token, about),
        streams,
    ]


@dataclass(frozen=True)
class Explorer:
    """The section with the attention maps (`--explore`) of one measurement.

    Attributes:
        key: anchor of the section; the anchor of a head is `#KEY-LAYER.HEAD`.
        note: description of the sequence and of the maps.
        data: JSON-serializable data for `templates/explore.js`. `maps` contains bytes n of shape (heads, S, S), query
            by key for S tokens, compressed with zlib and encoded in base64; the attention weight is (n / 255)^2.
    """

    key: str
    title: str
    note: str
    data: Mapping[str, Any]


def explorers(data: ReportData) -> list[Explorer]:
    """Make an explorer for every measurement that has attention maps from `--explore`."""
    found = [
        (data.label(run), one, one.explored)
        for run, one in data.measured
        if one.explored is not None and not run.trained
    ]
    return [
        Explorer(
            f"explore-{number}",
            "Explore the heads" + (f": {label}" if len(found) > 1 else ""),
            html.caption(
                "explored",
                heads=counted(len(explored.heads), "head"),
                tokens=len(explored.tokens),
                sequences=one.sequences,
            ),
            _content(data, one, explored),
        )
        for number, (label, one, explored) in enumerate(found)
    ]


def _content(data: ReportData, one: Measurement, explored: Explored) -> dict[str, Any]:
    rates_LH, importance_LHT = one.sink_rate_of_heads(), one.importance.astype(float).round(DECIMALS)
    same = [found for found in data.assessed if found.model == one.model and Heads.name in found.results]
    roles = {(head.layer, head.head): head.kind for found in same for head in found.result(Heads).heads}
    return {
        "eps": one.eps,
        "layers": one.layers,
        "heads": one.heads,
        "first": importance_LHT[:, :, 0].tolist(),
        "tokens": explored.texts or [str(token) for token in explored.tokens],
        "kept": [
            {
                "layer": layer,
                "head": head,
                "rate": round(float(rates_LH[layer - 1, head - 1]), 1),
                "role": roles.get((layer, head), ""),
                "importance": importance_LHT[layer - 1, head - 1, : len(explored.tokens)].tolist(),
            }
            for layer, head in explored.heads
        ],
        "maps": base64.b64encode(zlib.compress(explored.attention.tobytes(), 9)).decode(),
    }
