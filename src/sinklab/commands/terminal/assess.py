"""An assessment in the terminal: one table, a line for everything that was done."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sinklab.assessing.documents import Assessment
from sinklab.assessing.lines import assess_lines, head_counts, perplexity_text
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
    for line in assess_lines(assessment):
        if before not in (None, line.part):
            table.add_section()
        part, effect = line.part if line.part != before else "", line.effect
        loss, perplexity, divergence = f"{effect.loss:.4f}", perplexity_text(effect.loss), f"{effect.kl:.4f}"
        table.add_row(part, line.what, loss, perplexity, divergence, line.more)
        before = line.part
    print_table(table, console, names=2)
    if assessment.heads is not None:
        console.print(f"heads ({escape(assessment.heads.sink)}): {escape(head_counts(assessment))}", highlight=False)
    for part, why in assessment.skipped.items():
        console.print(f"[yellow]skipped:[/yellow] {part}: {escape(why)}", highlight=False)
    for note in assessment.notes:
        console.print(f"[yellow]note:[/yellow] {escape(note)}", highlight=False)
