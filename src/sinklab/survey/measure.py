"""Surveys: several measurements, each saved with its settings in its own directory, and one document with all results.

A measurement is a model, a text and a request (`Item`). Only the most recent model is kept in memory. A repeated call
runs only the missing measurements. A call with other settings raises InputError, so that no table mixes settings.

Load one model by its name and measure it.

Bits per byte normalise the loss by the bytes of the text, so they are comparable between tokenizers:

    bits per byte = (sum over predicted tokens of -log2 p) / (sum over predicted tokens of their UTF-8 bytes)

Both sums leave out tokens that are not predicted: the first token of every sequence (often BOS) and, under a prefix
mask, the whole prefix. If a sequence ends in the middle of a character, only the bytes of its own tokens are counted.

Compare the loss on a few sequences with and without BOS, where a model is fed other special tokens than its BOS.

Some models need BOS: without it, the loss of Gemma 3 and 4 is several nats higher. A tokenizer or a chat template that
leaves it out, or writes it twice, changes both the loss and the sink.
"""

import gc
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sinklab.data.corpora import DEFAULT_TEXT_NOTE, default_text, identity
from sinklab.data.textfiles import ReadCounts, expanded, notes_on_folder, text_files
from sinklab.errors import InputError
from sinklab.files import MEASUREMENT, REPORT, check_results, parse_json, write_json
from sinklab.jobs import AnyDocument, JobStep, Ledger, Observer, StepProgress, check_request, ignore, run_steps, unsaved
from sinklab.measuring import inputs
from sinklab.measuring.driver import changed_positions, measure, measure_with_study
from sinklab.measuring.inputs import UNKNOWN, Encoded, token_rows
from sinklab.measuring.measurement import TABLES, Measurement, remove_tables
from sinklab.measuring.options import Options, Request
from sinklab.models.adapter import check_length
from sinklab.models.hooks import Progress
from sinklab.models.huggingface.loading import AS_IT_IS, Loading, check_config, check_name, name_in_results
from sinklab.opening import Model, is_run, model_files, open_model
from sinklab.tables import in_brackets, later_sink_text

SEQUENCES = 8
LENGTH = 64
NATS = 0.1
"""Difference in loss, in nats per token, from which there is a note."""


def bos_notes(model: Model, rows: Sequence[Encoded], request: Request) -> list[str]:
    """Return a note if BOS at the start of the sequences reduces the loss by NATS or more.

    The loss is measured on the first SEQUENCES sequences of at most LENGTH tokens, with the special tokens that were
    fed and with one BOS instead of them, on the same targets. The BOS is that of the tokenizer or of the config. The
    result is empty if exactly this BOS was fed, for runs, which have the BOS of their recipe, without a loss, and with
    `no_bos`, which is a choice.
    """
    adapter, has_loss = model.adapter, request.options.loss and model.adapter.has_head
    if model.planned_steps is not None or request.no_bos or not has_loss or adapter.first_target > 2:
        return []
    prefix = rows[0].prefix if rows else ()
    others = [(bos,) for bos in model.bos_ids if (bos,) != prefix]
    body = min(request.length, LENGTH, adapter.limit or LENGTH) - max(len(prefix), 1)
    if not rows or not others or body < 2:
        return []
    few = [row.ids[:body] for row in rows if row.prefix == prefix][:SEQUENCES]

    def read(special: tuple[int, ...]) -> Measurement:
        tokens_NT = token_rows([Encoded(special, ids) for ids in few])
        options = Options(eps=request.options.eps, first_target=len(special) + 2)
        return measure(adapter, tokens_NT, options)

    fed = read(prefix)
    with_bos, best = min(((read(other), other) for other in others), key=lambda one: one[0].loss or 0)
    assert fed.loss is not None
    assert with_bos.loss is not None
    if fed.loss - with_bos.loss < NATS:
        return []
    (name,) = model.token_texts(list(best))
    written = "".join(model.token_texts(list(prefix))) or "no BOS"
    why = "the tokenizer or chat template does not put it first; to add it: --bos"
    if prefix:
        why = f"the text, the tokenizer or the chat template puts {written} first"
    return [
        f"the model needs its BOS {name}: with {written} the loss is {fed.loss - with_bos.loss:.2f} nats per token "
        f"higher than with {name} ({fed.loss:.2f} and {with_bos.loss:.2f}, {len(few)} sequences of {body} tokens), and "
        f"Sink_1 is {fed.sink_rate[0]:.1f} % instead of {with_bos.sink_rate[0]:.1f} %; {why}"
    ]


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
        text: a text file, a folder of them, or a source such as stdlib (data/corpora.py); None for the text
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
    opened = open_model(model, loading, length=request.length, for_text=request.options.inputs == "natural")
    measurement = measure_loaded(opened, text, request, progress)
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


