"""The paper's numbers (`published.yaml`), and which of them stand beside the cells of an experiment."""

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Self

from pydantic import Field, field_validator, model_validator

from sinklab.experiments.quantities import quantity
from sinklab.files import parse_yaml
from sinklab.schema import Part

OF_MODELS = ("natural", "random", "repeat", "base", "chat", "sink_t")
"""What is said of existing models: Sink_1 by kind of input and of training, and the sink at a position t."""

TRAINS = "trains"
"""Its value is 0.0 where the paper reports that a cell does not train."""


class PublishedRow(Part):
    """A row of a table of the paper.

    Attributes:
        values: by quantity, or as `OF_MODELS` has it.
        trains: whether the paper reports that it trained.
        without: why no cell stands beside it, where none does.
    """

    values: dict[str, float] = Field(default_factory=dict)
    trains: bool = True
    without: str = ""

    @model_validator(mode="before")
    @classmethod
    def _what_is_no_remark_is_a_value(cls, row: object) -> object:
        if not isinstance(row, dict):
            return row
        remarks = {key: row[key] for key in (TRAINS, "without") if key in row}
        return {"values": {key: value for key, value in row.items() if key not in remarks}, **remarks}

    @field_validator("values")
    @classmethod
    def _values_are_of_quantities(cls, values: dict[str, float]) -> dict[str, float]:
        for name in set(values) - set(OF_MODELS):
            quantity(name)
        return values

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.trains == (not self.values):
            raise ValueError("a row has values, or says `trains: false`, and not both")
        return self

    @property
    def numbers(self) -> dict[str, float]:
        """Its values by quantity; of a row that failed to train, {"trains": 0.0}."""
        return dict(self.values) if self.trains else {TRAINS: 0.0}


class PublishedTable(Part):
    """A table of the paper, its rows by name."""

    rows: dict[str, PublishedRow]


@cache
def published_tables() -> Mapping[str, PublishedTable]:
    """The tables of `published.yaml` by name."""
    text = (resources.files("sinklab") / "experiments" / "published.yaml").read_text(encoding="utf-8")
    return {name: PublishedTable.model_validate(table) for name, table in parse_yaml(text).items()}


class Published(Part):
    """Which numbers of the paper stand beside which cells.

    Attributes:
        table: of `published.yaml`.
        rows: the row of a cell; the row that has the cell's name, where there is one, unless given.
    """

    table: str
    rows: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _table_and_rows_are_there(self) -> Self:
        if self.table not in published_tables():
            raise ValueError(f"there is no published table {self.table!r}; there are: {', '.join(published_tables())}")
        known = published_tables()[self.table].rows
        for cell, row in self.rows.items():
            if row not in known:
                raise ValueError(
                    f"published {self.table} has no row {row!r} for cell {cell!r}; it has: {', '.join(known)}"
                )
        return self

    def numbers_of(self, cell: str) -> dict[str, float]:
        """The paper's numbers for a cell by quantity, {"trains": 0.0} where it failed there; {} without a row."""
        row = published_tables()[self.table].rows.get(self.rows.get(cell, cell))
        return row.numbers if row else {}
