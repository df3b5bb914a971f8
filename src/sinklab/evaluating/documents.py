"""evaluation.json: how a model does on downstream tasks, task by task, with its sink; formulas in docs/eval.md."""

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field, ValidationError

from sinklab.errors import InputError
from sinklab.files import parse_json, written_aside
from sinklab.schema import ReadDocument

EVALUATION = "evaluation.json"
RECORDS = ".jsonl.gz"


class TaskMetric(ReadDocument):
    """One metric over the items of a task.

    Attributes:
        value: as lm-eval has it: accuracies are shares, from 0 to 1.
        stderr: standard error of that mean over items; None where lm-eval knows none.
    """

    value: float
    stderr: float | None = None


class TextSink(ReadDocument):
    """The sink of the model on natural text, measured as `sinklab measure` does.

    Attributes:
        text: the file that was given, or "task": the items of the task, each with its right answer.
        sequences, length, eps: of the measurement.
        bos: whether position 1 is a special token.
        sink_1: percent of (sequence, layer, head) triples whose importance of position 1 is above eps.
        bias: percent on an added bias, sink logit or sink token; None where the model has none.
    """

    text: str
    sequences: int
    length: int
    eps: float
    bos: bool
    sink_1: float
    bias: float | None = None


class TaskScores(ReadDocument):
    """A task.

    Attributes:
        version: of the task in lm-eval.
        data: the file, or "hub".
        sha256: of the file's bytes; None for the hub.
        limit: how many items were asked for; None for all.
        seed: draws them.
        items: how many were scored, of `available`.
        left_out: items that were drawn and have an answer longer than the model's context.
        cut: items whose context lost its first words, as it is longer than the model's.
        metrics: by lm-eval's name.
        sink: None where the text gives no sequence.
        records: file of the items, beside this one.
        seconds: of scoring; of the last call where there were several.
    """

    version: str
    data: str
    sha256: str | None = None
    limit: int | None
    seed: int
    items: int
    available: int
    left_out: int = 0
    cut: int = 0
    metrics: dict[str, TaskMetric]
    sink: TextSink | None = None
    records: str | None = None
    seconds: float

    @property
    def settings(self) -> dict[str, object]:
        """What decides the numbers, beside the model."""
        return {"limit": self.limit, "seed": self.seed, "data": self.sha256 or self.data}


class DownstreamScores(ReadDocument):
    """evaluation.json.

    Attributes:
        asked: what the model is: its files, revision and dtype.
        lm_eval: its version.
        notes: what a reader must know of how the model was loaded, and of the tasks.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, populate_by_name=True)

    schema_version: Literal[1] = Field(default=1, alias="schema")
    model: str
    asked: dict[str, str | None]
    lm_eval: str
    notes: list[str] = Field(default_factory=list)
    tasks: dict[str, TaskScores] = Field(default_factory=dict)

    def document(self) -> dict[str, object]:
        """As JSON has it."""
        return self.model_dump(mode="json", by_alias=True)


class ItemRecord(ReadDocument):
    """One item.

    Attributes:
        item: its number in the task, from 0.
        doc_hash: lm-eval's SHA-256 of the item.
        target: the right answer, as the task has it.
        responses: of the model, one for each request: of a choice, log-likelihood (nats) and whether it is what the
            model would say by itself; else a text or a number.
        metrics: of this item.
    """

    item: int
    doc_hash: str
    target: object
    responses: list[object]
    metrics: dict[str, object]


def load_scores(path: Path) -> DownstreamScores:
    """Read an evaluation.json.

    Raises:
        InputError: it is not there or damaged.
    """
    try:
        return DownstreamScores.model_validate(parse_json(path.read_text("utf-8")))
    except (OSError, ValueError, ValidationError) as error:
        raise InputError(f"{path} cannot be read as an evaluation ({error}): make it again in another --out") from error


def write_records(path: Path, records: Sequence[ItemRecord]) -> None:
    """Write a gzip file of a line for each item, the same bytes for the same items.

    Raises:
        SinklabError: it cannot be written.
    """
    lines = "".join(f"{json.dumps(one.model_dump(mode='json'), ensure_ascii=False)}\n" for one in records)
    with written_aside(path) as aside:
        aside.write_bytes(gzip.compress(lines.encode("utf-8"), mtime=0))


def read_records(path: Path) -> Iterator[ItemRecord]:
    """The items of such a file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield ItemRecord.model_validate_json(line)
