"""Inputs of a tuning run: model, conversations, settings and tokens for the sink metric."""

import hashlib
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from sinklab.data.textfiles import ReadCounts, expanded, notes_on_folder
from sinklab.device import pick_device
from sinklab.errors import InputError
from sinklab.files import sha256_of
from sinklab.measuring.inputs import natural_text, token_rows
from sinklab.models.huggingface.loading import DEVICE_MAP, Loading
from sinklab.opening import Model, open_model
from sinklab.train.recipe import load_recipe
from sinklab.tuning.chats import ChatTemplate, TokenizedChat, first_tokens, read_chats
from sinklab.tuning.settings import TuneManifest, TuneOptions, held_out_for, length_for, settings_for
from sinklab.tuning.tuned_directory import Tuning

LIBRARIES = ("torch", "transformers", "trl", "accelerate")


@dataclass(frozen=True)
class TuneSources:
    """Input files of a tuning run.

    Attributes:
        chats: file of conversations.
        text: text file for the sink metric; None for the held-out conversations.
        template: file with a chat template that replaces the model's; None for the model's.
    """

    chats: Path
    text: Path | None = None
    template: Path | None = None


@dataclass(frozen=True)
class SftDataset:
    """Loaded model and its tuning data.

    Attributes:
        trained, held_out: tokenized training and held-out conversations.
        tokens_NT: tokens for the sink metric, (N, T).
        tuning: content of sft.json before the first update; all settings are in `tuning.asked`.
    """

    model: Model
    trained: list[TokenizedChat]
    held_out: list[TokenizedChat]
    tokens_NT: Tensor
    tuning: Tuning


def prepare_dataset(model: str, sources: TuneSources, options: TuneOptions, loading: Loading) -> SftDataset:
    """Load the model, tokenize the conversations and the text of the sink metric, and return them with all settings.

    Settings that `options` leaves unset are derived from the model and the conversations.

    Raises:
        InputError: if the model, a file or an option is unusable.
        SinklabError: if no checkpoint of a run is valid.
    """
    try:
        given = None if sources.template is None else sources.template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--chat-template {sources.template} cannot be read: {error}") from error
    opened = open_trainable(model, loading)
    template = ChatTemplate(opened.tokenizer, given)
    length = length_for(options, opened.adapter.limit)
    usable, counts = read_chats(sources.chats, template, length, options.seed)
    count = held_out_for(options, len(usable))
    held_out, trained = usable[:count], usable[count:]
    settings = settings_for(options, length, count, len(trained))
    read = ReadCounts()
    if sources.text is None:
        tokens_NT = first_tokens(held_out, settings.sequences, settings.sink_length)
    else:
        rows = natural_text(
            sources.text,
            opened.encoder(),
            sequences=settings.sequences,
            length=settings.sink_length,
            fewer=True,
            render=opened.conversations().render,
            counts=read,
        )
        tokens_NT = opened.arrange(token_rows(rows), len(rows[0].prefix), None)
    notes = [*opened.notes, *template.notes, counts, *read.notes()]
    if opened.step is not None:
        data = load_recipe(str(Path(opened.name) / "recipe.yaml")).data
        notes.insert(0, f"the checkpoint of the run is from step {opened.step:,}")
        if data.fixed_token is not None or data.random_tokens is not None:
            notes.append(
                "the run was trained with data.fixed_token or data.random_tokens, which are not applied to the "
                "conversations"
            )
    if sources.text is not None:
        notes += notes_on_folder(expanded(str(sources.text)))
    if len(tokens_NT) < settings.sequences:
        notes.append(
            f"the sink metric uses {len(tokens_NT)} of the requested {settings.sequences} sequences: the text or the "
            "held-out conversations do not contain more of this length"
        )
    tuning = Tuning(
        model=opened.name,
        architecture=type(opened.module).__name__,
        parameters=sum(parameter.numel() for parameter in opened.module.parameters()),
        asked=TuneManifest(
            **dict(settings),
            files=opened.files,
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
    return SftDataset(opened, trained, held_out, tokens_NT, tuning)


def open_trainable(name: str, loading: Loading) -> Model:
    """Load a Hugging Face model, or the exported model of a run, with float32 weights for training.

    Raises:
        InputError: if the model cannot be loaded, its weights are quantised, or several GPUs are visible or requested.
        SinklabError: as `open_model`.
    """
    if loading.device == DEVICE_MAP:
        raise InputError("--device map is not supported, because tuning uses one device: use auto, cpu or cuda")
    if pick_device(loading.device).type == "cuda" and torch.cuda.device_count() > 1:
        raise InputError("tuning uses one GPU, but several are visible: select one, as in CUDA_VISIBLE_DEVICES=0")
    model = open_model(name, replace(loading, dtype="float32"), as_transformers=True)
    if method := model.adapter.quantised:
        raise InputError(
            f"the weights of {name} are quantised ({method}) and cannot be trained: use the unquantised model"
        )
    return model
