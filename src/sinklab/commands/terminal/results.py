"""Results in the terminal: of a report, of measurements of one or many models, of tasks, assessments, backends."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from sinklab.commands.terminal.tables import print_notes, print_table, print_title
from sinklab.experiments.definition import SCALES
from sinklab.experiments.documents import Summary
from sinklab.report.data import ReportData
from sinklab.report.experiments.sweeps import cells_of, run_warnings
from sinklab.report.experiments.tables import claims_table, experiment_table, paper_models
from sinklab.report.summary import headline
from sinklab.report.tables import (
    assessment_table,
    cells_table,
    comparison_table,
    measurement_facts,
    measurement_tables,
    tables,
)
from sinklab.survey.suites import CheckpointsDocument, DomainsDocument, FamiliesDocument
from sinklab.tables import Table, TableCell, TableColumn, Value, names, numbers

if TYPE_CHECKING:
    from sinklab.assessing.assessment import Assessment
    from sinklab.evaluating.evaluation import DownstreamScores, TaskMetric, TaskScores
    from sinklab.measuring.measurement import Measurement
    from sinklab.survey.backends import Parity
    from sinklab.survey.checkpoints import Checkpoints
    from sinklab.survey.compare import Comparison
    from sinklab.survey.families import Families, Size
    from sinklab.survey.measure_many import Domains

SHARES = ("acc", "exact_match")
"""Beginnings of the metrics of downstream tasks that are shown in percent."""


def print_report(data: ReportData, console: Console) -> None:
    """Print the tables of the page with the notes of the measurements, then the experiments, then other claims."""
    for table in [*([cells_table(data, curves=True)] if data.cells else []), *tables(data)]:
        print_table(table, console)
    notes = [*((data.label(run), note) for run in data.runs for note in run.notes), *data.failures]
    print_notes([f"{name}: {note}" for name, note in notes], console)
    for sweep in data.sweeps:
        print_summary(sweep.summary, sweep.experiments, console)
    if data.claims:
        print_table(claims_table(data.claims), console)


def print_summary(summary: Summary, wanted: Iterable[str], console: Console) -> None:
    """Our numbers beside the paper's and the verdict of each claim, of some experiments of a summary."""
    for name in wanted:
        experiment = summary.experiments[name]
        cells = cells_of(summary, experiment)
        place = f" {'at' if experiment.scale in SCALES else 'in'} {experiment.scale}" if experiment.scale else ""
        print_title(f"{name}{place}: {experiment.title}", console)
        print_table(experiment_table(experiment, cells), console)
        if elsewhere := paper_models(experiment):
            print_table(elsewhere, console)
        print_notes([f"adapted: {why}" for why in experiment.adapted], console)
        warnings = [
            f"{cell}, seed {run.seed}: {warning}"
            for cell, found in cells.items()
            for run in found.runs
            for warning in run_warnings(run)
        ]
        print_notes(warnings, console)
        if claims := [claim for claim in summary.claims if claim.experiment == name]:
            print_table(claims_table(claims), console)


def print_assessment(assessment: "Assessment", console: Console) -> None:
    """Print one table over all parts, with what was skipped and the notes."""
    print_title(f"{assessment.model}: {assessment.layers} layers, context {assessment.context:,}", console)
    print_table(assessment_table(assessment), console)


def print_measurement(measurement: "Measurement", console: Console) -> None:
    """Print the tables of one measurement, and its notes."""
    m = measurement
    model = (m.model or "model") + (f" at {m.revision}" if m.revision else "")
    print_title(
        f"{model}: {m.sequences} sequences of {m.length} tokens, {m.inputs}", console, measurement_facts(measurement)
    )
    for table in measurement_tables(measurement):
        print_table(table, console)
    print_notes(m.notes, console)


def print_domains(domains: "Domains", console: Console) -> None:
    """A line per domain."""
    document = DomainsDocument(model=domains.model, domains={name: {} for name in domains.outcome.measured})
    _print_survey(ReportData.of_suite(document, domains.outcome.measured), console)


def print_families(families: "Families", console: Console) -> None:
    """A line per model, measured and published side by side."""
    if families.outcome.measured:
        document = FamiliesDocument.model_validate({**families.document(), "failed": {}})
        _print_survey(ReportData.of_suite(document, families.outcome.measured), console)


def print_checkpoints(checkpoints: "Checkpoints", console: Console) -> None:
    """A line per checkpoint, in the order of the steps."""
    document = CheckpointsDocument(model=checkpoints.model, checkpoints=checkpoints.rows())
    _print_survey(ReportData.of_suite(document, checkpoints.outcome.measured), console)


def _print_survey(data: ReportData, console: Console) -> None:
    print_title(" ".join(headline(data)), console)
    print_report(data, console)


