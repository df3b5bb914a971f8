"""Scores on downstream tasks in the terminal: a line for every metric of every task, and the sink."""

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sinklab.commands.tables import print_table
from sinklab.commands.terminal.text import printable
from sinklab.evaluating.documents import DownstreamScores, TaskMetric, TaskScores

SHARES = ("acc", "exact_match")
"""Beginnings of the metrics that are shown in percent."""


def print_scores(scores: DownstreamScores, console: Console) -> None:
    """Print one table, then what was left out and the notes."""
    table = Table(title=escape(printable(scores.model)), title_justify="left")
    table.add_column("task", overflow="fold")
    table.add_column("metric", overflow="fold")
    for head in ("value", "standard error", "items", "Sink_1"):
        table.add_column(head, justify="right", no_wrap=True)
    for name, task in scores.tasks.items():
        sink = f"{task.sink.sink_1:.1f} %" if task.sink else "–"
        for metric, score in task.metrics.items():
            table.add_row(escape(name), escape(metric), *_numbers(metric, score), f"{task.items:,}", sink)
            name, sink = "", ""
    print_table(table, console, names=2)
    for note in (*_remarks(scores), *scores.notes):
        console.print(f"[yellow]note:[/yellow] {escape(printable(note))}", highlight=False)


def _numbers(metric: str, score: TaskMetric) -> tuple[str, str]:
    times, unit = (100, " %") if metric.startswith(SHARES) else (1, "")
    decimals = 1 if unit else 4
    stderr = "–" if score.stderr is None else f"{times * score.stderr:.{decimals}f}{unit}"
    return f"{times * score.value:.{decimals}f}{unit}", stderr


def _remarks(scores: DownstreamScores) -> Iterator[str]:
    for name, task in scores.tasks.items():
        yield from _of_items(name, task)
        if task.sink is None:
            yield f"{name}: no item is long enough to measure the sink on; give --text FILE"
        else:
            where = "its items" if task.sink.text == "task" else task.sink.text
            yield f"{name}: Sink_1 is of {task.sink.sequences} sequences of {task.sink.length} tokens of {where}"


def _of_items(name: str, task: TaskScores) -> Iterator[str]:
    if task.left_out:
        yield f"{name}: {task.left_out:,} items were left out, as an answer is longer than the model's context"
    if task.cut:
        yield f"{name}: {task.cut:,} contexts are longer than the model's, and lost their first words"
