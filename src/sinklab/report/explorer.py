"""The explored heads of a measurement (`--explore`): attention maps, importance, sink rates and roles.

`templates/explore.js` draws them from this data in the page. The attention maps of a measurement are one zlib
stream, which browsers decompress.
"""

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sinklab.assessing.parts.heads import Heads
from sinklab.measuring.explored import Explored
from sinklab.measuring.measurement import Measurement
from sinklab.report.data import ReportData
from sinklab.tables import counted

DECIMALS = 4
"""Number of decimals to which importance is rounded in the page."""


@dataclass(frozen=True)
class Explorer:
    """The explored heads of one measurement.

    Attributes:
        key: anchor of the section; the anchor of a head is `#KEY-LAYER.HEAD`.
        title: title of the section.
        note: description of the sequence and of the maps.
        data: JSON-serializable data for the script; `maps` is the base64 text of a zlib stream of bytes n (kept heads,
            S, S), query by key; the attention weight is (n / 255)^2.
    """

    key: str
    title: str
    note: str
    data: Mapping[str, Any]


def explorers(data: ReportData) -> list[Explorer]:
    """Make an explorer for every measurement that has attention maps of its heads."""
    found = [(data.label(run), one, one.explored) for run, one in data.measured if one.explored is not None]
    return [
        Explorer(
            f"explore-{number}",
            "Explore the heads" + (f": {label}" if len(found) > 1 else ""),
            f"Attention of {counted(len(explored.heads), 'head')} on the first {len(explored.tokens)} tokens of the "
            f"first sequence, quantised to 8 bits. Importance and sink rates are averages over all {one.sequences} "
            "sequences of the measurement.",
            _content(one, explored, _roles(data, one)),
        )
        for number, (label, one, explored) in enumerate(found)
    ]


def _content(one: Measurement, explored: Explored, roles: Mapping[tuple[int, int], str]) -> dict[str, Any]:
    shown, rates_LH = len(explored.tokens), one.sink_rate_of_heads()
    return {
        "eps": one.eps,
        "layers": one.layers,
        "heads": one.heads,
        "first": one.importance[:, :, 0].astype(float).round(DECIMALS).tolist(),
        "tokens": explored.texts or [str(token) for token in explored.tokens],
        "kept": [
            {
                "layer": layer,
                "head": head,
                "rate": round(float(rates_LH[layer - 1, head - 1]), 1),
                "role": roles.get((layer, head), ""),
                "importance": one.importance[layer - 1, head - 1, :shown].astype(float).round(DECIMALS).tolist(),
            }
            for layer, head in explored.heads
        ],
        "maps": base64.b64encode(zlib.compress(explored.attention.tobytes(), 9)).decode(),
    }


def _roles(data: ReportData, one: Measurement) -> dict[tuple[int, int], str]:
    """Return the kind of each head by (layer, head), 1-based, from assessments of the same model; empty without any."""
    assessed = (found.document for found in data.assessed if found.document.model == one.model)
    parts = [document.result(Heads) for document in assessed if Heads.name in document.results]
    return {(head.layer, head.head): head.kind for part in parts for head in part.heads}
