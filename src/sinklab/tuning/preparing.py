"""Preparation of a tuning: model, conversations, settings, tokens for the sink metric."""

import hashlib
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from sinklab.errors import InputError
from sinklab.files import sha256_of
from sinklab.measuring.conversations import Conversations
from sinklab.measuring.inputs import default_prefix, natural_tokens, pretrained_encode
from sinklab.models.huggingface.loading import Loading
from sinklab.tuning.chats import ChatTemplate, TokenizedChat, first_tokens, read_chats
from sinklab.tuning.documents import Tuning
from sinklab.tuning.loading import Student, load_student
from sinklab.tuning.settings import TuneManifest, TuneOptions, TuneSettings, held_out_for, length_for, settings_for

LIBRARIES = ("torch", "transformers", "trl", "accelerate")


@dataclass(frozen=True)
class TuneSources:
    """The input files of a tuning.

    Attributes:
        chats: .jsonl of conversations.
        text: for the sink metric; None for the held-out conversations.
        template: a chat template in place of the model's own.
    """

    chats: Path
    text: Path | None = None
    template: Path | None = None


@dataclass(frozen=True)
class SftDataset:
    """A model and the data that it is tuned on.

    Attributes:
        trained, held_out: conversations.
        tokens_NT: on which the sink is measured.
        tuning: sft.json before the first update.
    """

    student: Student
    trained: list[TokenizedChat]
    held_out: list[TokenizedChat]
    settings: TuneSettings
    tokens_NT: Tensor
    tuning: Tuning


def prepare_dataset(model: str, sources: TuneSources, options: TuneOptions, loading: Loading) -> SftDataset:
    """Load the model, read the conversations, decide the settings that were left open.

    Raises:
        InputError: a model, file or option that cannot be used.
    """
    given = None if sources.template is None else _read_template(sources.template)
    student = load_student(model, loading)
    template = ChatTemplate(student.tokenizer, given)
    length = length_for(options, student.context)
    chats = read_chats(sources.chats, template, length, options.seed)
    count = held_out_for(options, len(chats.usable))
    held_out, trained = chats.usable[:count], chats.usable[count:]
    settings = settings_for(options, length, count, len(trained))
    tokens_NT = _sink_tokens(sources.text, student, held_out, settings)
    notes = [*student.notes, *template.notes, chats.note(length)]
    if len(tokens_NT) < settings.sequences:
        notes.append(f"the sink is measured on {len(tokens_NT)} of {settings.sequences} sequences: there are no more")
    tuning = Tuning(
        model=model,
        architecture=type(student.model).__name__,
        parameters=sum(parameter.numel() for parameter in student.model.parameters()),
        asked=TuneManifest(
            **dict(settings),
            files=student.files,
            data=sha256_of(sources.chats),
            sink_tokens=hashlib.sha256(tokens_NT.to(torch.int64).numpy().tobytes()).hexdigest(),
            chat_template=given,
        ),
        conversations=len(trained),
        trained_tokens=sum(sum(chat.is_trained[1:]) for chat in trained),
        sequences=len(tokens_NT),
        notes=notes,
        versions={name: version(name) for name in LIBRARIES},
    )
    return SftDataset(student, trained, held_out, settings, tokens_NT, tuning)


def _sink_tokens(text: Path | None, student: Student, held_out: list[TokenizedChat], settings: TuneSettings) -> Tensor:
    """The tokens on which the sink is measured: (N, T)."""
    if text is None:
        return first_tokens(held_out, settings.sequences, settings.sink_length)
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


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--chat-template {path} cannot be read: {error}") from error