def read_tokens(model: Model, text: Path | None, request: Request) -> ReadTokens:
    """Build the input sequences of a measurement: from the text, or random or repeated tokens.

    Raises:
        InputError: if the sequences exceed the model's context, the text is unusable or too short, the chat template
            fails on a conversation, or BOS is to be ablated or prepended and the model has none.
        SinklabError: if the process that renders chat templates fails.
    """
    check_length(request.length, model.adapter.limit)
    before = model.encoder().forced_prefix if request.bos else model.special if request.begins_like_text else ()
    if request.bos and not before:
        raise InputError(f"--bos: {model.name} has no BOS, neither in its tokenizer nor in its config: leave it out")
    if draw := {"random": inputs.random_tokens, "repeat": inputs.repeated_tokens}.get(request.options.inputs):
        if request.length <= len(before):
            raise InputError(f"a length of {request.length} leaves no room after BOS: use {len(before) + 1} or more")
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
        "column": request.column,
    }
    if request.drawn_text:
        rows = inputs.drawn_text(text, encode, draw=request.seed, **wanted)
    else:
        rows = inputs.natural_text(text, encode, fewer=request.fewer, **wanted)
    written_NT, sizes_NT = inputs.token_rows(rows), None
    sizes = [[*(0 for _ in row.prefix), *row.ids.sizes] for row in rows if isinstance(row.ids, inputs.Spelled)]
    if len(sizes) == len(rows):
        sizes_NT = torch.tensor(sizes)
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
    if len(rows) < request.sequences:
        shared = f"the pieces of the text are divided among {inputs.SHARES} draws"
        why = shared if request.drawn_text else "the text has no more sequences of this length"
        short = f" (documents that are shorter: {counts.short:,})" if counts.short else ""
        notes.append(f"{len(rows)} of {request.sequences} sequences: {why}{short}")
    if text == default_text():
        notes.append(DEFAULT_TEXT_NOTE)
    if doubled := [row for row in rows if row.doubled]:
        special_text = "".join(model.token_texts(list(doubled[0].prefix)))
        notes.append(
            f"{len(doubled)} of {len(rows)} sequences begin with {special_text} in the text itself: the tokenizer's "
            "special tokens were not added to it (tokenizer(text) of transformers adds them)"
        )
    if 0 < (some := sum(bool(row.prefix) for row in rows)) < len(rows):
        notes.append(f"{some} of {len(rows)} sequences begin with BOS, the others do not")
    return ReadTokens(tokens_NT, sizes_NT, bos_tokens, rows, notes)


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
            who = "tokenizer" if model.planned_steps is None else "tokenizer or the recipe"
            notes.append(
                f"no bits per byte: tokens and text differ in {unknown} of {len(predicted_NT)} sequences: the {who} "
                "changes or leaves out characters"
            )
        elif size:
            bits = measurement.loss * predicted_NT.numel() / math.log(2) / size
    notes += [*model.notes, *read.notes, *bos_notes(model, read.rows, request)]
    folder = expanded(str(text)) if request.options.inputs == "natural" and text else None
    files = text_files(folder) if folder and folder.is_dir() else []
    if len(files) > 1:
        how = "are drawn from" if request.drawn_text else "alternate between"
        notes.append(f"the sequences {how} the {len(files)} files of {text}")
    explored = measurement.explored
    found: dict[str, Any] = {
        "revision": model.loading.revision,
        "commit": model.commit,
        "vocabulary": model.vocabulary_hash,
        "fed": model.fed(read.tokens_NT),
        "explored": explored.with_texts(model.decode) if explored and model.tokenizer else explored,
        "bits_per_byte": bits,
        "notes": notes,
    }
    return measurement.model_copy(update=found)


RUN_HASH = re.compile(r"-[0-9a-f]{16}$")
REQUEST = "request.json"
FILES = "files"


