"""Surveys: several measurements, each saved with its settings in its own directory, and one document with all results.

A measurement is a model, a text and a request (`Item`). Only the most recent model is kept in memory. A repeated call
runs only the missing measurements. A call with other settings raises InputError, so that no table mixes settings.
"""

import gc
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from sinklab.data.sources.corpora import identity
from sinklab.errors import InputError
from sinklab.files import MEASUREMENT, REPORT, check_results, parse_json, write_json
from sinklab.jobs import AnyDocument, JobStep, Ledger, Observer, StepProgress, check_request, ignore, run_steps, unsaved
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.statistics.highest import in_brackets, later_sink_text
from sinklab.models.hooks import Progress
from sinklab.models.huggingface.loading import Loading, check_config, name_in_results
from sinklab.opening import Model, is_run, model_files, open_model
from sinklab.survey.measure_one import check_measurable, measure_loaded
from sinklab.survey.request import Request

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
        loaded = {"revision": loading.revision, "dtype": loading.dtype}
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
            model = open_model(item.model, item.loading, step=item.step, as_transformers=item.as_transformers)
            for other in items:
                if other.opened_by == item.opened_by:
                    check_measurable(model, other.request)
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
