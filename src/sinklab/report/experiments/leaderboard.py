"""The leaderboard of mitigations: every cell of the experiments about them, each number with its spread over seeds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from sinklab.assessing.assessment import comparable
from sinklab.assessing.part import PartNumber
from sinklab.assessing.parts import NUMBERS
from sinklab.experiments.documents import CellRun, CellSummary
from sinklab.report.experiments.sweeps import Sweep
from sinklab.report.experiments.tables import by_seed, estimate_of, sink_elsewhere_text
from sinklab.tables import Table, TableCell, TableColumn, counted

MITIGATIONS, RETUNED = "mitigations", "mitigations_retuned"
RETUNED_IS = "the lowest of the losses at several learning rates, since one rate for all is unfair"
AT_RATE = "_lr_"
LOSS, SINK = "valid_loss", "sink_1"


@dataclass(frozen=True)
class SeedScore:
    """A number over the seeds of a cell.

    Attributes:
        median: over the seeds, as the experiment's table has it.
        seeds: the number of each seed.
        note: what it was reached with, or where the sink is otherwise.
    """

    median: float
    seeds: tuple[float, ...]
    note: str = ""


ScoreOf = Callable[[str, CellSummary], SeedScore | None]


@dataclass(frozen=True)
class BoardColumn:
    """A column of the board.

    Attributes:
        decimals: that are shown.
        score: of a cell, by its name; None where it has none.
        explained: what its title and unit do not say, for the note below the board.
        quantity: that it shows, where it is one.
    """

    title: str
    unit: str
    decimals: int
    score: ScoreOf
    explained: str = ""
    quantity: str = ""


@dataclass(frozen=True)
class Standing:
    """A line of the board.

    Attributes:
        failed: how many of its runs failed.
        scores: one per column.
    """

    cell: str
    failed: int
    scores: Sequence[SeedScore | None]


@dataclass(frozen=True)
class Leaderboard:
    """The board, the lowest validation loss first.

    Attributes:
        baseline: the cell that the others are held against.
        assessed: whether some of its runs were.
    """

    scale: str
    baseline: str
    assessed: bool
    columns: Sequence[BoardColumn]
    standings: Sequence[Standing]


def leaderboard(sweep: Sweep) -> Leaderboard | None:
    """The board of a sweep, None where it has no experiment about mitigations."""
    names = [name for name in sweep.experiments if name.startswith(MITIGATIONS) and name != RETUNED]
    if not names:
        return None
    columns = (
        BoardColumn("Valid. loss", "nats / token", 3, _quantity(LOSS), quantity=LOSS),
        BoardColumn("Retuned", "loss at the best rate", 3, lambda name, cell: _retuned(sweep, name), RETUNED_IS),
        BoardColumn("Sink₁", "% of heads", 1, _quantity(SINK), quantity=SINK),
        BoardColumn("On the bias", "% of heads", 1, _quantity("sink_bias")),
        BoardColumn("Norm ratio", "largest block", 1, _quantity("norm_ratio")),
        BoardColumn("Kurtosis", "largest block", 1, _quantity("kurtosis")),
        BoardColumn("Speed", "tokens / s", 0, _of_runs(lambda run: run.tokens_per_second)),
        BoardColumn("Memory", "peak, MB", 0, _of_runs(lambda run: run.peak_memory_mb)),
        *(prices := _prices(sweep, names)),
    )
    cells = {cell: found for name in names for cell, found in sweep.cells_of(sweep.experiments[name]).items()}
    standings = [
        Standing(
            name,
            sum(run.status == "failed" for run in cell.runs),
            [column.score(name, cell) for column in columns],
        )
        for name, cell in cells.items()
    ]
    standings.sort(key=_by_loss)
    first = sweep.experiments[names[0]]
    return Leaderboard(first.scale, first.baseline or first.cells[0], bool(prices), columns, standings)


def leaderboard_table(board: Leaderboard, key: str) -> Table:
    """A row per cell, with the lowest and the highest seed behind each median."""
    columns = [TableColumn("Cell", "what was changed", text=True)]
    columns += [TableColumn(one.title, one.unit, f",.{one.decimals}f", help=one.explained) for one in board.columns]
    rows = [
        [
            one.cell + (f" ({counted(one.failed, 'run')} failed)" if one.failed else ""),
            *(_cell(score, column.form) for score, column in zip(one.scores, columns[1:], strict=True)),
        ]
        for one in board.standings
    ]
    table = Table("Leaderboard of mitigations", columns, rows, key=key).without_empty_columns()
    notes = [
        f"At scale {board.scale}. Medians over seeds, with the lowest and the highest seed. A heading sorts by its "
        "column, and once more in reverse; missing values come last.",
        *(f"{column.title}: {column.help}." for column in table.columns if column.help),
    ]
    if board.assessed:
        notes.append("Added loss is in nats per token, above the unchanged model (sinklab assess).")
    return replace(table, notes=notes)


def _cell(score: SeedScore | None, form: str) -> TableCell | None:
    if score is None:
        return None
    low, high = f"{min(score.seeds):{form}}", f"{max(score.seeds):{form}}"
    ends = [f"{low} … {high}" if low != high else f"all {low}"] if len(score.seeds) > 1 else []
    return TableCell(score.median, " ".join([*ends, score.note]).strip())


def _by_loss(standing: Standing) -> tuple[bool, float]:
    loss = standing.scores[0]
    return (True, 0.0) if loss is None else (False, loss.median)


def _quantity(quantity: str) -> ScoreOf:
    def score(name: str, cell: CellSummary) -> SeedScore | None:
        estimate = estimate_of(cell, quantity)
        if estimate is None or estimate.median is None:
            return None
        seeds = tuple(value for _, value in by_seed(cell, quantity))
        return SeedScore(estimate.median, seeds, sink_elsewhere_text(cell, quantity))

    return score


def _of_runs(value: Callable[[CellRun], float | None]) -> ScoreOf:
    def score(name: str, cell: CellSummary) -> SeedScore | None:
        found = tuple(one for run in cell.runs if run.status == "done" and (one := value(run)) is not None)
        return SeedScore(median(found), found) if found else None

    return score


def _prices(sweep: Sweep, names: Sequence[str]) -> list[BoardColumn]:
    """Columns from the assessments of the runs of some experiments."""
    runs = [
        run
        for name in names
        for cell in sweep.cells_of(sweep.experiments[name]).values()
        for run in cell.runs
        if run.hash
    ]
    found = comparable({run.hash: one for run in runs if (one := sweep.assessment(run)) is not None})

    numbers = {run_hash: assessment.numbers() for run_hash, assessment in found.items()}

    def score(number: PartNumber) -> ScoreOf:
        return _of_runs(lambda run: numbers.get(run.hash or "", {}).get(number.name))

    return [BoardColumn(*one.column, 3, score(one), one.explained) for one in NUMBERS if one.column and found]


def _retuned(sweep: Sweep, name: str) -> SeedScore | None:
    """The lowest loss of a cell at several learning rates, with the rate."""
    tuned = sweep.experiments.get(RETUNED)
    cells = sweep.cells_of(tuned) if tuned else {}
    found = [
        (estimate.median, cell)
        for other, cell in cells.items()
        if other.startswith(name + AT_RATE) and (estimate := estimate_of(cell, LOSS)) and estimate.median is not None
    ]
    if not found:
        return None
    lowest, cell = min(found, key=lambda one: one[0])
    rate = cell.change.get("optim.lr")
    rate = (
        rate if isinstance(rate, float) else next((lr for run in cell.runs if (lr := sweep.learning_rate(run))), None)
    )
    seeds = tuple(value for _, value in by_seed(cell, LOSS))
    return SeedScore(lowest, seeds, f"at {rate:.1e}".replace("e-0", "e-") if rate else "")
