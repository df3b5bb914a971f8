"""Load a model: a run directory, a Hugging Face model directory or .gguf file, or a model on the hub by its name."""

import hashlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn

from sinklab.data.tokenizers import Tokenizer
from sinklab.device import pick_device
from sinklab.errors import InputError
from sinklab.files import sha256_of
from sinklab.measuring.inputs import DocumentEncoder, Encode, default_prefix, pretrained_encode, spelling
from sinklab.measuring.measurement import FED, Fed
from sinklab.models.adapter import Adapter, adapt, own_transformer
from sinklab.models.families import text_config
from sinklab.models.huggingface.loading import (
    AS_IT_IS,
    TOKENIZER_FILES,
    Loading,
    Pretrained,
    check_name,
    check_revision,
    given_tokenizer,
    load_model_tokenizer,
    load_pretrained,
    name_in_results,
    pick_dtype,
)
from sinklab.models.huggingface.tokenizer_files import Conversations, TokenizerKind

WEIGHTS = ("*.safetensors", "*.gguf", "config.json", "adapter_config.json", "recipe.yaml", "*.py")
TOKENIZER = (*TOKENIZER_FILES, "special_tokens_map.json", "added_tokens.json")
MODEL_FILES = (*WEIGHTS, *TOKENIZER, "chat_template*", "additional_chat_templates/*")


@dataclass(frozen=True)
class Model:
    """A model with its tokenizer.

    Attributes:
        name: name or path passed to `open_model`; for a model on the hub, followed by its subfolder, if any.
        module: sinklab's Transformer, or a Hugging Face model.
        loading: dtype, device and other options with which the model was loaded.
        tokenizer: sinklab's tokenizer, or a Hugging Face tokenizer; None for a model in memory that is given token ids.
        encode: function from text to token ids, without special tokens.
        special: ids of the special tokens that are prepended to plain text by default.
        bos_ids: ids of BOS: that of the tokenizer and, if it differs, that of the config; empty if the model has none.
        vocabulary: number of token ids: that of the tokenizer, or of the model's embedding if it is smaller.
        arrange: function (tokens (N, T), number of special tokens that they begin with, seed) -> input sequences. For
            a run, sequences are arranged as in training, with the recipe's fixed and random tokens; seed None is the
            recipe's seed. For Hugging Face models they are returned unchanged; InputError if a token is not in the
            model's embedding.
        commit: commit of the model on the hub; None for a local model, or if the commit is unknown.
        step: training step of a run, also if it was loaded as a Hugging Face model; None for other models.
        planned_steps: total number of training steps of a run; None for Hugging Face models.
        notes: notes from loading the model, shown with results.
        held_out: function that returns the first N token ids of a run's validation text, or all if there are fewer. It
            prepares the data again if necessary, and raises the errors of `recipe_and_data`. None for Hugging Face
            models.
    """

    name: str
    loading: Loading
    module: nn.Module
    tokenizer: Any
    encode: Encode
    special: tuple[int, ...]
    vocabulary: int
    arrange: Callable[[Tensor, int, int | None], Tensor]
    bos_ids: tuple[int, ...] = ()
    commit: str | None = None
    step: int | None = None
    planned_steps: int | None = None
    notes: tuple[str, ...] = ()
    held_out: Callable[[int], list[int]] | None = None

    @cached_property
    def adapter(self) -> Adapter:
        """Adapter, which gives access to the blocks and attention calls of `module`."""
        return adapt(cast("Any", self.module))

    @cached_property
    def files(self) -> str | None:
        """Hash of the model's files (`model_files`); None for a model on the hub.

        Raises InputError if a file cannot be read.
        """
        return model_files(Path(self.name))

    def encoder(self, *, bare: bool = False, forced: bool = False, sizes: bool = False) -> DocumentEncoder:
        """Return the encoder of documents for this model.

        Args:
            bare, forced: see `DocumentEncoder`.
            sizes: whether the ids are `Spelled`, with the number of UTF-8 bytes of each token.
        """
        encode = self.encode
        if sizes:
            own = isinstance(self.tokenizer, Tokenizer)
            token = self.tokenizer.token if own else self.tokenizer.convert_ids_to_tokens
            added = self.tokenizer.backend.get_added_tokens_decoder() if own else self.tokenizer.added_tokens_decoder
            encode = spelling(encode, token, set(added))
        return DocumentEncoder(encode, self.special, self.bos_ids, forced, bare)

    def decode(self, tokens: list[int]) -> str:
        """Convert token ids to text, including special tokens."""
        own = isinstance(self.tokenizer, Tokenizer)
        return (
            self.tokenizer.backend.decode(tokens, skip_special_tokens=False) if own else self.tokenizer.decode(tokens)
        )

    def token_texts(self, tokens: list[int]) -> list[str]:
        """Return the text of each token; its string in the vocabulary if the text is blank or not valid by itself."""
        own = isinstance(self.tokenizer, Tokenizer)
        string = self.tokenizer.backend.id_to_token if own else self.tokenizer.convert_ids_to_tokens
        texts = [self.decode([token]) for token in tokens]
        return [
            text if text.strip() and "\ufffd" not in text else str(string(token))
            for token, text in zip(tokens, texts, strict=True)
        ]

    def fed(self, tokens_NT: Tensor) -> Fed:
        """Return the first tokens of the first of these sequences."""
        ids = tokens_NT[0, :FED].tolist()
        return Fed(ids=ids, tokens=self.token_texts(ids) if self.tokenizer else None)

    @property
    def vocabulary_hash(self) -> str | None:
        """Hash of the tokens and ids, without added tokens: a chat model and its base model have the same hash.

        It is the start of a SHA-256, 16 hexadecimal digits. Added tokens are included for tokenizers without a
        `tokenizers` backend; without a tokenizer, the hash is None.
        """
        if self.tokenizer is None:
            return None
        own = isinstance(self.tokenizer, Tokenizer)
        backend = self.tokenizer.backend if own else getattr(self.tokenizer, "backend_tokenizer", None)
        vocabulary = backend.get_vocab(with_added_tokens=False) if backend else self.tokenizer.get_vocab()
        return hashlib.sha256(json.dumps(sorted(vocabulary.items())).encode()).hexdigest()[:16]

    def conversations(self) -> Conversations:
        """Return a renderer that applies the model's chat template, or writes lines `role: content` if it has none."""
        return Conversations() if isinstance(self.tokenizer, Tokenizer) else Conversations(self.tokenizer)


