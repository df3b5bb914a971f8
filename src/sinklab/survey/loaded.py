"""What is measured: a Hugging Face model or a run directory, loaded once and asked as often as wanted."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from sinklab.data.sources.corpora import documents
from sinklab.data.sources.textfiles import text_files
from sinklab.data.spelling import UNKNOWN, spelling, vocabulary_digest
from sinklab.device import pick_device
from sinklab.errors import InputError
from sinklab.measuring.conversations import Conversations
from sinklab.measuring.inputs import SHARES, default_prefix, pretrained_encode
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.surgery.study import changed_positions, measure_with_study
from sinklab.models.adapter import adapt
from sinklab.models.hooks import Progress
from sinklab.models.huggingface.loading import (
    Loading,
    Pretrained,
    check_config,
    check_revision,
    load_pretrained,
    load_pretrained_tokenizer,
)
from sinklab.models.huggingface.subfolder import name_in_results
from sinklab.models.native import NativeAdapter
from sinklab.survey.bits import with_bits_per_byte
from sinklab.survey.request import Request

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerBase

    from sinklab.data.config import DataConfig
    from sinklab.data.tokenizers import Tokenizer


class LoadedModel(Protocol):
    """A loaded model, which can be asked more than once."""

    def check(self, request: Request) -> None:
        """Refuse what this model cannot answer, before anything is measured.

        Raises:
            InputError: sequences beyond its context, or a change of learned positions that it does not have.
        """
        ...

    def measure(self, text: Path | None, request: Request, progress: Progress | None = None) -> Measurement:
        """Measure it.

        Args:
            text: a .txt or .jsonl file or a folder of them; needed for natural inputs only.
            progress: called with (sequences done, sequences in all).

        Raises:
            InputError: a text or option that cannot be used.
            SinklabError: the model cannot be measured.
        """
        ...


def load_model(
    name: str, loading: Loading, step: int | None = None, *, request: Request | None = None, text: Path | None = None
) -> LoadedModel:
    """Load a run directory (it has a recipe.yaml), a model directory or .gguf file, or a model of the hub by its name.

    Args:
        step: of the checkpoint, of a run directory; the newest unless given.
        request, text: what it will be asked; what its tokenizer rules out is refused before the weights are read.

    Raises:
        InputError: it cannot be loaded, or it could not be asked that.
    """
    check_revision(name, loading.revision)
    if is_run(name):
        return _LoadedRun(name, loading, step)
    check = None if request is None else partial(_check_bos, name, request, text)
    named = name_in_results(name, loading.subfolder)
    return LoadedPretrained(named, loading.revision, load_pretrained(name, loading, check))


def check_loadable(name: str, loading: Loading) -> None:
    """Refuse a model that is not there or has no config, before others are loaded.

    Raises:
        InputError: it could not be loaded.
    """
    if not is_run(name):
        check_config(name, loading)


def check_readable(name: str, loading: Loading, text: Path | None, request: Request) -> None:
    """Refuse a model whose chat template fails on the text, before others are measured; its weights are not loaded.

    Raises:
        InputError: it has no tokenizer, or that makes too few sequences of the text.
    """
    if is_run(name) or request.options.inputs != "natural":
        return
    tokenizer = load_pretrained_tokenizer(name, loading)
    if tokenizer.chat_template:
        try:
            _as_read(tokenizer, request.needed(text), request)
        except InputError as error:
            raise InputError(f"{name}: {error}") from error


def _check_bos(name: str, request: Request, text: Path | None, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Refuse to leave out a BOS that no sequence has: neither the tokenizer nor its chat template writes one."""
    if "no_bos" not in request.study.ablate or default_prefix(tokenizer):
        return
    conversations = Conversations(tokenizer, keep_bos=not request.drawn_text)
    if text is not None:
        next(documents(str(text), render=conversations.render))
    if not conversations.bos:
        raise _no_bos_to_leave_out(f"the tokenizer of {name} puts no BOS first")


def _no_bos_to_leave_out(why: str) -> InputError:
    return InputError(
        f"--ablate no_bos: {why}, so there is none to leave out; --ablate mask_first:1 hides the first token, "
        "whatever it is"
    )


