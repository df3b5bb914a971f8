"""One tuning from its beginning, or from its newest checkpoint, to the model and its documents."""

import hashlib
import importlib.util
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from sinklab.errors import InputError
from sinklab.files import sha256_of, write_json
from sinklab.measuring.conversations import Conversations
from sinklab.measuring.huggingface.exported import own_transformer
from sinklab.measuring.huggingface.loading import AS_IT_IS, Loading
from sinklab.measuring.inputs import default_prefix, natural_tokens, pretrained_encode
from sinklab.outputs import check_results
from sinklab.train.directory.lock import leave, lock_run
from sinklab.tuning.card import tuned_card
from sinklab.tuning.chats import Chats, beginnings, read_chats
from sinklab.tuning.checkpoints import discard_torn, newest, write_model
from sinklab.tuning.documents import (
    METRICS,
    SFT,
    UPDATES,
    TuneEvaluation,
    TuneUpdate,
    Tuning,
    load_tuning,
    read_rows,
    write_rows,
)
from sinklab.tuning.loading import Student, load_student, without_bars
from sinklab.tuning.settings import TuneSettings, TuneWanted, held_out_for, length_for, settings_for
from sinklab.tuning.template import ChatTemplate, Spoken

MODEL, CHECKPOINTS = "model", "checkpoints"
LIBRARIES = ("torch", "transformers", "trl", "accelerate")


class TuneListener:
    """Is told how the work goes. This one says nothing."""

    def notes(self, notes: list[str]) -> None:
        """What a reader must know of the model and the conversations, before they are used."""

    def starts(self, steps: int, done: int) -> None:
        """Training begins, or goes on after so many of its updates."""

    def updated(self, update: TuneUpdate) -> None:
        """An update was made."""

    def evaluated(self, evaluation: TuneEvaluation) -> None:
        """The model was evaluated."""


@dataclass(frozen=True)
class TuneSources:
    """Files that a tuning reads.

    Attributes:
        chats: .jsonl of conversations.
        text: on which the sink is measured; None for the conversations held out.
        template: a chat template in place of the model's own.
    """

    chats: Path
    text: Path | None = None
    template: Path | None = None


