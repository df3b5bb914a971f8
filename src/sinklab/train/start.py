"""`model.init_from`: weights of a checkpoint as the start of a run.

    a Llama        directory, .gguf file, or name on the hub: its sizes, tokenizer and weights, in float32
    a run of ours  directory: the same, of any variant, at its newest checkpoint

Tensors that the recipe's model has beyond those of the checkpoint are new. What is new starts where it changes nothing,
as far as there is such a place:

    sink logit              `model.attention.bias.start`, -12 unless said otherwise: 6e-6 of a row, and less
    key of k and kv biases  the same, a learned number that is added to its logit
    output and value gates  sigmoid(0) = 1/2 everywhere, and twice the output projection: exactly the same outputs
    value of v biases       zero
    gates behind norms      sigmoid(0) = 1/2 everywhere, and twice the weight of the norm: exactly the same outputs

A sink token, an operation that is not softmax, norms that were not there: they change the outputs at once.
"""

import hashlib
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sinklab.attention.biases import ASIDE
from sinklab.data.tokenizers import Tokenizer, load_tokenizer
from sinklab.errors import InputError
from sinklab.files import cache_folder
from sinklab.model.llama import from_llama
from sinklab.model.transformer import Transformer
from sinklab.schema import leaves
from sinklab.train.directory.run import RECIPE, load_run
from sinklab.train.recipe import Recipe, build_recipe

OPEN = (
    "layers",
    "width",
    "heads",
    "kv_heads",
    "ffn_width",
    "vocab_size",
    "context",
    "position",
    "norm",
    "mixer",
    "projection",
)
"""Keys of `model` that a recipe may leave to its checkpoint; a context of its own it may have."""

GATE_BEHIND_NORM = ".gate.up.weight"


