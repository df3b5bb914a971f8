"""Figures of a sweep: our values compared with the paper's, and the figures of each experiment.

An experiment has up to four figures: values by cell, one quantity against another, training curves, sinks by layer.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import polars as pl

from sinklab.experiments.documents import CellRun, CellSummary, ExperimentSummary
from sinklab.experiments.paper import statements
from sinklab.experiments.quantities import quantity
from sinklab.experiments.verdicts.wording import number
from sinklab.measuring.registry import METRICS, Evaluation, Metric
from sinklab.report.charts import STEPS, Drawing, Figure, dots, lines, scatter
from sinklab.report.data import ReportedRun, run_table
from sinklab.report.html import caption
from sinklab.report.sweeps import Sweep
from sinklab.tables import NOTHING, SINK_1, PlotAxis, Table, TableColumn, names

OTHER_MODELS = "other models"
CELL_NAME = re.compile(r"(.+)_(\d+(?:\.\d+)?(?:e-?\d+)?)([kMB]?)")
FACTORS = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9}
FEWEST_ORDERED = 3
"""Minimum number of cells named `WORD_NUMBER` for which the cells are ordered by number."""
LAYER_NUMBERS = ("sink_layer_", "layer_step_")
"""Prefixes of quantities of one layer; an experiment with such a quantity has a figure of the sinks by layer."""
STATEMENT_PIXELS = 215
TRAINING_CURVES: Sequence[tuple[set[str], str, Callable[[Evaluation], float | None]]] = (
    (
        {"emergence_step", "sink_step", "norm_step", "loss_change"},
        f"{SINK_1} (percent of heads)",
        METRICS["sink_1"].read,
    ),
    ({"norm_step"}, "Norm ratio of the first token", METRICS["norm_ratio"].read),
    ({"loss_change"}, "Validation loss (nats per token)", lambda one: one.valid_loss if one.step else None),
)
"""Training curves as (metrics, axis title, value of an evaluation).

