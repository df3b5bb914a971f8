"""A sweep on disk: summary, run files, provenance (time, versions, machines), tables, and remarks on its claims."""

import json
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from sinklab.assessing.assess_model import ASSESSMENT, Assessment, load_assessment
from sinklab.experiments.documents import (
    ANALYSES,
    GRID,
    JUDGED,
    CellRun,
    CellSummary,
    ExperimentSummary,
    JudgedClaim,
    Summary,
    counts_by_subject,
    edited,
    read_record,
    verdict_counts,
)
from sinklab.experiments.quantities import ClaimSubject, quantity
from sinklab.experiments.sweep.packed import RECIPES, RUNS, is_packed, read_packed, unpack
from sinklab.experiments.verdicts.kinds import ONE_MAY_DEVIATE
from sinklab.files import parse_yaml
from sinklab.measuring.registry import Metric
from sinklab.tables import Table, TableCell, TableColumn, Value, counted, later_sink_text, names, number_text
from sinklab.train.run import Evaluation, read_environment, read_history

PROVENANCE = ("recipe.yaml", "measurement.json")
COMMIT_DIGITS = 10
DID_NOT_TRAIN = "training failed"
ABOUT: Mapping[ClaimSubject, str] = {"sinks": "sinks", "norms": "norms and kurtosis", "loss": "loss and divergence"}
NOTE = "Values are median [minimum, maximum] over {}s."


@dataclass(frozen=True)
class Sweep:
    """A directory whose summary lists experiments.

    Attributes:
        top: the directory of summary.json.
        summary: content of summary.json, with `CellRun.edited` recomputed by `read_sweep`.
        files: parent of the run directories: `top`, or a temporary folder if the runs are packed.
        packed: folder with the packed files of a run, by run directory; empty if the runs are not packed.
    """

    top: Path
    summary: Summary
    files: Path
    packed: Mapping[str, Path] = field(default_factory=dict)

    def folder(self, run: CellRun) -> Path | None:
        """Return the directory of a run, which need not exist; None if the summary names no directory."""
        return self.files / run.directory if run.directory else None

    def provenance(self, run: CellRun) -> Path | None:
        """Return the path of recipe.yaml (recipes.yaml if packed), else of measurement.json; None if neither exists."""
        if run.directory in self.packed:
            return self.packed[run.directory] / RECIPES
        folder = self.folder(run)
        return next((folder / name for name in PROVENANCE if (folder / name).is_file()), None) if folder else None

    def history(self, run: CellRun) -> Sequence[Evaluation]:
        """Return the evaluations of a run so far; empty if there are none. See `read_history` for errors."""
        folder = self.folder(run)
        return read_history(folder / "metrics.jsonl") if folder else ()

    def assessment(self, run: CellRun) -> Assessment | None:
        """Return the assessment in the run's directory; None if there is none. See `load_assessment` for errors."""
        folder = self.folder(run)
        return load_assessment(folder / ASSESSMENT) if folder and (folder / ASSESSMENT).is_file() else None

    def learning_rate(self, run: CellRun) -> float | None:
        """Return the learning rate in a run's recipe; None if the recipe is missing, unreadable or has none."""
        folder = self.folder(run)
        if folder is None:
            return None
        try:
            return float(parse_yaml((folder / "recipe.yaml").read_text(encoding="utf-8"))["optim"]["lr"])
        except (OSError, ValueError, KeyError, TypeError):
            return None


def read_sweep(top: Path, summary: Summary) -> Sweep:
    """Read the sweep in a directory, and update `CellRun.edited` from the checksums in the records.

    Packed runs are unpacked into a temporary folder, which is removed when the returned object is garbage-collected.

    Raises:
        InputError: if a record or a packed run cannot be read or is damaged (see `read_record`, `unpack`).
        SinklabError: if packed runs cannot be written to the temporary folder.
    """
    files, packed = top, {}
    if is_packed(top):
        files = Path(tempfile.mkdtemp(prefix="sinklab-"))
        unpack(top, files)
        packed = {run.directory: path.parent for path in top.glob(f"*/{RUNS}") for run in read_packed(path.parent)}

    def with_edits(run: CellRun) -> CellRun:
        record = read_record(files / run.directory) if run.directory else None
        if record is None or record.hash != run.hash:
            return run
        return run.model_copy(update={"edited": edited(files / run.directory, record)})

    sweep = Sweep(top, with_runs(summary, with_edits), files, packed)
    if files != top:
        weakref.finalize(sweep, shutil.rmtree, files, ignore_errors=True)
    return sweep


