"""Schemas of result files: summary.json of trained or measured experiments, and record.json of a run of a sweep."""

import math
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Literal, get_args

from pydantic import ConfigDict, Field, SkipValidation, computed_field

from sinklab.errors import InputError
from sinklab.experiments.quantities import SUBJECTS, ClaimSubject, RunNumbers, subject_of
from sinklab.files import if_present, read_document, sha256_of, write_json
from sinklab.schema import ReadDocument, VersionedDocument, finite_or_none
from sinklab.tables import highest_rate

SUMMARY, RECORD = "summary.json", "record.json"

CHECKED = ("recipe.yaml", "metrics.jsonl", "measurement.json")
"""Files of a run directory whose checksums are in record.json."""

Verdict = Literal["reproduced", "direction only", "contradicted", "inconclusive", "no verdict", "not asked", "not run"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
JUDGED: tuple[Verdict, ...] = VERDICTS[:4]
"""Verdicts of checks on five replicates or more."""

Analysis = Literal["confirmatory", "exploratory"]
"""Confirmatory: claims of the paper, written before the runs or measurements that decide them. Exploratory: others."""
ANALYSES: tuple[Analysis, ...] = get_args(Analysis)

RunStatus = Literal["done", "failed"]

GRID = "+"
"""Separator between cell and values in the name of a grid cell, such as softmax+decay_0.5."""

ReplicateKind = Literal["seed", "draw", "model"]
"""Unit of replication of an experiment: a training seed, a draw of sequences, or an existing model."""


class RunRecord(VersionedDocument):
    """record.json: the outcome of a run of a sweep.

    Attributes:
        hash: hash of the run (`Recipe.content_hash`).
        name, seed: name and seed of the recipe.
        status: done, or failed if training diverged (a loss, gradient or weight is not finite).
        message: reason for the failure; empty if done.
        step, steps: number of updates done, and number of updates in the recipe.
        triples: number of (sequence, attention layer, head) triples from which a sink rate is computed.
        seconds: training time in seconds, without evaluations and checkpoints.
        tokens_per_second: mean training tokens per second of the updates; None if unknown.
        peak_memory_mb: peak GPU memory of the updates on rank 0 or, on a CPU, peak memory of its process, in MB (2**20
            bytes). None if the process that recorded the run did no update, or if the peak is unknown.
        kurtosis: kurtosis of the hidden states after training, maximum over blocks; None if the run failed, or was
            recorded without its checkpoints.
        files: SHA-256 of recipe.yaml, metrics.jsonl and measurement.json at the end of the run, by file name; missing
            files are omitted.
    """

    hash: str
    name: str
    seed: int
    status: RunStatus
    message: str = ""
    step: int = 0
    steps: int = 0
    triples: int = 0
    seconds: float | None = None
    tokens_per_second: float | None = None
    peak_memory_mb: float | None = None
    kurtosis: float | None = None
    files: dict[str, str] = Field(default_factory=dict)

    def save(self, directory: Path) -> None:
        """Write record.json in the run directory."""
        write_json(directory / RECORD, self.model_dump(by_alias=True))


class CellRun(ReadDocument):
    """One run of a trained cell, or one replicate of a measured cell.

    Attributes:
        seed: seed of the run, or index of the replicate (draw or model).
        hash: hash of the run, or of the settings of the measurement.
        directory: directory of the run or measurement, relative to the directory of summary.json; empty for a run
            that has not been started.
        status: done, failed, or unfinished.
        message: error message of a failed run or measurement; for a finished run that is listed as unfinished because
            it has no metrics, this reason; else empty.
        values: finite values by quantity (`quantities.py`); missing values are omitted.
        never: names of the step quantities whose threshold was never reached.
        edited: names of result files that were modified or removed after the end of the run.
        seconds: duration of training (`RunRecord`) or of the measurement, in seconds; None if unknown.
        tokens_per_second, peak_memory_mb: see `RunRecord`; None for measurements.
        numbers: the numbers of a finished run or measurement; not in summary.json.
    """

    seed: int
    hash: str
    directory: str
    status: Literal["done", "failed", "unfinished"]
    message: str = ""
    values: dict[str, float] = Field(default_factory=dict)
    never: list[str] = Field(default_factory=list)
    edited: list[str] = Field(default_factory=list)
    seconds: float | None = None
    tokens_per_second: float | None = None
    peak_memory_mb: float | None = None
    numbers: SkipValidation[RunNumbers | None] = Field(default=None, exclude=True, repr=False)

    @property
    def warnings(self) -> list[str]:
        """Warnings about the run: result files modified or removed after its end, and its message."""
        return [
            *([f"edited since it ended: {', '.join(self.edited)}"] if self.edited else []),
            *filter(None, [self.message]),
        ]


class CellEstimate(ReadDocument):
    """Median and range of a quantity over the replicates of a cell.

    Attributes:
        seeds: values in the order of the replicates (seeds, draws or models). Replicates without a value are omitted.
            If the quantity is a training step, None means that it was never reached.
        median, smallest, largest: median, minimum and maximum of `seeds`, where a step that was never reached counts as
            infinite; None if the result is infinite.
        untrained, lowest: for `norm_ratio`, medians of `norm_untrained` and `norm_lowest` over the seeds; else None.
    """

    seeds: list[float | None] = Field(default_factory=list)
    median: float | None = None
    smallest: float | None = None
    largest: float | None = None
    untrained: float | None = None
    lowest: float | None = None

    @property
    def never_reached(self) -> int:
        """Number of replicates that never reached the step; 0 for quantities that are not steps."""
        return self.seeds.count(None)


class CellSummary(ReadDocument):
    """Results of a cell. Rates, loss and norm ratio are medians over the finished runs, each at its last evaluation.

    Unknown values are None or empty.

    Attributes:
        sink_rate: Sink_k for k = 1, 2, .., percent of (sequence, layer, head) triples.
        sink_rate_bias: sink rate of a bias (`sink_bias` in `quantities.py`), percent.
        valid_loss: validation loss, nats per token.
        hidden_norm_ratio_max: |h_1| over the mean |h_t| of the other positions (h_t: hidden state at position t),
            maximum over the input of the first block and the outputs of all blocks.
        seeds: number of finished runs or measurements.
        seconds: mean duration of a run or measurement, in seconds.
        change: values of the recipe keys (dotted) that differ from the base; for a measured cell, values of the
            settings that differ from the default or between cells.
        values: median and range of each quantity in the tables over the replicates, by name of the quantity.
        runs: runs of the cell, one per replicate, finished or not.
        sink_max, sink_max_position: maximum of `sink_rate` over the first half of the positions, percent, and its
            position (1-based).
    """

    sink_rate: list[float | None] = Field(default_factory=list)
    sink_rate_bias: float | None = None
    valid_loss: float | None = None
    hidden_norm_ratio_max: float | None = None
    seeds: int = 1
    seconds: float | None = None
    change: dict[str, object] = Field(default_factory=dict)
    values: dict[str, CellEstimate] = Field(default_factory=dict)
    runs: list[CellRun] = Field(default_factory=list)

    @computed_field
    @property
    def sink_max(self) -> float | None:
        found = highest_rate(self.sink_rate)
        return found[1] if found else None

    @computed_field
    @property
    def sink_max_position(self) -> int | None:
        found = highest_rate(self.sink_rate)
        return found[0] if found else None

    @property
    def numbers(self) -> list[RunNumbers]:
        """Numbers of the finished runs, sorted by seed; empty for a cell that was read from summary.json."""
        return sorted((run.numbers for run in self.runs if run.numbers), key=lambda run: run.seed)

    def estimate(self, name: str) -> CellEstimate | None:
        """Return median and range of a quantity over `runs`; if no run has a value, those in `values`, else None."""
        return estimated(self.runs, name) or self.values.get(name)

    def by_seed(self, name: str) -> list[tuple[CellRun, float]]:
        """Return (run, value) pairs of a quantity; runs without a value, or that never reached a step, are omitted."""
        return [(run, run.values[name]) for run in self.runs if name in run.values]

    def count(self, status: str) -> int:
        """Return the number of runs with a status: done, failed or unfinished."""
        return sum(run.status == status for run in self.runs)

    def of_seeds(self, seeds: Collection[int]) -> "CellSummary":
        """Return a copy with only the runs of these seeds; the cell itself if it has no other runs.

        The copy's `values` are computed from these runs. Its other medians and `seconds` are None or empty.
        """
        runs = [run for run in self.runs if run.seed in seeds]
        if len(runs) == len(self.runs):
            return self
        values = {name: one for name in self.values if (one := estimated(runs, name))}
        done = sum(run.status == "done" for run in runs)
        return CellSummary(seeds=done, change=self.change, values=values, runs=runs)


def estimated(runs: Sequence[CellRun], name: str) -> CellEstimate | None:
    """Return median and range of a quantity over runs; None if no run has a value."""
    has = [run for run in runs if name in run.values or name in run.never]
    if not has:
        return None
    values = [run.values.get(name, math.inf) for run in has]
    norms = name == "norm_ratio"
    return CellEstimate(
        seeds=[finite_or_none(value) for value in values],
        median=finite_or_none(median(values)),
        smallest=finite_or_none(min(values)),
        largest=finite_or_none(max(values)),
        untrained=median_of_known(run.values.get("norm_untrained") for run in has) if norms else None,
        lowest=median_of_known(run.values.get("norm_lowest") for run in has) if norms else None,
    )


def median_of_known(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are not None; None if there are no such values."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


class JudgedClaim(ReadDocument):
    """A claim with its verdict (docs/verdicts.md).

    Attributes:
        experiment: id of the experiment.
        scale: scale of the trained models, or names of the existing models.
        evidence: numbers behind the verdict, or the reason why there is no verdict, in sentences.
        cells: names of the cells that the check uses.
        quantity: main quantity of the check; empty for `diverges` and `trains`, for a claim without a check, and for a
            claim that cannot be judged on the given models.
        analysis: confirmatory or exploratory; empty if unknown.
        stated: date on which the claim was written, YYYY-MM-DD; empty if unknown.
        changed: date and description of a later change of the claim, and which results had been seen; empty if there
            is none.
        same_as: EXPERIMENT.CLAIM whose check is used; such a claim is not counted. Empty for other claims.
        seeds: number of replicates on which the verdict is based (`kinds.Finding`); for an `all` check, the smallest
            number of its parts.
        replicate: unit that `seeds` counts: seed, draw or model.
        models: number of existing models in the verdict; 1 for trained cells.
        rule: rule that decides the claim, `seed by seed` or `no overlap` (docs/verdicts.md); empty without a check, or
            if the claim cannot be judged on the given models.
        at_eps: verdicts at thresholds of the sink rate other than the recipe's, by threshold; empty if fewer than five
            replicates recorded the rates at these thresholds, or if the check cannot be evaluated at them
            (`quantities.AT_EPS`).
        by_importance: verdict on a comparison of Sink_1 if the mean importance of the first token, which has no
            threshold, replaces Sink_1; empty for other checks, for existing models, or if fewer than five seeds
            recorded the importance.
        elsewhere: for a claim without a verdict because of fewer than five seeds, verdict and evidence of an earlier
            sweep with five or more, in sentences; empty for other claims, if there is no earlier verdict, or if --steps
            or --text was passed.
    """

    id: str = ""
    experiment: str = ""
    text: str = ""
    verdict: str = "not run"
    scale: str = ""
    evidence: str = ""
    cells: list[str] = Field(default_factory=list)
    quantity: str = ""
    analysis: str = ""
    stated: str = ""
    changed: str = ""
    same_as: str = ""
    seeds: int = 0
    replicate: ReplicateKind = "seed"
    models: int = 1
    rule: str = ""
    at_eps: dict[str, str] = Field(default_factory=dict)
    by_importance: str = ""
    elsewhere: str = ""

    @property
    def shown_verdict(self) -> str:
        """Verdict as displayed, such as `reproduced`, `one seed: no verdict` or `reproduced for this model`."""
        if self.verdict == "no verdict" and self.seeds == 1:
            return f"one {self.replicate}: no verdict"
        of = "this model" if self.models == 1 else "these models"
        return f"{self.verdict} for {of}" if self.replicate == "draw" and self.verdict in JUDGED else self.verdict

    @property
    def remarks(self) -> list[str]:
        """Remarks in sentences, from `at_eps`, `by_importance`, `elsewhere`, `changed` and `same_as`."""
        differing = {eps: verdict for eps, verdict in self.at_eps.items() if verdict != self.verdict}
        same = [eps for eps in self.at_eps if eps not in differing]
        by_importance = [f"By mean importance instead of Sink_1, the verdict is {self.by_importance}."]
        return [
            *([f"The verdict is the same at eps {' and '.join(same)}."] if same else []),
            *(f"At eps {eps}, the verdict is {verdict}." for eps, verdict in differing.items()),
            *(by_importance if self.by_importance else []),
            *([self.elsewhere] if self.elsewhere else []),
            *([f"Revision of {self.changed}"] if self.changed else []),
            *([f"The check is that of {self.same_as}, where the claim is counted."] if self.same_as else []),
        ]

    @property
    def subject(self) -> ClaimSubject | None:
        """Subject of the claim's main quantity (`subject_of`); None if the claim cannot be judged on the models."""
        return subject_of(self.quantity) if self.quantity or self.rule else None

    @property
    def changed_by_importance(self) -> str:
        """Verdict by mean importance (`by_importance`) if it differs from the verdict; else empty."""
        return "" if self.by_importance == self.verdict else self.by_importance

    @property
    def full_evidence(self) -> str:
        """Evidence and all remarks, joined into one text."""
        return " ".join(filter(None, (self.evidence, *self.remarks)))

    @property
    def statement(self) -> str:
        """Text of the claim; its id if it has no text."""
        return self.text or self.id


class ExperimentSummary(ReadDocument):
    """An experiment in summary.json.

    Attributes:
        scale: scale of the trained models, or names of the existing models.
        cells: names of the cells, in the order of the table.
        baseline: cell with which the other cells are compared; empty for measured cells.
        columns: quantities in the table of results.
        published: the paper's numbers by cell and quantity; {"trains": 0.0} for a cell whose training failed there.
        elsewhere: for measured cells, numbers of the paper's table by model, cell and quantity (`measured.paper_rows`).
        against: two quantities; a figure plots the second quantity against the first. Empty for no figure.
        families: model family by cell, for the colours of that figure; only cells of models in the paper's list.
        adapted: differences between the models at this scale and the paper's, and reasons for the changes at this scale
            (`Adaptation.why`), in sentences.
        seeds: seeds in the table; empty for all.
        replicate: unit of replication: seed, draw or model.
        axes: names of the values on each axis of a grid; a cell's name joins one value of each axis with `GRID`. Empty
            if the experiment has no grid.
    """

    title: str = ""
    question: str = ""
    source: str = ""
    scale: str = ""
    cells: list[str] = Field(default_factory=list)
    baseline: str = ""
    columns: list[str] = Field(default_factory=list)
    published: dict[str, dict[str, float]] = Field(default_factory=dict)
    elsewhere: dict[str, dict[str, dict[str, float]]] = Field(default_factory=dict)
    adapted: list[str] = Field(default_factory=list)
    against: list[str] = Field(default_factory=list)
    families: dict[str, str] = Field(default_factory=dict)
    seeds: list[int] = Field(default_factory=list)
    replicate: ReplicateKind = "seed"
    axes: dict[str, list[str]] = Field(default_factory=dict)


class Summary(ReadDocument):
    """summary.json: results of the experiments of a sweep, or of one experiment on existing models.

    Attributes:
        id, title: id and title of a single experiment; empty if there are several.
        scale: scale of the trained models, or names of the existing models; empty if there are several scales.
        experiments: experiments by id.
        cells: cells of all experiments by name; cells of the same name have the same recipe in every experiment.
        claims: claims of all experiments, with their verdicts.
        counts: number of claims by kind of analysis and verdict (`verdict_counts`).
    """

    schema_version: Literal[3] = Field(default=3, alias="schema")
    id: str = ""
    title: str = ""
    scale: str = ""
    experiments: dict[str, ExperimentSummary] = Field(default_factory=dict)
    cells: dict[str, CellSummary] = Field(default_factory=dict)
    claims: list[JudgedClaim] = Field(default_factory=list)
    counts: dict[str, dict[str, int]] = Field(default_factory=dict)

    model_config = ConfigDict(populate_by_name=True)

    @property
    def runs(self) -> list[CellRun]:
        """Runs of all cells; a run that several cells share (same hash) is listed once."""
        return list({run.hash: run for cell in self.cells.values() for run in cell.runs}.values())

    def cells_of(self, experiment: str) -> dict[str, CellSummary]:
        """Return the cells of an experiment by name, as `cell` does.

        Raises:
            KeyError: if there is no such experiment.
        """
        return {name: self.cell(experiment, name) for name in self.experiments[experiment].cells}

    def cell(self, experiment: str, name: str) -> CellSummary:
        """Return a cell with only the runs of the experiment's seeds; an empty cell if there is none of this name."""
        cell, about = self.cells.get(name, CellSummary(seeds=0)), self.experiments.get(experiment)
        return cell.of_seeds(about.seeds) if about and about.seeds else cell

    def claims_named(self, names: Iterable[str]) -> list[JudgedClaim]:
        """Return the judged claims with these names (EXPERIMENT.CLAIM); unknown names are ignored."""
        found = {f"{claim.experiment}.{claim.id}": claim for claim in self.claims}
        return [found[name] for name in names if name in found]

    def claims_of(self, experiment: str) -> list[JudgedClaim]:
        """Return the judged claims of an experiment, by its id."""
        return [claim for claim in self.claims if claim.experiment == experiment]

    def save(self, directory: Path) -> None:
        """Write summary.json in a directory."""
        write_json(directory / SUMMARY, self.model_dump(by_alias=True))


def verdict_counts(claims: Sequence[JudgedClaim]) -> dict[str, dict[str, int]]:
    """Return the number of claims by kind of analysis, then by verdict; references (`same_as`) are not counted."""
    counted = [claim for claim in claims if not claim.same_as]
    kinds = dict.fromkeys([*(one for one in ANALYSES if any(claim.analysis == one for claim in counted)),
                           *(claim.analysis for claim in counted)])  # fmt: skip
    found = {kind: [claim.verdict for claim in counted if claim.analysis == kind] for kind in kinds}
    return {
        kind: {one: verdicts.count(one) for one in dict.fromkeys([*VERDICTS, *verdicts]) if one in verdicts}
        for kind, verdicts in found.items()
    }


def counts_by_subject(claims: Sequence[JudgedClaim]) -> dict[str, dict[ClaimSubject, dict[str, int]]]:
    """Return the number of claims by kind of analysis, then by subject, then by verdict, as `verdict_counts` counts."""
    by_subject: dict[ClaimSubject, dict[str, dict[str, int]]] = {
        name: verdict_counts([one for one in claims if one.subject == name]) for name in SUBJECTS
    }
    kinds = dict.fromkeys(kind for found in by_subject.values() for kind in found)
    return {kind: {name: found[kind] for name, found in by_subject.items() if kind in found} for kind in kinds}


def read_record(directory: Path) -> RunRecord | None:
    """Read record.json of a run directory; None if the run has not ended or is not part of a sweep.

    Raises:
        InputError: if the record cannot be read, is damaged or has another schema version.
    """
    remedy = "if it is damaged or has another schema version, remove it to record the run again"
    return if_present(lambda: read_document(RunRecord, directory / RECORD, remedy))


def record_of(directory: Path, run_hash: str) -> RunRecord | None:
    """Return the record that `read_record` returns; None if it belongs to a run with a different hash."""
    record = read_record(directory)
    return record if record is not None and record.hash == run_hash else None


def checksums(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of a run's result files (`CHECKED`) by name; missing files are omitted.

    Raises:
        InputError: if a file cannot be read.
    """
    found = {}
    for path in (directory / name for name in CHECKED):
        try:
            if path.is_file():
                found[path.name] = sha256_of(path)
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from error
    return found


def edited(directory: Path, record: RunRecord) -> list[str]:
    """Return the names of the files in `RunRecord.files` that were modified or removed since the run was recorded."""
    now = checksums(directory)
    return [name for name, before in record.files.items() if now.get(name) != before]
