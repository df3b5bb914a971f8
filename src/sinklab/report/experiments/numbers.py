"""The numbers of a cell by quantity: over its seeds, of each seed, and as text."""

import statistics

from sinklab.experiments.documents import CellEstimate, CellRun, CellSummary
from sinklab.experiments.quantities import Quantity, quantity
from sinklab.measuring.statistics.highest import elsewhere_text

NOTHING = "–"


def quantity_of(name: str) -> Quantity:
    """What a column shows; one that this version does not know is shown under its name."""
    try:
        return quantity(name)
    except ValueError:
        return Quantity(name, name, "", "positive", 3)


def estimate_of(cell: CellSummary, name: str) -> CellEstimate | None:
    """Mean and interval over the seeds; the plain mean where the summary has none, None without any seed."""
    values = [value for _, value in by_seed(cell, name)]
    return cell.values.get(name) or (CellEstimate(mean=statistics.fmean(values)) if values else None)


def by_seed(cell: CellSummary, name: str) -> list[tuple[CellRun, float]]:
    """The runs that have the number, each with it."""
    return [(run, run.values[name]) for run in cell.runs if name in run.values]


def number_text(value: float | None, decimals: int) -> str:
    """The number, an en dash for none."""
    return NOTHING if value is None else f"{value:,.{decimals}f}"


def mean_text(estimate: CellEstimate | None, decimals: int) -> str:
    """The mean; `> 1,500` where seeds never reached the step that is asked for."""
    if estimate is None:
        return NOTHING
    return ("> " if estimate.never_reached else "") + number_text(estimate.mean, decimals)


def interval_text(estimate: CellEstimate | None, decimals: int) -> str:
    """`[15.1, 21.7]`, nothing where there is no interval."""
    if estimate is None or estimate.low is None or estimate.high is None:
        return ""
    return f"[{estimate.low:,.{decimals}f}, {estimate.high:,.{decimals}f}]"


def estimate_text(estimate: CellEstimate | None, decimals: int) -> str:
    """Mean and interval in one line."""
    return f"{mean_text(estimate, decimals)} {interval_text(estimate, decimals)}".strip()


def sink_elsewhere_text(cell: CellSummary, name: str) -> str:
    """Beside Sink_1: `76.8 % at position 2` where the highest sink of the cell is at another position; else empty."""
    return elsewhere_text(cell.sink_rate) if name == "sink_1" else ""


def change_text(cell: CellSummary) -> list[str]:
    """What the cell changes in the base recipe, as `--set` takes it."""
    return [f"{key}={_setting(value)}" for key, value in cell.change.items()]


def _setting(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
