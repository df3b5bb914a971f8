"""What a tuning leaves: sft.json, metrics.jsonl (its evaluations) and updates.jsonl; docs/sft.md says what is in them.

Losses are in nats per token that the assistant says. Sink rates are in percent, position 1 first.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sinklab.errors import InputError
from sinklab.files import parse_json, write_text
from sinklab.schema import Ratio, ReadDocument
from sinklab.tuning.settings import TuneManifest

SFT, METRICS, UPDATES = "sft.json", "metrics.jsonl", "updates.jsonl"

AnyRow = TypeVar("AnyRow", bound=BaseModel)


class TuneUpdate(ReadDocument):
    """One update.

    Attributes:
        step: counted from 1.
        loss: of its conversations.
        grad_norm: before clipping.
        lr: that it was made with.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float


class TuneEvaluation(ReadDocument):
    """One evaluation, that of step 0 before any update.

    Attributes:
        step: updates made.
        train_loss: mean over the updates since the evaluation before; None where there were none.
        valid_loss: of the conversations held out.
        sink_rate, sink_rate_bias: percent of (sequence, layer, head) triples; of a bias where the model has one.
        hidden_norm_ratio: |h_1| over the mean of the others, before the first block and after every block; infinite,
            and null in the file, where the others are 0.
        lr, grad_norm: of the last update; the norm is that before clipping.
        grad_norm_max: largest since the evaluation before.
    """

    step: int
    train_loss: float | None = None
    valid_loss: float
    sink_rate: list[float]
    sink_rate_bias: float | None = None
    hidden_norm_ratio: list[Ratio] | None = None
    lr: float | None = None
    grad_norm: float | None = None
    grad_norm_max: float | None = None


class Tuning(ReadDocument):
    """sft.json.

    Attributes:
        model: as it was called.
        architecture: the class of transformers that was tuned.
        asked: what decides the numbers; the same call continues, another is refused.
        conversations: trained on; `held_out` are among `asked`.
        trained_tokens: of the assistant, in one epoch.
        sequences: on which the sink is measured.
        notes: what a reader must know.
        base, chat: the first evaluation, and the last one once all updates are made.
        grad_norm_max: of all updates.
        seconds: of all calls that have worked on it, as far as they came to an end.
        versions: of the libraries that trained.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, populate_by_name=True)

    schema_version: Literal[1] = Field(default=1, alias="schema")
    model: str
    architecture: str
    parameters: int
    asked: TuneManifest
    conversations: int
    trained_tokens: int
    sequences: int
    notes: list[str]
    base: TuneEvaluation | None = None
    chat: TuneEvaluation | None = None
    grad_norm_max: float | None = None
    seconds: float = 0.0
    versions: dict[str, str] = Field(default_factory=dict)

    def document(self) -> dict[str, object]:
        """As JSON has it."""
        return self.model_dump(mode="json", by_alias=True)


def load_tuning(folder: Path) -> Tuning | None:
    """What stands in sft.json; None where there is none.

    Raises:
        InputError: it is damaged.
    """
    path = folder / SFT
    if not path.is_file() or not path.stat().st_size:
        return None
    try:
        return Tuning.model_validate(parse_json(path.read_text(encoding="utf-8")))
    except (ValueError, ValidationError) as error:
        raise InputError(f"{path} is damaged ({error}): choose another --out, or move it away") from error


def read_rows(path: Path, kind: type[AnyRow]) -> list[AnyRow]:
    """The rows of a .jsonl file of ours; none where there is no file.

    Raises:
        InputError: it is damaged.
    """
    if not path.is_file():
        return []
    try:
        return [kind.model_validate_json(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except ValueError as error:
        raise InputError(f"{path} is damaged ({error}): choose another --out, or move it away") from error


def write_rows(path: Path, rows: Sequence[BaseModel]) -> None:
    """Write rows as .jsonl, atomically."""
    write_text(path, "".join(json.dumps(row.model_dump(mode="json"), allow_nan=False) + "\n" for row in rows))
