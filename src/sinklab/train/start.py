"""`model.init_from`: initialise a run with the weights of a checkpoint.

    Llama        directory, .gguf file or name on the Hub
    sinklab run  run directory (newest valid checkpoint) or exported run, of any variant

The run takes sizes, tokenizer and weights (as float32) from the checkpoint. Tensors that the checkpoint lacks are
initialised to preserve the outputs where that is possible:

    sink logit              `model.attention.bias.start`, default -12: attention weight 6e-6 in rows of log-sum-exp 0
    key of k and kv biases  a learned offset, initially `start` as above, is added to its logit
    output and value gates  sigmoid(0) = 1/2 everywhere, and the output projection is doubled: identical outputs. With a
                            value gate, the value of a v or kv bias and the learned remainder value of stick-breaking
                            are halved, because they are not gated. If head_norm follows a value gate, the projection
                            is not doubled, because the norm removes the factor 1/2
    value of v, kv biases   zero
    gates after norms       sigmoid(0) = 1/2 everywhere, and the weight of the norm is doubled: identical outputs
    projected embeddings    both projections are the identity: identical outputs

Other changes alter the initial outputs, such as a sink token, another operation, a V-scale gate, additional norms, or a
value gate with a K bias of fixed value.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sinklab.attention.biases import NEGLIGIBLE_LOGIT
from sinklab.data.tokenizers import Tokenizer, load_tokenizer
from sinklab.errors import InputError
from sinklab.files import cache_folder
from sinklab.model.llama import from_llama
from sinklab.model.transformer import Transformer
from sinklab.schema import leaves
from sinklab.train.recipe import Recipe, build_recipe
from sinklab.train.run import RECIPE, load_run

CHECKPOINT_KEYS = ("layers", "width", "heads", "kv_heads", "ffn_width", "vocab_size", "context")
CHECKPOINT_KEYS += ("position", "norm", "mixer", "pattern", "projection")
"""Keys of `model` that default to the checkpoint's values. Of these, only `MAY_DIFFER` and `position.kind` may differ.

