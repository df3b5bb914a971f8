"""Result tables, rendered in the terminal, in HTML or in Markdown.

`commands/terminal.py` renders them in the terminal, `report/templates/table.html.j2` in HTML. Cells contain
unformatted numbers or text; the column's format specification is applied to the numbers in every output.

Specification of chart axes; `report/charts.py` draws the charts. `highest_rate` is the position with the highest sink
rate, which is not always the first position, for example after an intervention.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

T = TypeVar("T")
NOTHING = "–"
INFINITE = "∞"
SINK_1 = "Sink₁"
"""Name of the statistic Sink_1 in tables, charts and pages."""


def number_text(value: float | None, form: str = "") -> str:
    """Format a number by a specification such as `,.2f`; None is `–`, infinity `∞`, and a rounded 0 has no sign."""
    if value is None:
        return NOTHING
    if isinstance(value, float) and math.isinf(value):
        return INFINITE if value > 0 else f"-{INFINITE}"
    text = format(value, form)
    return text.lstrip("+-") if value == 0 or not text.strip("+-0.,") else text


NUMBER_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


def counted(number: int, noun: str) -> str:
    """Format a count with a noun: `no runs`, `one run`, `three runs`, `17 runs`. Counts up to 12 are spelled out."""
    word = NUMBER_WORDS[number] if number < len(NUMBER_WORDS) else str(number)
    return f"{word} {noun}{'' if number == 1 else 's'}"


def plural(count: int, noun: str) -> str:
    """Format a count with its noun: `1 seed`, `3 seeds`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


@dataclass(frozen=True)
class TableCell:
    """A table value with annotations.

    Attributes:
        value: number (formatted by its column) or text; None for a missing value.
        note: small text after the value, such as the spread over seeds.
        tone: style of the cell: a verdict or `warn`; ignored in Markdown. In HTML, only text columns other than the row
            header are styled.
        link: hyperlink target, used only in HTML.
    """

    value: float | str | None
    note: str = ""
    tone: str = ""
    link: str = ""


Value = TableCell | float | str | None


@dataclass(frozen=True)
class TableColumn:
    """A table column.

    Attributes:
        title: column heading.
        unit: unit, shown below the title; omitted in Markdown.
        form: format specification of the numbers.
        text: whether cells are text, which is left-aligned and wrapped. Leading text columns name the rows.
        help: explanation of the column for the notes below a table; used only by the leaderboard.
    """

    title: str
    unit: str = ""
    form: str = ""
    text: bool = False
    help: str = ""

    def text_of(self, value: Value) -> str:
        """Format the value of a cell, without its note."""
        found = _value(value)
        return found if isinstance(found, str) else number_text(found, self.form)


@dataclass(frozen=True)
class Table:
    """A table of results.

    Attributes:
        title: heading; empty for none.
        columns, rows: columns, and rows with one value per column.
        notes: explanations shown below the table.
        key: HTML anchor of the table.
    """

    title: str
    columns: Sequence[TableColumn]
    rows: Sequence[Sequence[Value]]
    notes: Sequence[str] = field(default_factory=list)
    key: str = ""

    @property
    def names(self) -> int:
        """Number of leading text columns, which name the rows."""
        return next((at for at, column in enumerate(self.columns) if not column.text), len(self.columns))

    def cells(self) -> list[list[tuple[str, TableCell]]]:
        """Return, for every row, pairs of formatted value and cell."""
        return [
            [
                (column.text_of(value), value if isinstance(value, TableCell) else TableCell(value))
                for column, value in zip(self.columns, row, strict=True)
            ]
            for row in self.rows
        ]

    def without_empty_columns(self) -> "Table":
        """Return a copy without empty columns; leading text columns (`names`) are always kept."""
        kept = [
            at
            for at in range(len(self.columns))
            if at < self.names or any(_value(row[at]) not in (None, "", NOTHING) for row in self.rows)
        ]
        return replace(
            self, columns=[self.columns[at] for at in kept], rows=[[row[at] for at in kept] for row in self.rows]
        )


def _value(value: Value) -> float | str | None:
    return value.value if isinstance(value, TableCell) else value


def table_of(
    title: str,
    items: Iterable[T],
    columns: Sequence[tuple[TableColumn, Callable[[T], Value]]],
    notes: Sequence[str] = (),
) -> Table:
    """Build a table with one row per item; each column is paired with a function that maps an item to its value."""
    rows = [[value(item) for _, value in columns] for item in items]
    return Table(title, [column for column, _ in columns], rows, notes)


