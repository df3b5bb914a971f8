"""A measurement as two tables in the terminal: the first positions, and the layers."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sinklab.commands.tables import print_table
from sinklab.commands.terminal.details import details_tables
from sinklab.commands.terminal.findings import print_findings
from sinklab.measuring.measurement import Measurement

POSITIONS = 6


def print_measurement(measurement: Measurement, console: Console) -> None:
    """Print the sink rate of the first positions, what goes with it, and a line per layer."""
    m = measurement
    model = (m.model or "model") + (f" at {m.revision}" if m.revision else "")
    title = f"{model}: {m.sequences} sequences of {m.length} tokens, {m.inputs}"
    console.print(f"[bold]{escape(title)}[/bold]", highlight=False)
    notes = [
        None if m.step is None else f"step {m.step:,} of {m.planned_steps:,}",
        "position 1 is BOS" if m.bos else "no BOS",
        f"loss {m.loss:.4f} nats/token" if m.loss is not None else None,
        f"{m.bits_per_byte:.4f} bits/byte" if m.bits_per_byte is not None else None,
        "proxy scores" if m.proxy else None,
        f"{m.backend}, {m.dtype}, {m.seconds:.1f} s",
    ]
    console.print(escape(", ".join(note for note in notes if note)), style="dim", highlight=False)
    print_table(_positions(m), console, names=int(m.sink_rate_visible is not None))
    print_table(_times_uniform(m), console, names=0)
    if m.sink_rates:
        print_table(_thresholds(m), console)
    if m.sink_rate_by_length:
        print_table(_by_length(m), console)
    print_table(_layers(m), console)
    if m.massive_activations:
        print_table(_massive(m), console)
    print_findings(m, console)
    if m.details is not None:
        for table in details_tables(m.details):
            print_table(table, console)
    for note in m.notes:
        console.print(f"[yellow]note:[/yellow] {escape(note)}", highlight=False)


def _positions(m: Measurement) -> Table:
    table = Table(title=f"Sink rate, eps {m.eps:g} (%)", title_justify="left")
    shown, half = range(min(POSITIONS, m.length)), m.length // 2
    if m.sink_rate_visible is not None:
        table.add_column("mean over")
    if m.sink_rate_bias is not None:
        table.add_column("bias", justify="right")
    for k in shown:
        table.add_column(str(k + 1), justify="right")
    if half > POSITIONS:
        table.add_column(f"highest of\n{POSITIONS + 1}..{half}", justify="right")
    for name, rates in (("queries from it on", m.sink_rate), ("queries that see it", m.sink_rate_visible)):
        if rates is None:
            continue
        cells = [name] if m.sink_rate_visible is not None else []
        if m.sink_rate_bias is not None:
            cells.append(f"{m.sink_rate_bias:.2f}" if rates is m.sink_rate else "")
        cells += [f"{rates[k]:.2f}" for k in shown]
        if half > POSITIONS:  # the last positions have few queries, among which the query itself weighs heavily
            top = max(range(POSITIONS, half), key=lambda k, rates=rates: rates[k])
            cells.append(f"{rates[top]:.2f} at {top + 1}")
        table.add_row(*cells)
    return table


def _times_uniform(m: Measurement) -> Table:
    table = Table(title="Importance, times that of uniform attention", title_justify="left")
    shown, half = range(min(POSITIONS, m.length)), m.length // 2
    cells = [f"{m.uniform_ratio[k]:.2f}" for k in shown]
    for k in shown:
        table.add_column(str(k + 1), justify="right")
    if half > POSITIONS:
        top = max(range(POSITIONS, half), key=m.uniform_ratio.__getitem__)
        table.add_column(f"highest of\n{POSITIONS + 1}..{half}", justify="right")
        cells.append(f"{m.uniform_ratio[top]:.2f} at {top + 1}")
    table.add_row(*cells)
    return table


def _thresholds(m: Measurement) -> Table:
    table = Table(title="Sink rate by threshold (%)", title_justify="left")
    table.add_column("eps", justify="right")
    shown = range(min(POSITIONS, m.length))
    for k in shown:
        table.add_column(str(k + 1), justify="right")
    for eps, rates in (m.sink_rates or {}).items():
        table.add_row(eps, *(f"{rates[k]:.2f}" for k in shown))
    for eps, rates in (m.sink_rates_visible or {}).items():
        table.add_row(f"{eps} visible", *(f"{rates[k]:.2f}" for k in shown))
    return table


def _by_length(m: Measurement) -> Table:
    table = Table(title="Sink rate of position 1 by length (%)", title_justify="left")
    by_length = m.sink_rate_by_length or {}
    table.add_column("T", justify="right")
    for eps in next(iter(by_length.values())):
        table.add_column(f"eps {eps}", justify="right")
    whole = m.sink_rates or {f"{m.eps:g}": m.sink_rate}
    for length, rates in {**by_length, str(m.length): whole}.items():
        table.add_row(length, *(f"{rate[0]:.2f}" for rate in rates.values()))
    return table


def _massive(m: Measurement) -> Table:
    table = Table(title="Largest activations", title_justify="left")
    for name in ("after layer", "position", "dimension", "value", "times the median"):
        table.add_column(name, justify="right")
    for one in (m.massive_activations or [])[:3]:
        cells = (one.layer, one.position, one.dimension, f"{one.value:.1f}", f"{one.ratio_to_median:.0f}")
        table.add_row(*map(str, cells))
    return table


def _layers(m: Measurement) -> Table:
    table = Table(title="Position 1 by layer (norms over the mean of the rest)", title_justify="left")
    visible = m.importance_visible
    for name in ("layer", "importance", *([] if visible is None else ["visible"]), "highest head", "|h|", "|k|", "|v|"):
        table.add_column(name, justify="right")
    if m.row_sums is not None:
        table.add_column("row sum", justify="right")
    hidden = m.hidden_norm_ratio or []
    if hidden:
        table.add_row("input", *([""] * (2 if visible is None else 3)), f"{hidden[0]:.2f}", "", "")
    aligned = len(hidden) == m.layers + 1  # a hybrid has blocks without attention
    for layer in range(m.layers):
        heads = m.importance[layer, :, 0]
        table.add_row(
            str(layer + 1),
            f"{heads.mean():.3f}",
            *([] if visible is None else [f"{visible[layer, :, 0].mean():.3f}"]),
            f"{heads.max():.3f} (head {int(heads.argmax()) + 1})",
            _ratio(hidden[1:] if aligned else None, layer),
            _ratio(m.key_norm_ratio, layer),
            _ratio(m.value_norm_ratio, layer),
            *([] if m.row_sums is None else [f"{m.row_sums[layer].mean():.2f}"]),
        )
    return table


def _ratio(ratios: list[float] | None, layer: int) -> str:
    return f"{ratios[layer]:.2f}" if ratios else "-"
