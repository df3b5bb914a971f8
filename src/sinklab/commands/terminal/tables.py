"""Consoles, texts, tables and notes in a terminal of any width.

Text is wrapped; numbers are not (Rich alone would break 92.47 into 92.4 and 7). Columns that do not fit are printed
below, with the row names repeated. A word longer than its column, such as a recipe key, is broken after punctuation if
possible.
"""

import re
from collections.abc import Iterable, Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from sinklab.tables import Table

NARROWEST_NAME = 18  # minimum width in characters of a column of wrapped text
BETWEEN, EDGES = 3, 1  # characters of padding and borders, per column and per table
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


def stderr() -> Console:
    """Return a rich console on stderr, for all output except results."""
    return Console(stderr=True, emoji=False)


def printable(text: str) -> str:
    """Replace non-printable characters, including line feeds, by `�`, because names may contain control sequences."""
    return "".join(character if character.isprintable() else "�" for character in text)


def print_table(table: Table, console: Console) -> None:
    """Print a table with its notes; columns beyond the console width are printed below as further tables."""
    names, wanted = list(range(table.names)), _wanted(table)
    least = [min(width, NARROWEST_NAME) if table.columns[at].text else width for at, width in enumerate(wanted)]
    groups: list[list[int]] = [[]]
    for column in range(table.names, len(table.columns)):
        if groups[-1] and EDGES + sum(BETWEEN + least[at] for at in (*names, *groups[-1], column)) > console.width:
            groups.append([])
        groups[-1].append(column)
    for number, group in enumerate(groups):
        title = "" if number else table.title
        console.print(_drawn(table, [*names, *group], title, console.width, wanted))
    for note in table.notes:
        console.print(printable(note), style="dim", markup=False, highlight=False)


def print_text(text: str, console: Console) -> None:
    """Print a text without wrapping and markup; non-printable characters are replaced, line feeds are kept."""
    console.print("\n".join(printable_lines(text)), highlight=False, markup=False, emoji=False, soft_wrap=True)


def print_notes(notes: Iterable[str], console: Console) -> None:
    """Print each note or warning on a line of its own."""
    for note in notes:
        console.print(Text("note: ", style="yellow"), Text(printable(note)), sep="")


def print_title(title: str, console: Console, below: Sequence[str] = ()) -> None:
    """Print a title, and on the next line the texts of `below`, separated by commas."""
    console.print(Text(printable(title), style="bold"))
    if below:
        console.print(Text(printable(", ".join(below)), style="dim"))


def _wanted(table: Table) -> list[int]:
    """Return the width in characters of the longest line of each column, heading included."""
    cells, wanted = table.cells(), list[int]()
    for at, column in enumerate(table.columns):
        said = (f"{text} {cell.note}".strip() for text, cell in (row[at] for row in cells))
        lines = (line for text in (column.title, column.unit, *said) for line in printable_lines(text))
        wanted.append(max(map(cell_len, lines)))
    return wanted


def _widths(table: Table, columns: Sequence[int], width: int, wanted: Sequence[int]) -> dict[int, int]:
    """Return the width of each text column: short ones in full, long ones equal shares of the remaining width."""
    texts = sorted((at for at in columns if table.columns[at].text), key=wanted.__getitem__)
    left = width - EDGES - BETWEEN * len(columns) - sum(wanted[at] for at in columns if at not in texts)
    found: dict[int, int] = {}
    for number, at in enumerate(texts):
        found[at] = max(1, min(wanted[at], left // (len(texts) - number)))
        left -= found[at]
    return found


def broken(text: str, width: int) -> str:
    """Return the text with words longer than `width` broken into lines, if possible after punctuation."""

    def lines(word: str) -> Iterator[str]:
        while len(word) > width:
            end = max((found.end() for found in re.finditer(r"[_./=,:-]", word[:width])), default=width)
            yield word[:end]
            word = word[end:]
        yield word

    return re.sub(rf"\S{{{width + 1},}}", lambda found: "\n".join(lines(found[0])), text)


def printable_lines(text: str) -> list[str]:
    """Return the lines of a text, with non-printable characters replaced."""
    return [printable(line) for line in text.split("\n")]


def _drawn(table: Table, columns: Sequence[int], title: str, width: int, wanted: Sequence[int]) -> RichTable:
    heading = Text(printable(title), style="bold") if title else None
    drawn = RichTable(title=heading, title_justify="left", header_style="bold", box=SIMPLE_HEAD)
    widths = _widths(table, columns, width, wanted)
    for at in columns:
        column = table.columns[at]
        head = Text(printable(column.title))
        if column.unit:
            head.append(f"\n{printable(column.unit)}", "dim")
        justify = "left" if column.text else "right"
        drawn.add_column(head, justify=justify, no_wrap=not column.text, overflow="fold", width=widths.get(at))
    for row in table.cells():
        shown = []
        for at in columns:
            text, cell = row[at]
            said = "\n".join(printable_lines(f"{text} {cell.note}".strip()))
            shown.append(Text(broken(said, widths[at]) if at in widths else said, TONES.get(cell.tone, "")))
        drawn.add_row(*shown)
    return drawn
