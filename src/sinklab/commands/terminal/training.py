"""How a plan, the end of a run, and a replayed step look in a terminal."""

import shlex
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from sinklab.commands.tables import print_table
from sinklab.measuring.statistics.highest import elsewhere_text
from sinklab.train.directory.history import Evaluation, read_history
from sinklab.train.planning.plan import TrainingPlan, megabytes
from sinklab.train.recipe import Recipe
from sinklab.train.replay import Replay

LARGEST = 12


def print_end(directory: Path, recipe: Recipe, console: Console) -> None:
    """The last evaluation of a finished run, where it is, and what can be done with it."""
    history = read_history(directory / "metrics.jsonl")
    if history:
        print_table(_end_table(history[-1], recipe), console)
    where = shlex.quote(str(directory))
    console.print(f"in {directory}:", highlight=False, markup=False, soft_wrap=True)
    doing = {f"sinklab measure {where} --text FILE": "another text", f"sinklab report {where}": "charts"}
    if recipe.schedule.shape == "flat":
        more = f"sinklab train ... --set train.steps={2 * recipe.train.steps} --out {where}"
        doing[more] = "go on from here"
    width = max(map(len, doing))
    for command, what in doing.items():
        console.print(f"  {command:{width}}   {what}", highlight=False, markup=False, soft_wrap=True)


def _end_table(last: Evaluation, recipe: Recipe) -> Table:
    title = Text(f"{recipe.name}, step {last.step:,} of {recipe.train.steps:,}", "table.title")
    table = Table(show_header=False, title=title)
    shown = {
        "tokens": (last.tokens, ",", ""),
        "validation loss": (last.valid_loss, ".3f", " nats / token"),
        "Sink_1": (next(iter(last.sink_rate), None), ".1f", " % of heads"),
        "highest elsewhere": (elsewhere_text(last.sink_rate) or None, "", ""),
        "on the bias": (last.sink_rate_bias, ".1f", " % of heads"),
        "norm ratio": (last.largest_norm_ratio, ".1f", ", largest block"),
    }
    for name, (value, form, unit) in shown.items():
        if value is not None:
            table.add_row(name, f"{value:{form}}{unit}")
    return table


def print_replay(found: Replay, console: Console) -> None:
    """The loss, the first tensor that is not finite, and the parameters with the largest gradients."""
    begin = "the initial weights" if found.checkpoint is None else str(found.checkpoint)
    console.print(f"step {found.step} from {begin}, {found.repeated} updates repeated", highlight=False, soft_wrap=True)
    console.print(f"loss {found.loss:.6g}, gradient norm {found.grad_norm:.6g}", highlight=False)
    console.print(f"first tensor that is not finite: {found.first_not_finite or 'none'}", highlight=False)
    table = Table(
        "parameter",
        Column("gradient norm", justify="right"),
        title=f"the {LARGEST} largest gradients, not finite ones first",
    )
    ranked = sorted(found.grad_norms.items(), key=lambda item: (item[1] == item[1], -item[1]))
    for name, norm in ranked[:LARGEST]:
        table.add_row(name, f"{norm:.4g}")
    print_table(table, console)


def print_plan(plan: TrainingPlan, console: Console) -> None:
    """A table of the plan."""
    title = Text(f"{plan.name} on {plan.processes} x {plan.device}", "table.title")
    table = Table(show_header=False, title=title)
    per_token = plan.flops_per_step / plan.tokens_per_step
    rows = {
        "parameters": f"{plan.parameters:,}",
        "steps": f"{plan.steps:,}",
        "tokens": f"{plan.tokens:,}, {plan.tokens_per_step:,} a step",
        "operations": f"{plan.flops_per_step:.3g} a step, {per_token:.3g} a token",
        **{f"  {name}": f"{part / plan.flops.total:.0%}" for name, part in asdict(plan.flops).items()},
        "memory per process": f"{megabytes(plan.memory.total)} MB",
        **{f"  {name}": f"{megabytes(size)} MB" for name, size in asdict(plan.memory).items()},
    }
    if plan.hours_at_peak is not None:
        rows["at the full speed of the card"] = f"{plan.hours_at_peak:.1f} hours"
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
