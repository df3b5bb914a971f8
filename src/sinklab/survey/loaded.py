"""A model that is loaded once and measured as often as wanted: which sequences it reads, and what is noted of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch.nn.functional as F
from torch import Tensor

from sinklab.data.sources.corpora import documents
from sinklab.data.sources.textfiles import text_files
from sinklab.data.spelling import UNKNOWN
from sinklab.errors import InputError
from sinklab.measuring.inputs import SHARES, default_prefix, pretrained_encode
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.surgery.study import changed_positions, measure_with_study
from sinklab.models.hooks import Progress
from sinklab.models.huggingface.loading import Loading, check_config, load_pretrained_tokenizer, name_in_results
from sinklab.models.huggingface.rendering import Conversations
from sinklab.opening import Model, is_run, open_model
from sinklab.survey.bits import with_bits_per_byte
from sinklab.survey.request import Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_model(
    name: str, loading: Loading, step: int | None = None, *, request: Request | None = None, text: Path | None = None
) -> Model:
    """Open a model to be measured.

    Args:
        step: of the checkpoint, of a run directory; the newest unless given.
        request, text: what it will be asked; what its tokenizer rules out is refused before the weights are read.

    Raises:
        InputError: it cannot be loaded, or it could not be asked that.
    """
    check = None if request is None else partial(_check_bos, name, request, text)
    return open_model(name, loading, step=step, check=check)


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
        special = default_prefix(tokenizer)
        conversations = Conversations(tokenizer, keep_bos=not (special or request.no_bos or request.drawn_text))
        prefix, encode = () if request.no_bos else special, pretrained_encode(tokenizer)
        try:
            request.text_tokens(
                request.needed(text), encode, length=request.length, prefix=prefix, render=conversations.render
            )
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


def check_request(model: Model, request: Request) -> None:
    """Refuse what this model cannot answer, before anything is measured.

    Raises:
        InputError: sequences beyond its context, or a change of learned positions that it does not have.
    """
    model.adapter.check_length(request.length)
    with changed_positions(cast("Any", model.adapter.module), request.study, request.length):
        pass


def read_tokens(model: Model, text: Path | None, request: Request) -> ReadTokens:
    """The sequences that are asked for.

    Raises:
        InputError: sequences beyond its context, a text that cannot be used, or no BOS that could be left out.
    """
    model.adapter.check_length(request.length)
    drawn_NT = request.drawn(model.vocabulary)
    if drawn_NT is not None:
        return ReadTokens(drawn_NT, None, 0, model.conversations(keep_bos=False))
    prefix = () if request.no_bos else model.special
    if "no_bos" in request.study.ablate and not prefix and model.planned_steps is not None:
        raise _no_bos_to_leave_out(f"{model.name} was trained without BOS (data.bos: false)")
    conversations = model.conversations(keep_bos=not (model.special or request.no_bos or request.drawn_text))
    plain_NT, sizes_NT = request.text_tokens(
        request.needed(text), model.spelled, length=request.length, prefix=prefix, render=conversations.render
    )
    bare_NS = plain_NT[:, len(prefix) :]
    tokens_NT = model.arrange(bare_NS, bool(prefix), request.seed)
    if sizes_NT is not None:  # a recipe may put other tokens in the place of the text's
        replaced_NS = tokens_NT[:, len(prefix) :] != bare_NS
        sizes_NT = sizes_NT.masked_fill(F.pad(replaced_NS, (len(prefix), 0)), UNKNOWN)
    return ReadTokens(tokens_NT, sizes_NT, len(prefix) or int(conversations.bos), conversations)


def measure_loaded(model: Model, text: Path | None, request: Request, progress: Progress | None = None) -> Measurement:
    """Measure a model that is loaded.

    Args:
        text: a .txt or .jsonl file or a folder of them; needed for natural inputs only.
        progress: called with (sequences done, sequences in all).

    Raises:
        InputError: a text or option that cannot be used.
        SinklabError: the model cannot be measured.
    """
    read = read_tokens(model, text, request)
    measurement = measure_with_study(
        model.adapter,
        read.tokens_NT,
        request.options_for(name_in_results(model.name, model.loading.subfolder), bos=read.bos_tokens > 0),
        request.study,
        bos_tokens=read.bos_tokens,
        progress=progress,
    )
    if model.step is not None and model.planned_steps is not None:
        measurement = measurement.of_step(model.step, model.planned_steps)
    found = {"revision": model.loading.revision, "commit": model.commit, "vocabulary": model.vocabulary_hash}
    measurement = with_bits_per_byte(
        measurement.model_copy(update=found), read.sizes_NT, first_target=model.adapter.first_target
    )
    return _annotated(measurement, request, text, read.conversations, model.notes)


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
