"""The details of a measurement in the terminal: a line per layer, and the strongest secondary sinks."""

from collections.abc import Iterator

from rich.table import Table

from sinklab.measuring.statistics.details import Details
from sinklab.measuring.statistics.secondary import FIRST_FEW, first_of_each, stretches

SHOWN_SINKS = 3  # of the first few positions, and of those past them


def details_tables(details: Details) -> Iterator[Table]:
    """The tables to print, one after another."""
    yield _layers(details)
    if details.secondary_sinks:
        yield _secondary(details)


def _layers(d: Details) -> Table:
    """A column for every statistic that declares one, those of angles first."""
    layers = len(d.entropy)
    columns = {"layer": [str(layer + 1) for layer in range(layers)]}
    for statistic, array in sorted(d.present(), key=lambda one: not one[0].angles):
        if (column := statistic.column) is None:
            continue
        found = [column.of(array)] if column.of else [d.by_layer[field] for field in statistic.fields]
        known = [numbers for numbers in found if numbers is not None]
        if statistic.axes.startswith("M"):
            known = [numbers[1:] for numbers in known if len(numbers) == layers + 1]  # where every block has attention
        if known:
            columns[column.title] = [
                " / ".join(f"{number:.{column.decimals}f}" for number in pair) for pair in zip(*known, strict=True)
            ]
    table = Table(title="Details by layer (key 1 / the others)", title_justify="left")
    for name in columns:
        table.add_column(name, justify="right")
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    return table


def _secondary(d: Details) -> Table:
    title = (
        f"Sinks past position 1; at positions {FIRST_FEW + 1} to T / 2 in {d.secondary_rate:.2f} % of heads and "
        "sequences"
    )
    table = Table(title=title, title_justify="left")
    columns = ("sequence", "position", "token id", "heads (%)", "importance", "cos with token 1", "in layers", "alike")
    for name in columns:
        table.add_column(name, justify="right")
    for one in first_of_each(d.secondary_sinks, SHOWN_SINKS):
        alike = "-" if one.alignment is None else f"{one.alignment:.2f}"
        where = (str(one.sequence), str(one.position), str(one.token))
        lives = ["-" if not numbers else stretches(numbers) for numbers in (one.layers, one.alike)]
        table.add_row(*where, f"{one.heads:.1f}", f"{one.importance:.3f}", alike, *lives)
    return table
