"""The sink by the length of the sequences, a line for each threshold: figure 3 of the paper.

As in `charts.py`, names are data and nothing else.
"""

from collections.abc import Mapping

import altair as alt

from sinklab.experiments.documents import CellSummary
from sinklab.report.charts import HEIGHT, ChartRows, Drawing, Width, cell_colour
from sinklab.report.figure import Figure

FEWEST = 2
"""Lengths that a line joins."""


def length_figure(cells: Mapping[str, CellSummary], width: Width) -> Figure | None:
    """Sink_1 of cells that say their eps and length; None unless there are several lengths.

    Args:
        cells: of a summary, by name.
    """
    rows = [row for name, cell in cells.items() if (row := _row(name, cell))]
    if len({row["length"] for row in rows}) < FEWEST:
        return None
    rows.sort(key=lambda row: (row["eps"], row["length"]))
    caption = (
        "Sink rate of the first token of the same sequences cut at different lengths, for several thresholds ε. Points "
        "are medians over draws of sequences, bars from the smallest to the largest."
    )
    return Figure("sink-by-length", "The sink by threshold and length", caption, [_sink_by_length(rows, width)])


def _row(name: str, cell: CellSummary) -> dict[str, str | float | None] | None:
    eps, length, found = cell.change.get("eps"), cell.change.get("length"), cell.values.get("sink_1")
    if not isinstance(eps, float) or not isinstance(length, int) or found is None:
        return None
    numbers = {"median": found.median, "low": found.smallest, "high": found.largest}
    return {"cell": f"ε = {eps:g}", "name": name, "eps": eps, "length": length, **numbers}


def _sink_by_length(rows: ChartRows, width: Width = 640) -> Drawing:
    """Sink_1 against length.

    Args:
        rows: `cell, name, length, median, low, high`; `cell` names the threshold, the others are percent of heads.
    """
    lengths = sorted({row["length"] for row in rows})
    base = alt.Chart(alt.Data(values=list(rows))).encode(
        x=alt.X(
            "length:Q",
            title="Tokens per sequence",
            scale=alt.Scale(type="log", base=2, domain=[lengths[0], lengths[-1]]),
            axis=alt.Axis(values=lengths, format="d", grid=False),
        ),
        color=cell_colour(list(dict.fromkeys(row["cell"] for row in rows))),
    )
    scale = alt.Scale(domain=[0, 100])
    value = alt.Y("median:Q", title="Sink₁ (percent of heads)", scale=scale)
    tooltip = [
        alt.Tooltip("name:N", title="cell"),
        alt.Tooltip("length:Q", title="tokens"),
        alt.Tooltip("median:Q", title="percent", format=".1f"),
        alt.Tooltip("low:Q", title="from", format=".1f"),
        alt.Tooltip("high:Q", title="to", format=".1f"),
    ]
    bars = base.mark_rule(strokeWidth=2, opacity=0.6).encode(y=alt.Y("low:Q", scale=scale, title=""), y2="high:Q")
    points = base.mark_point(filled=True, size=40, opacity=1).encode(y=value, tooltip=tooltip)
    return alt.layer(base.mark_line().encode(y=value), bars, points).properties(width=width, height=HEIGHT)
