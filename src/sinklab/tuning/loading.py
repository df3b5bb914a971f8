"""The model that is tuned: a run as its exported Hugging Face model, or any that `sinklab measure` takes."""

import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sinklab.device import pick_device
from sinklab.errors import InputError
from sinklab.models.huggingface.anatomy import check_length, quantisation
from sinklab.models.huggingface.loading import (
    DEVICE_MAP,
    Loading,
    check_name,
    check_revision,
    load_pretrained,
)
from sinklab.survey.items import model_files
from sinklab.survey.loaded import is_run

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Student:
    """A model to be tuned, in float32, and its tokenizer.

    Attributes:
        files: changes when the model's files may have changed; None for a model of the hub.
        context: tokens that it knows positions for; None where there is no end.
        notes: what a reader must know of how it was loaded.
    """

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    files: str | None
    context: int | None
    notes: list[str] = field(default_factory=list)


def load_student(name: str, loading: Loading) -> Student:
    """Load a model for training: its weights in float32, whatever its files have.

    Args:
        name: a run directory, at its newest checkpoint; a model directory, a .gguf file, or a name on the hub.
        loading: its dtype is passed over.

    Raises:
        InputError: it cannot be loaded, or its weights are quantised and would stay so.
    """
    check_name(name)
    check_revision(name, loading.revision)
    if loading.device == DEVICE_MAP:
        raise InputError("--device map: a model is tuned on one device; give auto, cpu or cuda:N")
    if pick_device(loading.device).type == "cuda" and torch.cuda.device_count() > 1:
        raise InputError("a model is tuned on one device, and there are several: choose one by CUDA_VISIBLE_DEVICES=0")
    whole = replace(loading, dtype="float32")
    if not is_run(name):
        return _student(name, name, whole)
    from sinklab.export.directory import export_run
    from sinklab.train.recipe import load_recipe

    data = load_recipe(str(Path(name) / "recipe.yaml"), ()).data
    with tempfile.TemporaryDirectory() as folder:
        exported = export_run(Path(name), Path(folder) / "model")
        found = _student(name, str(exported.directory), whole)
    notes = [f"the run stands at step {exported.step:,}", *found.notes]
    if data.fixed_token is not None or data.random_tokens is not None:
        notes.append("the run's own text had changed tokens (data.fixed_token, data.random_tokens); the chats have not")
    return replace(found, notes=notes)


def is_ours(model: "PreTrainedModel") -> bool:
    """Whether it is a SinklabForCausalLM, also one of the code beside an exported run."""
    return model.config.model_type == "sinklab"


def _student(name: str, place: str, loading: Loading) -> Student:
    loaded = load_pretrained(place, loading)
    config = loaded.model.config
    if quantised := quantisation(config):
        raise InputError(f"the weights of {name} are quantised ({quantised}) and cannot be trained: give the original")
    return Student(loaded.model, loaded.tokenizer, model_files(Path(name)), _context(loaded.model), loaded.notes)


def _context(model: "PreTrainedModel") -> int | None:
    """The longest sequence that `check_length` lets pass."""
    said = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if not said:
        return None
    check_length(model.config, said)
    return int(said)
