"""Load one model by its name and measure it.

Bits per byte normalise the loss by the bytes of the text, so they are comparable between tokenizers:

    bits per byte = (sum over predicted tokens of -log2 p) / (sum over predicted tokens of their UTF-8 bytes)

Both sums leave out tokens that are not predicted: the first token of every sequence (often BOS) and, under a prefix
mask, the whole prefix. If a sequence ends within a character, only the bytes of the tokens inside the sequence are
counted.
"""

import math
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
from sinklab.jobs.ledger import unsaved
from sinklab.measuring.inputs import SHARES, default_prefix, pretrained_encode
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.surgery.study import changed_positions, measure_with_study
from sinklab.models.hooks import Progress
from sinklab.models.huggingface.loading import (
    AS_IT_IS,
    Loading,
    check_config,
    check_name,
    load_pretrained_tokenizer,
    name_in_results,
)
from sinklab.models.huggingface.rendering import Conversations
from sinklab.opening import Model, is_run, open_model
from sinklab.outputs import MEASUREMENT, REPORT, check_results
from sinklab.survey.request import Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def measure_model(
    model: str,
    text: Path | None,
    request: Request,
    *,
    loading: Loading = AS_IT_IS,
    out: Path | None = None,
    progress: Progress | None = None,
) -> Measurement:
    """Load a model by its name and measure its attention sinks on one text.

    Args:
        model: a run directory (it has a recipe.yaml), a model directory, a .gguf file, or a name on the Hugging Face
            hub.
        text: a .txt or .jsonl file, a folder of them, or a source such as stdlib (data/sources/corpora.py); needed for
            natural inputs only.
        out: output directory; None saves nothing.
        progress: callback, called with (sequences done, total sequences).

    Raises:
        InputError: if model, text or an option is unusable, or `out` cannot be written, is a run directory or has files
            not written by sinklab.
        UnsavedError: if the measurement could not be saved; the exception contains the measurement.
        SinklabError: if the model cannot be measured.
    """
    check_name(model)
    request.check(text)
    if out is not None:
        check_results(out, (*MEASUREMENT, REPORT))
    measurement = measure_loaded(load_model(model, loading, request=request, text=text), text, request, progress)
    if out is not None:
        with unsaved(lambda: measurement):
            measurement.save(out)
    return measurement


def load_model(
    name: str, loading: Loading, step: int | None = None, *, request: Request | None = None, text: Path | None = None
) -> Model:
    """Load a model for a measurement.

    Args:
        step: step of the checkpoint to load from a run directory; default: the newest checkpoint.
        request, text: settings and text of the measurement. If BOS is to be ablated, a Hugging Face tokenizer is
            checked for it before the weights are read.

    Raises:
        InputError: if the model cannot be loaded, or BOS is to be ablated and there is none.
        SinklabError: if none of a run's checkpoints is valid.
    """
    check = None if request is None else partial(_check_bos, name, request, text)
    return open_model(name, loading, step=step, check=check)


def check_loadable(name: str, loading: Loading) -> None:
    """Check that a model exists and has a config, without loading the weights; runs and .gguf files are not checked.

    Raises:
        InputError: if the config cannot be loaded.
    """
    if not is_run(name):
        check_config(name, loading)


