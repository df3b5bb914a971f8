"""An assessment in the terminal: one table, a line for everything that was done."""

import math
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sinklab.assessing.documents import Assessment, Effect
from sinklab.commands.tables import print_table

Line = tuple[str, str, Effect, str]  # the part, what was done, what came of it, what else is worth saying


def print_assessment(assessment: Assessment, console: Console) -> None:
    """Print one table over all parts, then what was skipped and the notes."""
    title = f"{assessment.model}: {assessment.layers} layers, context {assessment.context:,}"
    console.print(f"[bold]{escape(title)}[/bold]", highlight=False)
    table = Table(title="What the sink costs and buys (nats per token)", title_justify="left")
    table.add_column("AssessPart")
    table.add_column("What was done", overflow="fold")
    for head in ("loss", "perplexity", "KL"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    before = None
    for part, what, effect, more in lines(assessment):
        if before not in (None, part):
            table.add_section()
        perplexity = f"{math.exp(effect.loss):,.2f}" if effect.loss < 20 else "–"
        table.add_row(part if part != before else "", what, f"{effect.loss:.4f}", perplexity, f"{effect.kl:.4f}", more)
        before = part
    print_table(table, console, names=2)
    if assessment.heads is not None:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(assessment.heads.counts.items()))
        console.print(f"heads ({escape(assessment.heads.sink)}): {escape(counts)}", highlight=False)
    for part, why in assessment.skipped.items():
        console.print(f"[yellow]skipped:[/yellow] {part}: {escape(why)}", highlight=False)
    for note in assessment.notes:
        console.print(f"[yellow]note:[/yellow] {escape(note)}", highlight=False)


def lines(assessment: Assessment) -> Iterator[Line]:
    """Everything that has a loss, part by part."""
    a = assessment
    if a.streaming is not None:
        yield "streaming", "unchanged", a.streaming.unchanged, _size(a.streaming.sequences, a.streaming.length)
        for row in a.streaming.caches:
            yield "streaming", f"cache {row.cache}, first {row.first} kept", row, ""
    if a.quantisation is not None:
        yield (
            "quantisation",
            "unchanged",
            a.quantisation.unchanged,
            _size(a.quantisation.sequences, a.quantisation.length),
        )
        for setting in a.quantisation.settings:
            due = f"due to the sink {setting.due_to_sink:+.4f}" + (", destroyed" if setting.destroyed else "")
            yield "quantisation", setting.name, setting.everything, due
    if a.eviction is not None:
        yield "eviction", "unchanged", a.eviction.unchanged, _size(a.eviction.sequences, a.eviction.length)
        for policy in a.eviction.policies:
            yield "eviction", f"{policy.policy}, {policy.budget} keys", policy, ""
    if a.length is not None:
        for bucket in a.length.buckets:
            within = f"within the context {bucket.within.loss:.4f}" if bucket.start > a.length.context else ""
            yield "length", f"positions {bucket.start:,} to {bucket.stop - 1:,}", bucket.whole, within
    if a.carries is not None:
        yield "carries", "unchanged", a.carries.unchanged, _size(a.carries.sequences, a.carries.length)
        for keys in a.carries.keys:
            share = f"share {100 * keys.share:.1f} %"
            for what, effect in (("value zeroed", keys.value_zeroed), ("hidden", keys.hidden), ("spread", keys.spread)):
                yield "carries", f"{keys.keys}: {what}", effect, share
                share = ""
            for shift in keys.shifted:
                if shift.by is not None:
                    yield "carries", f"{keys.keys}: logit {shift.by:+g}", shift, ""


def _size(sequences: int, length: int) -> str:
    return f"{sequences} x {length:,} tokens"
