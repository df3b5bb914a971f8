"""Tables and notes in a terminal of any width.

No number is wrapped or cut: text wraps, and columns that do not fit are printed below, beside the names of the rows
once more. (Rich alone would break 92.47 into 92.4 and 7.)
"""

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from sinklab.tables import Table

NARROWEST_NAME = 18  # characters that a column of text may be narrowed to
UNLIMITED = 10_000
TONES = {
    "reproduced": "bold green",
    "direction only": "bold cyan",
    "contradicted": "bold red",
    "inconclusive": "bold yellow",
    "no verdict": "yellow",
    "not asked": "dim",
    "not run": "dim",
    "warn": "red",
}


def printable(text: str) -> str:
    """The text with control characters shown as `�`, so that a name cannot steer the terminal."""
    return "".join(character if character.isprintable() else "�" for character in text)


def print_table(table: Table, console: Console) -> None:
    """Print a table with its notes, in as many parts as the console is narrow."""
    names = list(range(table.names))
    title, group = table.title, list[int]()
    for column in range(table.names, len(table.columns)):
        if group and _narrowest(table, [*names, *group, column]) > console.width:
            console.print(_drawn(table, [*names, *group], title))
            title, group = "", []
        group.append(column)
    console.print(_drawn(table, [*names, *group], title))
    for note in table.notes:
        console.print(printable(note), style="dim", markup=False, highlight=False)


def print_notes(notes: Iterable[str], console: Console) -> None:
    """Warnings, a line each."""
    for note in notes:
        console.print(Text("note: ", style="yellow"), Text(printable(note)), sep="")


def print_title(title: str, console: Console, below: Sequence[str] = ()) -> None:
    """The subject of the tables that follow, and facts in a line below."""
    console.print(Text(printable(title), style="bold"))
    if below:
        console.print(Text(printable(", ".join(below)), style="dim"))


def _narrowest(table: Table, columns: Sequence[int]) -> int:
    """How narrow the columns can be made with texts wrapped and numbers whole."""
    drawn = _drawn(table, columns, "")
    for at, column in zip(columns, drawn.columns, strict=True):
        column.max_width = NARROWEST_NAME if table.columns[at].text else None
    return Console(width=UNLIMITED).measure(drawn).maximum


def _drawn(table: Table, columns: Sequence[int], title: str) -> RichTable:
    heading = Text(printable(title), style="bold") if title else None
    drawn = RichTable(title=heading, title_justify="left", header_style="bold", box=SIMPLE_HEAD)
    for at in columns:
        column = table.columns[at]
        head = Text(printable(column.title))
        if column.unit:
            head.append(f"\n{printable(column.unit)}", "dim")
        drawn.add_column(head, justify="left" if column.text else "right", no_wrap=not column.text, overflow="fold")
    for row in table.cells():
        shown = [(f"{text} {cell.note}".strip().split("\n"), cell.tone) for text, cell in (row[at] for at in columns)]
        drawn.add_row(*(Text("\n".join(map(printable, lines)), TONES.get(tone, "")) for lines, tone in shown))
    return drawn