def open_model(
    name: str,
    loading: Loading = AS_IT_IS,
    *,
    step: int | None = None,
    as_transformers: bool = False,
    length: int = 0,
    for_text: bool = True,
) -> Model:
    """Load a run directory (which contains a recipe.yaml), a model directory or .gguf file, or a model on the hub.

    Args:
        loading: dtype, device and other options.
        step: step of a run's checkpoint; default: the newest valid one. Ignored for other models and with
            `as_transformers`.
        as_transformers: load the newest valid checkpoint of a run as the Hugging Face model that `sinklab export`
            writes. Ignored for other models.
        length: length of the sequences that will be read, compared with the context of a Hugging Face model before its
            weights are loaded.
        for_text: False if only token ids are read, so that the tokenizer of a Hugging Face model may be missing.

    Raises:
        InputError: see `check_name`, `check_revision`, `load_pretrained`, `load_run` and `export_run`, for example if
            the model does not exist or cannot be loaded.
        SinklabError: see `load_run` and `export_run`, for example if no checkpoint of a run is valid.
    """
    check_name(name)
    check_revision(name, loading.revision)
    if not is_run(name):
        loaded = load_pretrained(name, loading, length, for_text)
        return _of_pretrained(name_in_results(name, loading.subfolder), loaded, loading)
    if not as_transformers:
        return _run(name, loading, step)
    from sinklab.export.directory import export_run

    with tempfile.TemporaryDirectory() as folder:
        exported = export_run(Path(name), Path(folder) / "model")
        loaded = load_pretrained(str(exported.directory), loading, length)
        return replace(_of_pretrained(name, loaded, loading), step=exported.step)


def is_run(name: str) -> bool:
    """Return whether `name` is a run directory: a directory that contains a recipe.yaml."""
    return (Path(name) / "recipe.yaml").is_file()


def model_files(place: Path) -> str | None:
    """Return a SHA-256 of the names, sizes and contents of a local model's files; None if the path does not exist.

    Included are weights, config.json, recipe.yaml, Python code, tokenizer files and chat templates, also in subfolders.
    If `place` is a file, only that file is hashed. Links without a target are left out. The hash does not depend on
    modification times, so a copy has the same hash. Hashing takes about a second per GB.

    Raises:
        InputError: if a file cannot be read.
    """
    if not place.exists():
        return None
    found = {path for pattern in MODEL_FILES for path in place.rglob(pattern)} if place.is_dir() else {place}
    files = sorted(path for path in found if path.is_file())
    try:
        state = [[str(path.relative_to(place)), path.stat().st_size, sha256_of(path)] for path in files]
    except OSError as error:
        raise InputError(f"cannot read {error.filename or place}: {error.strerror}") from error
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()


