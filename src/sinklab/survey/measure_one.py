"""Load one model by its name and measure it.

Bits per byte normalise the loss by the bytes of the text, so they are comparable between tokenizers:

    bits per byte = (sum over predicted tokens of -log2 p) / (sum over predicted tokens of their UTF-8 bytes)

Both sums leave out tokens that are not predicted: the first token of every sequence (often BOS) and, under a prefix
mask, the whole prefix. If a sequence ends in the middle of a character, only the bytes of its own tokens are counted.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sinklab.data.sources.corpora import default_text
from sinklab.data.sources.textfiles import ReadCounts, expanded, notes_on_folder, text_files
from sinklab.data.tokenizers import UNKNOWN
from sinklab.errors import InputError
from sinklab.files import MEASUREMENT, REPORT, check_results
from sinklab.jobs import unsaved
from sinklab.measuring import inputs
from sinklab.measuring.frames import remove_tables
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.surgery.study import changed_positions, measure_with_study
from sinklab.models.hooks import Progress
from sinklab.models.huggingface.loading import AS_IT_IS, Loading, check_name
from sinklab.models.native import check_length
from sinklab.opening import Model, open_model
from sinklab.survey.bos_check import bos_notes
from sinklab.survey.request import Request


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
        model: a run directory, a model directory, a .gguf file, or a name on the Hugging Face hub.
        text: a text file, a folder of them, or a source such as stdlib (data/sources/corpora.py); None for the text
            that comes with sinklab (`default_text`). Only natural inputs need a text.
        out: output directory; an earlier measurement in it is replaced, and its tables are removed. None saves nothing.
        progress: callback, called with (sequences done, total sequences).

    Raises:
        UnsavedError: if the measurement cannot be saved; the exception contains the measurement.
    """
    check_name(model)
    text = request.check(text)
    if out is not None:
        check_results(out, (*MEASUREMENT, REPORT))
    measurement = measure_loaded(open_model(model, loading), text, request, progress)
    if out is not None:
        with unsaved(lambda: measurement):
            measurement.save(out)
        remove_tables(out)
    return measurement


@dataclass(frozen=True)
class ReadTokens:
    """Input sequences of a measurement.

    Attributes:
        tokens_NT: token ids, (N, T).
        sizes_NT: number of UTF-8 bytes of text of each token, (N, T); 0 for special tokens at the start, negative if
            the number is unknown or the recipe replaced the token. None for random and repeated tokens.
        bos_tokens: number of special tokens at the start of each sequence; 0 if it differs between sequences.
        rows: the sequences of a text; empty for random and repeated tokens.
        notes: remarks on the text: how conversations were rendered, and the special tokens.
    """

    tokens_NT: Tensor
    sizes_NT: Tensor | None
    bos_tokens: int
    rows: list[inputs.Encoded]
    notes: list[str]


def check_measurable(model: Model, request: Request) -> None:
    """Raise InputError if the sequences exceed the model's context, or a change of positions does not fit the model."""
    check_length(request.length, model.adapter.limit)
    with changed_positions(model.adapter, request.study):
        pass