def with_runs(summary: Summary, changed: Callable[[CellRun], CellRun]) -> Summary:
    """Return a copy of a summary with `changed` applied to every run."""
    cells = {
        name: cell.model_copy(update={"runs": [changed(run) for run in cell.runs]})
        for name, cell in summary.cells.items()
    }
    return summary.model_copy(update={"cells": cells})


def origins(sweeps: Sequence[Sweep]) -> list[tuple[str, str]]:
    """Return (title, text) pairs: duration, versions and machines of the runs that ended; empty if there are none.

    The core-hours are hours times threads of the runs on CPUs, the GPU-hours are hours of the other runs. A run without
    env.json counts as a run on a CPU with one thread.

    Raises:
        SinklabError: if env.json of a run cannot be read or is damaged.
    """
    runs = {run.hash: (sweep, run) for sweep in sweeps for run in sweep.summary.runs if run.status != "unfinished"}
    found = [
        (read_environment(folder) if (folder := sweep.folder(run)) else {}, run.seconds or 0.0)
        for sweep, run in runs.values()
    ]
    if not found:
        return []
    environments = [env for env, _ in found]
    on_cpu, on_cards = (
        [one for one in found if str(one[0].get("device", "cpu")).startswith("cpu") is cpu] for cpu in (True, False)
    )
    begun = sorted(str(env["begun"])[:10] for env in environments if env.get("begun"))
    changed = sum(bool(env.get("changed_files")) for env in environments)
    silent = len(found) - len(begun)

    def distinct(values: Iterable[object]) -> str:
        return ", ".join(dict.fromkeys(str(value) for value in values if value is not None))

    core_seconds = sum(seconds * int(env.get("threads") or 1) for env, seconds in on_cpu)
    hours = ((core_seconds / 3600, "core-hours"), (sum(seconds for _, seconds in on_cards) / 3600, "GPU-hours"))
    titles = {"sinklab": "sinklab", "python": "Python", "torch": "PyTorch", "processor": "Processor"}
    facts = {
        "Runs": ", ".join([str(len(found)), *(f"{spent:.1f} {unit}" for spent, unit in hours if spent)]),
        "Start date": " to ".join(dict.fromkeys((begun[0], begun[-1]))) if begun else "",
        "Commit": distinct(str(env["git"])[:COMMIT_DIGITS] for env in environments if env.get("git")),
        "Uncommitted changes": f"in {counted(changed, 'run')}" if changed else "",
        **{title: distinct(env.get(key) for env in environments) for key, title in titles.items()},
        "Device": distinct(env.get("device") for env, _ in on_cards),
        "Threads": distinct(env.get("threads") for env in environments),
        "Not recorded": f"date and versions of {counted(silent, 'run')}" if silent else "",
    }
    return [(title, text) for title, text in facts.items() if text]


def value_text(value: object) -> str:
    """Format a recipe value as in `--set KEY=VALUE`; floats are rounded to six significant digits."""
    return f"{value:g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)


def later_sink_of(cell: CellSummary, name: str) -> str:
    """Return `later_sink_text` of a cell for the quantity `sink_1`; empty for other quantities."""
    return later_sink_text(cell.sink_rate) if name == "sink_1" else ""