@dataclass(frozen=True)
class Item:
    """One measurement of a survey.

    Attributes:
        name: name in the results, and of the subdirectory of the output directory.
        model: run directory, model directory, .gguf file or Hugging Face id.
        text: file or folder of text; None for inputs without text.
        text_hash: hash of the text (`text_hash`).
        step: step of a checkpoint of a run; None for the newest, and for other models.
        more: further settings in request.json.
        measure: function of the model and a callback (sequences done, total sequences) that runs the measurement;
            default: `measure_loaded`.
        as_transformers: load a run as a model of transformers.
    """

    name: str
    model: str
    loading: Loading
    text: Path | None
    text_hash: str | None
    request: Request
    step: int | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    measure: Callable[[Model, Progress], Measurement] | None = None
    as_transformers: bool = False

    @property
    def opened_by(self) -> tuple[object, ...]:
        """Arguments of `open_model`; items with equal ones share the loaded model."""
        return self.model, self.loading, self.step, self.as_transformers

    @cached_property
    def decides(self) -> dict[str, Any]:
        """All settings that affect the measurement, JSON-serializable: the content of request.json.

        Raises:
            InputError: if a file of the model cannot be read.
        """
        place, loading = Path(self.model), self.loading
        if self.step is not None:
            place = place / "checkpoints" / f"step_{self.step:08d}"
        loaded = {"revision": loading.revision, **loading.precision}
        loaded |= {} if loading.tokenizer == "auto" else {"tokenizer": loading.tokenizer}
        named = {"model": name_in_results(self.model, loading.subfolder), FILES: model_files(place)}
        return json.loads(
            json.dumps({**named, "text": self.text_hash, **loaded, **self.request.document(), **self.more})
        )

    def finished(self, folder: Path) -> Measurement | None:
        """Return the measurement that an earlier call has saved in `folder`; None if there is none.

        Raises:
            InputError: see `Measurement.load`; also if it has other settings, or its request.json is damaged.
        """
        if not (folder / "measurement.json").is_file():
            return None
        try:
            before = parse_json((folder / REQUEST).read_text("utf-8")) if (folder / REQUEST).is_file() else {}
        except ValueError as error:
            raise InputError(f"{folder / REQUEST} is damaged: delete {folder} to measure it again") from error
        unknown = None in (before.get(FILES), self.decides.get(FILES))  # the model was or is now loaded from the hub
        check_request(folder, "a measurement", before, self.decides, {FILES} if unknown else set())
        return Measurement.load(folder)


@dataclass(frozen=True)
class Outcome:
    """Measurements of a survey, and reasons for failures, by name of the measurement."""

    measured: dict[str, Measurement] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def measure_all(
    items: Sequence[Item],
    result_of: Callable[[Outcome], AnyDocument],
    out: Path | None,
    document: str,
    observe: Observer = ignore,
    *,
    check_first: bool = True,
    stop_at_failure: bool = False,
) -> AnyDocument:
    """Run the unfinished measurements of a survey, save all results, and return them.

    Args:
        items: the measurements, in the order in which they are run and listed.
        result_of: function that builds the survey's result from the measurements so far.
        out: output directory; a repeated call resumes. None saves nothing.
        document: name of the file for the survey's result, which is written after every measurement.
        check_first: before the first measurement, read the configs of all unfinished models and load the first model;
            their errors are raised.
        stop_at_failure: raise the error of a failed item; `document` is then written only when all items are measured.
            By default, failures are recorded in the result, and the other items are measured.

    Raises:
        InputError: before any measurement, if `out` cannot be written, the subdirectory of an item is a run directory,
            or existing files were not written by sinklab, are damaged, or contain results with other settings.
        HeldError: if another process writes the same document.
        UnsavedError: if a result cannot be saved; the exception contains the results so far.
        SinklabError: if `out` cannot be locked.
        Exception: an error of `check_first`; with `stop_at_failure`, the error of an item.
    """
    ledger = Ledger[AnyDocument](out, document)
    if out is not None:
        check_results(out, (REPORT,))
        for item in items:
            check_results(out / item.name, (*MEASUREMENT, REQUEST))
    measured, failed = dict[str, Measurement](), dict[str, str]()
    opened: list[tuple[object, Model]] = []

    def result() -> AnyDocument:
        return result_of(Outcome({item.name: measured[item.name] for item in items if item.name in measured}, failed))

    def save() -> None:
        if not stop_at_failure or len(measured) == len(items):
            ledger.save(result())

    def model_of(item: Item) -> Model:
        if not opened or opened[0][0] != item.opened_by:
            opened.clear()
            gc.collect()  # frees the memory of the previous model
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            alike = [other for other in items if other.opened_by == item.opened_by]
            sharing = [other.request for other in alike]
            how = {"step": item.step, "as_transformers": item.as_transformers}
            how["for_text"] = any(one.measure or one.request.options.inputs == "natural" for one in alike)
            length = max(request.length for request in sharing)
            model = open_model(item.model, item.loading, length=length, **how)
            check_length(length, model.adapter.limit)
            for request in sharing:
                with changed_positions(model.adapter, request.study):  # raises if they do not fit the model
                    pass
            opened.append((item.opened_by, model))
        return opened[0][1]

    def run(item: Item, progress: StepProgress) -> str:
        try:
            model = model_of(item)
            if item.measure is not None:
                measured[item.name] = item.measure(model, progress.reach)
            else:
                measured[item.name] = measure_loaded(model, item.text, item.request, progress.reach)
        except InputError as error:
            raise InputError(f"{item.model}: {error}" if stop_at_failure else str(error)) from error
        if out is not None:
            with unsaved(result):
                write_json(out / item.name / REQUEST, item.decides)
                measured[item.name].save(out / item.name)
        save()
        return summary_line(measured[item.name])

    def fail(name: str, why: str) -> None:
        failed[name] = why
        save()

    with ledger.locked():
        if out is not None:
            measured |= {item.name: found for item in items if (found := item.finished(out / item.name)) is not None}
        unfinished = [item for item in items if item.name not in measured]
        if check_first and unfinished:
            for item in {item.opened_by: item for item in unfinished}.values():
                if not is_run(item.model):
                    check_config(item.model, item.loading)
            if not stop_at_failure:
                model_of(unfinished[0])
        kept = {name: summary_line(found) for name, found in measured.items()}
        steps = [JobStep(item.name, partial(run, item), kept.get(item.name)) for item in items]
        run_steps(steps, observe, None if stop_at_failure else fail)
        save()
    return result()


