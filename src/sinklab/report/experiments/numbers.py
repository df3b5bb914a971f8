"""The numbers of a cell by quantity: over its seeds, of each seed, and as text."""

from sinklab.experiments.documents import CellEstimate, CellRun, CellSummary, estimated
from sinklab.experiments.quantities import Quantity, quantity
from sinklab.measuring.statistics.highest import elsewhere_text

NOTHING = "–"


def quantity_of(name: str) -> Quantity:
    """What a column shows; one that this version does not know is shown under its name."""
    try:
        return quantity(name)
    except ValueError:
        return Quantity(name, name, "", 3)


def estimate_of(cell: CellSummary, name: str) -> CellEstimate | None:
    """The number over the seeds, None without any seed that has it."""
    return estimated(cell.runs, name) or cell.values.get(name)


def by_seed(cell: CellSummary, name: str) -> list[tuple[CellRun, float]]:
    """The runs that have the number, each with it."""
    return [(run, run.values[name]) for run in cell.runs if name in run.values]


def number_text(value: float | None, decimals: int) -> str:
    """The number, an en dash for none."""
    return NOTHING if value is None else f"{value:,.{decimals}f}"


def median_text(estimate: CellEstimate | None, decimals: int) -> str:
    """The median; `never` where most seeds never reached the step that is asked for."""
    if estimate is None:
        return NOTHING
    return "never" if estimate.median is None else number_text(estimate.median, decimals)


def ends_text(estimate: CellEstimate | None, decimals: int) -> str:
    """`[15.1, 21.7]`, the smallest and the largest seed; nothing with one seed."""
    if estimate is None or len(estimate.seeds) < 2:
        return ""
    ends = ("never" if one is None else f"{one:,.{decimals}f}" for one in (estimate.smallest, estimate.largest))
    return f"[{', '.join(ends)}]"


def untrained_text(estimate: CellEstimate | None, decimals: int) -> str:
    """`untrained 2.9, lowest 1.2` of a norm ratio, nothing of other numbers."""
    if estimate is None or estimate.untrained is None:
        return ""
    return f"untrained {number_text(estimate.untrained, decimals)}, lowest {number_text(estimate.lowest, decimals)}"


def estimate_text(estimate: CellEstimate | None, decimals: int) -> str:
    """Median, smallest and largest in one line; of a norm ratio also before training and at its lowest."""
    texts = (median_text(estimate, decimals), ends_text(estimate, decimals), untrained_text(estimate, decimals))
    return " ".join(filter(None, texts))


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
