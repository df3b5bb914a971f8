"""The files of a tuning: sft.json, metrics.jsonl (evaluations) and updates.jsonl; described in docs/sft.md.

Losses are in nats per token of the assistant. Sink rates are in percent, position 1 first.
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
        lr: of the update.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float


class TuneEvaluation(ReadDocument):
    """One evaluation; step 0 is before any update.

    Attributes:
        step: updates made.
        train_loss: mean over the updates since the previous evaluation; None if there were none.
        valid_loss: of the held-out conversations.
        sink_rate, sink_rate_bias: percent of (sequence, layer, head) triples; of a bias where the model has one.
        hidden_norm_ratio: |h_1| over the mean of the others, before the first block and after every block; infinite,
            null in the file, where the others are 0.
        lr, grad_norm: of the last update; the norm before clipping.
        grad_norm_max: largest since the previous evaluation.
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
        model: name as given.
        architecture: the class of transformers that was tuned.
        asked: everything that decides the numbers; a call with the same resumes, another is refused.
        conversations: number trained on; `held_out` is in `asked`.
        trained_tokens: tokens of the assistant in one epoch.
        sequences: number on which the sink is measured.
        notes: what a reader must know.
        base, chat: the first evaluation; the last one, after all updates.
        grad_norm_max: of all updates.
        seconds: of all calls that were not killed.
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

    def sides(self) -> dict[str, TuneEvaluation]:
        """The evaluations of the base and of the chat model that were made."""
        return {name: side for name, side in (("base", self.base), ("chat", self.chat)) if side is not None}

    def document(self) -> dict[str, object]:
        """As JSON has it."""
        return self.model_dump(mode="json", by_alias=True)


def load_tuning(folder: Path) -> Tuning | None:
    """Read sft.json; None if there is none.

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
    """The rows of a .jsonl file; none without a file.

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
