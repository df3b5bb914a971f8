"""Ablations and propositions in the terminal."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sinklab.commands.tables import print_table
from sinklab.measuring.findings import Mixing, Propositions
from sinklab.measuring.measurement import Measurement


def print_findings(m: Measurement, console: Console) -> None:
    """Print what a measurement holds beside its numbers; nothing where nothing was asked for."""
    if m.ablations:
        print_table(_ablations(m), console)
        said = [
            f"{one.name}: {'; '.join(one.sentences)}; targets from position {one.first_target} on"
            for one in m.ablations
        ]
        console.print(escape("\n".join(said)), style="dim", highlight=False)
    if m.mixing:
        print_table(_mixing(m.mixing), console)
    if m.propositions:
        console.print(escape(_sentence(m.propositions)), highlight=False)


def _ablations(m: Measurement) -> Table:
    table = Table(title="Ablations", title_justify="left")
    table.add_column("without")
    for name in (
        "loss before",
        "after",
        "change (nats)",
        "Sink_1 before (%)",
        "after",
        "highest after,\n% at position",
    ):
        table.add_column(name, justify="right")
    for one in m.ablations or []:
        table.add_row(
            escape(one.name),
            f"{one.loss_before:.4f}",
            f"{one.loss_after:.4f}",
            f"{one.loss_change:+.4f}",
            f"{one.sink_rate_before:.2f}",
            f"{one.sink_rate_after:.2f}",
            one.highest_after,
        )
    return table


def _mixing(mixing: Mixing) -> Table:
    what = f"How far another token at position {mixing.position} spreads: change of later tokens, over their norm"
    table = Table(title=what, title_justify="left")
    for name in ("after block", "as it is", "without key 1", "times"):
        table.add_column(name, justify="right")
    for block, (whole, without) in enumerate(zip(mixing.spread, mixing.spread_without_first, strict=True)):
        times = f"{without / whole:.2f}" if whole else "-"
        table.add_row(str(block or "input"), f"{whole:.4f}", f"{without:.4f}", times)
    return table


def _sentence(p: Propositions) -> str:
    name = f"proposition {p.number} of the paper" if p.number else "no proposition of the paper"
    measured = [f"hidden states differ by {p.hidden_deviation:.1e} of their norm"]
    if p.attention_deviation is not None:
        measured.append(f"attention by {p.attention_deviation:.1e} from {'the closed form' if p.number else '1/t'}")
    if p.bound_slack is not None:
        measured.append(f"attention stays {p.bound_slack:.1e} below the bound")
    verdict = "holds" if p.holds else "does not hold"
    if p.holds is None:
        verdict = f"{p.dtype} cannot decide"
    elif p.number is None:
        verdict = "as equal as without positions" if p.holds else "not equal"
    return f"repeated tokens, positions {p.position}, {name}: {p.statement}: {verdict} ({', '.join(measured)})"