def summary_line(measurement: Measurement) -> str:
    """Return the main numbers of a measurement as one line of text."""
    parts = [f"Sink_1 {measurement.sink_rate[0]:.2f} %" + in_brackets(later_sink_text(measurement.sink_rate))]
    if measurement.loss is not None:
        parts.append(f"loss {measurement.loss:.4f}")
    return ", ".join([*parts, f"{measurement.sequences} sequences"])


def text_hash(text: Path | None) -> str | None:
    """Return a SHA-256 of a text's contents (`identity`); None if `text` is None.

    Raises:
        InputError: if there is no such text, or a file cannot be read.
    """
    return None if text is None else identity(str(text), contents=True)


def without_hash(name: str) -> str:
    """Return the name of a run directory without the run hash at its end; other names are unchanged."""
    return RUN_HASH.sub("", name) or name


def labels(models: Sequence[str]) -> dict[str, str]:
    """Return the models by label: the id on the hub, or the last parts of a local path, as few as make labels distinct.

    Raises:
        InputError: if a model is listed twice, by the same path or by different ones.
    """

    def parts_of(model: str) -> tuple[str, ...]:
        path = Path(model)  # of a local model's resolved path, without the root; of a Hugging Face id, the id
        if path.exists():
            return path.resolve().parts[1:]
        return ("/".join(part for part in path.parts if part not in (path.anchor, "..")),)

    parts = {model: parts_of(model) for model in models}
    for count in range(1, 2 + max(map(len, parts.values()))):
        named = {"/".join(own[-count:]): model for model, own in parts.items()}
        if len(named) == len(models):
            return named
    listed = [parts[model] for model in models]
    twice = next(model for model in models if listed.count(parts[model]) > 1)
    raise InputError(f"{twice} is repeated: pass different models")


def check_formats(formats: Sequence[str], out: Path | None, one: bool) -> None:
    """Check before measuring that the tables can be written; a no-op if no format is requested.

    Args:
        formats: requested formats, "csv" or "parquet".
        out: output folder of the tables; None if --out was not set.
        one: whether the command makes a single measurement.

    Raises:
        InputError: if `out` is None or the command makes several measurements; see also `check_results`.
    """
    if not formats:
        return
    if not one:
        raise InputError("--format supports one measurement of one MODEL: leave it out for several measurements")
    if out is None:
        raise InputError(f"--format {formats[0]} needs an output directory: set --out DIR")
    check_results(out, [f"{table}.{kind}" for kind in formats for table in TABLES])
