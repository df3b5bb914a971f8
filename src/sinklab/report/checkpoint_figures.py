"""Figures of a model's checkpoints: the sink, the loss and the norms by training step, and the sink by layer.

As in `charts.py`, names are data and nothing else.
"""

from collections.abc import Callable, Mapping, Sequence

import altair as alt
import numpy as np

from sinklab.report.charts import HEIGHT, ChartRows, Drawing, Width
from sinklab.report.figure import Figure
from sinklab.report.heatmaps import Side, scale_over, side_by_side
from sinklab.survey.documents import MeasuredCheckpoint, StepUnit

WIDE = 100
"""The last step over the first one after 0: from here on the axis is logarithmic, as public runs save their first
steps at powers of two."""

CURVES: tuple[tuple[str, Callable[[MeasuredCheckpoint], float | None]], ...] = (
    ("Sink₁ (percent of heads)", lambda one: one.sink_1),
    ("Sink on the bias (percent of heads)", lambda one: one.sink_bias),
    ("First token, times uniform attention", lambda one: one.uniform_ratio),
    ("Loss (nats per token)", lambda one: one.loss),
    ("Norm of the first token over the others'", lambda one: one.norm_ratio),
)


def checkpoint_figures(
    checkpoints: Mapping[str, MeasuredCheckpoint], eps: float, width: Width, number: int
) -> list[Figure]:
    """Curves over steps, and which layers have the sink when.

    Args:
        eps: threshold of the sink rate.
        number: of the suite, for the keys.
    """
    found = sorted(checkpoints.values(), key=lambda one: one.step)
    if not found:
        return []
    small = width if width == "container" else 300
    unit = found[0].unit
    counted = "tokens" if unit == "tokens" else "steps"
    drawn = [_by_step(rows, title, unit, small) for title, value in CURVES if (rows := _rows(found, value))]
    caption = (
        f"The same sequences read by every checkpoint: the share of (sequence, layer, head) triples in which the "
        f"importance of the first token is above ε = {eps:g}, that importance over the one of uniform attention, the "
        "loss, and the norm of the first token's hidden state over the mean of the others in the block where it is "
        "largest."
    )
    curves = Figure(f"checkpoints-{number}", "When the sink comes", caption, drawn, small=True)
    layers_LS = np.array([one.by_layer for one in found]).T
    layers = side_by_side(
        f"checkpoint-layers-{number}",
        "Which layers have the sink when",
        f"Share of the (sequence, head) pairs of a layer in which the importance of the first token is above ε = "
        f"{eps:g}; checkpoints in the order of their {counted}, from {found[0].step:,} to {found[-1].step:,}.",
        [("first token", layers_LS)],
        scale_over("percent of heads", [layers_LS]),
        width,
        columns=Side("Checkpoint"),
    )
    return [curves, layers]


def _rows(found: Sequence[MeasuredCheckpoint], value: Callable[[MeasuredCheckpoint], float | None]) -> ChartRows:
    return [
        {"step": one.step, "checkpoint": one.checkpoint, "value": number}
        for one in found
        if (number := value(one)) is not None
    ]


def _by_step(rows: ChartRows, title: str, unit: StepUnit, width: Width) -> Drawing:
    """A curve over the steps; rows: `step, checkpoint, value`."""
    steps = [row["step"] for row in rows]
    later = [step for step in steps if step > 0]
    wide = bool(later) and later[-1] >= WIDE * later[0]
    powers = [10**power for power in range(len(str(steps[-1])))]
    base = alt.Chart(alt.Data(values=list(rows))).encode(
        x=alt.X(
            "step:Q",
            title=("Tokens read" if unit == "tokens" else "Training step") + (" (log scale)" if wide else ""),
            scale=alt.Scale(type="symlog", constant=1) if wide else alt.Scale(zero=False),
            axis=alt.Axis(format=",d", grid=False, values=[0, *powers] if wide else alt.Undefined),
        ),
        y=alt.Y("value:Q", title=title, scale=alt.Scale(zero=not title.startswith("Loss"), nice=True)),
    )
    tooltip = [
        alt.Tooltip("checkpoint:N", title="checkpoint"),
        alt.Tooltip("step:Q", title=unit, format=",d"),
        alt.Tooltip("value:Q", title="value", format=".3f"),
    ]
    points = base.mark_point(size=34, opacity=1, filled=True).encode(tooltip=tooltip)
    return alt.layer(base.mark_line(), points).properties(width=width, height=HEIGHT)