A curve is drawn if an experiment uses one of the metrics in its table or claims. The loss at step 0 is omitted.
"""


def cell_order(cells: Sequence[str]) -> tuple[str, dict[str, str]] | None:
    """Order cells by the number in their names, such as `lr_1e-3` or `tokens_50M`.

    Returns:
        The word shared by the names, and the cells' labels by name in ascending order of the number; a cell without a
        number is first. None if fewer than three cells are named `WORD_NUMBER`, if their words differ, or if several
        cells have other names.
    """
    found = {name: match for name in cells if (match := CELL_NAME.fullmatch(name))}
    others = [name for name in cells if name not in found]
    words = {match[1] for match in found.values()}
    if len(words) != 1 or len(found) < FEWEST_ORDERED or len(others) > 1:
        return None
    rising = sorted(found, key=lambda name: float(found[name][2]) * FACTORS[found[name][3]])
    labels = {name: found[name][2] + found[name][3] for name in rising}
    return words.pop().replace("_", " "), {name: name for name in others} | labels


def experiment_keys(sweeps: Sequence[Sweep]) -> list[tuple[Sweep, str, str]]:
    """Return (sweep, experiment, key) for every experiment, with a key for its anchor and chart files.

    Keys are unique among the experiments, and consist of letters, digits, - and _.
    """
    found: dict[str, tuple[Sweep, str]] = {}
    for sweep in sweeps:
        for name in sweep.summary.experiments:
            plain = re.sub(r"[^A-Za-z0-9_-]", "-", name) or "experiment"
            keys = (plain, *(f"{plain}-{number}" for number in range(2, len(found) + 3)))
            found[next(key for key in keys if key not in found)] = (sweep, name)
    return [(sweep, name, key) for key, (sweep, name) in found.items()]


def experiment_figures(sweep: Sweep, name: str, key: str, page: Path) -> list[Figure]:
    """Draw the figures of an experiment of a sweep.

    Args:
        key: anchor of the experiment's section, without `experiment-`; the keys of the figures start with it.
        page: folder of the page; links of points are relative to it.

    Raises:
        InputError: if metrics.jsonl of a run cannot be read or has an invalid line.
    """
    experiment = sweep.summary.experiments[name]
    cells = sweep.summary.cells_of(name)
    asked = {*experiment.columns, *(claim.quantity for claim in sweep.summary.claims_of(name))}
    made = [_numbers(sweep, experiment, cells, key, page)]
    if chart := quantity_scatter(cells, experiment):
        first, second = (quantity(one).shown for one in experiment.against)
        many = f"{experiment.replicate}s"
        about = f"Each point is a model: the median over {many}. Bars extend from the minimum to the maximum."
        made.append(Figure(f"{key}-against", f"{experiment.title}: {second} versus {first}", about, [chart]))
    read = {title: read for quantities, title, read in TRAINING_CURVES if quantities & asked}
    by_layer = any(one.startswith(LAYER_NUMBERS) for one in asked)
    runs = [
        ReportedRun(Path(run.directory), cell, run.seed, history=sweep.history(run))
        for cell, found in (cells.items() if read or by_layer else ())
        for run in found.runs
    ]
    table = run_table(runs, {}, read)
    growth = []
    for title in read:
        if rows := table.filter(pl.col("metric") == title).select("cell", "seed", "step", "value").to_dicts():
            known, from_zero = {row["cell"] for row in rows}, not title.startswith("Validation loss")
            y = PlotAxis(title, "value", zero=from_zero, at_least=1.0 if from_zero else None, precision=".2f")
            growth.append(lines(rows, STEPS, y, order=[cell for cell in cells if cell in known], apart=["seed"]))
    if growth:
        made.append(Figure(f"{key}-growth", f"{experiment.title}: training curves", "One line per run.", growth))
    rates = [
        {"cell": run.cell, "seed": run.seed, "step": one.step, "layer": layer, "value": rate}
        for run in (runs if by_layer else ())
        for one in run.history
        for layer, rate in enumerate(one.rate_layers, 1)
        if rate is not None
    ]
    if rates:
        about = "Sink on the first token: maximum over the heads of a layer, with one line per layer and run."
        y = PlotAxis("Sequences in which the head has a sink (percent)", "value", at_least=1.0, precision=".2f")
        chart = lines(rates, STEPS, y, "layer", apart=["cell", "seed"])
        made.append(Figure(f"{key}-layers", f"{experiment.title}: by layer", about, [chart]))
    return [figure for figure in made if figure is not None]


def _numbers(
    sweep: Sweep, experiment: ExperimentSummary, cells: dict[str, CellSummary], key: str, page: Path
) -> Figure | None:
    """Draw a chart per quantity: each cell's values, their median and range, and the paper's value.

    Returns None if no cell has a value.
    """
    varied, labels = cell_order(list(cells)) or (None, {cell: cell for cell in cells})
    drawn: list[Drawing] = []
    bounds = False
    for metric in map(quantity, experiment.columns):
        seeds, middles = _points(sweep, {cell: cells[cell] for cell in labels}, metric.name, page)
        if not middles:
            continue
        bounds = bounds or any(row["never_reached"] for row in middles)
        printed = {cell: experiment.published.get(cell, {}).get(metric.name) for cell in labels}
        paper = [{"cell": cell, "value": value} for cell, value in printed.items() if value is not None]
        axis = _values_axis(_title(metric), metric.unit in ("%", "steps"))
        of = experiment.replicate
        drawn.append(dots(labels, seeds, middles, paper, axis, metric.decimals, varied, replicate=of))
    if not drawn:
        return None
    about = caption(
        "experiment_numbers",
        replicate=experiment.replicate,
        scale=experiment.scale,
        bounds=bounds,
        in_paper=bool(experiment.published),
    )
    return Figure(f"{key}-numbers", experiment.title, about, drawn, small=True)


def _points(
    sweep: Sweep, cells: Mapping[str, CellSummary], metric: str, page: Path
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows `seeds` and `middles` of `charts.dots` for a metric; unknown and missing fields are omitted."""
    seeds, middles = [], []
    for cell, found in cells.items():
        for run, value in found.by_seed(metric):
            link = link_to(sweep, run, page)
            seeds.append(
                {"cell": cell, "seed": run.seed, "value": value, "run": run.hash, **({"link": link} if link else {})}
            )
        if one := found.estimate(metric):
            reached = max((value for value in one.seeds if value is not None), default=None)
            ends = {"smallest": one.smallest, "largest": reached} if len(one.seeds) > 1 else {}
            known = {"median": one.median, **ends, "beyond": reached if one.never_reached else None}
            known = {name: value for name, value in known.items() if value is not None}
            middles.append({"cell": cell, "never_reached": one.never_reached, **known})
    return seeds, middles


