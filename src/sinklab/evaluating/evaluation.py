"""Settings of an evaluation, and contents of its evaluation.json: scores on downstream tasks and sink metric.

docs/eval.md defines the scores.
"""

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

from sinklab.files import read_document
from sinklab.schema import ReadDocument, VersionedDocument
from sinklab.settings import ADVANCED, INPUT, MOST, CommandSettings, Flag, Seed, Several, split_names

EVALUATION = "evaluation.json"


class TaskRequest(CommandSettings, frozen=True):
    """Settings of an evaluation on downstream tasks."""

    panel = INPUT

    tasks: Annotated[Several[str], BeforeValidator(split_names), Flag(text=str, metavar="NAMES")] = Field(
        min_length=1, description="lm-eval tasks, comma-separated: hellaswag, arc_easy, ..."
    )
    limit: int | None = Field(
        default=None, ge=1, le=MOST, description="Items per task, drawn with --seed; default: all."
    )
    data: Path | None = Field(
        default=None,
        description="File (.jsonl or .jsonl.gz) with the items of hellaswag; default: its file in SINKLAB_DATA/eval, "
        "else the items on the hub.",
    )
    text: Path | None = Field(
        default=None, description="Text for the sink metric: a text file or a folder; default: the task's items."
    )
    batch_size: Annotated[int, Flag(panel=ADVANCED)] = Field(default=4, ge=1, description="Requests per batch.")
    seed: Annotated[Seed, Flag(panel=ADVANCED)] = Field(
        default=0, description="Random seed for drawing the items and few-shot examples."
    )


class TaskMetric(ReadDocument):
    """A metric of a task, aggregated over its items.

    Attributes:
        value: value reported by lm-eval; accuracies are fractions from 0 to 1.
        stderr: standard error over items; None if lm-eval reports none.
    """

    value: float
    stderr: float | None = None


class TextSink(ReadDocument):
    """Sink of the model on natural text, as in `sinklab measure`.

    Attributes:
        text: file, folder or corpus; or "task" for the items of the task with their correct answers.
        sha256: hash of the text (`text_hash`); None for "task".
        sequences, length: number of sequences, and number of tokens in each.
        eps: threshold on importance.
        bos: True if position 1 of the sequences is a special token.
        sink_1: Sink_1, percent of (sequence, layer, head) triples with an importance of position 1 above eps.
        bias: sink rate in percent of everything attended to that is not a token of the sequence: an added bias, sink
            logit, remainder of stick-breaking, sink token or registers; None if the model has none of these.
    """

    text: str
    sha256: str | None = None
    sequences: int
    length: int
    eps: float
    bos: bool
    sink_1: float
    bias: float | None = None


class TaskScores(ReadDocument):
    """Scores on a task.

    Attributes:
        version: version of the task in lm-eval.
        data: name of the file with the items, or "hub".
        sha256: SHA-256 of the file with the items; None for the hub.
        limit: number of items requested; None for all items.
        seed: random seed with which items and few-shot examples were drawn.
        items: number of items scored.
        available: number of items of the task.
        left_out: number of drawn items excluded because an answer does not fit in the model's context.
        cut: number of scored items whose prompt was truncated to fit in the model's context.
        metrics: metrics by lm-eval's names.
        sink: sink on natural text; None if it cannot be measured on the items, usually because they are too short.
        records: name of the file with the item records, in the same directory; None if the results are not saved.
        seconds: time in seconds in which the last call answered and scored requests, without the sink metric and the
            time of earlier, interrupted calls.
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


class DownstreamScores(VersionedDocument):
    """Contents of evaluation.json: scores of a model on downstream tasks.

    Attributes:
        model: name of the model.
        asked: identity of the model: name, hash of its files, commit on the hub, and requested dtype.
        lm_eval: version of lm-eval.
        notes: notes on how the model was loaded.
        tasks: scores by task name.
    """

    model: str
    asked: dict[str, str | None]
    lm_eval: str
    notes: list[str] = Field(default_factory=list)
    tasks: dict[str, TaskScores] = Field(default_factory=dict)


class ItemRecord(ReadDocument):
    """Result of one item of a task.

    Attributes:
        item: index in the task, from 0.
        doc_hash: lm-eval's SHA-256 of the item.
        target: correct answer, in the format of the task.
        responses: the model's answer to each request of the item, after lm-eval's filter: a pair (log-likelihood in
            nats, True if greedy decoding gives the continuation), the log-likelihood of a text, or a generated text.
        metrics: metrics of this item.
    """

    item: int
    doc_hash: str
    target: object
    responses: list[object]
    metrics: dict[str, object]


def load_scores(path: Path) -> DownstreamScores:
    """Read an evaluation.json.

    Raises:
        InputError: if the file cannot be read or is not an evaluation.
    """
    return read_document(DownstreamScores, path, "move it away, or choose another --out")
