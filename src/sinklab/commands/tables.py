"""Tables in a terminal of any width: no number is wrapped or cut.

Rich narrows the columns of a table that does not fit, and breaks 92.47 into 92.4 and 7. Here columns of numbers keep
their width, text wraps, and what still does not fit stands below, beside the names of the rows once more.
"""

from collections.abc import Iterator, Sequence
from copy import copy

from rich.console import Console
from rich.table import Column, Table

NARROWEST_NAME = 18  # characters that a column of names may be narrowed to
UNLIMITED = 10_000


def print_table(table: Table, console: Console, names: int = 1) -> None:
    """Print a table whole, in as many parts as the console is narrow.

    Args:
        table: columns of numbers are those justified to the right.
        names: how many of the first columns name the rows; every part has them.
    """
    for part in parts(table, console.width, names):
        console.print(part)


def parts(table: Table, width: int, names: int = 1) -> Iterator[Table]:
    """The table, or its columns in groups of which each fits `width` characters where a single column does."""
    columns = [_unbroken(column) for column in table.columns]
    first, rest = columns[:names], columns[names:]
    group: list[Column] = []
    shown = table
    for column in rest:
        if group and _narrowest([*first, *group, column], table) > width:
            yield _with_columns(shown, [*first, *group])
            group, shown = [], copy(table)
            shown.title = None
        group.append(column)
    yield _with_columns(shown, [*first, *group])


def _unbroken(column: Column) -> Column:
    column = copy(column)
    if column.justify == "right":
        column.no_wrap = True
    return column


def _narrowest(columns: Sequence[Column], table: Table) -> int:
    """How narrow the table can be made with names and texts wrapped, and numbers whole."""
    trial = _with_columns(table, columns)
    trial.title = None
    for column in trial.columns:
        if not column.no_wrap:
            column.max_width = max(NARROWEST_NAME, column.min_width or 0)
    return Console(width=UNLIMITED).measure(trial).maximum


def _with_columns(table: Table, columns: Sequence[Column]) -> Table:
    made = copy(table)
    made.columns, made.rows = [], []
    for column in columns:
        made.add_column(
            column.header,
            justify=column.justify,
            style=column.style,
            no_wrap=column.no_wrap,
            overflow="fold",
            min_width=column.min_width,
        )
    for row, cells in zip(table.rows, zip(*(column.cells for column in columns), strict=True), strict=True):
        made.add_row(*cells, style=row.style, end_section=row.end_section)
    return made
