"""Training in a terminal: a plan, the end of a run, a replayed step, the list of runs, a tuning, data to prepare."""

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from sinklab.commands.terminal.tables import print_notes, print_table, print_title
from sinklab.measuring.statistics.highest import elsewhere_text, in_brackets
from sinklab.report.runs import ListedRun
from sinklab.tables import Table, TableCell, TableColumn, names, number_text, numbers
from sinklab.train.directory.history import Evaluation, read_history
from sinklab.train.planning import TrainingPlan, megabytes
from sinklab.train.recipe import Recipe
from sinklab.train.replay import Replay

if TYPE_CHECKING:
    from sinklab.data.texts import Estimate
    from sinklab.tuning.documents import Tuning

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
    found = {
        "tokens": (last.tokens, ",", ""),
        "validation loss": (last.valid_loss, ".3f", " nats / token"),
        "Sink_1": (next(iter(last.sink_rate), None), ".1f", " % of heads"),
        "highest elsewhere": (elsewhere_text(last.sink_rate) or None, "", ""),
        "on the bias": (last.sink_rate_bias, ".1f", " % of heads"),
        "norm ratio": (last.largest_norm_ratio, ".1f", ", largest block"),
    }
    rows = [
        (name, value if isinstance(value, str) else number_text(value, form) + unit)
        for name, (value, form, unit) in found.items()
        if value is not None
    ]
    return Table(f"{recipe.name}, step {last.step:,} of {recipe.train.steps:,}", names("", ""), rows)


def print_replay(found: Replay, console: Console) -> None:
    """The loss, the first tensor that is not finite, and the parameters with the largest gradients."""
    begin = "the initial weights" if found.checkpoint is None else str(found.checkpoint)
    console.print(f"step {found.step} from {begin}, {found.repeated} updates repeated", highlight=False, soft_wrap=True)
    console.print(f"loss {found.loss:.6g}, gradient norm {found.grad_norm:.6g}", highlight=False)
    console.print(f"first tensor that is not finite: {found.first_not_finite or 'none'}", highlight=False)
    ranked = sorted(found.grad_norms.items(), key=lambda item: (item[1] == item[1], -item[1]))
    columns = [*names("parameter"), TableColumn("gradient norm", form=".4g")]
    print_table(Table(f"the {LARGEST} largest gradients, not finite ones first", columns, ranked[:LARGEST]), console)


def print_plan(plan: TrainingPlan, console: Console) -> None:
    """A table of the plan."""
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
    title = f"{plan.name} on {plan.processes} x {plan.device}"
    print_table(Table(title, names("", ""), list(rows.items())), console)


def print_runs(runs: Sequence[ListedRun], console: Console) -> None:
    """A line per run."""
    columns = [*names("Run", "State"), TableColumn("Step"), TableColumn("Sink_1", "%", ".1f")]
    columns += [TableColumn("bias", "%", ".1f"), TableColumn("loss", form=".3f"), TableColumn("seed")]
    columns += names("Changes")
    rows = [
        (
            run.directory,
            run.state,
            f"{run.step:,}/{run.steps:,}" if run.steps is not None else None,
            TableCell(run.sink_rate, in_brackets(run.sink_elsewhere).strip()),
            run.sink_rate_bias,
            run.valid_loss,
            run.seed,
            run.why or ", ".join(run.differs),
        )
        for run in runs
    ]
    print_table(Table("Runs", columns, rows), console)


def print_tuning(tuning: "Tuning", console: Console) -> None:
    """The base and the chat model side by side, and the notes."""
    asked = tuning.asked
    about = f"{asked.steps} updates of {asked.batch_size} conversations of at most {asked.length} tokens"
    print_title(tuning.model, console, [about])
    columns = [*names(""), *numbers(".2f", "Sink_1", "on the bias", unit="%"), *numbers(".2f", "norm ratio")]
    columns += [TableColumn("loss", form=".4f"), TableColumn("max gradient", form=".4g")]
    rows = [
        (
            name,
            TableCell(side.sink_rate[0], in_brackets(elsewhere_text(side.sink_rate)).strip()),
            side.sink_rate_bias,
            max(side.hidden_norm_ratio) if side.hidden_norm_ratio else None,
            side.valid_loss,
            tuning.grad_norm_max if name == "chat" else None,
        )
        for name, side in tuning.sides().items()
    ]
    title = f"Before and after tuning (eps {asked.eps:g}, loss held out in nats)"
    print_table(Table(title, columns, rows).without_empty_columns(), console)
    print_notes(tuning.notes, console)


def print_estimate(found: "Estimate", console: Console) -> None:
    """An estimate of what `sinklab data prepare` would read and write."""
    from sinklab.data.texts import known_sum

    columns = [*names("domain"), *numbers(",d", "bytes of text files", "tokens in them", "tokens taken")]
    rows = [(amount.name, amount.bytes, amount.tokens, amount.taken) for amount in found.amounts]
    sizes, tokens = [amount.bytes for amount in found.amounts], [amount.tokens for amount in found.amounts]
    rows.append(("all", known_sum(sizes), known_sum(tokens), found.tokens))
    written = "not known" if found.shard_bytes is None else f"{found.shard_bytes:,}"
    notes = [f"shards: {written} bytes. Estimated; nothing was written. An en dash: not known."]
    print_table(Table("", columns, rows, notes), console)