def print_comparison(comparison: "Comparison", console: Console) -> None:
    """A line per quantity, a column per model, and the difference of each from the first."""
    first = next(iter(comparison.measured.values()))
    print_title(
        f"Comparison: {first.sequences} sequences of {first.length} tokens, {first.inputs}, eps {first.eps:g}", console
    )
    print_table(comparison_table(comparison.rows(), list(comparison.measured)), console)
    for model, measured in comparison.measured.items():
        notes = ["position 1 is BOS" if measured.bos else "no BOS", *measured.notes]
        print_notes([f"{model}: {note}" for note in notes], console)


def print_sizes(found: "Sequence[Size]", dtype: str, console: Console) -> None:
    """A line per model: its size on disk and in memory."""
    columns = [*names("model"), TableColumn("size", "millions", ",.1f")]
    columns += numbers(".2f", "disk", "float32", "bfloat16", "peak", unit="GB")
    columns += [TableColumn("published", "Sink_1, %", ".2f")]
    rows: list[list[Value]] = [
        [
            size.model.rpartition("/")[2],
            TableCell(size.parameters / 1e6, "*" if size.counted == "config" else ""),
            size.disk_gb,
            size.float32_gb,
            size.bfloat16_gb,
            size.peak_gb,
            size.published,
        ]
        for size in found
    ]
    rows.append([f"{len(found)} models", "", sum(size.disk_gb for size in found), "", "", "", ""])
    notes = ["* counted from the local configuration"] if any(size.counted == "config" for size in found) else []
    title = f"Size on disk and in memory in GB (10^9 bytes); peak: about, in dtype {dtype}"
    print_table(Table(title, columns, rows, notes), console)


def print_parity(parity: "Parity", console: Console) -> None:
    """A line per attention backend, and why others are unavailable."""
    print_title(
        f"{parity.model}: {parity.sequences} sequences of {parity.length} tokens, {parity.dtype} on {parity.device}",
        console,
        [
            f"transformers {parity.transformers}, torch {parity.torch}",
            f"{parity.default} by default",
            "learned sink logits" if parity.has_sinks else "no sink logits",
            f"logits agree up to {parity.tolerance:.1e}",
        ],
    )
    columns = [
        *names("backend", "verdict"),
        TableColumn("logits", form=".1e"),
        TableColumn("without the sink", form=".1e"),
        TableColumn("share on the sink", form=".4f"),
        TableColumn("importance", "difference", ".1e"),
        TableColumn("importance", "of position 1", ".4f"),
    ]
    rows = [
        (
            one.backend,
            one.verdict,
            one.logits_difference,
            one.without_sink_difference,
            one.sink_share,
            one.importance_difference,
            one.importance_first,
        )
        for one in parity.backends
    ]
    notes = [f"{one.backend}: {one.why}" for one in parity.backends if one.why is not None]
    print_table(Table("Beside eager attention", columns, rows, notes).without_empty_columns(), console)


def print_scores(scores: "DownstreamScores", console: Console) -> None:
    """A line per metric of every task with the sink on its items, then the notes."""
    columns = [*names("task", "metric"), *numbers("", "value", "standard error"), *numbers(",d", "items")]
    columns += [TableColumn("Sink_1", "%", ".1f")]
    rows = [
        (name, metric, *_score(metric, score), task.items, task.sink.sink_1 if task.sink else None)
        for name, task in scores.tasks.items()
        for metric, score in task.metrics.items()
    ]
    print_table(Table(scores.model, columns, rows), console)
    print_notes([*_remarks(scores), *scores.notes], console)


def _score(metric: str, score: "TaskMetric") -> tuple[str, str | None]:
    times, unit, form = (100, " %", ".1f") if metric.startswith(SHARES) else (1, "", ".4f")
    stderr = None if score.stderr is None else f"{times * score.stderr:{form}}{unit}"
    return f"{times * score.value:{form}}{unit}", stderr


def _remarks(scores: "DownstreamScores") -> Iterator[str]:
    for name, task in scores.tasks.items():
        yield from _of_items(name, task)
        if task.sink is None:
            yield f"{name}: no item is long enough to measure the sink on; give --text FILE"
        else:
            where = "its items" if task.sink.text == "task" else task.sink.text
            yield f"{name}: Sink_1 is of {task.sink.sequences} sequences of {task.sink.length} tokens of {where}"


def _of_items(name: str, task: "TaskScores") -> Iterator[str]:
    if task.left_out:
        yield f"{name}: {task.left_out:,} items were left out, as an answer is longer than the model's context"
    if task.cut:
        yield f"{name}: {task.cut:,} contexts are longer than the model's, and lost their first words"
