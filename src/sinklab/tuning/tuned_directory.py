"""Directory of a tuning run: sft.json, metrics.jsonl (evaluations), updates.jsonl, checkpoints and the tuned model.

Losses are in nats per assistant token, sink rates in percent. See docs/sft.md.
"""

import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

import sinklab
from sinklab.export.directory import atomic_directory, card_head, write_code
from sinklab.files import read_document, write_text
from sinklab.schema import Ratio, ReadDocument, VersionedDocument
from sinklab.tables import Table, markdown, names, numbers
from sinklab.tuning.settings import TuneManifest

SFT, METRICS, UPDATES = "sft.json", "metrics.jsonl", "updates.jsonl"
MODEL, CHECKPOINTS = "model", "checkpoints"
PREFIX = "checkpoint-"
STATE = "trainer_state.json"
"""State of the Trainer, the last file of a checkpoint; training resumes only from a checkpoint with this file."""

SINK = "sink"
"""Key of the sink metrics in the Trainer's log of an evaluation."""

NOT_THE_MODEL = ("*.pt", "*.pth", "training_args.bin", STATE, "README.md")
"""Glob patterns of checkpoint files that are not part of the model."""


class TuneUpdate(ReadDocument):
    """A row of updates.jsonl: one update.

    Attributes:
        step: number of the update, 1-based.
        loss: loss on the conversations of the update.
        grad_norm: gradient norm before clipping.
        lr: learning rate of the update.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float


class TuneEvaluation(ReadDocument):
    """A row of metrics.jsonl: one evaluation. Step 0 is the evaluation before training.

    Attributes:
        step: number of updates done.
        train_loss: mean loss over the updates since the previous evaluation; None without such updates.
        valid_loss: loss on the held-out conversations.
        sink_rate: Sink_k in percent of (sequence, layer, head) triples, for positions k = 1, 2, ...
        sink_rate_bias: sink rate in percent of an added bias, sink logit, remainder of stick-breaking, sink token or
            registers; None if the model has none of these.
        hidden_norm_ratio: |h_1| over the mean |h_t| of the other positions, before the first block and after every
            block; infinite (null in the file) if the mean is 0 and |h_1| is not. None if the blocks of the model are
            not found.
        lr, grad_norm: learning rate and gradient norm (before clipping) of the last update; None at step 0.
        grad_norm_max: largest gradient norm since the previous evaluation; None without updates.
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


class Tuning(VersionedDocument):
    """Contents of sft.json: settings and results of a tuning run.

    Attributes:
        model: name of the model as passed.
        architecture: transformers class of the model.
        parameters: number of parameters of the model.
        asked: settings that affect the result.
        conversations: number of training conversations; the number of held-out conversations is `asked.held_out`.
        trained_tokens: number of assistant tokens that contribute to the loss in one epoch.
        sequences: number of sequences for the sink metric.
        notes: notes on the model and the conversations.
        base, chat: evaluations before training and after all updates; None until they are made.
        grad_norm_max: largest gradient norm of all updates so far, before clipping; None without updates.
        seconds: total training time of all calls, except killed ones, in seconds.
        versions: versions of torch, transformers, trl and accelerate, by name.
    """

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
        """Return the available evaluations of the base and the chat model, by name ("base", "chat")."""
        return {name: side for name, side in (("base", self.base), ("chat", self.chat)) if side is not None}

    def numbers(self) -> dict[str, float]:
        """Return the quantities that claims use, by name; empty until training is complete.

        These are the decrease of the held-out loss (nats per assistant token), the largest gradient norm, and the
        change of Sink_1 (percentage points).
        """
        if self.base is None or self.chat is None or self.grad_norm_max is None:
            return {}
        return {
            "sft_loss_fall": self.base.valid_loss - self.chat.valid_loss,
            "sft_largest_grad_norm": self.grad_norm_max,
            "sft_sink_change": self.chat.sink_rate[0] - self.base.sink_rate[0],
        }


def tuned_beside(run: Path) -> Path:
    """Return the tuning directory of a run in a sweep: RUN-sft, beside RUN, because the files in RUN are hashed."""
    return run.with_name(f"{run.name}-sft")