def is_run(name: str) -> bool:
    """Whether it is a run directory."""
    return (Path(name) / "recipe.yaml").is_file()


@dataclass(frozen=True)
class ReadTokens:
    """What a model is measured on.

    Attributes:
        tokens_NT: the sequences.
        sizes_NT: bytes of text that each token stands for (`inputs.sizes_of`); None where they are of no text.
        bos_tokens: special tokens that each sequence begins with.
        conversations: how chats were written.
    """

    tokens_NT: Tensor
    sizes_NT: Tensor | None
    bos_tokens: int
    conversations: Conversations


class LoadedPretrained:
    """A Hugging Face model with its tokenizer.

    Args:
        name: as the user calls it.
        revision: of the hub, that was asked for.
    """

    def __init__(self, name: str, revision: str | None, loaded: Pretrained) -> None:
        self._name, self._revision, self._loaded = name, revision, loaded
        self._model, self._tokenizer = loaded.model, loaded.tokenizer

    def check(self, request: Request) -> None:
        from sinklab.models.huggingface.anatomy import check_length

        check_length(self._model.config, request.length)
        with changed_positions(self._model, request.study, request.length):
            pass

    def tokens(self, text: Path | None, request: Request) -> ReadTokens:
        """The sequences that are asked for.

        Raises:
            InputError: sequences beyond its context, or a text that cannot be used.
        """
        from sinklab.models.huggingface.anatomy import check_length, vocabulary_size

        check_length(self._model.config, request.length)
        drawn_NT = request.drawn(min(len(self._tokenizer), vocabulary_size(self._model)))
        if drawn_NT is not None:
            return ReadTokens(drawn_NT, None, 0, Conversations(self._tokenizer))
        return _as_read(self._tokenizer, request.needed(text), request)

    def measure(self, text: Path | None, request: Request, progress: Progress | None = None) -> Measurement:
        read = self.tokens(text, request)
        measurement = measure_with_study(
            adapt(self._model),
            read.tokens_NT,
            request.options_for(self._name, bos=read.bos_tokens > 0),
            request.study,
            bos_tokens=read.bos_tokens,
            progress=progress,
        )
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        found = {
            "revision": self._revision,
            "commit": self._loaded.commit,
            "vocabulary": _digest(backend) if backend else vocabulary_digest(self._tokenizer.get_vocab()),
        }
        measurement = with_bits_per_byte(measurement.model_copy(update=found), read.sizes_NT, first_target=2)
        return _annotated(measurement, request, text, read.conversations, self._loaded.notes)


def _as_read(tokenizer: "PreTrainedTokenizerBase", text: Path, request: Request) -> ReadTokens:
    """Text as a Hugging Face model reads it."""
    special = default_prefix(tokenizer)
    conversations = Conversations(tokenizer, keep_bos=not (special or request.no_bos or request.drawn_text))
    prefix = [] if request.no_bos else special
    encode = spelling(
        pretrained_encode(tokenizer),
        tokenizer.convert_ids_to_tokens,  # type: ignore[arg-type]
        set(tokenizer.added_tokens_decoder),
    )
    tokens_NT, sizes_NT = request.text_tokens(
        text, encode, length=request.length, prefix=prefix, render=conversations.render
    )
    return ReadTokens(tokens_NT, sizes_NT, len(prefix) or int(conversations.bos), conversations)


