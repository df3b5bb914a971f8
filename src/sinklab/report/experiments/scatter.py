"""One number of an experiment's cells against another: a point for each cell, with the ends of both."""

import altair as alt

from sinklab.experiments.documents import CellSummary, ExperimentSummary
from sinklab.experiments.quantities import Quantity
from sinklab.report import theme
from sinklab.report.charts import HEIGHT, Drawing, Width
from sinklab.report.experiments.numbers import estimate_of, quantity_of

OTHERS = "other models"


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
    layers = [base.mark_point(size=70, filled=True).encode(x=x, y=y, tooltip=tooltip)]
    if any("x_low" in row for row in rows):
        layers.append(base.mark_rule(opacity=0.5).encode(x=alt.X("x_low:Q"), x2="x_high:Q", y=y))
    if any("y_low" in row for row in rows):
        layers.append(base.mark_rule(opacity=0.5).encode(x=x, y=alt.Y("y_low:Q"), y2="y_high:Q"))
    layers.append(base.mark_text(align="left", dx=8, dy=-8).encode(x=x, y=y, text="model:N"))
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
