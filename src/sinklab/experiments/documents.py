"""What a sweep leaves on the disk, as it is written and read: summary.json, and record.json in every run directory."""

from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field, ValidationError, computed_field

from sinklab.errors import InputError
from sinklab.files import parse_json, write_json
from sinklab.measuring.statistics.highest import highest_rate
from sinklab.schema import ReadDocument

SUMMARY, RECORD = "summary.json", "record.json"

Verdict = Literal["reproduced", "direction only", "contradicted", "inconclusive", "not run"]
RunStatus = Literal["done", "failed"]


class RunRecord(ReadDocument):
    """How one run of a sweep ended; its numbers stand in metrics.jsonl beside it.

    Attributes:
        hash: of the run (`Recipe.content_hash`).
        name, seed: of its recipe.
        status: done, or failed for good: what was tried again would fail again, such as a loss that is not finite.
        message: why it failed.
        step: of the last update, of `steps`.
        triples: (sequence, layer, head) triples that its rates are over.
        seconds: of training.
        tokens_per_second: of its updates.
        peak_memory_mb: of the process, or of the card where it was trained on one.
        kurtosis: of the hidden states at the end, in the block where it is largest.
        files: SHA-256 of recipe.yaml, metrics.jsonl and measurement.json when the run ended.
    """

    schema_version: Literal[1] = Field(default=1, alias="schema")
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

    model_config = ConfigDict(populate_by_name=True)

    def save(self, directory: Path) -> None:
        """Write record.json."""
        write_json(directory / RECORD, self.model_dump(by_alias=True))


class CellRun(ReadDocument):
    """One run of a cell.

    Attributes:
        hash: of the run.
        directory: relative to that of the summary.
        status: done, failed, or unfinished.
        message: why it failed.
        values: the numbers of its last evaluation by quantity (`quantities`), those it has.
        edited: files of its directory that are no longer what they were when it ended.
        seconds: of training.
    """

    seed: int
    hash: str
    directory: str
    status: Literal["done", "failed", "unfinished"]
    message: str = ""
    values: dict[str, float] = Field(default_factory=dict)
    edited: list[str] = Field(default_factory=list)
    seconds: float | None = None
    tokens_per_second: float | None = None
    peak_memory_mb: float | None = None


class CellEstimate(ReadDocument):
    """A quantity over the seeds of a cell.

    Attributes:
        mean: on the scale on which it is compared, turned back.
        low, high: the 95 % interval of the mean; None with one seed and no recorded spread, or with `never_reached`.
        never_reached: seeds that never reached the step that is asked for. They count as their last step, so that
            the mean is a lower bound.
    """

    mean: float
    low: float | None = None
    high: float | None = None
    never_reached: int = 0


class CellSummary(ReadDocument):
    """A cell: plain means over its finished seeds; what is not known is None or empty.

    Attributes:
        sink_rate: percent of (sequence, layer, head) triples, position 1 first.
        sink_rate_bias: percent, of a bias, sink logit or sink token.
        valid_loss: nats per token.
        hidden_norm_ratio_max: |h_1| over the mean of the others, in the block where it is largest.
        seeds: finished runs of the cell.
        seconds: of training, per run.
        change: dotted keys of the recipe and their values, where they are not the base's.
        values: by quantity, with intervals.
        runs: each of its seeds.
        sink_max, sink_max_position: the highest of `sink_rate` at positions 1 to T / 2, percent, and where it is.
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


class JudgedClaim(ReadDocument):
    """A claim of an experiment with what the runs say of it (docs/verdicts.md).

    Attributes:
        experiment: whose it is.
        scale: at which it was tried; the verdict says nothing beyond it.
        evidence: the numbers that decided it, a sentence.
        cells: that it is about.
        quantity: that it is about; empty where it is about none.
        seeds_needed: how many would decide, where it is inconclusive and that can be said.
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
    seeds_needed: int | None = None

    @property
    def said(self) -> str:
        """What is claimed."""
        return self.text or self.id


class ExperimentSummary(ReadDocument):
    """An experiment of a sweep.

    Attributes:
        cells: names of its cells, in its order.
        baseline: the cell that the others are compared with.
        columns: quantities that its table shows.
        published: the paper's numbers by cell and quantity; of a row that failed there, {"trains": 0.0}.
        elsewhere: the paper's numbers of other models than the one that is measured, by model, cell and quantity.
        against: two quantities of which a figure shows the second against the first.
        families: of the models on the paper's list, by cell.
        adapted: why its cells differ from the paper's at this scale.
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


class Summary(ReadDocument):
    """summary.json: everything that a sweep's directory has to say; empty where there is none.

    Attributes:
        id, title: of the experiment, where there is only one.
        scale: of all cells.
        cells: of all experiments. A name is one recipe, whichever experiment it is in.
    """

    schema_version: int = Field(default=2, alias="schema")
    id: str = ""
    title: str = ""
    scale: str = ""
    experiments: dict[str, ExperimentSummary] = Field(default_factory=dict)
    cells: dict[str, CellSummary] = Field(default_factory=dict)
    claims: list[JudgedClaim] = Field(default_factory=list)

    model_config = ConfigDict(populate_by_name=True)

    def save(self, directory: Path) -> None:
        """Write summary.json."""
        write_json(directory / SUMMARY, self.model_dump(by_alias=True))


def read_record(directory: Path) -> RunRecord | None:
    """The record of a run directory, None where it has not ended yet.

    Raises:
        InputError: it is damaged, or of another schema version.
    """
    path = directory / RECORD
    try:
        return RunRecord.model_validate(parse_json(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ValidationError) as error:
        raise InputError(
            f"{path} cannot be read ({_first_line(error)}): it is damaged or another version's. "
            "Remove it, and the run is recorded again"
        ) from error


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error).splitlines()[0]
