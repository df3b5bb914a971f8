"""The attention backends of a model in the terminal: a line for each, and the reasons below."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sinklab.commands.tables import print_table
from sinklab.survey.backends import Parity

NOTHING = "–"


def print_parity(parity: Parity, console: Console) -> None:
    """Print one table, what the model has, and why backends are unavailable."""
    title = f"{parity.model}: {parity.sequences} sequences of {parity.length} tokens, {parity.dtype} on {parity.device}"
    console.print(f"[bold]{escape(title)}[/bold]", highlight=False)
    said = [
        f"transformers {parity.transformers}, torch {parity.torch}",
        f"{parity.default} by default",
        "learned sink logits" if parity.has_sinks else "no sink logits",
        f"logits agree up to {parity.tolerance:.1e}",
    ]
    console.print(escape(", ".join(said)), style="dim", highlight=False)
    table = Table(title="Beside eager attention", title_justify="left")
    table.add_column("backend")
    table.add_column("verdict")
    table.add_column("logits", justify="right")
    if parity.has_sinks:
        table.add_column("without\nthe sink", justify="right")
        table.add_column("share on\nthe sink", justify="right")
    table.add_column("importance\ndifference", justify="right")
    table.add_column("importance\nof position 1", justify="right")
    for one in parity.backends:
        sinks = [_number(one.without_sink_difference, ".1e"), _number(one.sink_share, ".4f")]
        table.add_row(
            one.backend,
            one.verdict,
            _number(one.logits_difference, ".1e"),
            *(sinks if parity.has_sinks else []),
            _number(one.importance_difference, ".1e"),
            _number(one.importance_first, ".4f"),
        )
    print_table(table, console, names=2)
    for one in parity.backends:
        if one.why is not None:
            console.print(f"[yellow]{one.backend}:[/yellow] {escape(one.why)}", highlight=False)


def _number(value: float | None, how: str) -> str:
    return NOTHING if value is None else f"{value:{how}}"
