"""The figures of experiments: numbers by cell, one number against another, curves over training, the leaderboard."""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sinklab.experiments.documents import CellEstimate, CellRun, CellSummary, ExperimentSummary
from sinklab.experiments.quantities import Quantity
from sinklab.plots import PlotAxis
from sinklab.report.charts import Dots, Drawing, Figure, Width, dots, lines, scatter
from sinklab.report.experiments.leaderboard import LOSS, SINK, Leaderboard
from sinklab.report.experiments.sweeps import Sweep
from sinklab.report.experiments.tables import by_seed, estimate_of, quantity_of, replicate_of
from sinklab.schema import finite_or_none
from sinklab.train.directory.history import Evaluation

OTHERS = "other models"
FAR = 1.0
"""Nats per token above the baseline from which losses are drawn on a scale that is linear near the baseline alone."""
NAME = re.compile(r"(.+)_(\d+(?:\.\d+)?(?:e-?\d+)?)([kMB]?)")
TIMES = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9}
FEWEST = 3
"""Cells that are an order."""
LAYERS = ("sink_layer_", "layer_step_")
"""Beginnings of numbers of one layer: an experiment about one shows them all."""


@dataclass(frozen=True)
class Ordered:
    """Cells from the smallest value to the largest.

    Attributes:
        what: is varied.
        labels: of the cells by their names, in order; a cell that varies nothing is first, under its own name.
    """

    what: str
    labels: dict[str, str]


def ordered(cells: Sequence[str]) -> Ordered | None:
    """The order that the names of cells say: None unless all but at most one are `WORD_NUMBER` with the same word."""
    found = {name: match for name in cells if (match := NAME.fullmatch(name))}
    others = [name for name in cells if name not in found]
    words = {match[1] for match in found.values()}
    if len(words) != 1 or len(found) < FEWEST or len(others) > 1:
        return None
    rising = sorted(found, key=lambda name: float(found[name][2]) * TIMES[found[name][3]])
    labels = {name: found[name][2] + found[name][3] for name in rising}
    return Ordered(words.pop().replace("_", " "), {name: name for name in others} | labels)


def keyed(sweeps: Sequence[Sweep]) -> list[tuple[Sweep, str, str]]:
    """Every experiment of some sweeps, with the key of its anchor and chart files, of letters, digits, - and _."""
    found: dict[str, tuple[Sweep, str]] = {}
    for sweep in sweeps:
        for name in sweep.experiments:
            plain = re.sub(r"[^A-Za-z0-9_-]", "-", name) or "experiment"
            keys = (plain, *(f"{plain}-{number}" for number in range(2, len(found) + 3)))
            found[next(key for key in keys if key not in found)] = (sweep, name)
    return [(sweep, name, key) for key, (sweep, name) in found.items()]


def all_experiment_figures(sweeps: Sequence[Sweep], page: Path, width: Width) -> list[Figure]:
    """Those of every experiment of some sweeps; see `experiment_figures`."""
    return [one for sweep, name, key in keyed(sweeps) for one in experiment_figures(sweep, name, key, page, width)]


def experiment_figures(sweep: Sweep, name: str, key: str, page: Path, width: Width) -> list[Figure]:
    """The figures of an experiment of a sweep.

    Args:
        key: of its section.
        page: the folder of the page, from which links lead to runs.

    Raises:
        InputError: the metrics of a run are damaged.
    """
    made = [
        _numbers(sweep, name, key, page, width),
        _against(sweep, name, key, width),
        _growth(sweep, name, key, width),
        _by_layer(sweep, name, key, width),
    ]
    return [figure for figure in made if figure is not None]


def _numbers(sweep: Sweep, name: str, key: str, page: Path, width: Width) -> Figure | None:
    experiment = sweep.experiments[name]
    cells = sweep.cells_of(experiment)
    order = ordered(list(cells))
    shown = [quantity_of(column) for column in experiment.columns]
    charts = [
        _chart(sweep, cells, experiment, one, order, page, width)
        for one in shown
        if any(estimate_of(cell, one.name) for cell in cells.values())
    ]
    estimates = [estimate_of(cell, one.name) for cell in cells.values() for one in shown]
    caption = _caption(experiment, any(one is not None and one.never_reached for one in estimates))
    return Figure(f"{key}-numbers", experiment.title, caption, charts, small=True) if charts else None


def _against(sweep: Sweep, name: str, key: str, width: Width) -> Figure | None:
    experiment = sweep.experiments[name]
    chart = against(sweep.cells_of(experiment), experiment, width) if len(experiment.against) == 2 else None
    if chart is None:
        return None
    first, second = (quantity_of(one).label for one in experiment.against)
    many = f"{replicate_of(experiment)}s"
    caption = f"Every point is a model: medians over {many}, the bars from the smallest to the largest of several."
    return Figure(f"{key}-against", f"{experiment.title}: {second} against {first}", caption, [chart])