def load_tuning(path: Path) -> Tuning:
    """Read the sft.json at `path`.

    Raises:
        InputError: if the file is missing, cannot be read or is damaged.
    """
    return read_document(Tuning, path, "restore it, or move its directory away")


def write_rows(path: Path, rows: Sequence[BaseModel]) -> None:
    """Write rows as .jsonl, atomically.

    Raises:
        ValueError: if a row contains NaN or an infinite number.
        InputError, SinklabError: if the file cannot be written.
    """
    write_text(path, "".join(json.dumps(row.model_dump(mode="json"), allow_nan=False) + "\n" for row in rows))


def newest(folder: Path) -> tuple[Path | None, list[TuneUpdate], list[TuneEvaluation]]:
    """Return the newest complete checkpoint in `folder`, or None, and the updates and evaluations up to it."""
    found = {int(path.parent.name.removeprefix(PREFIX)): path for path in folder.glob(f"{PREFIX}*/{STATE}")}
    for step in sorted(found, reverse=True):
        with suppress(ValueError, OSError):  # torn while it was written
            return found[step].parent, *rows_of(json.loads(found[step].read_text(encoding="utf-8"))["log_history"])
    return None, [], []


def rows_of(history: Sequence[dict[str, Any]]) -> tuple[list[TuneUpdate], list[TuneEvaluation]]:
    """Return the rows of updates.jsonl and metrics.jsonl from the Trainer's log history."""
    updates: list[TuneUpdate] = []
    evaluations: list[TuneEvaluation] = []
    for one in history:
        if "loss" in one and "grad_norm" in one:
            update = {"loss": one["loss"], "grad_norm": one["grad_norm"], "lr": one["learning_rate"]}
            updates.append(TuneUpdate(step=one["step"], **update))
        elif SINK in one:
            since = [row for row in updates if row.step > (evaluations[-1].step if evaluations else 0)]
            evaluations.append(
                TuneEvaluation(
                    step=one["step"],
                    train_loss=sum(row.loss for row in since) / len(since) if since else None,
                    valid_loss=one["eval_loss"],
                    **one[SINK],
                    lr=updates[-1].lr if updates else None,
                    grad_norm=updates[-1].grad_norm if updates else None,
                    grad_norm_max=max((row.grad_norm for row in since), default=None),
                )
            )
    return updates, evaluations


def write_model(checkpoint: Path, directory: Path, tuning: Tuning, is_ours: bool) -> None:
    """Write the model of a checkpoint as a Hugging Face directory, atomically.

    Args:
        checkpoint: folder of the checkpoint.
        directory: output directory; it must be new or empty.
        tuning: results for the model card.
        is_ours: True for a SinklabForCausalLM, whose modeling code is written with the weights.

    Raises:
        SinklabError: if the directory cannot be written.
    """
    left_out = {path.name for pattern in NOT_THE_MODEL for path in checkpoint.glob(pattern)}
    with atomic_directory(directory) as aside:
        for path in sorted(checkpoint.iterdir()):
            if path.is_file() and path.name not in left_out:
                shutil.copy2(path, aside / path.name)
        if is_ours:
            write_code(aside)
        write_text(aside / "README.md", _card(tuning))


def _card(tuning: Tuning) -> str:
    """Build README.md of the tuned model: loss and Sink_1 before and after tuning, and the settings."""
    asked = tuning.asked.model_dump(exclude={"files", "data", "sink_tokens"})
    settings = [(name, str(value)) for name, value in asked.items() if "\n" not in str(value)]
    columns = [*names(""), *numbers(".4f", "held-out loss, nats per token"), *numbers(".2f", "Sink_1, percent")]
    sides = [(name, side.valid_loss, side.sink_rate[0]) for name, side in tuning.sides().items()]
    return (
        f"{card_head('sft')}\n# {Path(tuning.model).name}, tuned on conversations\n\n"
        f"{tuning.architecture} of {tuning.parameters:,} parameters, tuned by sinklab {sinklab.__version__} on the "
        f"assistant's tokens of {tuning.conversations:,} conversations.\n\n"
        f"{markdown(Table('', columns, sides))}\n\n## Settings\n\n{markdown(Table('', names('', ''), settings))}\n"
    )
