"""The catalogue as a table."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sinklab.interventions.catalogue import Intervention


def print_catalogue(rows: Iterable[Intervention], console: Console) -> None:
    """Print a line per intervention; the kinds of a choice and their own values stand together."""
    table = Table("key", "what it does", box=None, pad_edge=False, header_style="bold")
    for row in rows:
        notes = [row.explanation.removesuffix(".")]
        if not row.is_kind:
            notes += [f"values: {row.values}", f"default: {row.default}" if row.default else "must be given"]
        if row.neutral:
            notes.append(f"changes nothing: {row.neutral}")
        name = f"{row.key}={row.kind}" if row.is_kind else f"  {row.key} ({row.kind})" if row.kind else row.key
        table.add_row(Text(name, style="bold" if row.is_kind else ""), Text("; ".join(filter(None, notes))))
    console.print(table)