def experiment_table(experiment: ExperimentSummary, cells: Mapping[str, CellSummary]) -> Table:
    """Make the table of an experiment's results, with a row per cell.

    The columns are the cell, the number of finished runs, and for each quantity the median with the range and, if there
    are any, the paper's values. Quantities without values are omitted.
    """
    paper = {cell: experiment.published.get(cell, {}) for cell in cells}
    in_paper = {name for numbers in paper.values() for name in numbers}
    shown = [
        quantity(one)
        for one in experiment.columns
        if one in in_paper or any(cell.estimate(one) for cell in cells.values())
    ]
    columns = [*names("Cell"), TableColumn(f"{experiment.replicate}s".capitalize(), "finished")]
    for one in shown:
        unit = ", ".join(filter(None, (one.unit, "measured once, at the end" if one.once else "")))
        columns.append(TableColumn(one.label, unit, f",.{one.decimals}f"))
        if one.name in in_paper:
            columns.append(TableColumn("Paper", one.unit, f",.{max(one.decimals, 2)}f"))
    rows: list[list[Value]] = []
    for name, cell in cells.items():
        done, planned = (cell.count("done"), len(cell.runs)) if cell.runs else (cell.seeds, cell.seeds)
        failed = f"({cell.count('failed')} failed)" if cell.count("failed") else ""
        row: list[Value] = [name, TableCell(str(done) if done == planned else f"{done} of {planned}", failed)]
        for one in shown:
            row.append(_estimate(cell, one, later_sink_of(cell, one.name)))
            if one.name in in_paper:
                not_trained = one.name not in paper[name] and paper[name].get("trains") == 0.0
                row.append(DID_NOT_TRAIN if not_trained else paper[name].get(one.name))
        rows.append(row)
    return Table("", columns, rows, [NOTE.format(experiment.replicate)])


def grid_tables(experiment: ExperimentSummary, cells: Mapping[str, CellSummary]) -> list[Table]:
    """Make a table per quantity of a grid, with the first axis as rows and combinations of the other axes as columns.

    Returns an empty list if the experiment is not a grid.
    """
    if not experiment.axes:
        return []
    own, *changes = experiment.axes.values()
    combinations = list(product(*changes))
    made = []
    for shown in map(quantity, experiment.columns):
        form = f",.{shown.decimals}f"
        columns = [*names("Cell"), *(TableColumn(", ".join(one), form=form) for one in combinations)]
        found = {name: _estimate(cell, shown) for name, cell in cells.items()}
        rows = [[name, *(found.get(GRID.join((name, *one))) for one in combinations)] for name in own]
        title = ", ".join(filter(None, (shown.label, shown.unit)))
        made.append(Table(title, columns, rows, [NOTE.format(experiment.replicate)]))
    return made


def _estimate(cell: CellSummary, quantity: Metric, elsewhere: str = "") -> TableCell | None:
    if (estimate := cell.estimate(quantity.name)) is None:
        return None
    form = f",.{quantity.decimals}f"
    ends = ("never" if one is None else f"{one:{form}}" for one in (estimate.smallest, estimate.largest))
    notes = [f"[{', '.join(ends)}]" if len(estimate.seeds) > 1 else ""]
    if estimate.never_reached:
        notes = [f"({counted(estimate.never_reached, 'seed')} without the event)"]
    elif estimate.untrained is not None:
        untrained, lowest = (number_text(one, form) for one in (estimate.untrained, estimate.lowest))
        notes.append(f"(medians: untrained {untrained}, lowest since {lowest})")
    notes.append(f"({elsewhere})" if elsewhere else "")
    return TableCell("never" if estimate.median is None else estimate.median, " ".join(filter(None, notes)))


def paper_models(experiment: ExperimentSummary) -> Table | None:
    """Make a table of `ExperimentSummary.elsewhere`, the paper's values by model; None if it is empty."""
    found = {model: row for model, row in experiment.elsewhere.items() if row}
    printed = list(dict.fromkeys((cell, name) for row in found.values() for cell in row for name in row[cell]))
    if not printed:
        return None
    labels = [f"{cell}, {quantity(name).label}" for cell, name in printed]
    columns = [*names("Model"), *(TableColumn(label, form=",.2f") for label in labels)]
    rows = [[model, *(row.get(cell, {}).get(name) for cell, name in printed)] for model, row in found.items()]
    return Table("The paper’s values by model", columns, rows)