def check_readable(name: str, loading: Loading, text: Path | None, request: Request) -> None:
    """Check that a model's tokenizer can be loaded, and that a chat template can encode the text, without the weights.

    Runs are not checked, nor is anything for random and repeated tokens.

    Raises:
        InputError: if the tokenizer cannot be loaded; for a tokenizer with a chat template, if the template fails on
            the text or the text gives too few sequences.
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
    """Raise InputError if BOS is to be ablated but neither the tokenizer nor its chat template adds a BOS."""
    if "no_bos" not in request.study.ablate or default_prefix(tokenizer):
        return
    conversations = Conversations(tokenizer, keep_bos=not request.drawn_text)
    if text is not None:
        next(documents(str(text), render=conversations.render))
    if not conversations.bos:
        raise _no_bos_to_leave_out(f"the tokenizer of {name} does not add BOS to this text")


def _no_bos_to_leave_out(why: str) -> InputError:
    return InputError(
        f"--ablate no_bos: {why}, so there is no BOS to remove; use --ablate mask_first:1 to hide the first token"
    )


@dataclass(frozen=True)
class ReadTokens:
    """Input sequences of a measurement.

    Attributes:
        tokens_NT: token ids, (N, T).
        sizes_NT: bytes of text per token (`inputs.sizes_of`), (N, T), negative where token and text differ; None for
            random and repeated tokens.
        bos_tokens: number of special tokens at the start of each sequence.
        conversations: renderer that applied the chat template to conversations, with its notes.
    """

    tokens_NT: Tensor
    sizes_NT: Tensor | None
    bos_tokens: int
    conversations: Conversations


def check_request(model: Model, request: Request) -> None:
    """Check that the measurement settings fit the model.

    Raises:
        InputError: if the sequences exceed the context, learned positions are changed in a model without them, an
            ablation is unknown, or a position is beyond the sequences.
    """
    model.adapter.check_length(request.length)
    with changed_positions(cast("Any", model.adapter.module), request.study, request.length):
        pass


def read_tokens(model: Model, text: Path | None, request: Request) -> ReadTokens:
    """Build the input sequences of a measurement: from the text, or random or repeated tokens.

    Raises:
        InputError: if the sequences exceed the context, the text is missing, unusable or too short, or there is no BOS
            to ablate.
    """
    model.adapter.check_length(request.length)
    drawn_NT = request.synthetic_tokens(model.vocabulary)
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
    if sizes_NT is not None:  # a recipe may replace tokens of the text
        replaced_NS = tokens_NT[:, len(prefix) :] != bare_NS
        sizes_NT = sizes_NT.masked_fill(F.pad(replaced_NS, (len(prefix), 0)), UNKNOWN)
    return ReadTokens(tokens_NT, sizes_NT, len(prefix) or int(conversations.bos), conversations)


def measure_loaded(model: Model, text: Path | None, request: Request, progress: Progress | None = None) -> Measurement:
    """Measure a loaded model; the other arguments are those of `measure_model`.

    Raises:
        InputError: if the text is unusable, or an option does not fit the model.
        SinklabError: if the model cannot be measured.
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
    found: dict[str, Any] = {"revision": model.loading.revision, "commit": model.commit}
    found["vocabulary"] = model.vocabulary_hash
    if measurement.explored is not None:
        found["explored"] = measurement.explored.with_texts(model.decode)
    measurement = _with_bits_per_byte(
        measurement.model_copy(update=found), read.sizes_NT, first_target=model.adapter.first_target
    )
    return _annotated(measurement, request, text, read.conversations, model.notes)


def _with_bits_per_byte(measurement: Measurement, sizes_NT: Tensor | None, first_target: int) -> Measurement:
    """Return the measurement with `bits_per_byte`, or a note if tokens and text differ; unchanged if no sizes or loss.

    Args:
        sizes_NT: bytes of text per token, (N, T): 0 for BOS, negative where token and text differ; None for random and
            repeated tokens.
        first_target: 1-based position of the first predicted token.
    """
    if sizes_NT is None or measurement.loss is None:
        return measurement
    predicted_NT = sizes_NT[:, first_target - 1 :]
    unknown = int((predicted_NT < 0).any(1).sum())
    if unknown:
        why = f"tokens and text differ in {unknown} of {len(sizes_NT)} sequences"
        note = f"no bits per byte: {why}: the tokenizer changes or leaves out characters, or the recipe replaces tokens"
        return measurement.model_copy(update={"notes": [*measurement.notes, note]})
    size = int(predicted_NT.sum())
    bits = measurement.loss * predicted_NT.numel() / math.log(2)
    return measurement.model_copy(update={"bits_per_byte": bits / size if size else None})


def _annotated(
    measurement: Measurement,
    request: Request,
    text: Path | None,
    conversations: Conversations,
    loaded: Sequence[str] = (),
) -> Measurement:
    """Return the measurement with notes on the loaded model, the text, and missing sequences."""
    notes = [*loaded, *conversations.notes()]
    folder = text if request.options.inputs == "natural" and text is not None and text.is_dir() else None
    if folder is not None and len(files := text_files(folder)) > 1:
        how = "are drawn from" if request.drawn_text else "alternate between"
        notes.append(f"the sequences {how} the {len(files)} files of {text}")
    if measurement.sequences < request.sequences:
        shared = f"the pieces of the text are divided among {SHARES} draws"
        why = shared if request.drawn_text else "the text has no more sequences of this length"
        notes.append(f"{measurement.sequences} of {request.sequences} sequences: {why}")
    return measurement.model_copy(update={"notes": [*measurement.notes, *notes]}) if notes else measurement