def names(*titles: str) -> list[TableColumn]:
    """Create a text column for each title."""
    return [TableColumn(title, text=True) for title in titles]


def numbers(form: str, *titles: str, unit: str = "") -> list[TableColumn]:
    """Create a number column for each title, all with the same format and unit."""
    return [TableColumn(title, unit, form) for title in titles]


def markdown(table: Table) -> str:
    """Render a table in Markdown, without its title, its notes and the units. Markup in titles and cells is escaped."""
    lines = [_row(column.title for column in table.columns), _row("---" for _ in table.columns)]
    lines += [_row(" ".join(filter(None, (text, cell.note))) for text, cell in row) for row in table.cells()]
    return "\n".join(lines)


def _row(texts: Iterable[str]) -> str:
    return f"| {' | '.join('<br>'.join(escaped(line) for line in text.split(chr(10))) for text in texts)} |"


def escaped(text: str) -> str:
    """Return the text with Markdown and HTML markup escaped, and whitespace collapsed to single spaces."""
    plain = " ".join(text.split()).replace("\\", "\\\\")
    for character in "|`*_[]":
        plain = plain.replace(character, f"\\{character}")
    return plain.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


@dataclass(frozen=True)
class PlotAxis:
    """An axis of a chart.

    Attributes:
        title: title of the axis, with the unit in brackets; `log scale` is added for a log or symlog scale.
        field: name of the field of the data rows that is shown on the axis.
        short: title in a tooltip; empty means the title without its unit.
        order: values of a categorical axis in display order; None for a continuous one.
        scale: kind of scale; "auto" is logarithmic if all values are above 0 and span more than a factor of 30.
        zero: whether a linear scale includes 0.
        at_least: smallest allowed maximum of the scale, so that noise does not look like an effect; None for no limit.
        domain: minimum and maximum of the scale; None to compute them from the data.
        constant: absolute value below which a symlog scale is approximately linear.
        format: number format of axis labels, in d3's notation; None for the default of the scale type.
        precision: number format of tooltips, in d3's notation.
        ticks: tick positions; None for Vega's default.
        whole: whether all values are integers, so that ticks are integers too.
    """

    title: str
    field: str
    short: str = ""
    order: Sequence[str] | Sequence[float] | None = None
    scale: Literal["linear", "log", "symlog", "auto"] = "linear"
    zero: bool = True
    at_least: float | None = None
    domain: tuple[float, float] | None = None
    constant: float = 1.0
    format: str | None = None
    precision: str = ".4~f"
    ticks: Sequence[float] | None = None
    whole: bool = False

    @property
    def name(self) -> str:
        """Title in a tooltip: `short`, or the title without its unit and with a lower-case first letter."""
        title = self.title.split(" (")[0]
        return self.short or title[:1].lower() + title[1:]


NO_SINK = 1.0
"""Sink rate in percent below which a model has no sink."""


def highest_rate(rates: Sequence[float | None]) -> tuple[int, float] | None:
    """Return the position (1-based) with the highest sink rate among 1 .. T / 2, and this rate.

    None if no rate is known. Later positions are excluded: few queries see them, and one of these is the query at the
    same position, so that alpha may be above the threshold without a sink. If T is 1, position 1 is included.

    Args:
        rates: sink rate in percent by position, position 1 first; None or NaN if unknown.
    """
    known = {
        position: rate
        for position, rate in enumerate(rates[: max(1, len(rates) // 2)], 1)
        if rate is not None and not math.isnan(rate)
    }
    best = max(known, key=known.__getitem__, default=None)
    return None if best is None else (best, known[best])


def later_sink(rates: Sequence[float | None]) -> tuple[int, float] | None:
    """Return the result of `highest_rate` if the position is not 1 and the rate at least 1 percent, else None."""
    found = highest_rate(rates)
    return found if found and found[0] > 1 and found[1] >= NO_SINK else None


def later_sink_text(rates: Sequence[float | None]) -> str:
    """Return a text such as `76.8 % at position 2`, shown with Sink_1; empty if `later_sink` returns None."""
    found = later_sink(rates)
    return f"{found[1]:.1f} % at position {found[0]}" if found else ""


def in_brackets(text: str) -> str:
    """Put a text in parentheses with a leading space; an empty text stays empty."""
    return f" ({text})" if text else ""