def claims_table(claims: Sequence[JudgedClaim]) -> Table:
    """Make a table of claims (verdict, text, evidence with remarks); the title contains the counts of verdicts."""
    kinds = [
        f"{kind} {', '.join(f'{number} {verdict}' for verdict, number in found.items())}".strip()
        for kind, found in verdict_counts(claims).items()
    ]
    rows = []
    for claim in claims:
        scale = f" at {claim.scale}" if claim.scale and claim.replicate == "seed" else ""
        rows.append((TableCell(claim.shown_verdict + scale, tone=claim.verdict), claim.statement, claim.full_evidence))
    return Table(": ".join(filter(None, ("Claims", "; ".join(kinds)))), names("Verdict", "Claim", "Evidence"), rows)


def subjects_of_claims(claims: Sequence[JudgedClaim]) -> str:
    """Return a sentence per kind of analysis with the numbers of verdicts by subject; empty if none has two subjects.

    README.md of packed results does not have these sentences (`remarks_on_counts`).
    """
    sentences = []
    for kind, subjects in counts_by_subject(claims).items():
        if len(subjects) < 2:
            continue
        totals = {name: sum(found.values()) for name, found in subjects.items()}
        verb = "is" if next(iter(totals.values())) == 1 else "are"
        parts = [
            f"about {ABOUT[name]} ({', '.join(f'{number} {verdict}' for verdict, number in found.items())})"
            for name, found in subjects.items()
        ]
        (first, *others), total = totals.values(), sum(totals.values())
        listed = [f"{first} {verb} {parts[0]}", *map(" ".join, zip(map(str, others), parts[1:], strict=True))]
        of = f"{kind} claims".strip()
        sentences.append(f"Of the {total} {of}, {', '.join(listed[:-1])} and {listed[-1]}.")
    return " ".join(sentences)


def remarks_on_counts(claims: Sequence[JudgedClaim]) -> str:
    """Return the sentences of `chance_of_claims` and `importance_of_claims`; empty if both are."""
    return " ".join(filter(None, (chance_of_claims(claims), importance_of_claims(claims))))


def importance_of_claims(claims: Sequence[JudgedClaim]) -> str:
    """Return a sentence on the confirmatory comparisons of Sink_1 whose verdict differs by mean importance.

    The sentence is empty if no confirmatory comparison has verdicts by both (`JudgedClaim.by_importance`).
    """
    both = [
        (claim.verdict, claim.by_importance)
        for claim in claims
        if claim.analysis == ANALYSES[0] and claim.verdict in JUDGED and claim.by_importance and not claim.same_as
    ]
    if not both:
        return ""
    changed = Counter((before, after) for before, after in both if before != after)
    changes = " and ".join(
        f"from {before} to {after} for {count}" for (before, after), count in sorted(changed.items())
    )
    compared = f"{len(both)} confirmatory claims compare" if len(both) > 1 else "One confirmatory claim compares"
    return (
        f"{compared} Sink_1 between cells. By the mean importance of the first token "
        f"instead, which has no threshold, {f'the verdict changes {changes}' if changes else 'no verdict changes'}."
    )


def chance_of_claims(claims: Sequence[JudgedClaim]) -> str:
    """Return a sentence on how many confirmatory claims chance would reproduce.

    If half of all seeds satisfied a claim that is judged seed by seed, n seeds would reproduce it with probability
    1 / 2^n, five seeds 1/32; from nine seeds on, (n + 1) / 2^n, because one may deviate. The sentence is empty if no
    confirmatory claim has a verdict that was judged seed by seed.
    """
    seeds = [
        claim.seeds
        for claim in claims
        if claim.rule == "seed by seed" and claim.analysis == ANALYSES[0] and claim.verdict in JUDGED
        if not claim.same_as
    ]
    if not seeds:
        return ""
    decided = f"{len(seeds)} of the confirmatory claims are" if len(seeds) > 1 else "One of the confirmatory claims is"
    return (
        f"{decided} judged seed by seed: if half of all seeds satisfied each of them, chance would reproduce "
        f"{sum((n + 1 if n >= ONE_MAY_DEVIATE else 1) / 2**n for n in seeds):.1f}."
    )
