"""One number of cells against another, a point for each cell with the ends of both: of an experiment, of the board."""

from collections.abc import Sequence

import altair as alt

from sinklab.experiments.documents import CellSummary, ExperimentSummary
from sinklab.experiments.quantities import Quantity
from sinklab.report import theme
from sinklab.report.charts import HEIGHT, Drawing, Width
from sinklab.report.experiments.leaderboard import LOSS, SINK, Leaderboard, SeedScore
from sinklab.report.experiments.tables import estimate_of, quantity_of
from sinklab.report.figure import Figure

OTHERS = "other models"
FAR = 1.0
"""Nats per token above softmax from which losses are drawn on a scale that is linear near softmax alone."""


def against(cells: dict[str, CellSummary], experiment: ExperimentSummary, width: Width) -> Drawing | None:
    """The second quantity of `against` over the first; None where no cell has both.

    Models of one family of the paper's list have one colour.
    """
    across, up = (quantity_of(name) for name in experiment.against)
    rows = [
        row
        for name, cell in cells.items()
        if (row := _row(name, cell, across, up, experiment.families.get(name, OTHERS)))
    ]
    if not rows:
        return None
    families = list(dict.fromkeys(str(row["family"]) for row in rows))
    colour = alt.Color(
        "family:N",
        title=None,
        scale=alt.Scale(domain=families, range=[theme.PALETTE[at % len(theme.PALETTE)] for at in range(len(families))]),
        legend=alt.Legend() if len(families) > 1 else None,
    )
    x = alt.X("x:Q", title=_title(across), scale=alt.Scale(zero=False, nice=True))
    y = alt.Y("y:Q", title=_title(up), scale=alt.Scale(zero=False, nice=True))
    tooltip = [
        alt.Tooltip("model:N", title="model"),
        alt.Tooltip("x:Q", title=across.label, format=f".{across.decimals}f"),
        alt.Tooltip("y:Q", title=up.label, format=f".{up.decimals}f"),
    ]
    base = alt.Chart(alt.Data(values=rows)).encode(color=colour)
    return _layered(base, rows, x, y, tooltip, alt.SizeValue(70), width)


def board_figure(board: Leaderboard, key: str, width: Width) -> Figure | None:
    """Sink_1 of every cell of a leaderboard against what its loss is above softmax's; None without softmax's loss.

    Named are softmax, and the cells that no other is as good as in both and better in one.
    """
    at = {column.quantity: number for number, column in enumerate(board.columns) if column.quantity}
    scores = {
        one.cell: (loss, sink)
        for one in board.standings
        if (loss := one.scores[at[LOSS]]) is not None and (sink := one.scores[at[SINK]]) is not None
    }
    if board.baseline not in scores or len(scores) < 2:
        return None
    least = scores[board.baseline][0].median
    points = {cell: (loss.median - least, sink.median) for cell, (loss, sink) in scores.items()}

    def is_named(cell: str) -> bool:
        x, y = points[cell]
        return cell == board.baseline or not any(a <= x and b <= y and (a, b) != (x, y) for a, b in points.values())

    rows = [
        _board_row(cell, loss, sink, least)
        | {
            "kind": board.baseline if cell == board.baseline else "mitigations",
            "size": 190 if cell == board.baseline else 55,
            "named": cell if is_named(cell) else "",
        }
        for cell, (loss, sink) in scores.items()
    ]
    kinds = [board.baseline, "mitigations"]
    colour = alt.Color(
        "kind:N", title=None, scale=alt.Scale(domain=kinds, range=[theme.PALETTE[1], theme.PALETTE[0]]), legend=None
    )
    x = alt.X("x:Q", title=f"Validation loss above {board.baseline} (nats / token)", scale=_loss_scale(rows))
    y = alt.Y("y:Q", title="Sink₁ (% of heads)", scale=alt.Scale(zero=True, nice=True))
    tooltip = [
        alt.Tooltip("model:N", title="cell"),
        alt.Tooltip("x:Q", title=f"loss above {board.baseline}", format="+.3f"),
        alt.Tooltip("y:Q", title="Sink₁", format=".1f"),
    ]
    base = alt.Chart(alt.Data(values=rows)).encode(color=colour)
    size = alt.Size("size:Q", scale=None)
    chart = _layered(base, rows, x, y, tooltip, size, width, "named:N")
    caption = (
        f"Medians over seeds, the lines from the smallest to the largest; {board.baseline} is the large point. Named "
        "are it and the cells to which no other is better in both. A sink may stand elsewhere: the board says where."
    )
    return Figure(key, f"Sink₁ against the loss at scale {board.scale}", caption, [chart])


def _loss_scale(rows: Sequence[dict[str, float | str]]) -> alt.Scale:
    """Linear up to a nat above softmax; beyond, a scale on which what is far away leaves room for what is near."""
    far = max(abs(float(row["x"])) for row in rows) > FAR
    return alt.Scale(type="symlog", constant=0.05) if far else alt.Scale(zero=False, nice=True)


def _board_row(cell: str, loss: SeedScore, sink: SeedScore, least: float) -> dict[str, float | str]:
    row: dict[str, float | str] = {"model": cell, "x": loss.median - least, "y": sink.median}
    for axis, seeds in (("x", [one - least for one in loss.seeds]), ("y", sink.seeds)):
        if len(seeds) > 1:
            row |= {f"{axis}_low": min(seeds), f"{axis}_high": max(seeds)}
    return row


def _layered(
    base: alt.Chart,
    rows: Sequence[dict[str, float | str]],
    x: alt.X,
    y: alt.Y,
    tooltip: list[alt.Tooltip],
    size: alt.Size | alt.SizeValue,
    width: Width,
    named: str = "model:N",
) -> Drawing:
    """Points, lines from end to end where a row has ends, and names."""
    layers = [base.mark_point(filled=True, opacity=0.9).encode(x=x, y=y, size=size, tooltip=tooltip)]
    if any("x_low" in row for row in rows):
        layers.append(base.mark_rule(opacity=0.5).encode(x=alt.X("x_low:Q"), x2="x_high:Q", y=y))
    if any("y_low" in row for row in rows):
        layers.append(base.mark_rule(opacity=0.5).encode(x=x, y=alt.Y("y_low:Q"), y2="y_high:Q"))
    layers.append(base.mark_text(align="left", dx=8, dy=-8).encode(x=x, y=y, text=named))
    return alt.layer(*layers).properties(width=width, height=HEIGHT)


def _row(name: str, cell: CellSummary, across: Quantity, up: Quantity, family: str) -> dict[str, float | str] | None:
    x, y = estimate_of(cell, across.name), estimate_of(cell, up.name)
    if x is None or y is None or x.median is None or y.median is None:
        return None
    row: dict[str, float | str] = {
        "model": name.rpartition("/")[0] or name,
        "family": family,
        "x": x.median,
        "y": y.median,
    }
    for axis, one in (("x", x), ("y", y)):
        if len(one.seeds) > 1 and one.smallest is not None and one.largest is not None:
            row |= {f"{axis}_low": one.smallest, f"{axis}_high": one.largest}
    return row


def _title(one: Quantity) -> str:
    return f"{one.label} ({one.unit})" if one.unit else one.label
