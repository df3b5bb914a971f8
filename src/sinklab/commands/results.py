"""Terminal output of results and of plans: previews, estimates, and lists of experiments and interventions."""

import json
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from sinklab.commands.terminal import (
    TONES,
    YEAR,
    duration,
    numbers_of,
    print_notes,
    print_table,
    print_text,
    print_title,
    printable,
)
from sinklab.experiments.definition import SCALES, Scale
from sinklab.experiments.documents import JudgedClaim, Summary
from sinklab.experiments.paper import Covered
from sinklab.experiments.shipped import ListedExperiment, ScaleCost
from sinklab.experiments.sweep.local import cores_here, jobs_here
from sinklab.experiments.sweep.preview import Preview
from sinklab.interventions import NOT_INTERVENTIONS
from sinklab.measuring.answer import answer
from sinklab.report import result_tables
from sinklab.report.cells import cells_table, headline
from sinklab.report.collect import ListedRun
from sinklab.report.data import ReportData, model_label, recipe_changes
from sinklab.report.sweeps import (
    Sweep,
    claims_table,
    experiment_table,
    grid_tables,
    paper_models,
    subjects_of_claims,
    value_text,
)
from sinklab.schema import leaves
from sinklab.survey.suites import compared_rows
from sinklab.tables import (
    Table,
    TableCell,
    TableColumn,
    counted,
    in_brackets,
    later_sink_text,
    names,
    numbers,
    plural,
    table_of,
)
from sinklab.train.run import read_history

if TYPE_CHECKING:
    from sinklab.assessing.assess_model import Assessment
    from sinklab.assessing.parity import Parity
    from sinklab.data.texts import Estimate
    from sinklab.evaluating.evaluation import DownstreamScores, TaskMetric
    from sinklab.experiments.measured import ModelChoice, Pass
    from sinklab.experiments.sweep.packed import Verified
    from sinklab.interventions import Intervention, Overlay
    from sinklab.measuring.measurement import Measurement
    from sinklab.survey.suites import Survey
    from sinklab.train.planning import TrainingPlan
    from sinklab.train.recipe import Recipe
    from sinklab.train.update import Replay
    from sinklab.tuning.tuned_directory import Tuning

PROBLEMS = 20  # maximum number of problems, and of notes, listed per check
GRADIENTS = 12
"""Number of parameters (largest gradients) that a replay lists."""
VERDICT = 16, 30  # maximum width of a verdict, on consoles of less than 100 columns, and of 100 or more
FEW = 8
"""Maximum number of cells in the short table of an experiment."""
UNCHANGED = {
    "tiny": "loss 3.77 to 3.83, Sink_1 0 to 44 % (5 seeds)",
    "laptop": "loss 3.17 to 3.29, Sink_1 46 to 65 % (9 seeds)",
}
"""Results of a shipped recipe without changes, over the seeds of results/archive/tiny and results/laptop."""
OF_MODEL = ("model.", "losses.")
SHARES = ("acc", "exact_match")
"""Prefixes of the names of task metrics that are shown in percent."""


def print_report(data: ReportData, console: Console) -> None:
    """Print the tables of runs and suites, the notes, and each experiment with its claims."""
    for table in [*([cells_table(data)] if data.cells and not data.sweeps else []), *result_tables.suite_tables(data)]:
        print_table(table, console)
    print_notes([f"{name}: {note}" for name, note in data.notes], console)
    for sweep in data.sweeps:
        print_summary(sweep.summary, sweep.summary.experiments, console)


