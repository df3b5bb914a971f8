"""Figures of what was measured with --details: angles, entropy, distances, secondary sinks, kurtosis, maps."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import fmean

import numpy as np

from sinklab.measuring.statistics.details import ALIGNED, FIRST_FEW, Details
from sinklab.report import heatmaps, lines
from sinklab.report.bucket_figures import by_distance, by_query
from sinklab.report.data import ReportData
from sinklab.report.figure import DataTable, Figure
from sinklab.report.importance_figures import SHOWN_POSITIONS, Named, side_by_side

MAP_CELLS = 64  # larger maps are thinned: every cell is an element of the page


def details_figures(data: ReportData, width: int | str) -> list[Figure | None]:
    """In reading order; empty where nothing was measured with --details."""
    if not data.detailed:
        return []
    small = width if width == "container" else 300
    return [
        _cosine(data, small),
        _norm_product(data, small),
        _cosine_by_head(data, small),
        _value_ratio(data, small),
        _entropy(data, small),
        by_distance(data, width),
        by_query(data, width),
        _kurtosis(data, width),
        _alignment(data, small),
        _secondary(data, small),
        *_maps(data, small),
    ]


def _cosine(data: ReportData, width: int | str) -> Figure | None:
    maps = _by_position(data, lambda d: d.cosine)
    if not maps:
        return None
    caption = (
        "Mean over heads of the cosine between a key and the queries that see it. The logit of a query and a key is "
        "their cosine times both norms: where the first column stands out here, and not in the next figure, the sink "
        "has its large logits from the direction of its key."
    )
    scale = heatmaps.scale_over("cosine", [matrix for _, matrix in maps], diverging=True)
    figure = side_by_side(
        "angles-cosine",
        "Where queries point: cos(q, k)",
        caption,
        maps,
        scale,
        width,
        columns=heatmaps.POSITIONS,
    )
    return replace(figure, table=_layer_table(data))


def _norm_product(data: ReportData, width: int | str) -> Figure | None:
    maps = _by_position(data, lambda d: d.norm_product)
    if not maps:
        return None
    caption = (
        "Mean over heads of the norm of a key times the norms of the queries that see it, as they enter attention. A "
        "dark first column is a small key."
    )
    scale = heatmaps.scale_over("norm product", [matrix for _, matrix in maps])
    return side_by_side(
        "angles-norms",
        "How long queries and keys are: |q| |k|",
        caption,
        maps,
        scale,
        width,
        columns=heatmaps.POSITIONS,
    )


def _cosine_by_head(data: ReportData, width: int | str) -> Figure | None:
    maps = [(label, array[:, :, 0]) for label, array in _arrays(data, lambda d: d.cosine)]
    if not maps:
        return None
    caption = "Mean cosine between the queries and the key of the first token. Compare it with the heads of the sink."
    scale = heatmaps.scale_over("cosine", [matrix for _, matrix in maps], diverging=True)
    return side_by_side("angles-heads", "Which heads point at the first token", caption, maps, scale, width)


def _value_ratio(data: ReportData, width: int | str) -> Figure | None:
    caption = (
        "Norm of the first token's value over the mean norm of the others. Below one, attention on the first token "
        "adds little to the output."
    )
    maps = _arrays(data, lambda d: d.value_ratio)
    return _heads(maps, "value-ratio", "How much the first token gives", "ratio of norms", caption, width)


def _entropy(data: ReportData, width: int | str) -> Figure | None:
    reference = ""
    if lengths := {measured.length for _, measured, _ in data.detailed}:
        means = ", ".join(f"{fmean(np.log(np.arange(1, n + 1)).tolist()):.2f} for T = {n}" for n in sorted(lengths))
        reference = f" Attention that is uniform over all keys has {means}."
    caption = f"Entropy of the attention of a query, in nats, mean over queries and sequences.{reference}"
    maps = _arrays(data, lambda d: d.entropy)
    return _heads(maps, "entropy", "How spread the attention is", "entropy", caption, width)


def _heads(maps: list[Named], key: str, title: str, what: str, caption: str, width: int | str) -> Figure | None:
    if not maps:
        return None
    return side_by_side(key, title, caption, maps, heatmaps.scale_over(what, [matrix for _, matrix in maps]), width)


def _kurtosis(data: ReportData, width: int | str) -> Figure | None:
    collected: dict[tuple[str, str, int], list[float]] = {}
    for run, _, details in data.detailed:
        kurtosis_MT = details.kurtosis
        if kurtosis_MT is None or kurtosis_MT.shape[1] < 2:
            continue
        for where, values in (("first token", kurtosis_MT[:, 0]), ("the others", kurtosis_MT[:, 1:].mean(1))):
            for block, value in enumerate(values):
                collected.setdefault((run.cell, where, block), []).append(float(value))
    if not collected:
        return None
    rows = [
        {"cell": cell, "where": where, "layer": block, "value": fmean(values)}
        for (cell, where, block), values in collected.items()
    ]
    caption = (
        "Kurtosis E[(x - mean)⁴] / E[(x - mean)²]² of a token's hidden state over its channels, mean over tokens and "
        "sequences. A Gaussian has 3; a few channels far above the others, which make a model hard to quantise, give "
        "hundreds."
    )
    chart = lines.by_layer(rows, data.cells, "After block (0 is the embedding)", "Kurtosis", width)
    return Figure("kurtosis", "Outlier channels", caption, [chart])


def _alignment(data: ReportData, width: int | str) -> Figure | None:
    maps = _by_position(data, lambda d: d.alignment)
    if not maps:
        return None
    caption = (
        "Cosine between the hidden state of each token and that of the first token, mean over sequences; 0 is the "
        "embedding. Tokens that are like the first one, where it stands out, are candidates for further sinks."
    )
    scale = heatmaps.scale_over("cosine", [matrix for _, matrix in maps], diverging=True)
    return side_by_side(
        "alignment",
        "Which tokens are like the first",
        caption,
        maps,
        scale,
        width,
        rows=heatmaps.BLOCKS,
        columns=heatmaps.POSITIONS,
    )


def _secondary(data: ReportData, width: int | str) -> Figure | None:
    rows = [
        [
            f"{data.label(run)}: sequence {one.sequence}, position {one.position}",
            str(one.token),
            f"{one.heads:.1f}",
            f"{one.importance:.3f}",
            "–" if one.alignment is None else f"{one.alignment:.2f} after block {one.block}",
        ]
        for run, _, details in data.detailed
        for one in details.secondary_sinks
    ]
    if not rows:
        return None
    maps = _arrays(data, lambda d: d.secondary)
    eps = data.runs[0].eps
    caption = (
        f"Percent of sequences in which a head has an importance above ε = {eps:g} at some position past the first "
        f"{FIRST_FEW} and in the first half of the sequence. The numbers below name the strongest such tokens, and "
        f"those whose hidden state has a cosine above {ALIGNED:g} with the first token's where that stands out."
    )
    scale = heatmaps.scale_over("percent of sequences", [matrix for _, matrix in maps])
    figure = side_by_side("secondary", "Sinks other than the first token", caption, maps, scale, width)
    columns = ["Token", "Id", "Heads above ε (%)", "Importance", "Cosine with the first token"]
    return replace(figure, table=DataTable(columns, rows))


MAPS: list[tuple[Callable[[Details], np.ndarray | None], str, str, str, bool]] = [
    (lambda d: d.map_attention, "map-attention", "Attention of single heads", "attention", False),
    (lambda d: d.map_cosine, "map-cosine", "Cosines of single heads", "cosine", True),
    (lambda d: d.map_norm_product, "map-norms", "Norm products of single heads", "norm product", False),
]


def _maps(data: ReportData, width: int | str) -> Iterable[Figure]:
    for maps, key, title, what, diverging in MAPS:
        named: list[Named] = []
        for run, _, details in data.detailed:
            maps_PTT = maps(details)
            for (layer, head), map_TT in zip(details.maps, () if maps_PTT is None else maps_PTT, strict=False):
                later = np.triu(np.ones_like(map_TT, dtype=bool), 1)
                shown = heatmaps.pooled(np.where(later, np.nan, map_TT), MAP_CELLS)
                named.append((f"{data.label(run)}: layer {layer}, head {head}", shown))
        if not named:
            continue
        scale = heatmaps.scale_over(what, [matrix for _, matrix in named], diverging)
        legend = width != "container"
        sides = (heatmaps.QUERIES, heatmaps.KEYS)
        drawn = [heatmaps.heatmap(matrix, scale, label, *sides, width, 260, legend) for label, matrix in named]
        thinned = any(measured.length > MAP_CELLS for _, measured, _ in data.detailed)
        caption = "Query by key, mean over sequences" + (
            "; maps of long sequences are thinned by means over squares of positions, which the axes count."
            if thinned
            else "."
        )
        yield Figure(key, title, caption, drawn, scale)


def _arrays(data: ReportData, of: Callable[[Details], np.ndarray | None]) -> list[Named]:
    """An array of the details of every run that has it, with the run's name."""
    return data.arrays(lambda measured: None if measured.details is None else of(measured.details))


def _by_position(data: ReportData, of: Callable[[Details], np.ndarray | None]) -> list[Named]:
    """(layers or blocks, positions) of every run that has it: mean over heads, first positions only."""
    return [
        (label, (array.mean(1) if array.ndim == 3 else array)[:, :SHOWN_POSITIONS])
        for label, array in _arrays(data, of)
    ]


def _layer_table(data: ReportData) -> DataTable:
    rows = []
    for run, measured, details in data.detailed:
        means = (details.cosine_first, details.cosine_rest, details.norm_product_first, details.norm_product_rest)
        ratio = details.value_ratio
        for layer in range(measured.layers):
            rows.append(
                [
                    f"{data.label(run)}, layer {layer + 1}",
                    f"{measured.importance[layer, :, 0].mean():.3f}",
                    *("–" if values is None else f"{values[layer]:.3g}" for values in means),
                    f"{details.entropy_by_layer[layer]:.2f}",
                    "–" if ratio is None else f"{ratio[layer].mean():.2f}",
                ]
            )
    columns = ["Layer", "Importance of 1", "cos with key 1", "with the others", "|q||k| with key 1", "with the others"]
    return DataTable([*columns, "Entropy", "|v| ratio"], rows)
