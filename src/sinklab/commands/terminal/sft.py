"""A tuning in the terminal: the base and the chat model side by side."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sinklab.commands.tables import print_table
from sinklab.measuring.statistics.highest import elsewhere_text, in_brackets
from sinklab.tuning.documents import Tuning


def print_tuning(tuning: Tuning, console: Console) -> None:
    """Print one table, and the notes."""
    asked = tuning.asked
    about = f"{asked.steps} updates of {asked.batch_size} conversations of at most {asked.length} tokens"
    console.print(f"[bold]{escape(tuning.model)}[/bold], {about}", highlight=False, soft_wrap=True)
    table = Table(title=f"Before and after tuning (eps {asked.eps:g}, loss held out in nats)", title_justify="left")
    table.add_column("")
    heads = ["Sink_1, %", "norm ratio", "loss", "max gradient"]
    has_bias = any(side.sink_rate_bias is not None for side in tuning.sides().values())
    if has_bias:
        heads.insert(1, "on the bias, %")
    for head in heads:
        table.add_column(head, justify="right")
    for name, side in tuning.sides().items():
        numbers = [f"{side.sink_rate[0]:.2f}" + in_brackets(elsewhere_text(side.sink_rate))]
        if has_bias:
            numbers.append("–" if side.sink_rate_bias is None else f"{side.sink_rate_bias:.2f}")
        numbers.append(f"{max(side.hidden_norm_ratio):.2f}" if side.hidden_norm_ratio else "–")
        numbers.append(f"{side.valid_loss:.4f}")
        shown = name == "chat" and tuning.grad_norm_max is not None
        numbers.append(f"{tuning.grad_norm_max:.4g}" if shown else "–")
        table.add_row(name, *numbers)
    print_table(table, console)
    for note in tuning.notes:
        console.print(f"[yellow]note:[/yellow] {escape(note)}", highlight=False, soft_wrap=True)