@dataclass(frozen=True)
class Start:
    """A checkpoint to start from.

    Attributes:
        name: as the recipe has it.
        model: the model part of a recipe that it is a model of.
        weights: by our names, float32.
        tokenizer: what it reads text with.
    """

    name: str
    model: Mapping[str, Any]
    weights: Mapping[str, Tensor]
    tokenizer: Tokenizer

    def sha256(self) -> str:
        """Of names, shapes and values of the weights."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.weights.items()):
            digest.update(f"{name}{tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()


def load_start(name: str) -> Start:
    """The checkpoint that a recipe names.

    Raises:
        InputError: it is not there, cannot be loaded, or is no Llama that a recipe can name.
        SinklabError: none of a run's checkpoints is valid.
    """
    if (Path(name) / RECIPE).is_file():
        run = load_run(Path(name))
        weights = {key: tensor.detach().float() for key, tensor in run.model.state_dict().items()}
        return Start(name, run.recipe.model.model_dump(mode="json"), weights, load_tokenizer(str(run.tokenizer_path)))
    from sinklab.models.huggingface.loading import Loading, load_pretrained, without_bars
    from sinklab.models.native import own_transformer

    with without_bars() if Path(name).exists() else nullcontext():  # what is downloaded shows how far it is
        loaded = load_pretrained(name, Loading(dtype="float32", device="cpu"))
    own = own_transformer(loaded.model)
    if own is not None:
        model = own.config.model_dump(mode="json")
        weights = {key: tensor.detach() for key, tensor in own.state_dict().items()}
    elif loaded.model.config.model_type == "llama":
        model, weights = from_llama(loaded.model)
    else:
        raise InputError(
            f"model.init_from {name} is a {loaded.model.config.model_type}: give a Llama, or a run directory of sinklab"
        )
    return Start(name, model, weights, _tokenizer(name, loaded.tokenizer))


def _tokenizer(name: str, loaded: Any) -> Tokenizer:
    """The tokenizer of a directory as its files have it, else as transformers does (a .gguf file has none of them)."""
    if (Path(name) / "tokenizer.json").is_file():
        return load_tokenizer(name)
    key = hashlib.sha256(loaded.backend_tokenizer.to_str().encode()).hexdigest()[:20]
    folder = cache_folder() / "tokenizers" / key
    if not (folder / "tokenizer_config.json").is_file():
        eos, bos = loaded.eos_token_id, loaded.bos_token_id
        if eos is None:
            raise InputError(f"model.init_from {name}: its tokenizer has no end-of-text token")
        Tokenizer(loaded.backend_tokenizer, name, eos, eos if bos is None else bos).save(folder)
    return load_tokenizer(str(folder))


def started(recipe: Recipe) -> Recipe:
    """The recipe with what it leaves to its checkpoint: sizes, tokenizer, where a bias starts, and which weights it is.

    A recipe that starts from nothing, or that knows its weights already, is left as it is.

    Raises:
        InputError: the checkpoint cannot be used, or the recipe says otherwise than it in sizes or tokenizer.
    """
    name = recipe.model.init_from
    if name is None or recipe.model.init_sha256 is not None:
        return recipe
    start = _described(name)
    _check_sizes(recipe, start)
    given = recipe.model.model_fields_set
    model: dict[str, Any] = {key: start.model[key] for key in OPEN if key in start.model and key not in given}
    model["init_sha256"] = start.sha256
    bias, operation = recipe.model.attention.bias, recipe.model.attention.operation
    if bias.may_start and bias.starts_at is None and operation.has_logits:
        model["attention"] = {"bias": {"start": ASIDE}}
    overlay: dict[str, Any] = {"model": model}
    if "tokenizer" not in recipe.data.model_fields_set:
        overlay["data"] = {"tokenizer": start.tokenizer}
    return build_recipe(recipe.model_dump(mode="json", exclude_unset=True), overlay, origin=f"the recipe on {name}")


@dataclass(frozen=True)
class _Described:
    """What a recipe must know of a checkpoint: all but its weights."""

    name: str
    model: Mapping[str, Any]
    sha256: str
    tokenizer: str


@cache
def _described(name: str) -> _Described:
    """Read once by each process: the cells of an experiment begin with the same checkpoint."""
    start = load_start(name)
    return _Described(start.name, start.model, start.sha256(), start.tokenizer.source)


def _check_sizes(recipe: Recipe, start: _Described) -> None:
    """Refuse sizes that the recipe gives and the checkpoint does not have."""
    said = recipe.model.model_dump(mode="json", exclude_unset=True)
    theirs = leaves({key: start.model[key] for key in OPEN if key in start.model and key != "context"})
    ours = leaves({key: said[key] for key in OPEN if key in said})
    both = [key for key in ours if key in theirs and ours[key] != theirs[key]]
    if "position.kind" in both:  # other positions are an intervention
        both = [key for key in both if not key.startswith("position.")]
    if "kv_heads" in both and {ours["kv_heads"], theirs["kv_heads"]} == {None, theirs.get("heads")}:
        both.remove("kv_heads")
    if both:
        differing = ", ".join(f"model.{key} is {ours[key]} here and {theirs[key]} there" for key in both)
        raise InputError(
            f"the recipe's model is not that of model.init_from {start.name}: {differing}. Leave these keys out, and "
            "they are the checkpoint's"
        )


@torch.no_grad()
def begin(model: Transformer, start: Start, tokenizer_path: Path) -> list[str]:
    """Give a new model the weights of a checkpoint, and what it has beyond them a place where it changes nothing.

    Args:
        tokenizer_path: of the run's data.

    Returns:
        The names of the tensors that are new.

    Raises:
        InputError: other weights than the recipe knows, or none that it knows, another tokenizer, or tensors of other
            shapes.
    """
    if model.config.init_sha256 is None:
        raise InputError(
            f"model.init_from {start.name}: the recipe does not know its weights yet, which `sinklab train` fills in: "
            "give the recipe.yaml of a run that has begun"
        )
    if model.config.init_sha256 != start.sha256():
        raise InputError(
            f"the weights of model.init_from {start.name} are not those that the recipe knows (model.init_sha256): "
            "they have changed since"
        )
    vocabularies = [one.backend.get_vocab() for one in (start.tokenizer, load_tokenizer(str(tokenizer_path)))]
    if vocabularies[0] != vocabularies[1]:
        raise InputError(
            f"the data was made with another tokenizer than that of model.init_from {start.name}: leave out "
            "data.tokenizer, or prepare the text with it"
        )
    own = model.state_dict()
    if lost := sorted(set(start.weights) - set(own)):
        raise InputError(
            f"model.init_from {start.name} has {len(lost)} tensors that the recipe's model has not, such as {lost[0]}"
        )
    for name, tensor in start.weights.items():
        if own[name].shape != tensor.shape:
            raise InputError(
                f"{name} is {tuple(tensor.shape)} in model.init_from {start.name} and {tuple(own[name].shape)} in the "
                "recipe's model: it is not the same architecture"
            )
        own[name].copy_(tensor)
    new = sorted(set(own) - set(start.weights))
    for name in new:
        block, _, rest = name.partition(".attention.")
        if rest in ("output_gate.linear.weight", "value_gate.weight", "value_gate.bias"):
            own[name].zero_()
            if rest != "value_gate.bias":
                own[f"{block}.attention.out.weight"].mul_(2)
        elif rest == "core.bias.value":
            own[name].zero_()
        elif name.endswith(GATE_BEHIND_NORM):
            own[name].zero_()
            own[f"{name.removesuffix(GATE_BEHIND_NORM)}.weight"].mul_(2)
    return new
