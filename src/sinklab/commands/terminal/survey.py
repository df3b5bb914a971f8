"""Domains, comparisons, families and checkpoints as tables in the terminal, and the sizes of `--dry-run`."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sinklab.commands.tables import print_table
from sinklab.commands.terminal.text import printable
from sinklab.measuring.measurement import Measurement
from sinklab.survey.checkpoints import Checkpoints
from sinklab.survey.compare import Comparison
from sinklab.survey.domains import Domains
from sinklab.survey.families import Families, sink_1
from sinklab.survey.open_models import setting
from sinklab.survey.sizes import Size

NOTHING = "–"


def print_domains(domains: Domains, console: Console) -> None:
    """A line per domain, and how far apart they are."""
    measured = domains.outcome.measured
    first = next(iter(measured.values()))
    table = _table(f"{Path(domains.model).name} by domain, {first.length} tokens a sequence", "domain")
    thresholds = list(first.sink_rates or {f"{first.eps:g}": []})
    biased = any(m.sink_rate_bias is not None for m in measured.values())
    windowed = any(m.sink_rate_visible is not None for m in measured.values())
    _add_columns(table, "sequences", *(f"Sink_1, %\neps {eps}" for eps in thresholds))
    _add_columns(
        table,
        *(["visible, %"] if windowed else []),
        *(["bias\n%"] if biased else []),
        "loss\nnats",
        "|h_1| over\nthe rest",
    )
    for name, m in measured.items():
        rates = [m.sink_rates[eps][0] if m.sink_rates else m.sink_rate[0] for eps in thresholds]
        cells = [str(m.sequences), *(f"{rate:.2f}" for rate in rates)]
        cells += [_number((m.sink_rate_visible or m.sink_rate)[0], 2)] if windowed else []
        cells += [_number(m.sink_rate_bias, 2)] if biased else []
        _add_row(table, name, *cells, _number(m.loss, 4), _number(_largest_norm_ratio(m), 2))
    print_table(table, console)
    rates = [m.sink_rate[0] for m in measured.values()]
    spread = f"Sink_1 lies between {min(rates):.2f} and {max(rates):.2f} % in {len(rates)} domains"
    console.print(f"{spread}, at eps {first.eps:g}.", highlight=False)


def print_comparison(comparison: Comparison, console: Console) -> None:
    """A line per quantity, a column per model, and the difference of each from the first."""
    models = list(comparison.measured)
    first = comparison.measured[models[0]]
    what = f"{first.sequences} sequences of {first.length} tokens, {first.inputs}, eps {first.eps:g}"
    table = _table(f"Comparison: {what}", "quantity")
    _add_columns(table, models[0])
    for model in models[1:]:
        _add_columns(table, model, "difference")
    for row in comparison.rows():
        values = row.values | dict.fromkeys(row.infinite, math.inf)
        cells = [_number(values[models[0]], 3)]
        for model in models[1:]:
            cells += [_number(values[model], 3), _number(row.differences[model], 3, sign=True)]
        _add_row(table, f"{row.quantity} ({row.unit})", *cells)
    print_table(table, console)
    for model, measurement in comparison.measured.items():
        _print_notes(model, ["position 1 is BOS" if measurement.bos else "no BOS", *measurement.notes], console)


def print_families(families: Families, console: Console) -> None:
    """A line per model, measured and published side by side."""
    measured = families.outcome.measured
    if measured:
        table = _table(f"Open models, eps {setting().eps:g}", "model")
        _add_columns(table, "size", "Sink_1\n%", "published\n%", "difference", "loss\nnats", "time\ns")
        for model in families.models:
            if m := measured.get(model.id):
                rate, printed = sink_1(m), families.published(model)
                beside = [_number(printed, 2), _number(None if printed is None else rate - printed, 2, sign=True)]
                cells = [_millions(model.parameters), f"{rate:.2f}", *beside, _number(m.loss, 4), f"{m.seconds:.1f}"]
                _add_row(table, _short(model.id), *cells)
        print_table(table, console)
    for model, measurement in measured.items():
        _print_notes(model, measurement.notes, console)


def print_checkpoints(checkpoints: Checkpoints, console: Console) -> None:
    """A line per checkpoint, in the order of the steps."""
    measured, rows = checkpoints.outcome.measured, checkpoints.rows()
    first = next(iter(measured.values()))
    what = f"{first.sequences} sequences of {first.length} tokens, eps {first.eps:g}"
    table = _table(f"{Path(checkpoints.model).name} while it was trained: {what}", "checkpoint")
    biased = any(row.sink_bias is not None for row in rows.values())
    bias = ["bias\n%"] if biased else []
    unit = next(iter(rows.values())).unit
    _add_columns(table, unit, "Sink_1\n%", *bias, "times\nuniform", "loss\nnats", "|h_1| over\nthe rest")
    for name, row in rows.items():
        ratio = _largest_norm_ratio(measured[name])  # which the row does not have where it is infinite
        on_the_bias = [_number(row.sink_bias, 2)] if biased else []
        rates = [f"{row.sink_1:.2f}", *on_the_bias, f"{row.uniform_ratio:.2f}"]
        _add_row(table, row.checkpoint, f"{row.step:,}", *rates, _number(row.loss, 4), _number(ratio, 2))
    print_table(table, console)
    for name, measurement in measured.items():
        _print_notes(name, measurement.notes, console)


def print_sizes(found: Sequence[Size], dtype: str, console: Console) -> None:
    """A line per model: what it takes on disk and in memory."""
    table = _table(f"GB (10^9 bytes) on disk and in memory; peak: about, in dtype {dtype}", "model")
    _add_columns(table, "size", "disk", "float32", "bfloat16", "peak", "published\nSink_1, %")
    for size in found:
        numbers = (size.disk_gb, size.float32_gb, size.bfloat16_gb, size.peak_gb)
        counted = "*" if size.counted == "config" else ""
        cells = [_millions(size.parameters) + counted, *(f"{number:.2f}" for number in numbers)]
        _add_row(table, _short(size.model), *cells, _number(size.published, 2))
    table.add_section()
    _add_row(table, f"{len(found)} models", "", f"{sum(size.disk_gb for size in found):.2f}")
    print_table(table, console)
    if any(size.counted == "config" for size in found):
        console.print("* counted from the configuration that lies here", style="dim", highlight=False)


def _table(title: str, first: str) -> Table:
    table = Table(title=Text(printable(title)), title_justify="left", header_style="bold", box=SIMPLE_HEAD)
    table.add_column(first, overflow="fold", min_width=12)
    return table


def _add_columns(table: Table, *names: str) -> None:
    for name in names:
        table.add_column(Text("\n".join(map(printable, name.split("\n")))), justify="right")


def _add_row(table: Table, name: str, *cells: str) -> None:
    table.add_row(Text(printable(name)), *cells)


def _print_notes(name: str, notes: Iterable[str], console: Console) -> None:
    for note in notes:
        console.print(printable(f"{name}: {note}"), style="dim", markup=False, highlight=False, soft_wrap=True)


def _number(value: float | None, decimals: int, sign: bool = False) -> str:
    return NOTHING if value is None else f"{value:{'+' if sign and value else ''}.{decimals}f}"


def _largest_norm_ratio(measurement: Measurement) -> float | None:
    return max(measurement.hidden_norm_ratio or [], default=None)


def _short(model: str) -> str:
    return model.rpartition("/")[2]


def _millions(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.3g} M"
