"""`sinklab runs` as a table in the terminal."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from sinklab.measuring.statistics.highest import in_brackets
from sinklab.report.runs import ListedRun


def runs_table(runs: Sequence[ListedRun]) -> Table:
    """One line per run."""
    table = Table(title="Runs", title_justify="left")
    for head in ("Run", "State"):
        table.add_column(head, overflow="fold")
    for head in ("Step", "Sink_1, %", "bias, %", "loss", "seed"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("What differs", overflow="fold")
    for run in runs:
        table.add_row(
            Text(run.directory),
            run.state,
            f"{run.step:,}/{run.steps:,}" if run.steps is not None else "–",
            _fixed(run.sink_rate, 1) + in_brackets(run.sink_elsewhere),
            _fixed(run.sink_rate_bias, 1),
            _fixed(run.valid_loss, 3),
            "–" if run.seed is None else str(run.seed),
            Text(run.why or ", ".join(run.differs)),
        )
    return table


def _fixed(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