def read_tokens(model: Model, text: Path | None, request: Request) -> ReadTokens:
    """Build the input sequences of a measurement: from the text, or random or repeated tokens.

    Raises:
        InputError: if the sequences exceed the model's context, the text is unusable or too short, the chat template
            fails on a conversation, or BOS is to be ablated or prepended and the model has none.
        SinklabError: if the process that renders chat templates fails.
    """
    check_length(request.length, model.adapter.limit)
    before = model.encoder().forced_prefix if request.bos else ()
    if request.bos and not before:
        raise InputError(f"--bos: {model.name} has no BOS, neither in its tokenizer nor in its config: remove --bos")
    if draw := {"random": inputs.random_tokens, "repeat": inputs.repeated_tokens}.get(request.options.inputs):
        if request.length <= len(before):
            raise InputError(f"--length {request.length} leaves no room after BOS: use {len(before) + 1} or more")
        number, length = request.sequences, request.length - len(before)
        drawn_NS = draw(model.vocabulary, sequences=number, length=length, seed=request.seed)
        tokens_NT = torch.cat((drawn_NS.new_tensor(before).expand(number, -1), drawn_NS), dim=1)
        return ReadTokens(tokens_NT, None, len(before), [], [])
    assert text is not None  # `Request.check`
    conversations, counts = model.conversations(), ReadCounts()
    encode = model.encoder(bare=request.no_bos, forced=request.bos, sizes=True)
    wanted: dict[str, Any] = {
        "sequences": request.sequences,
        "length": request.length,
        "render": conversations.render,
        "counts": counts,
    }
    if request.drawn_text:
        rows = inputs.drawn_text(text, encode, draw=request.seed, **wanted)
    else:
        rows = inputs.natural_text(text, encode, fewer=request.fewer, **wanted)
    written_NT, sizes_NT = inputs.token_rows(rows), inputs.sizes_of(rows)
    special = {len(row.prefix) for row in rows}
    bos_tokens = special.pop() if len(special) == 1 else 0
    tokens_NT = model.arrange(written_NT, bos_tokens, request.seed)
    if sizes_NT is not None:  # a recipe may replace tokens of the text
        sizes_NT = sizes_NT.masked_fill(tokens_NT != written_NT, UNKNOWN)
    if "no_bos" in request.study.ablate and not bos_tokens:
        trained = f"{model.name} was trained without BOS (data.bos: false)"
        why = trained if model.planned_steps else f"the tokenizer of {model.name} does not add BOS to this text"
        raise InputError(
            f"--ablate no_bos: {why}, so there is no BOS to remove; use --ablate mask_first:1 to hide the first token"
        )
    notes = [*conversations.notes(), *counts.notes(), *notes_on_folder(expanded(str(text)))]
    if text == default_text():
        notes.append("the text is that of sinklab, 128 short texts in 11 languages and code: pass yours with --text")
    return ReadTokens(tokens_NT, sizes_NT, bos_tokens, rows, [*notes, *_special_notes(model, rows)])


def _special_notes(model: Model, rows: list[inputs.Encoded]) -> list[str]:
    """Return notes on sequences whose special tokens are not those that the tokenizer gives, or differ among them."""
    notes, some = [], sum(bool(row.prefix) for row in rows)
    if doubled := [row for row in rows if row.doubled]:
        written = "".join(model.token_texts(list(doubled[0].prefix)))
        notes.append(
            f"{len(doubled)} of {len(rows)} sequences begin with {written} in the text itself: the tokenizer's special "
            "tokens were not added to it (tokenizer(text) of transformers adds them)"
        )
    if 0 < some < len(rows):
        notes.append(f"{some} of {len(rows)} sequences begin with BOS, the others do not")
    return notes


def measure_loaded(model: Model, text: Path | None, request: Request, progress: Progress | None = None) -> Measurement:
    """Measure the attention sinks of a loaded model; the other arguments are those of `measure_model`."""
    read = read_tokens(model, text, request)
    measurement = measure_with_study(
        model.adapter,
        read.tokens_NT,
        request.options_for(model.name, bos=read.bos_tokens > 0),
        request.study,
        bos_tokens=read.bos_tokens,
        progress=progress,
    )
    if model.step is not None and model.planned_steps is not None:
        measurement = measurement.of_step(model.step, model.planned_steps)
    notes, bits = [*measurement.notes], None
    if read.sizes_NT is not None and measurement.loss is not None:
        predicted_NT = read.sizes_NT[:, model.adapter.first_target - 1 :]
        size, unknown = int(predicted_NT.sum()), int((predicted_NT < 0).any(1).sum())
        if unknown:
            notes.append(
                f"no bits per byte: tokens and text differ in {unknown} of {len(predicted_NT)} sequences: the "
                "tokenizer changes or leaves out characters, or the recipe replaces tokens"
            )
        elif size:
            bits = measurement.loss * predicted_NT.numel() / math.log(2) / size
    notes += [*model.notes, *read.notes, *bos_notes(model, read.rows, request)]
    folder = expanded(str(text)) if request.options.inputs == "natural" and text else None
    files = text_files(folder) if folder and folder.is_dir() else []
    if len(files) > 1:
        how = "are drawn from" if request.drawn_text else "alternate between"
        notes.append(f"the sequences {how} the {len(files)} files of {text}")
    if measurement.sequences < request.sequences:
        shared = f"the pieces of the text are divided among {inputs.SHARES} draws"
        why = shared if request.drawn_text else "the text has no more sequences of this length"
        notes.append(f"{measurement.sequences} of {request.sequences} sequences: {why}")
    found: dict[str, Any] = {
        "revision": model.loading.revision,
        "commit": model.commit,
        "vocabulary": model.vocabulary_hash,
        "fed": model.fed(read.tokens_NT),
        "explored": measurement.explored and measurement.explored.with_texts(model.decode),
        "bits_per_byte": bits,
        "notes": notes,
    }
    return measurement.model_copy(update=found)
