"""Experiments in a terminal: what there is, what a sweep will take, and what has come of one."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sinklab.commands.console import duration, short_duration
from sinklab.commands.tables import print_table
from sinklab.commands.terminal.report import VERDICT_STYLES, counts_line
from sinklab.commands.terminal.text import printable
from sinklab.experiments.definition import SCALES, Scale
from sinklab.experiments.documents import CellSummary, ExperimentSummary, JudgedClaim, Summary
from sinklab.experiments.paper import Covered
from sinklab.experiments.quantities import quantity
from sinklab.experiments.shipped import ListedExperiment, jobs_here
from sinklab.experiments.sweep.preview import CellPreview, Preview
from sinklab.measuring.statistics.highest import in_brackets
from sinklab.report.experiments.numbers import NOTHING, estimate_text, sink_elsewhere_text


def print_experiments(found: Sequence[ListedExperiment], console: Console) -> None:
    """Two lines per experiment: cells and the time that each scale takes here, and its question, cut to the width."""
    scales: list[Scale] = [scale for scale in SCALES if any(scale in one.scales for one in found)]
    jobs = jobs_here()
    rows = [("", "cells", *scales)]
    rows += [
        (one.id, str(one.cells), *(_time_here(one, scale, jobs, short_duration) for scale in scales)) for one in found
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    console.print(Text(lines[0], style="dim"), soft_wrap=True)
    for one, line in zip(found, lines[1:], strict=True):
        name, numbers = line[: widths[0]], line[widths[0] :]
        console.print(Text.assemble((printable(name), "bold"), printable(numbers)), soft_wrap=True)
        question = Text(f"  {printable(one.question or one.title)}", style="dim")
        question.truncate(console.width, overflow="ellipsis")
        console.print(question, soft_wrap=True)
    console.print()
    _print_estimates(found, jobs, console)
    said = "Without times are those that measure a --model. One in full: sinklab experiments ID"
    console.print(said, highlight=False)


def print_experiment(one: ListedExperiment, console: Console) -> None:
    """One experiment in full: what it asks and claims, its cells, and the time that each scale takes here."""
    console.print(Text(printable(f"{one.id}: {one.title}"), style="bold"))
    for text in filter(None, (one.question, one.source and f"After {one.source}")):
        console.print(Text(printable(text)))
    console.print()
    console.print(Text(printable(f"{len(one.cell_names)} cells: {', '.join(one.cell_names)}")))
    console.print()
    console.print(f"{len(one.claim_texts)} claims{':' * bool(one.claim_texts)}", highlight=False)
    for text in one.claim_texts:
        console.print(Padding(Text(printable(f"- {text}")), (0, 0, 0, 2), expand=False))
    console.print()
    jobs = jobs_here()
    for scale, cost in one.scales.items():
        runs = f"{cost.cells} cells of {one.seeds} seed{'s' * (one.seeds != 1)}, {cost.claims} claims"
        console.print(f"{scale}: {_time_here(one, scale, jobs)} ({runs})", highlight=False)
    _print_estimates([one], jobs, console)
    given = "--dry-run" if one.scales else "--model MODEL --text FILE --dry-run"
    console.print(Text(printable(f"What each cell changes: sinklab reproduce {one.id} {given}")), soft_wrap=True)
    console.print()


def _time_here(one: ListedExperiment, scale: Scale, jobs: int, said: Callable[[float], str] = duration) -> str:
    cost = one.scales.get(scale)
    return said(cost.hours * 3600 / jobs) if cost else NOTHING


def _print_estimates(found: Sequence[ListedExperiment], jobs: int, console: Console) -> None:
    """How the times are known, once for the scales of which it is the same."""
    ways: dict[str, list[str]] = {}
    for scale in SCALES:
        for cost in [one.scales[scale] for one in found if scale in one.scales][:1]:
            ways.setdefault(cost.estimated, []).append(scale)
    for estimated, scales in ways.items():
        console.print(f"{', '.join(scales)}: {jobs} at a time, {estimated}", highlight=False)


def print_coverage(parts: Mapping[str, Covered], console: Console) -> None:
    """A line per table, figure, takeaway and proposition of the paper: what it says, its claims, what is left out."""
    table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False)
    table.add_column("of the paper", no_wrap=True)
    table.add_column("says", min_width=24)
    table.add_column("claims", overflow="fold")
    table.add_column("not encoded")
    for name, part in parts.items():
        table.add_row(Text(name, style="bold"), part.says, "\n".join(part.claims), part.without)
    print_table(table, console, names=1)


def hours_line(ahead: Preview) -> str:
    """How long it will take, in a sentence."""
    if not ahead.missing:
        return f"all {ahead.runs} runs are done"
    trained = f"{ahead.missing} of {ahead.runs} runs are to be trained"
    if ahead.hours is None:
        how_long = "" if ahead.estimated else "; how long one takes there is not known before one has finished"
        return f"{trained} by {ahead.engine}, as many at a time as it takes{how_long}"
    return f"{trained}, {ahead.jobs} at a time: {duration(ahead.hours * 3600)} ({ahead.estimated})"


def print_preview(ahead: Preview, console: Console) -> None:
    """A line per cell, what it changes and what of it is done; and the time it all takes."""
    table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False)
    table.add_column("cell", overflow="fold")
    table.add_column("changes", overflow="fold")
    table.add_column("done", justify="right")
    table.add_column("a run takes", justify="right")
    for cell in ahead.cells:
        done = f"{cell.done} of {cell.seeds}"
        takes = NOTHING if cell.hours is None else duration(cell.hours * 3600)
        table.add_row(Text(printable(cell.name)), Text(printable(_change(cell))), done, takes)
    console.print(table)
    console.print(hours_line(ahead), highlight=False, soft_wrap=True)


def _change(cell: CellPreview) -> str:
    changed = ", ".join(f"{key}={value}" for key, value in cell.change.items()) or "nothing"
    return f"{changed} (the runs of {cell.same_as})" if cell.same_as else changed


def print_summary(summary: Summary, wanted: Sequence[str], console: Console) -> None:
    """Our numbers beside the paper's and the verdict of each claim, of the experiments that were asked for."""
    for name in wanted:
        one = summary.experiments[name]
        console.print(Text(printable(f"{name}: {one.title} ({one.scale})"), style="bold"))
        print_table(_numbers(one, summary), console)
        for why in one.adapted:
            console.print(Text(printable(f"adapted: {why}"), style="dim"))
        print_claims(summary, name, console)


