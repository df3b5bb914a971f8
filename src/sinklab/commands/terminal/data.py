"""An estimate of what `sinklab data prepare` would read and write, in a terminal."""

from rich.console import Console
from rich.table import Table

from sinklab.commands.tables import print_table
from sinklab.data.estimate import Estimate, total


def print_estimate(found: Estimate, console: Console) -> None:
    """A table of the estimate."""
    table = Table("domain")
    for name in ("bytes of text files", "tokens in them", "tokens taken"):
        table.add_column(name, justify="right")
    for amount in found.amounts:
        table.add_row(amount.name, *(_number(value) for value in (amount.bytes, amount.tokens, amount.taken)))
    table.add_section()
    sizes, tokens = [amount.bytes for amount in found.amounts], [amount.tokens for amount in found.amounts]
    table.add_row("all", _number(total(sizes)), _number(total(tokens)), _number(found.tokens))
    print_table(table, console)
    console.print(f"shards: {_number(found.shard_bytes)} bytes. Estimated; nothing was written.", highlight=False)


def _number(value: int | None) -> str:
    return "not known" if value is None else f"{value:,}"
