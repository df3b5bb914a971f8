"""Inputs of a tuning run: model, conversations, settings, and tokens of the sink metric."""

import hashlib
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from sinklab.device import pick_device
from sinklab.errors import InputError
from sinklab.files import sha256_of
from sinklab.measuring.inputs import natural_text, with_prefix
from sinklab.models.huggingface.anatomy import quantisation
from sinklab.models.huggingface.loading import DEVICE_MAP, Loading
from sinklab.opening import Model, open_model
from sinklab.train.recipe import load_recipe
from sinklab.tuning.chats import ChatTemplate, TokenizedChat, first_tokens, read_chats
from sinklab.tuning.settings import TuneManifest, TuneOptions, TuneSettings, held_out_for, length_for, settings_for
from sinklab.tuning.tuned_directory import Tuning

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LIBRARIES = ("torch", "transformers", "trl", "accelerate")


@dataclass(frozen=True)
class TuneSources:
    """Input files of a tuning run.

    Attributes:
        chats: .jsonl file of conversations.
        text: text for the sink metric; None for the held-out conversations.
        template: file with a chat template that replaces the model's; None for the model's.
    """

    chats: Path
    text: Path | None = None
    template: Path | None = None


@dataclass(frozen=True)
class SftDataset:
    """A loaded model and its tuning data.

    Attributes:
        trained, held_out: tokenized training and held-out conversations.
        tokens_NT: tokens of the sink metric, (N, T).
        tuning: content of sft.json before the first update; all settings are in `tuning.asked`.
    """

    model: Model
    trained: list[TokenizedChat]
    held_out: list[TokenizedChat]
    tokens_NT: Tensor
    tuning: Tuning


def prepare_dataset(model: str, sources: TuneSources, options: TuneOptions, loading: Loading) -> SftDataset:
    """Load the model, read and tokenize the conversations, and derive the settings that `options` leaves unset.

    Raises:
        InputError: if the model, a file or an option is unusable.
    """
    given = None if sources.template is None else _read_template(sources.template)
    opened = open_trainable(model, loading)
    template = ChatTemplate(opened.tokenizer, given)
    length = length_for(options, _context(opened))
    chats = read_chats(sources.chats, template, length, options.seed)
    count = held_out_for(options, len(chats.usable))
    held_out, trained = chats.usable[:count], chats.usable[count:]
    settings = settings_for(options, length, count, len(trained))
    tokens_NT = _sink_tokens(sources.text, opened, held_out, settings)
    notes = [*_notes_of_loading(opened), *template.notes, chats.note(length)]
    if len(tokens_NT) < settings.sequences:
        notes.append(
            f"the sink is measured on {len(tokens_NT)} of {settings.sequences} sequences: the text, or the held-out "
            "conversations of at least that length, give no more"
        )
    tuning = Tuning(
        model=model,
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
    """Load a Hugging Face model, or a run as its exported model, for training, with float32 weights.

    Raises:
        InputError: if the model cannot be loaded, its weights are quantised, or more than one device would be used.
    """
    if loading.device == DEVICE_MAP:
        raise InputError("--device map: a model is tuned on one device; use auto, cpu or cuda")
    if pick_device(loading.device).type == "cuda" and torch.cuda.device_count() > 1:
        raise InputError("a model is tuned on one device, and there are several: choose one by CUDA_VISIBLE_DEVICES=0")
    model = open_model(name, replace(loading, dtype="float32"), as_transformers=True)
    if quantised := quantisation(cast("PreTrainedModel", model.module).config):
        raise InputError(
            f"the weights of {name} are quantised ({quantised}) and cannot be trained: use the original model"
        )
    return model


def _context(model: Model) -> int | None:
    """Return `max_position_embeddings` of the model; None if its config has none."""
    config = cast("PreTrainedModel", model.module).config.get_text_config(decoder=True)
    context = getattr(config, "max_position_embeddings", None)
    return int(context) if context else None


def _notes_of_loading(model: Model) -> list[str]:
    if model.step is None:
        return [*model.notes]
    notes = [f"the run is at step {model.step:,}", *model.notes]
    data = load_recipe(str(Path(model.name) / "recipe.yaml")).data
    if data.fixed_token is not None or data.random_tokens is not None:
        notes.append(
            "the run was trained with replaced tokens (data.fixed_token, data.random_tokens); those of the "
            "conversations are not replaced"
        )
    return notes


def _sink_tokens(text: Path | None, model: Model, held_out: list[TokenizedChat], settings: TuneSettings) -> Tensor:
    """Build the tokens (N, T) of the sink metric from `text` or held-out conversations; N may be below `sequences`."""
    if text is None:
        return first_tokens(held_out, settings.sequences, settings.sink_length)
    bodies = natural_text(
        text,
        model.encode,
        sequences=settings.sequences,
        length=settings.sink_length,
        prefix=model.special,
        fewer=True,
        render=model.conversations(keep_bos=not model.special).render,
    )
    return with_prefix(bodies, model.special)


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--chat-template {path} cannot be read: {error}") from error
