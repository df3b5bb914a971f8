"""The details of a measurement in the terminal: a line per layer, and the strongest secondary sinks."""

from collections.abc import Iterator, Sequence

from rich.table import Table

from sinklab.measuring.statistics.details import FIRST_FEW, Details

SHOWN_SINKS = 3


def details_tables(details: Details) -> Iterator[Table]:
    """The tables to print, one after another."""
    yield _layers(details)
    if details.secondary_sinks:
        yield _secondary(details)


def _layers(d: Details) -> Table:
    table = Table(title="Details by layer (key 1 / the others)", title_justify="left")
    columns: list[tuple[str, Sequence[str]]] = [("layer", [str(i + 1) for i in range(len(d.entropy_by_layer))])]
    if d.cosine_first is not None and d.norm_product_first is not None:
        columns.append(("cos(q, k)", _pairs(d.cosine_first, d.cosine_rest, 2)))
        columns.append(("|q| |k|", _pairs(d.norm_product_first, d.norm_product_rest, 1)))
    columns.append(("entropy", [f"{value:.2f}" for value in d.entropy_by_layer]))
    if d.value_ratio is not None:
        columns.append(("lowest |v|", [f"{row.min():.2f}" for row in d.value_ratio]))
    if d.kurtosis_by_block is not None and len(d.kurtosis_by_block) == len(d.entropy_by_layer) + 1:
        columns.append(("kurtosis", [f"{value:.0f}" for value in d.kurtosis_by_block[1:]]))
    for name, _ in columns:
        table.add_column(name, justify="right")
    for cells in zip(*(texts for _, texts in columns), strict=True):
        table.add_row(*cells)
    return table


def _pairs(first: list[float], rest: list[float] | None, decimals: int) -> list[str]:
    others = [f" / {value:.{decimals}f}" for value in rest] if rest else [""] * len(first)
    return [f"{value:.{decimals}f}{other}" for value, other in zip(first, others, strict=True)]


def _secondary(d: Details) -> Table:
    title = f"Secondary sinks past position {FIRST_FEW}: in {d.secondary_rate:.2f} % of heads and sequences"
    table = Table(title=title, title_justify="left")
    for name in ("sequence", "position", "token id", "heads (%)", "importance", "cos with token 1"):
        table.add_column(name, justify="right")
    for one in d.secondary_sinks[:SHOWN_SINKS]:
        alike = "-" if one.alignment is None else f"{one.alignment:.2f}"
        where = (str(one.sequence), str(one.position), str(one.token))
        table.add_row(*where, f"{one.heads:.1f}", f"{one.importance:.3f}", alike)
    return table
