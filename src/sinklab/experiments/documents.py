"""Schemas of the result files of a sweep: summary.json, and record.json in every run directory."""

import gzip
import hashlib
import math
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Literal, get_args

from pydantic import ConfigDict, Field, ValidationError, computed_field

from sinklab.errors import InputError
from sinklab.files import parse_json, write_json
from sinklab.measuring.statistics.highest import highest_rate
from sinklab.schema import ReadDocument, VersionedDocument, finite_or_none

SUMMARY, RECORD = "summary.json", "record.json"

CHECKED = ("recipe.yaml", "metrics.jsonl", "measurement.json")
"""Files of a run directory whose checksums are in record.json."""

COMPRESSED = ".gz"

Verdict = Literal["reproduced", "direction only", "contradicted", "inconclusive", "no verdict", "not asked", "not run"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
JUDGED: tuple[Verdict, ...] = VERDICTS[:4]
"""Verdicts that require five seeds or more."""

ANALYSES = ("confirmatory", "exploratory")
"""Kinds of analysis (`claims.Analysis`); claims are counted separately for each."""

RunStatus = Literal["done", "failed"]

GRID = "+"
"""Separator of the parts of a grid cell's name."""

ReplicateKind = Literal["seed", "draw", "model"]
"""Unit of replication of an experiment: a training seed, a draw of sequences, or an existing model."""


class RunRecord(VersionedDocument):
    """record.json: the outcome of a run of a sweep.

    Attributes:
        hash: hash of the run (`Recipe.content_hash`).
        name, seed: name and seed of the recipe.
        status: done, or failed permanently (for example with a non-finite loss, which a retry would reproduce).
        message: reason for the failure, if any.
        step: number of updates done, out of `steps`.
        triples: number of (sequence, layer, head) triples of the sink rates.
        seconds: training time in seconds.
        tokens_per_second: training tokens per second of the updates.
        peak_memory_mb: peak memory of the GPU, or of the process on a CPU, MB.
        kurtosis: kurtosis of the final hidden states, maximum over blocks.
        files: SHA-256 of recipe.yaml, metrics.jsonl and measurement.json at the end of the run.
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
    """One run of a cell.

    Attributes:
        hash: hash of the run.
        directory: run directory, relative to the directory of the summary.
        status: done, failed, or unfinished.
        message: reason for the failure, if any.
        values: values of the run by quantity (`quantities.py`); missing values are omitted.
        never: step quantities whose threshold was never reached.
        edited: names of result files that were modified after the run had ended.
        seconds: training time in seconds.
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

    @property
    def warnings(self) -> list[str]:
        """Warnings on the run: result files modified after its end, and the reason for a failure."""
        return [
            *([f"edited since it ended: {', '.join(self.edited)}"] if self.edited else []),
            *filter(None, [self.message]),
        ]


class CellEstimate(ReadDocument):
    """Median and range of a quantity over the seeds of a cell.

    Attributes:
        seeds: values sorted by seed; seeds without a value are omitted, None is a step never reached.
        median, smallest, largest: statistics of `seeds`; None for a step never reached.
        untrained, lowest: medians over the seeds of the value before training and of the minimum over evaluations; for
            norm ratios only.
    """

    seeds: list[float | None] = Field(default_factory=list)
    median: float | None = None
    smallest: float | None = None
    largest: float | None = None
    untrained: float | None = None
    lowest: float | None = None

    @property
    def never_reached(self) -> int:
        """Number of seeds at which the step was never reached."""
        return self.seeds.count(None)


class CellSummary(ReadDocument):
    """Results of a cell: medians over the finished seeds at the last evaluation; None or empty if unknown.

    Attributes:
        sink_rate: Sink_k for k = 1, 2, .., percent of (sequence, layer, head) triples.
        sink_rate_bias: sink rate of a bias, sink logit or sink token, percent.
        valid_loss: validation loss, nats per token.
        hidden_norm_ratio_max: |h_1| over the mean |h_t| of the other positions, maximum over blocks.
        seeds: number of finished runs.
        seconds: mean training time per run in seconds.
        change: recipe keys (dotted) that differ from the base, with their values.
        values: median and range over all seeds, by quantity.
        runs: runs of the cell, one per seed.
        sink_max, sink_max_position: maximum of `sink_rate` over positions 1 to T / 2, percent, and its position.
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

    def estimate(self, name: str) -> CellEstimate | None:
        """Return median and range of a quantity over the seeds; None if no seed has a value."""
        return estimated(self.runs, name) or self.values.get(name)

    def by_seed(self, name: str) -> list[tuple[CellRun, float]]:
        """Return (run, value) pairs of a quantity, for the runs that have a value."""
        return [(run, run.values[name]) for run in self.runs if name in run.values]

    def count(self, status: str) -> int:
        """Return the number of runs with a status."""
        return sum(run.status == status for run in self.runs)

    def of_seeds(self, seeds: Collection[int]) -> "CellSummary":
        """Return a copy of the cell with the runs of these seeds only."""
        runs = [run for run in self.runs if run.seed in seeds]
        if len(runs) == len(self.runs):
            return self
        values = {name: one for name in self.values if (one := estimated(runs, name))}
        return self.model_copy(
            update={
                "runs": runs,
                "values": values,
                "seeds": sum(run.status == "done" for run in runs),
                "sink_rate": [],  # not stored per run
            }
        )


def estimated(runs: Sequence[CellRun], name: str) -> CellEstimate | None:
    """Compute median and range of a quantity over runs; None if no run has a value."""
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
    """Return the median of the values that are not None; None if all are."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


class JudgedClaim(ReadDocument):
    """A claim with its verdict (docs/verdicts.md).

    Attributes:
        experiment: id of the experiment.
        scale: scale of the trained models, or names of the existing models.
        evidence: numbers behind the verdict, in sentences.
        cells: names of the cells that the claim compares.
        quantity: quantity compared; may be empty.
        analysis: confirmatory or exploratory; empty if unknown.
        stated: date on which the claim was written, YYYY-MM-DD.
        changed: later changes to the claim, and the results that had been seen by then.
        same_as: EXPERIMENT.CLAIM whose check is used; such a claim is not counted.
        seeds: number of seeds of the verdict; with two cells, the smaller number.
        replicate: unit that `seeds` counts: seed, draw or model.
        models: number of existing models in the verdict.
        at_eps: verdict by threshold of the sink rate other than the recipe's, if recorded.
        finds: minimum effect that five seeds detect with 80 % power, estimated from pilot runs.
        elsewhere: verdict of an earlier sweep with five seeds, if this verdict has fewer.
    """

    model_config = ConfigDict(coerce_numbers_to_str=True)

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
    at_eps: dict[str, str] = Field(default_factory=dict)
    finds: str = ""
    elsewhere: str = ""

    @property
    def verdict_said(self) -> str:
        """Verdict as text: `reproduced`, `one seed: no verdict`, `reproduced for this model`."""
        if self.verdict == "no verdict" and self.seeds == 1:
            return f"one {self.replicate}: no verdict"
        of = "this model" if self.models == 1 else "these models"
        return f"{self.verdict} for {of}" if self.replicate == "draw" and self.verdict in JUDGED else self.verdict

    @property
    def remarks(self) -> list[str]:
        """Remarks on the verdict: verdicts at other thresholds and of five seeds, power, changes, references."""
        differing = {eps: verdict for eps, verdict in self.at_eps.items() if verdict != self.verdict}
        same = [eps for eps in self.at_eps if eps not in differing]
        return [
            *([f"The verdict is the same at eps {' and '.join(same)}."] if same else []),
            *(f"At eps {eps}, the verdict is {verdict}." for eps, verdict in differing.items()),
            *([self.elsewhere] if self.elsewhere else []),
            *([self.finds] if self.finds else []),
            *([f"Revision of {self.changed}"] if self.changed else []),
            *([f"The check is that of {self.same_as}, where the claim is counted."] if self.same_as else []),
        ]

    @property
    def full_evidence(self) -> str:
        """Evidence followed by all remarks, as one text."""
        return " ".join(filter(None, (self.evidence, *self.remarks)))

    @property
    def said(self) -> str:
        """Text of the claim."""
        return self.text or self.id


class ExperimentSummary(ReadDocument):
    """An experiment in summary.json.

    Attributes:
        cells: names of the cells, in the order of the table.
        baseline: cell with which the other cells are compared.
        columns: quantities in the table of results.
        published: the paper's numbers by cell and quantity; {"trains": 0.0} if training failed there.
        elsewhere: the paper's numbers for its own models, by model, cell and quantity.
        against: two quantities; a figure plots the second quantity against the first.
        families: model family by cell, for the paper's models.
        adapted: reasons why cells differ from the paper's at this scale.
        seeds: seeds in the table; empty for all.
        replicate: unit of replication: seed, draw or model.
        axes: names of the values along each axis of a grid; a cell's name joins one value of each axis with `GRID`.
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
    """summary.json: results of all experiments in a directory.

    Attributes:
        id, title: id and title of a single experiment; empty for several.
        scale: scale of all cells.
        cells: cells of all experiments by name; cells of the same name have the same recipe in every experiment.
        counts: number of claims per verdict, for confirmatory and exploratory claims; references are excluded.
    """

    schema_version: int = Field(default=3, alias="schema")
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
        """Runs of all cells, without duplicates."""
        return list({run.hash: run for cell in self.cells.values() for run in cell.runs}.values())

    def cells_of(self, experiment: str) -> dict[str, CellSummary]:
        """Return the cells of an experiment by name, with its seeds only; a cell without results is empty."""
        return {name: self.cell(experiment, name) for name in self.experiments[experiment].cells}

    def cell(self, experiment: str, name: str) -> CellSummary:
        """Return a cell with the seeds of an experiment only; an empty cell if there is no cell of this name."""
        cell, about = self.cells.get(name, CellSummary(seeds=0)), self.experiments.get(experiment)
        return cell.of_seeds(about.seeds) if about and about.seeds else cell

    def claims_named(self, names: Iterable[str]) -> list[JudgedClaim]:
        """Return the judged claims with these names (EXPERIMENT.CLAIM)."""
        found = {f"{claim.experiment}.{claim.id}": claim for claim in self.claims}
        return [found[name] for name in names if name in found]

    def claims_of(self, experiment: str) -> list[JudgedClaim]:
        """Return the judged claims of an experiment, by its id."""
        return [claim for claim in self.claims if claim.experiment == experiment]

    def save(self, directory: Path) -> None:
        """Write summary.json in a directory."""
        write_json(directory / SUMMARY, self.model_dump(by_alias=True))


def verdict_counts(claims: Sequence[JudgedClaim]) -> dict[str, dict[str, int]]:
    """Return the number of claims by kind of analysis and verdict; references (`same_as`) are excluded."""
    counted = [claim for claim in claims if not claim.same_as]
    kinds = dict.fromkeys([*(one for one in ANALYSES if any(claim.analysis == one for claim in counted)),
                           *(claim.analysis for claim in counted)])  # fmt: skip
    found = {kind: [claim.verdict for claim in counted if claim.analysis == kind] for kind in kinds}
    return {
        kind: {one: verdicts.count(one) for one in dict.fromkeys([*VERDICTS, *verdicts]) if one in verdicts}
        for kind, verdicts in found.items()
    }


def read_record(directory: Path) -> RunRecord | None:
    """Read record.json of a run directory; None if the run has not ended.

    Raises:
        InputError: if the record is damaged or has another schema version.
    """
    path = directory / RECORD
    try:
        return RunRecord.model_validate(parse_json(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ValidationError) as error:
        raise InputError(
            f"{path} cannot be read ({_first_line(error)}): it is damaged or of another version. "
            "Remove it to record the run again"
        ) from error


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error).splitlines()[0]


def record_of(directory: Path, run_hash: str) -> RunRecord | None:
    """Read the record of the run with a hash; None if the run has not ended. Records of other runs are ignored.

    Raises:
        InputError: if the record is damaged or has another schema version.
    """
    record = read_record(directory)
    return record if record is not None and record.hash == run_hash else None


def checksums(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of a run's result files (uncompressed) by file name; missing files are omitted."""
    contents = {name: _content(directory / name) for name in CHECKED}
    return {name: hashlib.sha256(text).hexdigest() for name, text in contents.items() if text is not None}


def edited(directory: Path, record: RunRecord) -> list[str]:
    """Return the names of the result files that were modified after the run had ended."""
    now = checksums(directory)
    return [name for name, before in record.files.items() if now.get(name) != before]


def _content(path: Path) -> bytes | None:
    """Return the content of a file, or of its compressed copy; None if neither can be read."""
    try:
        return path.read_bytes() if path.exists() else gzip.decompress(Path(f"{path}{COMPRESSED}").read_bytes())
    except (OSError, EOFError):
        return None