def against(cells: dict[str, CellSummary], experiment: ExperimentSummary, width: Width) -> Drawing | None:
    """The second quantity of `against` over the first; None where no cell has both.

    Models of one family of the paper's list have one colour.
    """
    across, up = (quantity_of(name) for name in experiment.against)
    rows = [
        {
            "model": name.rpartition("/")[0] or name,
            "family": experiment.families.get(name, OTHERS),
            **_ends("x", x.median, [x.smallest, x.largest] if len(x.seeds) > 1 else []),
            **_ends("y", y.median, [y.smallest, y.largest] if len(y.seeds) > 1 else []),
        }
        for name, cell in cells.items()
        if (x := estimate_of(cell, across.name)) and (y := estimate_of(cell, up.name))
        if x.median is not None and y.median is not None
    ]
    if not rows:
        return None
    return scatter(
        rows,
        PlotAxis(_title(across), "x", across.label, zero=False, precision=f".{across.decimals}f"),
        PlotAxis(_title(up), "y", up.label, zero=False, precision=f".{up.decimals}f"),
        "family",
        list(dict.fromkeys(row["family"] for row in rows)),
        label="model",
        tips=[("model", "model", "")],
        width=width,
    )


def _ends(field: str, value: float, spread: Sequence[float | None], above: float = 0.0) -> dict[str, Any]:
    """The fields of a point on one axis, with the smallest and the largest of several."""
    known = [one - above for one in spread if one is not None]
    ends = {f"{field}_low": min(known), f"{field}_high": max(known)} if len(known) > 1 else {}
    return {field: value - above, **ends}


def _title(one: Quantity) -> str:
    return f"{one.label} ({one.unit})" if one.unit else one.label


def board_figure(board: Leaderboard, key: str, width: Width) -> Figure | None:
    """Sink_1 of every cell of a leaderboard against its loss above the baseline's; None without the baseline's loss.

    Named are the baseline, and the cells that no other is as good as in both and better in one.
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
        {
            "model": cell,
            "kind": board.baseline if cell == board.baseline else "mitigations",
            "named": cell if is_named(cell) else "",
            **_ends("x", loss.median, loss.seeds, least),
            **_ends("y", sink.median, sink.seeds),
        }
        for cell, (loss, sink) in scores.items()
    ]
    chart = scatter(
        rows,
        PlotAxis(
            f"Validation loss above {board.baseline} (nats / token)",
            "x",
            f"loss above {board.baseline}",
            scale="symlog" if max(abs(x) for x, _ in points.values()) > FAR else "linear",
            constant=0.05,
            zero=False,
            precision="+.3f",
        ),
        PlotAxis("Sink₁ (% of heads)", "y", "Sink₁", precision=".1f"),
        "kind",
        ["mitigations", board.baseline],
        label="named",
        tips=[("model", "cell", "")],
        width=width,
    )
    caption = (
        "Medians over seeds, the lines from the smallest to the largest. Named are the baseline and the cells to which "
        "no other is better in both. A sink may be at another position: the board says where."
    )
    return Figure(key, f"Sink₁ against the loss at scale {board.scale}", caption, [chart])


def _caption(experiment: ExperimentSummary, bounds: bool) -> str:
    if replicate_of(experiment) == "seed":
        one, place, many = f"a run of one seed at scale {experiment.scale}", "recipe", "seeds"
    else:
        one, place, many = f"{experiment.scale} on one draw of sequences", "measurement", "draws"
    caption = (
        f"Every point is {one}, and leads to its {place}; the bar is the median over {many}, the line from the "
        "smallest to the largest."
    )
    if bounds:
        caption += " An arrow: there are seeds that did not get there within their steps."
    if experiment.published:
        caption += " The open diamond is the paper's number, a single run at the paper's own scale."
    return caption


def _chart(
    sweep: Sweep,
    cells: dict[str, CellSummary],
    experiment: ExperimentSummary,
    shown: Quantity,
    order: Ordered | None,
    page: Path,
    width: Width,
) -> Drawing:
    labels = order.labels if order else {cell: cell for cell in cells}
    estimates = {cell: estimate_of(cells[cell], shown.name) for cell in labels}
    rows = Dots(
        cells=list(labels),
        labels=list(labels.values()),
        seeds=[
            {"cell": cell, "at": labels[cell], **point_of(sweep, run, value, page)}
            for cell in labels
            for run, value in by_seed(cells[cell], shown.name)
        ],
        middles=[
            {"cell": cell, "at": labels[cell], **middle_of(one)} for cell, one in estimates.items() if one is not None
        ],
        paper=[
            {"cell": cell, "at": labels[cell], "value": experiment.published[cell][shown.name]}
            for cell in labels
            if shown.name in experiment.published.get(cell, {})
        ],
        decimals=shown.decimals,
    )
    return dots(rows, values_axis(_title(shown), shown.unit in ("%", "steps")), order and order.what, width=width)


def values_axis(title: str, from_zero: bool) -> PlotAxis:
    """The axis of the values of dots: from zero, and to one at least, or logarithmic where they span much."""
    scale = "linear" if from_zero else "auto"
    return PlotAxis(title, "value", scale=scale, zero=from_zero, at_least=1.0 if from_zero else None)


def middle_of(one: CellEstimate) -> dict[str, float]:
    """Median, ends where there are several seeds, and behind which seed those lie that never got there."""
    reached = [value for value in one.seeds if value is not None]
    several = len(one.seeds) > 1
    found = {
        "median": one.median,
        "smallest": one.smallest if several else None,
        "largest": max(reached, default=None) if several else None,
        "beyond": max(reached, default=None) if one.never_reached else None,
    }
    return {"never_reached": one.never_reached, **{name: value for name, value in found.items() if value is not None}}


def point_of(sweep: Sweep, run: CellRun, value: float, page: Path) -> dict[str, str | float]:
    """The number of a run as a point: what it says of the run, and where it leads."""
    link = link_to(sweep, run, page)
    return {"seed": run.seed, "value": value, "run": run.hash, **({"link": link} if link else {})}


def link_to(sweep: Sweep, run: CellRun, page: Path) -> str | None:
    """From the folder of a page to the recipe of a run, None where it is not on the disk.

    The names of folders are quoted, so that no part of them is taken for a scheme or a query.
    """
    file = sweep.provenance(run)
    return quote(os.path.relpath(file.resolve(), page.resolve())) if file else None


def _asked(sweep: Sweep, name: str) -> set[str]:
    """The numbers of an experiment's columns and claims."""
    return {*sweep.experiments[name].columns, *(claim.quantity for claim in sweep.claims_of(name))}


