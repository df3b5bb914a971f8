"""Figures of what every measurement holds: importance by head, by layer and by position, row sums and norms."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import torch

from sinklab.measuring import metrics
from sinklab.measuring.measurement import Measurement
from sinklab.report import charts, heatmaps, lines
from sinklab.report.data import ReportData
from sinklab.report.figure import ColourScale, Figure
from sinklab.report.heatmaps import Named, heatmap, side_by_side
from sinklab.report.summary import by_key, over_seeds
from sinklab.report.tables import mixing_table

SHOWN_POSITIONS = 64
VISIBLE = "visible queries"


def importance_figures(data: ReportData, width: int | str) -> list[Figure | None]:
    """In reading order; None where the data does not allow one."""
    small = width if width == "container" else 300
    return [
        _by_head(data, small),
        _by_layer(data, small),
        _by_position(data, width),
        _row_sums(data, small),
        _norms(data, small),
        _mixing(data, width),
    ]


def _by_head(data: ReportData, width: int | str) -> Figure | None:
    maps: list[Named] = []
    lengths: list[int] = []
    for run, measured in data.measured:
        label = data.label(run)
        maps.append((f"{label}: first token", measured.importance[:, :, 0]))
        lengths.append(measured.length)
        if measured.importance_visible is not None:
            maps.append((f"{label}: first token, {VISIBLE}", measured.importance_visible[:, :, 0]))
        if measured.importance_bias is not None:
            maps.append((f"{label}: bias", measured.importance_bias))
    if not maps:
        return None
    caption = (
        "Mean over sequences of the attention a head pays to the first token (or to an added bias), averaged over all "
        "queries. The colour scale is shared and reaches from 0 to ε at least. Outlined heads exceed ε on average. "
        + _said_of_uniform(lengths)
        + _said_of_masks(data)
        + "Point at a square for its value."
    )
    references = tuple(float(uniform_importance(length)[0]) for length in sorted(set(lengths)))
    scale = _importance_scale(maps, data)
    scale = replace(scale, outlined=data.runs[0].eps, references=references)
    return side_by_side("importance-heads", "Which heads have the sink", caption, maps, scale, width)


def _by_layer(data: ReportData, width: int | str) -> Figure | None:
    found = data.arrays(lambda m: m.importance)
    visible = [(f"{label}, {VISIBLE}", array) for label, array in data.arrays(lambda m: m.importance_visible)]
    if not found:
        return None
    maps = [(label, array.mean(1)[:, :SHOWN_POSITIONS]) for label, array in [*found, *visible]]
    uniform = [uniform_importance(array.shape[2])[:SHOWN_POSITIONS] for _, array in found] + [None] * len(visible)
    caption = (
        f"Importance of each of the first {max(matrix.shape[1] for _, matrix in maps)} positions in every layer: mean "
        "over sequences and over the layer's heads. A sink is a column brighter than the lowest row, which is what "
        "attention that is uniform over all tokens so far would give. The last positions are seen by few queries, "
        "which raises them. " + _said_of_masks(data)
    )
    scale = _importance_scale(maps, data)
    drawn = [
        heatmap(
            matrix, scale, name, columns=heatmaps.POSITIONS, width=width, legend=width != "container", lowest=lowest
        )
        for (name, matrix), lowest in zip(maps, uniform, strict=True)
    ]
    return Figure("importance-layers", "Which layers attend where", caption, drawn, scale)


def uniform_importance(length: int) -> np.ndarray:
    """alpha of every position, (T,), where each query attends to all tokens so far alike (metrics.py)."""
    return metrics.uniform_importance(torch.tensor([length]), length)[0].numpy()


def _said_of_uniform(lengths: Iterable[int]) -> str:
    values = [f"{uniform_importance(length)[0]:.3f} at T = {length}" for length in sorted(set(lengths))]
    return f"Uniform attention would give the first token {' and '.join(values)}. " if values else ""


def _said_of_masks(data: ReportData) -> str:
    if not data.arrays(lambda m: m.importance_visible):
        return ""
    return (
        f"“{VISIBLE.capitalize()}” is the mean over those queries alone that may see the key; uniform attention gives "
        "more there: in a window of w tokens the first has (1 + 1/2 + .. + 1/w) / w. "
    )


def _importance_scale(maps: list[Named], data: ReportData) -> ColourScale:
    """From 0 to eps at least, so that a model without a sink looks like one."""
    highest = max(float(matrix.max()) for _, matrix in maps)
    return ColourScale("importance", 0, max(*(run.eps for run in data.runs), math.ceil(highest * 10) / 10))


def _by_position(data: ReportData, width: int | str) -> Figure | None:
    found = by_key(
        ((run.cell, position), float(value))
        for run, measured in data.measured
        for position, value in enumerate(measured.importance.mean((0, 1))[:SHOWN_POSITIONS], start=1)
    )
    if not found:
        return None
    rows = [
        {"cell": cell, "position": position, "value": spread["mean"], "runs": spread["runs"]}
        for (cell, position), numbers in found.items()
        for spread in [over_seeds(numbers)]
    ]
    shown = max(position for _, position in found)
    caption = (
        f"Attention received by each of the first {shown} positions: for every key the mean over the "
        "queries from it on, itself included, then the mean over sequences, layers and heads. A sink stands out at the "
        "left above the dashed line, which is attention that is uniform over all tokens so far. The last positions are "
        "seen by few queries, which raises them."
    )
    uniform = [
        {"length": length, "position": k + 1, "value": float(value)}
        for length in sorted({measured.length for _, measured in data.measured})
        for k, value in enumerate(uniform_importance(length)[:shown])
    ]
    chart = charts.importance_by_position(rows, data.cells, data.runs[0].eps, uniform, width)
    return Figure("importance-positions", "Where the attention goes", caption, [chart])


def _row_sums(data: ReportData, width: int | str) -> Figure | None:
    maps = data.arrays(lambda m: m.row_sums)
    if not maps:
        return None
    caption = (
        "What the raw scores of a query sum to, as a mean over queries and sequences, for operations whose scores do "
        "not sum to one. There importance is that of the proxy scores |sim| / Σ |sim|, which hide how much attention "
        "there is in all: this figure shows it. Softmax would be 1 everywhere."
    )
    scale = heatmaps.scale_over("row sum", [matrix for _, matrix in maps])
    return side_by_side("row-sums", "How much attention there is in all", caption, maps, scale, width)


NORMS: dict[str, Callable[[Measurement], np.ndarray | None]] = {
    "Hidden states": lambda m: m.hidden_norm,
    "Keys": lambda m: m.key_norm,
    "Values": lambda m: m.value_norm,
}


def _norms(data: ReportData, width: int | str) -> Figure | None:
    drawn = []
    for title, norm in NORMS.items():
        arrays = ((run.cell, norms) for run, measured in data.measured if (norms := norm(measured)) is not None)
        if rows := lines.first_and_rest(arrays, first_layer=int(title != "Hidden states")):
            at = "Layer" if rows[0]["layer"] else "After block (0 is the embedding)"
            drawn.append(lines.by_layer(rows, data.cells, at, "Norm", width, title))
    if not drawn:
        return None
    caption = (
        "l2 norm of hidden states, keys and values at the first position (solid) and as a mean over the others "
        "(dashed), mean over sequences, heads and seeds. A sink usually comes with a large hidden state, and with a "
        "small key and a small value: it takes attention and gives nothing."
    )
    return Figure("norms", "Hidden states, keys and values of the first token", caption, drawn, small=True)


def _mixing(data: ReportData, width: int | str) -> Figure | None:
    arrays = [
        (run.cell, where, np.array(values))
        for run, measured in data.measured
        if (mixing := measured.mixing)
        for where, values in (("as it is", mixing.spread), ("first key hidden", mixing.spread_without_first))
    ]
    if not arrays:
        return None
    rows = [
        {**row, "where": where}
        for cell, where, values_M in arrays
        for row in lines.means([(cell, values_M)])
        if row["layer"] > 0
    ]
    positions = sorted({mixing.position for _, measured in data.measured if (mixing := measured.mixing)})
    caption = (
        f"The token at position {' or '.join(map(str, positions))} was replaced by another: norm of the change of the "
        "later tokens' hidden states over their norm, mean over positions and sequences, as the model is (solid) and "
        "with the first key hidden from all later queries (dashed). Where the dashed line is higher, resting on the "
        "first token kept the change from spreading."
    )
    chart = lines.by_layer(rows, data.cells, "After block", "Change over norm", width)
    table = mixing_table([(data.label(run), one) for run, one in data.measured])
    return Figure("mixing", "How far a change of one token spreads", caption, [chart], table=table)
