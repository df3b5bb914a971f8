"""The sections of a sweep on the page: one per experiment, and the leaderboard."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sinklab.experiments.documents import ANALYSES, CellSummary, ExperimentSummary, JudgedClaim, verdict_counts
from sinklab.report.charts import Figure, Width
from sinklab.report.experiments.figures import board_figure, experiment_figures, keyed, link_to
from sinklab.report.experiments.leaderboard import Leaderboard, leaderboard, leaderboard_table
from sinklab.report.experiments.sweeps import Sweep, run_warnings
from sinklab.report.experiments.tables import (
    Replicate,
    change_text,
    experiment_table,
    paper_models,
    quantity_of,
    replicate_of,
)
from sinklab.tables import Table, TableCell, TableColumn, counted, names


@dataclass(frozen=True)
class CellSection:
    """A cell of an experiment with its runs.

    Attributes:
        change: settings that it changes in the base recipe.
        badges: counts of failed, edited and unfinished runs, each with its style.
    """

    name: str
    change: Sequence[str]
    badges: Sequence[tuple[str, str]]
    runs: Table


@dataclass(frozen=True)
class ExperimentSection:
    """The section of an experiment.

    Attributes:
        key: of its anchor.
        about: as summary.json has it.
        verdicts: counts of each, for confirmatory and exploratory claims.
        run: whether any of its own claims, or without claims any of its cells, has the runs it needs.
        replicate: what its numbers are over: a seed, or a draw of sequences that an existing model is measured on.
        elsewhere: the paper's numbers of other models; None without any.
    """

    key: str
    name: str
    about: ExperimentSummary
    verdicts: Mapping[str, Mapping[str, int]]
    run: bool
    figures: Sequence[Figure]
    table: Table
    replicate: Replicate
    elsewhere: Table | None
    claims: Sequence[JudgedClaim]
    cells: Sequence[CellSection]


@dataclass(frozen=True)
class ExperimentGroup:
    """Experiments under one heading.

    Attributes:
        key: of its anchor.
        folded: whether the reader has to unfold them.
    """

    key: str
    title: str
    folded: bool
    experiments: Sequence[ExperimentSection]


@dataclass(frozen=True)
class BoardSection:
    """The leaderboard.

    Attributes:
        figure: the loss of every cell against its sink; None without the baseline's loss.
    """

    board: Leaderboard
    figure: Figure | None
    table: Table


def experiment_sections(sweeps: Sequence[Sweep], page: Path) -> list[ExperimentSection]:
    """A section per experiment, in the order of the summaries.

    Args:
        page: the folder of the page, from which links lead to runs.

    Raises:
        InputError: the metrics of a run are damaged.
    """
    return [_section(sweep, name, key, page) for sweep, name, key in keyed(sweeps)]


def _section(sweep: Sweep, name: str, key: str, page: Path) -> ExperimentSection:
    experiment, claims = sweep.experiments[name], sweep.claims_of(name)
    cells = sweep.cells_of(experiment)
    return ExperimentSection(
        key=key,
        name=name,
        about=experiment,
        verdicts=verdict_counts(claims),
        run=_is_run(claims, cells.values()),
        figures=experiment_figures(sweep, name, key, page, "container"),
        table=experiment_table(experiment, cells),
        replicate=replicate_of(experiment),
        elsewhere=paper_models(experiment),
        claims=claims,
        cells=[
            CellSection(cell, change_text(found), _badges(found), _runs(sweep, experiment, cell, found, page))
            for cell, found in cells.items()
        ],
    )


def _runs(sweep: Sweep, experiment: ExperimentSummary, name: str, cell: CellSummary, page: Path) -> Table:
    shown = [quantity_of(one) for one in experiment.columns]
    columns = [
        *names(replicate_of(experiment).capitalize(), "State"),
        *(TableColumn(one.label, form=f",.{one.decimals + 1}f") for one in shown),
        TableColumn("Seconds", form=",.0f"),
        TableColumn("Run"),
    ]
    rows = [
        [
            str(run.seed),
            TableCell(run.status, "; ".join(run_warnings(run)), "warn" if run_warnings(run) else ""),
            *(run.values.get(one.name) for one in shown),
            run.seconds,
            TableCell(run.hash, link=link_to(sweep, run, page) or ""),
        ]
        for run in cell.runs
    ]
    return Table(f"runs of {name}", columns, rows).without_empty_columns()


def _badges(cell: CellSummary) -> list[tuple[str, str]]:
    failed, unfinished = (sum(run.status == how for run in cell.runs) for how in ("failed", "unfinished"))
    edited = sum(bool(run.edited) for run in cell.runs)
    counts = ((failed, "failed", "warn"), (edited, "edited", "warn"), (unfinished, "unfinished", "inconclusive"))
    return [(f"{number} {what}", style) for number, what, style in counts if number]


def grouped(experiments: Sequence[ExperimentSection]) -> list[ExperimentGroup]:
    """Those with confirmatory claims, the others, and last, folded, those that are not run."""
    run = [one for one in experiments if one.run]
    confirmatory = [one for one in run if any(claim.analysis == ANALYSES[0] for claim in _own(one.claims))]
    others = [one for one in run if one not in confirmatory]
    waiting = [one for one in experiments if not one.run]
    groups = [
        ExperimentGroup("confirmatory", "The paper’s experiments: confirmatory claims", False, confirmatory),
        ExperimentGroup("exploratory", "Exploratory experiments", False, others),
        ExperimentGroup("not-run", f"Not run: {counted(len(waiting), 'experiment')}", len(experiments) > 1, waiting),
    ]
    return [group for group in groups if group.experiments]


def _own(claims: Sequence[JudgedClaim]) -> Sequence[JudgedClaim]:
    """Those that state their comparison; of an experiment that only refers to others, all."""
    return [claim for claim in claims if not claim.same_as] or claims


def _is_run(claims: Sequence[JudgedClaim], cells: Iterable[CellSummary]) -> bool:
    if claims:
        return any(claim.verdict != "not run" for claim in _own(claims))
    return any(cell.seeds or any(run.status == "failed" for run in cell.runs) for cell in cells)


def board_sections(sweeps: Sequence[Sweep], width: Width) -> list[BoardSection]:
    """The leaderboard of every sweep that has one."""
    boards = [board for sweep in sweeps if (board := leaderboard(sweep)) is not None]
    keys = [f"leaderboard{number or ''}" for number in range(len(boards))]
    return [
        BoardSection(board, board_figure(board, f"{key}-scatter", width), leaderboard_table(board, key))
        for board, key in zip(boards, keys, strict=True)
    ]
