"""Terminal output of plans: experiments, coverage of the paper, previews, interventions, and estimates."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from sinklab.commands.terminal.progress import duration, short_duration
from sinklab.commands.terminal.tables import print_table, print_text, printable
from sinklab.experiments.definition import SCALES, Scale
from sinklab.experiments.paper import Covered
from sinklab.experiments.shipped import ListedExperiment, ScaleCost
from sinklab.experiments.sweep.engines.local import jobs_here
from sinklab.experiments.sweep.preview import Preview
from sinklab.report.sweeps import value_text
from sinklab.schema import leaves
from sinklab.tables import Table, TableColumn, names, numbers, plural

if TYPE_CHECKING:
    from sinklab.data.texts import Estimate
    from sinklab.experiments.passes import ModelChoice, Pass
    from sinklab.interventions import Intervention, Overlay
    from sinklab.train.planning import TrainingPlan


def print_experiments(found: Sequence[ListedExperiment], console: Console) -> None:
    """Print two lines per experiment: id, number of cells, time per scale; then question or title, truncated."""
    for experiment, costs in found:
        times = [f"{scale} {short_duration(_seconds(costs[scale]))}" for scale in SCALES if scale in costs]
        numbers = "  ".join(["", plural(len(experiment.cells), "cell"), ", ".join(times)]).rstrip()
        console.print(Text.assemble((printable(experiment.id), "bold"), numbers), soft_wrap=True)
        question = Text(f"  {printable(experiment.question or experiment.title)}", style="dim")
        question.truncate(console.width, overflow="ellipsis")
        console.print(question, soft_wrap=True)
    console.print()
    _print_estimates([costs for _, costs in found], console)
    said = "Experiments without times measure existing models. Details of an experiment: sinklab experiments ID"
    console.print(said, highlight=False)


def print_experiment(one: ListedExperiment, plan: str, console: Console) -> None:
    """Print one experiment in full: question, cells, dated claims, time per scale, and the command of its plan."""
    experiment, costs = one
    console.print(Text(printable(f"{experiment.id}: {experiment.title}"), style="bold"))
    for text in filter(None, (experiment.question, experiment.source and f"After {experiment.source}")):
        console.print(Text(printable(text)))
    console.print()
    console.print(Text(printable(f"{len(experiment.cells)} cells: {', '.join(experiment.cells)}")))
    console.print()
    by_date: dict[str, list[str]] = {}
    for claim in experiment.claims:
        by_date.setdefault(str(claim.stated or experiment.stated or ""), []).append(claim.text)
    for stated, texts in by_date.items():
        console.print(f"{plural(len(texts), 'claim')}{stated and f', stated {stated}'}:", highlight=False)
        listed = RichTable.grid(padding=(0, 1))
        for text in texts:
            listed.add_row(" -", Text(printable(text)))
        console.print(listed)
        console.print()
    for scale, cost in costs.items():
        runs = f"{cost.cells} cells of {plural(len(experiment.seeds_of(scale)), 'seed')}, {cost.claims} claims"
        console.print(f"{scale}: {duration(_seconds(cost))} ({runs})", highlight=False)
    _print_estimates([costs], console)
    print_text(f"Plan of each cell: {plan}", console)
    console.print()


def _seconds(cost: ScaleCost) -> float:
    return cost.hours * 3600 / jobs_here()


def _print_estimates(found: Sequence[Mapping[Scale, ScaleCost]], console: Console) -> None:
    """Print how the times were estimated, in one line for all scales with the same kind of estimate."""
    ways: dict[str, list[str]] = {}
    for scale in SCALES:
        for cost in [costs[scale] for costs in found if scale in costs][:1]:
            ways.setdefault(cost.estimated, []).append(scale)
    for estimated, scales in ways.items():
        console.print(f"{', '.join(scales)}: {jobs_here()} at a time, {estimated}", highlight=False)


def print_coverage(parts: Mapping[str, Covered], console: Console) -> None:
    """Print each part of the paper, such as a table, with its statement, our claims, and reasons for missing claims."""
    for name, part in parts.items():
        console.print(Text.assemble((printable(name), "bold"), f": {printable(part.says)}"))
        claims = ", ".join(one.removeprefix(f"{name}.") for one in part.claims)
        for title, text in (("claims", claims), ("not encoded", part.without)):
            if text:
                console.print(Padding(Text(printable(f"{title}: {text}"), "dim"), (0, 0, 0, 2), expand=False))


def hours_line(ahead: Preview) -> str:
    """Return a sentence with the number of unfinished runs and their expected duration, if it can be estimated."""
    if not ahead.missing:
        return f"all {ahead.runs} runs are done"
    trained = f"{ahead.missing} of {ahead.runs} runs will be trained"
    if ahead.hours is None:
        how_long = "" if ahead.estimated else "; the time per run is unknown until the first run has finished"
        return f"{trained} by {ahead.engine}, which limits the number of concurrent runs{how_long}"
    return f"{trained}, {ahead.jobs} at a time: {duration(ahead.hours * 3600)} ({ahead.estimated})"


def print_preview(ahead: Preview, console: Console) -> None:
    """Print a line per cell: changed recipe keys, finished runs, time per run; then the total time of the sweep."""
    rows = [
        (
            cell.name,
            (", ".join(f"{key}={value_text(value)}" for key, value in cell.change.items()) or "none")
            + (f" (same runs as {cell.same_as})" if cell.same_as else ""),
            f"{cell.done} of {cell.seeds}",
            None if cell.hours is None else duration(cell.hours * 3600),
        )
        for cell in ahead.cells
    ]
    columns = [*names("cell", "changes"), TableColumn("done"), TableColumn("time per run")]
    print_table(Table("", columns, rows), console)
    print_text(hours_line(ahead), console)


def print_passes(planned: Sequence[tuple[str, "Pass", range]], console: Console) -> None:
    """Print a line per pass (replicates x sequences x tokens, models, inputs, cells), then tokens and download size.

    Args:
        planned: triples of experiment id, pass, and numbers of its replicates.
    """
    from sinklab.experiments.passes import download_of, enumerated

    rows, models = [], dict[str, "ModelChoice"]()
    read = 0
    for experiment, one, replicates in planned:
        own = {str(model): model for model in map(one.model, replicates)}
        request = one.request(0)
        sequences = f"{len(replicates)} x {request.sequences} x {request.length}"
        rows.append((experiment, enumerated(list(own)), sequences, request.options.inputs, ", ".join(one.cells)))
        models |= own
        read += len(replicates) * request.sequences * request.length
    print_table(Table("", names("experiment", "model", "sequences", "inputs", "cells"), rows), console)
    print_text(f"{read:,} tokens are read; {download_of(list(models.values()))}", console)


def print_catalogue(found: "Iterable[Intervention]", console: Console) -> None:
    """Print a line per intervention (recipe key, or kind of a union) with its allowed, default and neutral values."""
    rows = []
    for one in found:
        notes = [one.explanation.removesuffix(".")]
        if not one.is_kind:
            notes += [f"values: {one.values}", f"default: {one.default}" if one.default else "required"]
        if one.neutral:
            notes.append(f"neutral: {one.neutral}")
        name = f"{one.key}={one.kind}" if one.is_kind else f"  {one.key} ({one.kind})" if one.kind else one.key
        rows.append((name, "; ".join(filter(None, notes))))
    print_table(Table("", names("key", "effect"), rows), console)


def settings_of(overlay: "Overlay") -> list[str]:
    """Return an overlay as values of --set: KEY=VALUE with a dotted key and a value in YAML."""
    values = leaves(overlay, empty=True).items()
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in values]


def print_variants(overlays: "Mapping[str, Overlay]", console: Console) -> None:
    """Print a line per variant with its changes to a recipe as values of --set."""
    rows = [(name, "\n".join(settings_of(overlay))) for name, overlay in overlays.items()]
    print_table(Table("", names("variant", "--set"), rows), console)


def print_plan(plan: "TrainingPlan", console: Console) -> None:
    """Print parameters, tokens, FLOPs, estimated memory and, on a known GPU, minimum time of a training run."""
    from sinklab.train.planning import MB

    per_token = plan.flops_per_step / plan.tokens_per_step
    rows = {
        "parameters": f"{plan.parameters:,}",
        "steps": f"{plan.steps:,}",
        "tokens": f"{plan.tokens:,}, {plan.tokens_per_step:,} per step",
        "FLOPs": f"{plan.flops_per_step:.3g} per step, {per_token:.3g} per token",
        **{f"  {name}": f"{part / plan.flops.total:.0%}" for name, part in asdict(plan.flops).items()},
        **{f"{name} per process, roughly": f"{size / MB:,.0f} MB" for name, size in plan.memory.items()},
    }
    if plan.hours_at_peak is not None:
        rows["time at the GPU's peak FLOP/s"] = f"{plan.hours_at_peak:.1f} hours"
    title = f"{plan.name} on {plan.processes} x {plan.device}"
    print_table(Table(title, names("", ""), list(rows.items())), console)


def print_estimate(found: "Estimate", console: Console) -> None:
    """Print the estimated bytes and tokens that `sinklab data prepare` would read and write."""
    from sinklab.data.texts import known_sum

    columns = [*names("domain"), *numbers(",d", "bytes of text", "available tokens", "selected tokens")]
    rows = [(amount.name, amount.bytes, amount.tokens, amount.taken) for amount in found.amounts]
    sizes, tokens = [amount.bytes for amount in found.amounts], [amount.tokens for amount in found.amounts]
    rows.append(("all", known_sum(sizes), known_sum(tokens), found.tokens))
    written = "an unknown number of" if found.shard_bytes is None else f"{found.shard_bytes:,}"
    notes = [f"shards: {written} bytes. All numbers are estimates; nothing was written. An en dash means unknown."]
    print_table(Table("", columns, rows, notes), console)
