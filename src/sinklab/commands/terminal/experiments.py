"""The experiments as a table."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sinklab.experiments.definition import Experiment


def print_experiments(found: Iterable[Experiment], console: Console) -> None:
    """Print a line per experiment: its question, its base recipe and its cells."""
    table = Table("id", "what it shows", box=None, pad_edge=False, header_style="bold")
    for one in found:
        claims = f"; {len(one.claims)} claims" if one.claims else ""
        said = f"{one.title}. On {one.base}: {', '.join(one.cells)}{claims}"
        table.add_row(Text(one.id, style="bold"), Text(said))
    console.print(table)
