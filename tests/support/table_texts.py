"""A table as texts, for tests."""

from sinklab.tables import Table


def table_texts(table: Table) -> tuple[list[tuple[str, str]], list[list[str]]]:
    """Title and unit of every column, and the texts of every row with their notes."""
    columns = [(column.title, column.unit) for column in table.columns]
    return columns, [[f"{text} {cell.note}".strip() for text, cell in row] for row in table.cells()]