def tune(
    model: str,
    sources: TuneSources,
    wanted: TuneWanted,
    out: Path,
    *,
    loading: Loading = AS_IT_IS,
    listener: TuneListener | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Tuning:
    """Tune a model, or go on where an earlier call has stopped; what is done already is not done again.

    Args:
        model: a run directory, a model directory, a .gguf file, or a name on the Hugging Face hub.
        out: for the documents, checkpoints and, in the end, the model.
        should_stop: asked after every update; once it says yes a checkpoint is saved, and the tuning has no `chat`.

    Raises:
        InputError: trl is not installed, a model, file or option that cannot be used, or a tuning with other settings
            in `out`; nothing has been written then.
        SinklabError: another process works there, a loss or gradient that is no finite number, or a full disk.
    """
    check_extra()
    check_results(out, (SFT,))
    is_new = not out.exists()
    with lock_run(out):
        try:
            with without_bars():
                return _tune(model, sources, wanted, out, loading, listener or TuneListener(), should_stop)
        finally:
            leave(out, is_new)


def check_extra() -> None:
    """Refuse to begin without trl.

    Raises:
        InputError: with the command that installs it.
    """
    if importlib.util.find_spec("trl") is None or importlib.util.find_spec("accelerate") is None:
        raise InputError("instruction tuning needs trl, which is not installed: pip install 'sinklab[sft]'")


def _tune(
    model: str,
    sources: TuneSources,
    wanted: TuneWanted,
    out: Path,
    loading: Loading,
    listener: TuneListener,
    should_stop: Callable[[], bool],
) -> Tuning:
    given = None if sources.template is None else _read_template(sources.template)
    before = load_tuning(out)
    _check_free(out, before)
    student = load_student(model, loading)
    template = ChatTemplate(student.tokenizer, given)
    length = length_for(wanted, student.context)
    chats = read_chats(sources.chats, template, length, wanted.seed)
    held_out = held_out_for(wanted, len(chats.usable))
    trained, kept_back = chats.usable[held_out:], chats.usable[:held_out]
    settings = settings_for(wanted, length, held_out, len(trained))
    tokens_NT = _sink_tokens(sources.text, student, kept_back, settings)
    found = Tuning(
        model=model,
        architecture=type(student.model).__name__,
        parameters=sum(parameter.numel() for parameter in student.model.parameters()),
        asked=_asked(sources, student, settings, tokens_NT, given),
        conversations=len(trained),
        trained_tokens=sum(sum(chat.is_trained[1:]) for chat in trained),
        sequences=len(tokens_NT),
        notes=_notes(student, template, chats, tokens_NT, settings),
        versions={name: version(name) for name in LIBRARIES},
    )
    found = _continued(found, before, out)
    if found.chat is not None:
        return found
    listener.notes(found.notes)
    return _trained(found, student, trained, kept_back, settings, tokens_NT, out, listener, should_stop)


def _trained(
    found: Tuning,
    student: Student,
    trained: list[Spoken],
    held_out: list[Spoken],
    settings: TuneSettings,
    tokens_NT: Tensor,
    out: Path,
    listener: TuneListener,
    should_stop: Callable[[], bool],
) -> Tuning:
    """Train, and write what has come of it."""
    from sinklab.measuring.huggingface.callback import SinkCallback
    from sinklab.tuning.trainer import TuneRecord, tuner

    begun, folder = time.perf_counter(), out / CHECKPOINTS
    write_json(out / SFT, found.document())
    discard_torn(folder)
    checkpoint = newest(folder)
    step = checkpoint[0] if checkpoint else 0
    sink = SinkCallback(tokens_NT, eps=settings.eps)
    record = TuneRecord(
        out,
        [row for row in read_rows(out / UPDATES, TuneUpdate) if row.step <= step],
        [row for row in read_rows(out / METRICS, TuneEvaluation) if row.step <= step and checkpoint],
        sink,
        should_stop,
        listener.updated,
        listener.evaluated,
    )
    if step < settings.steps:
        listener.starts(settings.steps, step)
        trainer = tuner(
            student.model, student.tokenizer, trained, held_out, settings, folder, [sink, record], begins=not checkpoint
        )
        trainer.train(resume_from_checkpoint=str(checkpoint[1]) if checkpoint else None)
    last = newest(folder)
    done = last is not None and last[0] == settings.steps
    found = found.model_copy(
        update={
            "base": record.evaluations[0] if record.evaluations else None,
            "chat": record.evaluations[-1] if done else None,
            "grad_norm_max": max((one.grad_norm for one in record.updates), default=None),
            "seconds": round(found.seconds + time.perf_counter() - begun, 1),
        }
    )
    if last is not None and done:
        if not (out / MODEL).exists():
            write_model(last[1], out / MODEL, tuned_card(found), own_transformer(student.model) is not None)
        write_rows(out / UPDATES, record.updates)
        write_rows(out / METRICS, record.evaluations)
    write_json(out / SFT, found.document())
    if done:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def _sink_tokens(text: Path | None, student: Student, held_out: list[Spoken], settings: TuneSettings) -> Tensor:
    """What the sink is measured on: (N, T)."""
    if text is None:
        return beginnings(held_out, settings.sequences, settings.sink_length)
    prefix = default_prefix(student.tokenizer)
    return natural_tokens(
        text,
        pretrained_encode(student.tokenizer),
        sequences=settings.sequences,
        length=settings.sink_length,
        prefix=prefix,
        fewer=True,
        render=Conversations(student.tokenizer, keep_bos=not prefix).render,
    )


def _notes(
    student: Student, template: ChatTemplate, chats: Chats, tokens_NT: Tensor, settings: TuneSettings
) -> list[str]:
    notes = [*student.notes, *template.notes, chats.note(settings.length)]
    if len(tokens_NT) < settings.sequences:
        notes.append(f"the sink is measured on {len(tokens_NT)} of {settings.sequences} sequences: there are no more")
    return notes


def _asked(
    sources: TuneSources, student: Student, settings: TuneSettings, tokens_NT: Tensor, template: str | None
) -> dict[str, object]:
    """Everything that decides the result."""
    return {
        "files": student.files,
        "data": sha256_of(sources.chats),
        "sink_tokens": hashlib.sha256(tokens_NT.to(torch.int64).numpy().tobytes()).hexdigest(),
        "chat_template": template,
        **settings.document(),
    }


def _continued(new: Tuning, before: Tuning | None, out: Path) -> Tuning:
    """What an earlier call has left of the same tuning, or the new one.

    Raises:
        InputError: it was another one.
    """
    if before is None:
        return new
    asked = cast(dict[str, object], {"model": new.model, **new.asked})
    there = cast(dict[str, object], {"model": before.model, **before.asked})
    for key in sorted({*asked, *there}):
        if asked.get(key) != there.get(key):
            raise InputError(
                f"{out / SFT} is of a tuning with other settings ({key} is {there.get(key)} there and "
                f"{asked.get(key)} now): choose another --out, or repeat the call that made it"
            )
    return before


def _check_free(out: Path, before: Tuning | None) -> None:
    """Refuse a directory whose model or checkpoints are not of a tuning.

    Raises:
        InputError: with the folder.
    """
    for name in (MODEL, CHECKPOINTS):
        folder = out / name
        if before is None and folder.exists():
            raise InputError(f"{folder} is there already and is no part of a tuning: choose another --out")


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--chat-template {path} cannot be read: {error}") from error