def print_claims(summary: Summary, experiment: str, console: Console) -> None:
    """A line per claim of an experiment: verdict, what is claimed, evidence."""
    claims = [claim for claim in summary.claims if claim.experiment == experiment]
    if not claims:
        return
    console.print(Text(printable(counts_line(claims))))
    table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for name in ("verdict", "claim", "evidence"):
        table.add_column(name, overflow="fold")
    for claim in claims:
        verdict = Text(printable(claim.verdict_said), style=VERDICT_STYLES.get(claim.verdict, "bold yellow"))
        table.add_row(verdict, Text(printable(claim.said)), Text(printable(_evidence(claim))))
    console.print(table)


def _evidence(claim: JudgedClaim) -> str:
    return "; ".join(filter(None, (claim.evidence, *claim.remarks)))


def _numbers(one: ExperimentSummary, summary: Summary) -> Table:
    table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False)
    table.add_column("cell", overflow="fold")
    table.add_column("seeds", justify="right")
    for name in one.columns:
        known = quantity(name)
        once = ", once at the end" if known.once else ""
        table.add_column(f"{known.label}\n[dim]{known.unit}{once}", justify="right")
        if _is_published(one, name):
            table.add_column("the paper's", justify="right", style="dim")
    for cell in one.cells:
        found = summary.cells.get(cell, CellSummary(seeds=0))
        own = found.of_seeds(one.seeds) if one.seeds else found
        table.add_row(Text(printable(cell)), *_row(one, cell, own))
    return table


def _row(one: ExperimentSummary, name: str, cell: CellSummary) -> Iterable[str]:
    failed = sum(run.status == "failed" for run in cell.runs)
    yield f"{cell.seeds}" + (f", {failed} failed" if failed else "")
    for column in one.columns:
        text = estimate_text(cell.values.get(column), quantity(column).decimals)
        yield text + in_brackets(sink_elsewhere_text(cell, column))
        if _is_published(one, column):
            value = one.published.get(name, {}).get(column)
            yield NOTHING if value is None else f"{value:.{quantity(column).decimals}f}"


def _is_published(one: ExperimentSummary, column: str) -> bool:
    return any(column in values for values in one.published.values())
