"""An assessment in the terminal: one table, a line for everything that was done."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sinklab.assessing.assessment import Assessment
from sinklab.commands.tables import print_table


def print_assessment(assessment: Assessment, console: Console) -> None:
    """Print one table over all parts, then what was skipped and the notes."""
    title = f"{assessment.model}: {assessment.layers} layers, context {assessment.context:,}"
    console.print(f"[bold]{escape(title)}[/bold]", highlight=False)
    table = Table(title="What the sink costs and buys (nats per token)", title_justify="left")
    table.add_column("Part")
    table.add_column("What was done", overflow="fold")
    for head in ("loss", "perplexity", "KL"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    before = None
    for part, row in assessment.rows():
        if before not in (None, part):
            table.add_section()
        loss, divergence = f"{row.effect.loss:.4f}", f"{row.effect.kl:.4f}"
        table.add_row(part if part != before else "", row.what, loss, row.perplexity, divergence, row.more)
        before = part
    print_table(table, console, names=2)
    for remark in assessment.remarks():
        console.print(escape(remark), highlight=False)
    for part, why in assessment.skipped.items():
        console.print(f"[yellow]skipped:[/yellow] {part}: {escape(why)}", highlight=False)
    for note in assessment.notes:
        console.print(f"[yellow]note:[/yellow] {escape(note)}", highlight=False)