def quantity_scatter(cells: dict[str, CellSummary], experiment: ExperimentSummary) -> Drawing | None:
    """Plot the second quantity of `experiment.against` against the first, with a colour per model family.

    None if the experiment does not name two such quantities, or no cell has a finite median of both.
    """
    if len(experiment.against) != 2:
        return None
    across, up = (quantity(name) for name in experiment.against)
    rows = [
        {
            "model": name.rpartition("/")[0] or name,
            "family": experiment.families.get(name, OTHER_MODELS),
            **error_bar("x", x.median, [x.smallest, x.largest] if len(x.seeds) > 1 else []),
            **error_bar("y", y.median, [y.smallest, y.largest] if len(y.seeds) > 1 else []),
        }
        for name, cell in cells.items()
        if (x := cell.estimate(across.name)) and (y := cell.estimate(up.name))
        if x.median is not None and y.median is not None
    ]
    if not rows:
        return None
    x_axis, y_axis = (
        PlotAxis(_title(one), field, one.shown, zero=False, precision=f".{one.decimals}f")
        for one, field in ((across, "x"), (up, "y"))
    )
    families = list(dict.fromkeys(row["family"] for row in rows))
    return scatter(rows, x_axis, y_axis, "family", families, label="model", tips=[("model", "model", "")])


def forests(sweeps: Sequence[Sweep], page: Path) -> list[Figure]:
    """Draw a figure for each sweep with claims about the paper's main statements: our values next to the paper's.

    Args:
        page: folder of the page; links of points are relative to it.
    """
    found = [_forest(sweep, f"forest{number or ''}", page) for number, sweep in enumerate(sweeps)]
    return [figure for figure in found if figure is not None]


def _forest(sweep: Sweep, key: str, page: Path) -> Figure | None:
    summary = sweep.summary
    said = [one.at(summary.scale) for one in statements()]
    claims = {place: summary.claims_named(one.claims) for place, one in enumerate(said, 1)}
    if not any(claims.values()):
        return None
    paper, rows = [], []
    seeds: list[dict[str, Any]] = []
    middles: list[dict[str, Any]] = []
    for place, statement in enumerate(said, 1):
        if not (wanted := statement.number):
            continue
        label, of = f"{place} {statement.says}", quantity(wanted.value)
        cell = summary.cell(claims[place][0].experiment, wanted.cell) if claims[place] else CellSummary(seeds=0)
        found = _points(sweep, {label: cell.model_copy(update={"values": {}})}, wanted.value, page)
        seeds, middles = seeds + found[0], middles + found[1]
        paper.append({"cell": label, "value": wanted.paper})
        ours = ", ".join(number(row["value"], of) for row in found[0]) or NOTHING
        rows.append([label, wanted.cell, of.label, ours, wanted.paper])
    labels = {row[0]: row[0] for row in rows}
    exploratory = [str(place) for place, found in claims.items() if found and found[0].analysis == "exploratory"]
    about = caption("forest", exploratory=", ".join(exploratory))
    columns = [*names("Statement", "Cell", "Quantity"), TableColumn("Ours", "every seed, %")]
    table = Table("", [*columns, TableColumn("Paper", "%", ".2f")], rows)
    scale = f" at {summary.scale}" if summary.scale else ""
    axis = _values_axis("Percent of heads", True)
    chart = dots(labels, seeds, middles, paper, axis, 1, label_width=STATEMENT_PIXELS)
    return Figure(key, f"Our sink rates{scale} compared with the paper's", about, [chart], table=table)


def error_bar(field: str, value: float, spread: Sequence[float | None], baseline: float = 0.0) -> dict[str, Any]:
    """Return the coordinate FIELD of a point and the ends FIELD_low and FIELD_high of its error bar.

    `baseline` is subtracted from all three. The ends are omitted if fewer than two values of `spread` are known.
    """
    known = [one - baseline for one in spread if one is not None]
    ends = {f"{field}_low": min(known), f"{field}_high": max(known)} if len(known) > 1 else {}
    return {field: value - baseline, **ends}


def _title(one: Metric) -> str:
    return f"{one.shown} ({one.unit})" if one.unit else one.shown


def _values_axis(title: str, from_zero: bool) -> PlotAxis:
    """Make a value axis: from zero to at least one if `from_zero`, else linear or, for a large range, logarithmic."""
    scale = "linear" if from_zero else "auto"
    return PlotAxis(title, "value", scale=scale, zero=from_zero, at_least=1.0 if from_zero else None)


def link_to(sweep: Sweep, run: CellRun, page: Path) -> str | None:
    """Return the link to the file of a run (`Sweep.provenance`), relative to a page's folder; None if there is no file.

    Folder names are quoted, so that no part of a name is parsed as a scheme or a query.
    """
    file = sweep.provenance(run)
    return quote(os.path.relpath(file.resolve(), page.resolve())) if file else None