def model_in_memory(model: Any, tokenizer: Any = None, for_text: bool = True) -> Model:
    """Return the `Model` of a Hugging Face model in memory, which is not changed.

    Args:
        tokenizer: Hugging Face tokenizer, or its path or name; default: that of the directory or hub name from which
            the model was loaded.
        for_text: False if only token ids are read, so that the tokenizer is optional.

    Raises:
        InputError: if it is another model, if `tokenizer` is not a Hugging Face tokenizer, or if it is None and the
            model's tokenizer cannot be loaded.
    """
    adapt(model)
    if own_transformer(model) is not None:
        raise InputError("a sinklab transformer in memory has no tokenizer: pass its run directory, or token ids")
    name, notes = model.config.name_or_path, []
    if tokenizer is None:
        try:
            tokenizer, notes = load_model_tokenizer(name)
        except InputError as error:
            if for_text:
                why = str(error) if name else "the model in memory was not loaded from a directory"
                raise InputError(f"no tokenizer for the text: {why}; pass `tokenizer`, or token ids") from error
    else:
        tokenizer, notes = given_tokenizer(tokenizer)
    loaded = Pretrained(model, tokenizer, notes)
    return _of_pretrained(name or type(model).__name__, loaded, AS_IT_IS)


def _of_pretrained(name: str, loaded: Pretrained, loading: Loading) -> Model:
    """Return the `Model` of a loaded Hugging Face model; `name` is its name in results."""
    from sinklab.models.families import vocabulary_size

    rows, declared = vocabulary_size(loaded.model), getattr(text_config(loaded.model.config), "bos_token_id", None)
    known = (getattr(loaded.tokenizer, "bos_token_id", None), declared)

    def arrange(tokens_NT: Tensor, _: int, seed: int | None) -> Tensor:
        if int(tokens_NT.max()) >= rows:
            token = int(tokens_NT.max())
            written = f"{loaded.tokenizer.convert_ids_to_tokens(token)!r}, " if loaded.tokenizer else ""
            raise InputError(
                f"the text contains {written}token {token} of the tokenizer "
                f"of {name}, and the model has only {rows} tokens: remove it from the text or the chat template"
            )
        return tokens_NT

    return Model(
        name=name,
        loading=loading,
        module=loaded.model,
        tokenizer=loaded.tokenizer,
        encode=pretrained_encode(loaded.tokenizer),
        special=tuple(default_prefix(loaded.tokenizer)) if loaded.tokenizer else (),
        vocabulary=min(len(loaded.tokenizer), rows) if loaded.tokenizer else rows,
        arrange=arrange,
        bos_ids=tuple(dict.fromkeys(one for one in known if isinstance(one, int) and 0 <= one < rows)),
        commit=loaded.commit,
        notes=tuple(loaded.notes),
    )


def _run(name: str, loading: Loading, step: int | None) -> Model:
    """Load a run. Its `arrange` uses the data loader of training, which inserts BOS, fixed and random tokens."""
    from sinklab.data.loader import Loader, TokenFile
    from sinklab.data.tokenizers import load_tokenizer
    from sinklab.train.run import load_run, recipe_and_data

    if loading.load_in is not None:
        raise InputError(f"--load-in {loading.load_in} is for models of the hub, not for runs: leave it out")
    if loading.tokenizer not in get_args(TokenizerKind):
        raise InputError("--tokenizer PATH is for models of the hub, and a run has its own")
    where, kind = pick_device(loading.device), pick_dtype(loading.dtype)
    run = load_run(Path(name), step)
    tokenizer, data = load_tokenizer(str(run.tokenizer_path)), run.recipe.data

    def arrange(tokens_NT: Tensor, bos: int, seed: int | None) -> Tensor:
        bare_NS = tokens_NT[:, bos:]  # the loader inserts BOS
        loader = Loader(
            bare_NS.flatten().numpy(),
            context=tokens_NT.shape[1] - 1,
            batch_size=len(bare_NS),
            seed=run.recipe.seed if seed is None else seed,
            config=data.model_copy(update={"bos": bos > 0}),
            vocab_size=tokenizer.vocab_size,
            bos_id=tokenizer.bos_id,
            shuffle=False,
        )
        return loader.batch(0)

    @cache
    def validated_on() -> TokenFile:  # opening verifies the file, which is slow for large data
        return recipe_and_data(Path(name))[1].valid

    return Model(
        name=name,
        loading=loading,
        module=run.model.to(where, kind if isinstance(kind, torch.dtype) else None),
        tokenizer=tokenizer,
        encode=lambda document: tokenizer.encode_batch([document])[0],
        special=(tokenizer.bos_id,) if data.bos else (),
        vocabulary=tokenizer.vocab_size,
        arrange=arrange,
        bos_ids=(tokenizer.bos_id,),
        step=run.step,
        planned_steps=run.recipe.train.steps,
        held_out=lambda tokens: validated_on()[:tokens].tolist(),
    )