class _LoadedRun:
    """A run directory of ours, at its newest checkpoint or that of a step."""

    def __init__(self, name: str, loading: Loading, step: int | None) -> None:
        from sinklab.data.tokenizers import load_tokenizer
        from sinklab.models.huggingface.loading import pick_dtype
        from sinklab.train.directory.run import load_run

        where, kind = pick_device(loading.device), pick_dtype(loading.dtype)
        self._name, run = name, load_run(Path(name), step)
        self._recipe, self._step = run.recipe, run.step
        self._tokenizer = load_tokenizer(str(run.tokenizer_path))
        self._model = run.model.to(where, kind if isinstance(kind, torch.dtype) else None)

    def check(self, request: Request) -> None:
        self._check_length(request)
        with changed_positions(self._model, request.study, request.length):
            pass

    def _check_length(self, request: Request) -> None:
        context = self._recipe.model.context
        if request.length > context:
            raise InputError(
                f"--length {request.length} is beyond the context of {self._name}: give at most --length {context}"
            )

    def measure(self, text: Path | None, request: Request, progress: Progress | None = None) -> Measurement:
        self._check_length(request)
        tokens_NT, bos, conversations = request.drawn(self._tokenizer.vocab_size), False, Conversations()
        sizes_NT = None
        if tokens_NT is None:
            text = request.needed(text)
            bos = self._recipe.data.bos and not request.no_bos
            if "no_bos" in request.study.ablate and not bos:
                raise _no_bos_to_leave_out(f"{self._name} was trained without BOS (data.bos: false)")
            data = self._recipe.data.model_copy(update={"bos": bos})
            tokens_NT, sizes_NT = _as_trained(text, request, data, self._tokenizer, conversations)
        measurement = measure_with_study(
            NativeAdapter(self._model),
            tokens_NT,
            request.options_for(self._name, bos),
            request.study,
            bos_tokens=int(bos),
            progress=progress,
        )
        at_step = measurement.of_step(self._step, self._recipe.train.steps)
        at_step = at_step.model_copy(update={"vocabulary": _digest(self._tokenizer.backend)})
        at_step = with_bits_per_byte(at_step, sizes_NT, self._model.config.first_target)
        return _annotated(at_step, request, text, conversations)


def _digest(backend: "Backend") -> str:
    """Of the vocabulary without what was added to it: a chat model has its base model's."""
    return vocabulary_digest(backend.get_vocab(with_added_tokens=False))


def _as_trained(
    text: Path, request: Request, data: "DataConfig", tokenizer: "Tokenizer", conversations: Conversations
) -> tuple[Tensor, Tensor | None]:
    """Text as the run saw its own: its tokenizer, and its loader for BOS, fixed and random tokens.

    With the bytes that each token stands for, 0 for BOS; UNKNOWN for a token that stands in the place of the text's.
    """
    from sinklab.data.loader import Loader

    added = set(tokenizer.backend.get_added_tokens_decoder())
    bare_NS, sizes_NS = request.text_tokens(
        text,
        spelling(lambda document: tokenizer.encode_batch([document])[0], tokenizer.token, added),
        length=request.length - int(data.bos),
        render=conversations.render,
    )
    loader = Loader(
        bare_NS.flatten().numpy(),
        context=request.length - 1,
        batch_size=len(bare_NS),
        seed=request.seed,
        config=data,
        vocab_size=tokenizer.vocab_size,
        bos_id=tokenizer.bos_id,
        shuffle=False,
    )
    tokens_NT = loader.batch(0)
    if sizes_NS is None:
        return tokens_NT, None
    sizes_NS = sizes_NS.masked_fill(tokens_NT[:, int(data.bos) :] != bare_NS, UNKNOWN)
    return tokens_NT, F.pad(sizes_NS, (int(data.bos), 0))


def _annotated(
    measurement: Measurement,
    request: Request,
    text: Path | None,
    conversations: Conversations,
    loaded: Sequence[str] = (),
) -> Measurement:
    """The measurement with what its reader must know about how the model was loaded, and about the text."""
    notes = [*loaded, *conversations.notes()]
    folder = text if request.options.inputs == "natural" and text is not None and text.is_dir() else None
    if folder is not None and len(files := text_files(folder)) > 1:
        notes.append(f"the {len(files)} files of {text} gave their sequences in turn, one each time")
    if measurement.sequences < request.sequences:
        shared = f"the pieces of the text are shared out over {SHARES} draws"
        why = shared if request.drawn_text else "the text has no more that are long enough"
        notes.append(f"{measurement.sequences} of {request.sequences} sequences: {why}")
    return measurement.model_copy(update={"notes": [*measurement.notes, *notes]}) if notes else measurement