If a recipe sets only some keys of `norm`, `position`, `mixer` or `projection`, the others also have these defaults.
"""

MAY_DIFFER = ("context", "pattern", "norm.alpha", "norm.qk_norm", "norm.head_norm", "norm.gate_rank")

GATE_BEHIND_NORM = ".gate.up.weight"


@dataclass(frozen=True)
class Start:
    """Initial checkpoint of a run.

    Attributes:
        name: value of `model.init_from`.
        model: model section of the recipe of the checkpoint; for a Llama, only sizes, position and norm.
        weights: float32 weights by parameter name in sinklab.
        tokenizer: tokenizer of the checkpoint.
    """

    name: str
    model: Mapping[str, Any]
    weights: Mapping[str, Tensor]
    tokenizer: Tokenizer

    def sha256(self) -> str:
        """Return the SHA-256 of the names, shapes and values of the weights, in hexadecimal."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.weights.items()):
            digest.update(f"{name}{tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()


def load_start(name: str) -> Start:
    """Load the initial checkpoint of a run.

    Args:
        name: value of `model.init_from` (see the module docstring).

    Raises:
        InputError: if the checkpoint or its tokenizer cannot be loaded, or if the model is neither a run nor a Llama
            whose architecture a recipe supports.
        SinklabError: if none of a run's checkpoints is valid, or its env.json is damaged.
    """
    if (Path(name) / RECIPE).is_file():
        run = load_run(Path(name))
        weights = {key: tensor.detach().float() for key, tensor in run.model.state_dict().items()}
        return Start(name, run.recipe.model.model_dump(mode="json"), weights, load_tokenizer(str(run.tokenizer_path)))
    from sinklab.models.adapter import own_transformer
    from sinklab.models.families import family_of
    from sinklab.models.huggingface.loading import Loading, load_pretrained

    loaded = load_pretrained(name, Loading(dtype="float32", device="cpu"))
    own = own_transformer(loaded.model)
    if own is not None:
        model = own.config.model_dump(mode="json")
        weights = {key: tensor.detach() for key, tensor in own.state_dict().items()}
    elif family_of(loaded.model).convertible:
        model, weights = from_llama(loaded.model)
    else:
        raise InputError(
            f"model.init_from {name} is a {loaded.model.config.model_type} model: use a Llama, or a sinklab run"
        )
    return Start(name, model, weights, _tokenizer(name, loaded.tokenizer))


def _tokenizer(name: str, loaded: Any) -> Tokenizer:
    """Load the tokenizer.json of directory `name`, else convert the tokenizer that transformers loaded (.gguf, Hub)."""
    if (Path(name) / "tokenizer.json").is_file():
        return load_tokenizer(name)
    key = hashlib.sha256(loaded.backend_tokenizer.to_str().encode()).hexdigest()[:20]
    folder = cache_folder() / "tokenizers" / key
    if not (folder / "tokenizer_config.json").is_file():
        eos, bos = loaded.eos_token_id, loaded.bos_token_id
        if eos is None:
            raise InputError(f"model.init_from {name}: the tokenizer has no eos_token, which must end every document")
        Tokenizer(loaded.backend_tokenizer, name, eos, eos if bos is None else bos).save(folder)
    return load_tokenizer(str(folder))


def with_checkpoint_values(recipe: Recipe) -> Recipe:
    """Return the recipe with unset values filled in from its initial checkpoint.

    These are the keys in `CHECKPOINT_KEYS`, the hash of the weights and the tokenizer. If a bias has a key `start` that
    is not set, it is set to -12, unless the operation has no logits, or the checkpoint has a k or kv bias without
    `start`. A recipe without an initial checkpoint, or with `model.init_sha256`, is returned unchanged.

    Raises:
        InputError: if the checkpoint is unusable, or the recipe differs from it in keys that must be equal.
        SinklabError: as `load_start`.
    """
    name = recipe.model.init_from
    if name is None or recipe.model.init_sha256 is not None:
        return recipe
    start, sha256 = _without_weights(name)
    _check_sizes(recipe, start)
    has_pattern = "pattern" in recipe.model.model_fields_set
    theirs = {
        key: start.model[key]
        for key in CHECKPOINT_KEYS
        if key in start.model and not (key == "pattern" and has_pattern)
    }
    defaults = {"model": theirs, "data": {"tokenizer": start.tokenizer.source}}
    found: dict[str, Any] = {"init_sha256": sha256}
    operation, own = recipe.model.attention.operation, recipe.model.pattern
    for part, bias in (("attention", recipe.model.attention.bias), ("pattern", None if own is None else own.bias)):
        before = (start.model.get(part) or {}).get("bias") or (start.model.get("attention") or {}).get("bias") or {}
        has_key = before.get("kind") in ("k", "kv") and before["start"] is None  # an offset would change its logit
        if getattr(bias, "start", NEGLIGIBLE_LOGIT) is None and operation.has_logits and not has_key:
            found[part] = {"bias": {"start": NEGLIGIBLE_LOGIT}}
    given = recipe.model_dump(mode="json", exclude_unset=True)
    return build_recipe(defaults, given, {"model": found}, origin=f"the recipe on {name}")


@cache
def _without_weights(name: str) -> tuple[Start, str]:
    """Return a checkpoint without weights, and the SHA-256 of its weights; cached, because many runs may share it."""
    start = load_start(name)
    return replace(start, weights={}), start.sha256()


def _check_sizes(recipe: Recipe, start: Start) -> None:
    """Check that the keys in `CHECKPOINT_KEYS` that the recipe sets have the checkpoint's values.

    Keys in `MAY_DIFFER` may. If `position.kind` differs, all keys of `position` may. `kv_heads: null` means `heads`.

    Raises:
        InputError: if another key differs; the message names all such keys, with both values.
    """
    given = recipe.model.model_dump(mode="json", exclude_unset=True)
    theirs = leaves({key: start.model[key] for key in CHECKPOINT_KEYS if key in start.model})
    ours = leaves({key: given[key] for key in CHECKPOINT_KEYS if key in given})
    differ = [key for key in ours if key in theirs and ours[key] != theirs[key] and not key.startswith(MAY_DIFFER)]
    if "position.kind" in differ:  # another positional encoding is an intervention
        differ = [key for key in differ if not key.startswith("position.")]
    if "kv_heads" in differ and {ours["kv_heads"], theirs["kv_heads"]} == {None, theirs.get("heads")}:
        differ.remove("kv_heads")
    if differ:
        values = ", ".join(f"model.{key} is {ours[key]} instead of {theirs[key]}" for key in differ)
        raise InputError(
            f"the recipe's model differs from the checkpoint model.init_from {start.name}: {values}. Remove these keys "
            "from the recipe to use the values of the checkpoint"
        )


@torch.no_grad()
def load_initial_weights(model: Transformer, start: Start, tokenizer_path: Path) -> list[str]:
    """Load a checkpoint's weights into a new model in place, and initialise new tensors as in the module docstring.

    Args:
        tokenizer_path: tokenizer.json of the run's data.

    Returns:
        The names of the new tensors.

    Raises:
        InputError: if the recipe lacks `model.init_sha256`, the hash of the weights or the tokenizer differs, or a
            tensor of the checkpoint is missing from the model or has another shape.
    """
    if model.config.init_sha256 is None:
        raise InputError(
            f"the recipe has model.init_from {start.name} but no model.init_sha256, the hash of the weights: set it "
            "with `sinklab.train.start.with_checkpoint_values`, as `sinklab train` does"
        )
    if model.config.init_sha256 != start.sha256():
        raise InputError(
            f"the weights of model.init_from {start.name} have changed: their hash differs from the "
            "recipe's model.init_sha256. Restore the weights, or remove the key to start a new run"
        )
    vocabularies = [one.backend.get_vocab() for one in (start.tokenizer, load_tokenizer(str(tokenizer_path)))]
    if vocabularies[0] != vocabularies[1]:
        raise InputError(
            f"the data was tokenized with another tokenizer than that of model.init_from {start.name}: remove "
            "data.tokenizer, or prepare the text with the checkpoint's tokenizer"
        )
    own = model.state_dict()
    if lost := sorted(set(start.weights) - set(own)):
        raise InputError(
            f"model.init_from {start.name} has {len(lost)} tensors that the recipe's model lacks, such as {lost[0]}: "
            "add these components of the checkpoint to the recipe"
        )
    for name, tensor in start.weights.items():
        if own[name].shape != tensor.shape:
            raise InputError(
                f"{name} is {tuple(tensor.shape)} in model.init_from {start.name} and {tuple(own[name].shape)} in the "
                "recipe's model: the architectures differ"
            )
        own[name].copy_(tensor)
    new = sorted(set(own) - set(start.weights))
    for name in new:
        block, _, rest = name.partition(".attention.")
        if rest in ("output_gate.linear.weight", "value_gate.weight", "value_gate.bias"):
            own[name].zero_()
            if rest == "output_gate.linear.weight" or (rest == "value_gate.weight" and not model.config.norm.head_norm):
                own[f"{block}.attention.out.weight"].mul_(2)
            if rest == "value_gate.weight":
                for value in ("bias.value", "learned.value"):  # the gate does not scale them
                    if (key := f"{block}.attention.core.{value}") in own:
                        own[key].div_(2)
        elif rest == "core.bias.value":
            own[name].zero_()
        elif name in ("embedding_map.weight", "head_map.weight"):
            own[name].copy_(torch.eye(len(own[name])))
        elif name.endswith(GATE_BEHIND_NORM):
            own[name].zero_()
            own[f"{name.removesuffix(GATE_BEHIND_NORM)}.weight"].mul_(2)
    return new