def print_claims(claims: Sequence[JudgedClaim], console: Console) -> None:
    """Print the verdict and text of each claim, with its evidence below."""
    table = claims_table(claims)
    drawn = RichTable(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    drawn.add_column(max_width=VERDICT[console.width >= 100])
    drawn.add_column()
    for (verdict, tone), claim, evidence in ([*row] for row in table.cells()):
        below = Padding(Text(printable(evidence[0]), "dim"), (0, 0, 1, 2), expand=False)
        drawn.add_row(Text(printable(verdict), TONES.get(tone.tone, "")), Group(Text(printable(claim[0])), below))
    print_title(table.title, console)
    console.print(drawn)


def print_summary(summary: Summary, wanted: Iterable[str], console: Console) -> None:
    """Print results (next to the paper's, if any), notes, warnings and verdicts of the experiments with these ids.

    The last line has the number of claims by subject, if they have several.
    """
    wanted = list(wanted)
    for name in wanted:
        experiment = summary.experiments[name]
        cells = summary.cells_of(name)
        place = f" {'at' if experiment.scale in SCALES else 'in'} {experiment.scale}" if experiment.scale else ""
        print_title(f"{name}{place}: {experiment.title}", console)
        for table in grid_tables(experiment, cells) or [experiment_table(experiment, cells)]:
            print_table(table, console)
        if elsewhere := paper_models(experiment):
            print_table(elsewhere, console)
        print_notes([f"adapted: {why}" for why in experiment.adapted], console)
        warnings = [
            f"{cell}, {experiment.replicate} {run.seed}: {warning}"
            for cell, found in cells.items()
            for run in found.runs
            for warning in run.warnings
        ]
        print_notes(warnings, console)
        if claims := summary.claims_of(name):
            print_claims(claims, console)
    if subjects := subjects_of_claims([claim for name in wanted for claim in summary.claims_of(name)]):
        print_text(subjects, console)


def print_verdicts(summary: Summary, wanted: Iterable[str], console: Console) -> None:
    """Print what holds in the experiments with these ids; for one experiment of few cells, also Sink_1 of each cell.

    An experiment without Sink_1 has its first quantity in the table.
    """
    from sinklab.report.sections import sweep_sentences  # which loads the chart libraries

    experiments = {name: summary.experiments[name] for name in wanted}
    claims = [claim for name in experiments for claim in summary.claims_of(name)]
    if len(experiments) == 1:
        [(name, experiment)] = experiments.items()
        place = f" {'at' if experiment.scale in SCALES else 'in'} {experiment.scale}" if experiment.scale else ""
        print_title(f"{name}{place}: {experiment.title}", console)
        cells, main = summary.cells_of(name), [one for one in experiment.columns if one == "sink_1"]
        shown = experiment.model_copy(update={"columns": main or experiment.columns[:1]})
        if len(cells) <= FEW:
            print_table(replace(experiment_table(shown, cells), notes=()), console)
    of_wanted = summary.model_copy(update={"experiments": experiments, "claims": claims})
    for sentence in sweep_sentences(Sweep(Path(), of_wanted, Path())):
        console.print(printable(sentence), markup=False, highlight=False)


def print_assessment(assessment: "Assessment", console: Console, full: bool = False) -> None:
    """Print the recommended settings of an assessment and its answer; with `full`, also every answer and change."""
    print_title(f"{model_label(assessment.model)}: {assessment.layers} layers, context {assessment.context:,}", console)
    settings = assessment.settings()
    if settings:
        print_table(result_tables.settings_table(assessment, settings if full else assessment.recommended()), console)
    unsafe = [f"Not safe: {'; '.join(assessment.unsafe())}."] if assessment.unsafe() else []
    console.print(" ".join([*unsafe, *assessment.answer()]), markup=False, highlight=False)
    if assessment.asked.get("quick") and not full:
        print_notes(assessment.notes[:1], console)
    if full or not settings:
        print_table(replace(result_tables.answers_table(assessment), notes=()), console)
    if full:
        print_table(result_tables.assessment_table(assessment), console)


def print_parity(parity: "Parity", console: Console) -> None:
    """Print the comparisons of a server's log-probabilities with those of the model here, the notes and the verdict."""
    for one in parity.prompts:
        print_table(one.table(), console)
    print_notes(parity.notes, console)
    print_text(parity.sentence(), console)


def print_measurement(measurement: "Measurement", console: Console, full: bool = False) -> None:
    """Print the conclusion, the main numbers and the notes of one measurement; with `full`, every layer."""
    facts = result_tables.measurement_facts(measurement)
    print_title(result_tables.measurement_title(measurement), console, facts if full else ())
    console.print(" ".join(answer(measurement)), markup=False, highlight=False)
    if measurement.fed is not None:
        console.print(printable(measurement.fed.line()), markup=False, highlight=False)
    for table in result_tables.measurement_tables(measurement, full):
        print_table(table, console)
    print_notes(measurement.notes, console)


def result_text(result: "Measurement | Assessment") -> str:
    """Return the text that `print_measurement` or `print_assessment` prints, in lines of at most 100 characters."""
    lines = StringIO()
    show: Any = print_measurement if hasattr(result, "sink_rate") else print_assessment
    show(result, Console(file=lines, width=100))
    return lines.getvalue().rstrip()


def print_survey(survey: "Survey", console: Console) -> None:
    """Print a headline, and a line per measured domain or checkpoint; nothing if no measurement succeeded."""
    if survey.outcome.measured:
        data = ReportData.of_survey(survey)
        print_title(" ".join(headline(data)), console)
        print_report(data, console)


def print_comparison(comparison: "Survey", console: Console) -> None:
    """Print each model's conclusion, a line per quantity with values and differences from the first, and notes."""
    compared = comparison.outcome.measured
    first = next(iter(compared.values()))
    texts = f"{plural(first.sequences, 'sequence')} of {first.length} tokens"
    print_title(f"Comparison: {texts}, {first.inputs}, eps {first.eps:g}", console)
    rows = compared_rows(compared)
    console.print(Text(printable(result_tables.difference_sentence(rows))))
    for model, measured in compared.items():
        console.print(Text(f"{printable(model)}: {answer(measured)[0]}"))
    print_table(result_tables.comparison_table(rows, list(compared)), console)
    for model, measured in compared.items():
        fed = [] if measured.fed is None else [measured.fed.line()]
        notes = ["position 1 is BOS" if measured.bos else "no BOS", *fed, *measured.notes]
        print_notes([f"{model}: {note}" for note in notes], console)


def print_scores(scores: "DownstreamScores", console: Console) -> None:
    """Print a line per metric of every downstream task, with Sink_1 (on the items or on a text), and then the notes."""
    columns = [*names("task", "metric"), *numbers("", "value", "standard error"), *numbers(",d", "items")]
    columns += [TableColumn("Sink_1", "%", ".1f")]
    rows = [
        (name, metric, *_score(metric, score), task.items, task.sink.sink_1 if task.sink else None)
        for name, task in scores.tasks.items()
        for metric, score in task.metrics.items()
    ]
    print_table(Table(scores.model, columns, rows), console)
    for name, task in scores.tasks.items():
        notes = []
        if task.left_out:
            notes.append(f"{plural(task.left_out, 'item')} excluded, because an answer exceeds the model's context")
        if task.cut:
            cut = plural(task.cut, "prompt")
            notes.append(f"{cut} truncated on the left, because the item exceeds the model's context")
        if task.sink is None:
            notes.append("the items are too short to measure the sink; pass --text FILE")
        else:
            where = "its items" if task.sink.text == "task" else task.sink.text
            read = plural(task.sink.sequences, "sequence")
            notes.append(f"Sink_1 is measured on {read} of {task.sink.length} tokens of {where}")
        print_notes([f"{name}: {note}" for note in notes], console)
    print_notes(scores.notes, console)


def _score(metric: str, score: "TaskMetric") -> tuple[str, str | None]:
    """Return value and standard error (None if unknown) of a metric as text; fractions are in percent."""
    times, unit, form = (100, " %", ".1f") if metric.startswith(SHARES) else (1, "", ".4f")
    stderr = None if score.stderr is None else f"{times * score.stderr:{form}}{unit}"
    return f"{times * score.value:{form}}{unit}", stderr


def print_end(directory: Path, recipe: "Recipe", console: Console) -> None:
    """Print the last evaluation of a finished run, if any, and what to compare it with.

    For a shipped recipe, these are the known numbers of its unchanged model, and commands that train this model (or, if
    the run is of it, one with an intervention) with the same settings and report both.
    """
    if history := read_history(directory / "metrics.jsonl"):
        last = history[-1]
        shown = numbers_of(last.model_dump())
        if last.largest_norm_ratio is not None:
            shown["largest norm"] = f"{last.largest_norm_ratio:.1f} x"
        weights = "attention" if recipe.model.attention.operation.sums_to_one else "proxy scores"
        says = {
            "loss": "nats (-log p) per token of validation text",
            "Sink_1": f"of heads give it over {recipe.metric.eps:g} of their {weights}",
            "bias": "of heads give the bias or sink token as much",
            "largest norm": "the mean of the others, largest over blocks",
        }
        title = f"{recipe.name}, step {last.step:,} of {recipe.train.steps:,}, in {directory}"
        columns = names("BOS, the first token" if recipe.data.bos else "The first token", "", "")
        print_table(Table(title, columns, [(name, text, says.get(name, "")) for name, text in shown.items()]), console)
    where, changes = shlex.quote(str(directory)), recipe_changes(recipe.model_dump(mode="json"))
    if changes is not None:
        kept = [one for one in changes if not one.startswith(OF_MODEL) or one.partition("=")[0] in NOT_INTERVENTIONS]
        known = f": {UNCHANGED[recipe.name]}" if not kept and recipe.name in UNCHANGED else ""
        name, added = ("unchanged", []) if len(kept) < len(changes) else ("gate", ["model.gate=head"])
        seed = [f"seed={recipe.seed}"] if recipe.seed else []
        sets = "".join(f" --set {shlex.quote(one)}" for one in [*kept, *seed, *added])
        print_text(f"{recipe.name} unchanged{known}; to compare{' with a gate' if added else ''}:", console)
        print_text(f"  sinklab train {recipe.name}{sets} --out {where}-{name}", console)
        print_text(f"  sinklab report {where} {where}-{name}", console)
    if recipe.schedule.shape == "flat":
        longer = f"--set train.steps={2 * recipe.train.steps} --out {where}"
        print_text(f"to train for longer, the same command with:\n  {longer}", console)


def print_replay(found: "Replay", console: Console) -> None:
    """Print loss and gradient norm of a replayed step, its first non-finite tensor, and the largest gradients."""
    begin = "the initial weights" if found.checkpoint is None else str(found.checkpoint)
    print_text(f"step {found.step} from {begin}, {plural(found.repeated, 'update')} repeated", console)
    print_text(f"loss {found.loss:.6g}, gradient norm {found.grad_norm:.6g}", console)
    print_text(f"first non-finite tensor: {found.first_not_finite or 'none'}", console)
    ranked = sorted(found.grad_norms.items(), key=lambda item: (item[1] == item[1], -item[1]))
    columns = [*names("parameter"), TableColumn("gradient norm", form=".4g")]
    print_table(Table(f"the {GRADIENTS} largest gradients, non-finite first", columns, ranked[:GRADIENTS]), console)


def print_checks(checks: "Sequence[Verified]", console: Console) -> None:
    """Print the outcome of each check of packed results, with at most PROBLEMS problems and PROBLEMS notes."""
    for check in checks:
        wrong = len(check.problems)
        problems = plural(wrong, "problem") if wrong else "no problem"
        lines = [*check.problems[:PROBLEMS], *check.notes[:PROBLEMS]]
        lines += ["more: see --json"] if max(wrong, len(check.notes)) > PROBLEMS else []
        print_text("\n  ".join([f"{check.name}: {check.checked} checked, {problems}", *lines]), console)


def print_runs(runs: Sequence[ListedRun], console: Console) -> None:
    """Print a line per training run: state, step, sink rate, loss, seed, and changed recipe keys or error."""
    table = table_of(
        "Runs",
        runs,
        [
            (TableColumn("Run", text=True), lambda run: run.directory),
            (TableColumn("State", text=True), lambda run: run.state),
            (TableColumn("Step"), lambda run: f"{run.step:,}/{run.steps:,}" if run.steps is not None else None),
            (
                TableColumn("Sink_1", "%", ".1f"),
                lambda run: TableCell(run.sink_rate, in_brackets(run.sink_elsewhere).strip()),
            ),
            (TableColumn("bias", "%", ".1f"), lambda run: run.sink_rate_bias),
            (TableColumn("loss", form=".3f"), lambda run: run.valid_loss),
            (TableColumn("seed"), lambda run: run.seed),
            (TableColumn("Changes", text=True), lambda run: run.why or ", ".join(run.differs)),
        ],
    )
    print_table(table, console)


def print_tuning(tuning: "Tuning", console: Console) -> None:
    """Print loss and sink of the model before and after fine-tuning, and the notes."""
    asked = tuning.asked
    about = f"{asked.steps} updates of {asked.batch_size} conversations of at most {asked.length} tokens"
    print_title(tuning.model, console, [about])
    columns = [*names(""), *numbers(".2f", "Sink_1", "on the bias", unit="%"), *numbers(".2f", "norm ratio")]
    columns += [TableColumn("loss", form=".4f"), TableColumn("max gradient norm", form=".4g")]
    rows = [
        (
            name,
            TableCell(side.sink_rate[0], in_brackets(later_sink_text(side.sink_rate)).strip()),
            side.sink_rate_bias,
            max(side.hidden_norm_ratio) if side.hidden_norm_ratio else None,
            side.valid_loss,
            tuning.grad_norm_max if name == "chat" else None,
        )
        for name, side in tuning.sides().items()
    ]
    title = f"Before and after tuning (eps {asked.eps:g}, held-out loss in nats per token)"
    print_table(Table(title, columns, rows).without_empty_columns(), console)
    print_notes(tuning.notes, console)


def print_experiments(found: Sequence[ListedExperiment], console: Console) -> None:
    """Print two lines per experiment: id, number of cells, time per scale; then question or title, truncated."""
    for experiment, costs in found:
        needed = {scale: _seconds(costs[scale]) for scale in SCALES if scale in costs}
        times = [f"{scale} {duration(seconds) if seconds < YEAR else '> 1 y'}" for scale, seconds in needed.items()]
        numbers = "  ".join(["", plural(len(experiment.cells), "cell"), ", ".join(times)]).rstrip()
        console.print(Text.assemble((printable(experiment.id), "bold"), numbers), soft_wrap=True)
        question = Text(f"  {printable(experiment.question or experiment.title)}", style="dim")
        question.truncate(console.width, overflow="ellipsis")
        console.print(question, soft_wrap=True)
    console.print()
    _print_estimates([costs for _, costs in found], console)
    note = (
        "Scales with more than a year (> 1 y) are for GPUs. Experiments without times measure existing models. Details "
        "of an experiment: sinklab experiments ID"
    )
    console.print(note, highlight=False)


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
    if ways and (busy := busy_line(os.getloadavg()[0], cores_here())):
        console.print(busy, highlight=False)


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
    if ahead.hours is not None and (busy := busy_line(os.getloadavg()[0], cores_here())):
        print_text(busy, console)


def busy_line(load: float, cores: int) -> str:
    """Return a sentence on a busy machine, whose load (waiting and running processes) is half its cores or more."""
    if load < cores / 2:
        return ""
    return (
        f"this machine is busy: about {load:.1f} processes already want its {counted(cores, 'core')}, so that the runs "
        f"may take up to {1 + load / cores:.1f} times as long"
    )


def print_passes(planned: Sequence[tuple[str, "Pass", range]], console: Console) -> None:
    """Print a line per pass (replicates x sequences x tokens, models, inputs, cells), then tokens and download size.

    Args:
        planned: triples of experiment id, pass, and numbers of its replicates.
    """
    from sinklab.experiments.measured import download_of, enumerated

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
        **{f"FLOPs of {name}": f"{100 * part / plan.flops.total:.0f} %" for name, part in asdict(plan.flops).items()},
        **{f"{name} per process, roughly": f"{size / MB:,.0f} MB" for name, size in plan.memory.items()},
    }
    if plan.hours_at_peak is not None:
        rows["time at the GPU's peak FLOP/s"] = f"{plan.hours_at_peak:.1f} hours"
    title = f"{plan.name} on {plan.processes} x {plan.device}"
    print_table(Table(title, names("quantity", "value"), list(rows.items())), console)


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
