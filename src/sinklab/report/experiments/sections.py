"""What the page shows of a sweep, as texts: a section per experiment, the leaderboard, the counts of verdicts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sinklab.experiments.documents import (
    ANALYSES,
    CellEstimate,
    CellRun,
    CellSummary,
    JudgedClaim,
    verdict_counts,
)
from sinklab.report.charts import Width
from sinklab.report.experiments.comparison import ComparedCell, ComparedCells, compared
from sinklab.report.experiments.figures import experiment_figures, keyed, link_to
from sinklab.report.experiments.leaderboard import BoardColumn, Leaderboard, SeedScore, leaderboard
from sinklab.report.experiments.models import Replicate, paper_models, replicate_of
from sinklab.report.experiments.numbers import (
    NOTHING,
    change_text,
    ends_text,
    median_text,
    number_text,
    quantity_of,
    untrained_text,
)
from sinklab.report.experiments.scatter import board_figure
from sinklab.report.experiments.sweeps import Sweep
from sinklab.report.figure import DataTable, Figure
from sinklab.report.summary import counted

FAILED_THERE = "did not train"
WHAT = "median [smallest, largest]"


@dataclass(frozen=True)
class ShownNumber:
    """A number in a table.

    Attributes:
        text: of the median.
        spread: the smallest and the largest, and what is to be known beside them.
        value: to sort by; None where there is none.
    """

    text: str
    spread: str = ""
    value: float | None = None


@dataclass(frozen=True)
class ShownRun:
    """A run in the list of a cell.

    Attributes:
        link: to its recipe.
        warnings: what is wrong with it.
    """

    seed: int
    status: str
    values: Sequence[str]
    seconds: str
    hash: str
    link: str | None
    warnings: Sequence[str]


@dataclass(frozen=True)
class ShownCell:
    """A cell with its runs.

    Attributes:
        change: what it changes in the base recipe.
        badges: what to know of its runs without looking at them, each with its style.
    """

    name: str
    change: Sequence[str]
    runs: Sequence[ShownRun]
    badges: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class ShownExperiment:
    """The section of an experiment.

    Attributes:
        key: of its anchor.
        columns: title and unit of the numbers' columns, the paper's beside ours.
        rows: the cell's name and its numbers.
        verdicts: how often there is each, confirmatory and exploratory claims apart.
        run: whether any of its own claims, or without claims any of its cells, has the runs it needs.
        in_paper: whether the paper has numbers for it.
        replicate: what its numbers are over: a seed, or a draw of sequences that an existing model is measured on.
        elsewhere: what the paper prints of other models than the one that is measured; None where nothing.
        run_columns: titles of the numbers of a run.
    """

    key: str
    name: str
    title: str
    question: str
    source: str
    scale: str
    adapted: Sequence[str]
    verdicts: Mapping[str, Mapping[str, int]]
    run: bool
    figures: Sequence[Figure]
    columns: Sequence[tuple[str, str]]
    rows: Sequence[tuple[str, Sequence[ShownNumber]]]
    in_paper: bool
    replicate: Replicate
    elsewhere: DataTable | None
    claims: Sequence[JudgedClaim]
    run_columns: Sequence[str]
    cells: Sequence[ShownCell]


@dataclass(frozen=True)
class ShownGroup:
    """Experiments under one heading.

    Attributes:
        key: of its anchor.
        folded: whether the reader has to ask for them.
    """

    key: str
    title: str
    folded: bool
    experiments: Sequence[ShownExperiment]


@dataclass(frozen=True)
class ShownBoard:
    """The leaderboard as texts, ready to be sorted.

    Attributes:
        key: of its anchor.
        figure: the loss of every cell against its sink; None where there is no softmax among them.
        explained: of the columns that are shown, title and explanation of those that have one.
    """

    key: str
    scale: str
    figure: Figure | None
    assessed: bool
    explained: Sequence[tuple[str, str]]
    columns: Sequence[tuple[str, str]]
    rows: Sequence[tuple[str, Sequence[ShownNumber]]]


def shown_experiments(sweeps: Sequence[Sweep], page: Path) -> list[ShownExperiment]:
    """A section per experiment, in the order of the summaries.

    Args:
        page: the folder of the page, from which links lead to runs.

    Raises:
        InputError: the metrics of a run are damaged.
    """
    return [_shown(sweep, name, key, page) for sweep, name, key in keyed(sweeps)]


def _shown(sweep: Sweep, name: str, key: str, page: Path) -> ShownExperiment:
    experiment, table = sweep.experiments[name], compared(sweep, name)
    claims, replicate = sweep.claims_of(name), replicate_of(experiment)
    return ShownExperiment(
        key=key,
        name=name,
        title=experiment.title or name,
        question=experiment.question,
        source=experiment.source,
        scale=experiment.scale,
        adapted=experiment.adapted,
        verdicts=verdict_counts(claims),
        run=_is_run(claims, sweep.cells_of(experiment).values()),
        figures=experiment_figures(sweep, name, key, page, "container"),
        columns=_columns(table, replicate),
        rows=[(cell.name, _numbers(table, cell)) for cell in table.cells],
        in_paper=bool(experiment.published),
        replicate=replicate,
        elsewhere=paper_models(experiment),
        claims=claims,
        run_columns=[one.label for one in table.columns],
        cells=[
            _cell(sweep, cell, found, [one.name for one in table.columns], page)
            for cell, found in sweep.cells_of(experiment).items()
        ],
    )


def _columns(table: ComparedCells, replicate: Replicate) -> list[tuple[str, str]]:
    columns = [(f"{replicate}s".capitalize(), "finished")]
    for one in table.columns:
        once = ", measured once, at the end" if one.once else ""
        columns.append((one.label, f"{one.unit}, {WHAT}{once}" if one.unit else f"{WHAT}{once}"))
        columns += [("the paper’s", one.unit)] if one.name in table.in_paper else []
    return columns


def _numbers(table: ComparedCells, cell: ComparedCell) -> list[ShownNumber]:
    numbers = [ShownNumber(cell.seeds, counted(cell.failed, "run") + " failed" if cell.failed else "")]
    for one in table.columns:
        estimate = cell.ours[one.name]
        beside = f"{_beside(estimate, one.decimals)} {cell.elsewhere[one.name]}".strip()
        numbers.append(ShownNumber(median_text(estimate, one.decimals), beside))
        if one.name in table.in_paper:
            there = FAILED_THERE if not cell.trained_there else NOTHING
            paper = cell.paper.get(one.name)
            numbers.append(ShownNumber(there if paper is None else number_text(paper, max(one.decimals, 2))))
    return numbers


def _beside(estimate: CellEstimate | None, decimals: int) -> str:
    if estimate and estimate.never_reached:
        return f"{counted(estimate.never_reached, 'seed')} did not get there"
    return " ".join(filter(None, (ends_text(estimate, decimals), untrained_text(estimate, decimals))))


def _cell(sweep: Sweep, name: str, cell: CellSummary, columns: Sequence[str], page: Path) -> ShownCell:
    return ShownCell(name, change_text(cell), [_run(sweep, run, columns, page) for run in cell.runs], _badges(cell))


def _badges(cell: CellSummary) -> list[tuple[str, str]]:
    failed, unfinished = (sum(run.status == how for run in cell.runs) for how in ("failed", "unfinished"))
    edited = sum(bool(run.edited) for run in cell.runs)
    counts = ((failed, "failed", "warn"), (edited, "edited", "warn"), (unfinished, "unfinished", "inconclusive"))
    return [(f"{number} {what}", style) for number, what, style in counts if number]


def _run(sweep: Sweep, run: CellRun, columns: Sequence[str], page: Path) -> ShownRun:
    edited = [f"edited since it ended: {', '.join(run.edited)}"] if run.edited else []
    decimals = [quantity_of(name).decimals + 1 for name in columns]
    return ShownRun(
        seed=run.seed,
        status=run.status,
        values=[number_text(run.values.get(name), d) for name, d in zip(columns, decimals, strict=True)],
        seconds=number_text(run.seconds, 0),
        hash=run.hash,
        link=link_to(sweep, run, page),
        warnings=[*edited, *([run.message] if run.message else [])],
    )


def grouped(experiments: Sequence[ShownExperiment]) -> list[ShownGroup]:
    """Those with confirmatory claims, the others, and last, folded, those that are not run."""
    run = [one for one in experiments if one.run]
    confirmatory = [one for one in run if any(claim.analysis == ANALYSES[0] for claim in _own(one.claims))]
    others = [one for one in run if one not in confirmatory]
    waiting = [one for one in experiments if not one.run]
    groups = [
        ShownGroup("confirmatory", "The paper’s experiments: confirmatory claims", False, confirmatory),
        ShownGroup("exploratory", "Exploratory experiments", False, others),
        ShownGroup("not-run", f"Not run: {counted(len(waiting), 'experiment')}", len(experiments) > 1, waiting),
    ]
    return [group for group in groups if group.experiments]


def _own(claims: Sequence[JudgedClaim]) -> Sequence[JudgedClaim]:
    """Those that state their comparison; of an experiment that only refers to others, all."""
    return [claim for claim in claims if not claim.same_as] or claims


def _is_run(claims: Sequence[JudgedClaim], cells: Iterable[CellSummary]) -> bool:
    if claims:
        return any(claim.verdict != "not run" for claim in _own(claims))
    return any(cell.seeds or any(run.status == "failed" for run in cell.runs) for cell in cells)


def shown_boards(sweeps: Sequence[Sweep], width: Width) -> list[ShownBoard]:
    """The leaderboard of every sweep that has one."""
    boards = [board for sweep in sweeps if (board := leaderboard(sweep)) is not None]
    return [_board(board, f"leaderboard{number or ''}", width) for number, board in enumerate(boards)]


def _board(board: Leaderboard, key: str, width: Width) -> ShownBoard:
    rows = [
        (
            standing.cell + (f" ({counted(standing.failed, 'run')} failed)" if standing.failed else ""),
            [_score(column, score) for column, score in zip(board.columns, standing.scores, strict=True)],
        )
        for standing in board.standings
    ]
    kept = [index for index in range(len(board.columns)) if any(row[index].value is not None for _, row in rows)]
    shown = [board.columns[index] for index in kept]
    return ShownBoard(
        key,
        board.scale,
        board_figure(board, f"{key}-scatter", width),
        board.assessed,
        [(one.title, one.explained) for one in shown if one.explained],
        [(one.title, one.unit) for one in shown],
        [(name, [row[index] for index in kept]) for name, row in rows],
    )


def _score(column: BoardColumn, score: SeedScore | None) -> ShownNumber:
    if score is None:
        return ShownNumber(NOTHING)
    low, high = (number_text(end(score.seeds), column.decimals) for end in (min, max)) if score.seeds else ("", "")
    spread = [f"{low} … {high}" if low != high else f"all {low}"] if len(score.seeds) > 1 else []
    return ShownNumber(
        number_text(score.median, column.decimals), " ".join([*spread, score.note]).strip(), score.median
    )