def _growth(sweep: Sweep, name: str, key: str, width: Width) -> Figure | None:
    """The quantities whose steps an experiment compares, against training step."""
    asked = _asked(sweep, name)
    charts = [_curve(sweep, name, curve, width) for numbers, curve in _CURVES if numbers & asked]
    shown = [chart for chart in charts if chart is not None]
    title = f"{sweep.experiments[name].title}: while the models train"
    return Figure(f"{key}-growth", title, "A line per seed.", shown) if shown else None


_STEPS = PlotAxis("Training step", "step", "step", whole=True, precision=",d")


@dataclass(frozen=True)
class _Curve:
    """A number of every evaluation that has it."""

    title: str
    number: Callable[[Evaluation], float | None]
    from_zero: bool = True


_CURVES = (
    (
        {"emergence_step", "norm_step", "loss_change"},
        _Curve("Sink₁ (percent of heads)", lambda one: one.sink_rate[0] if one.sink_rate else None),
    ),
    ({"norm_step"}, _Curve("Norm ratio of the first token", lambda one: finite_or_none(one.largest_norm_ratio))),
    ({"loss_change"}, _Curve("Validation loss (nats)", lambda one: one.valid_loss if one.step else None, False)),
)
"""By the numbers whose experiments show them; the loss of an untrained model is left out."""


def _curve(sweep: Sweep, name: str, curve: _Curve, width: Width) -> Drawing | None:
    cells = sweep.cells_of(sweep.experiments[name])
    rows = [
        {"cell": cell, "seed": run.seed, "step": one.step, "value": value}
        for cell, found in cells.items()
        for run in found.runs
        for one in sweep.history(run)
        if (value := curve.number(one)) is not None
    ]
    if not rows:
        return None
    y = PlotAxis(curve.title, "value", zero=curve.from_zero, at_least=1.0 if curve.from_zero else None, precision=".2f")
    known = {row["cell"] for row in rows}
    return lines(rows, _STEPS, y, order=[cell for cell in cells if cell in known], apart=["seed"], width=width)


def _by_layer(sweep: Sweep, name: str, key: str, width: Width) -> Figure | None:
    """How often each layer's most frequent sink head sinks, where an experiment asks about layers."""
    experiment = sweep.experiments[name]
    if not any(one.startswith(LAYERS) for one in _asked(sweep, name)):
        return None
    rows = [
        {"cell": cell, "seed": run.seed, "step": one.step, "layer": layer, "value": rate}
        for cell, found in sweep.cells_of(experiment).items()
        for run in found.runs
        for one in sweep.history(run)
        for layer, rate in enumerate(one.rate_layers, 1)
        if rate is not None
    ]
    if not rows:
        return None
    caption = "Of each layer the head that most often sinks into the first token; a line per seed."
    y = PlotAxis("Sequences in which a head sinks (percent)", "value", at_least=1.0, precision=".2f")
    chart = lines(rows, _STEPS, y, "layer", apart=["cell", "seed"], width=width)
    return Figure(f"{key}-layers", f"{experiment.title}: layer by layer", caption, [chart])
