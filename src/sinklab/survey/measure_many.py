"""Surveys: several measurements, each saved with its settings in its own directory, and one document with all results.

A repeated call runs only the missing measurements. A call with other settings raises InputError, so that no table mixes
settings.
"""

import gc
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sinklab.data.sources.corpora import identity
from sinklab.errors import InputError
from sinklab.files import parse_json, write_json
from sinklab.jobs import AnyDocument, JobStep, Ledger, Observer, StepProgress, check_request, ignore, run_steps, unsaved
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.statistics.highest import in_brackets, later_sink_text
from sinklab.models.hooks import Progress
from sinklab.models.huggingface.loading import Loading, name_in_results
from sinklab.opening import model_files
from sinklab.outputs import MEASUREMENT, REPORT, check_results
from sinklab.survey.request import Request
from sinklab.survey.suites import SuiteDocument

REQUEST = "request.json"
FILES = "files"


@dataclass(frozen=True)
class Item:
    """One measurement of a survey.

    Attributes:
        name: name in the results, and of the subdirectory of the output directory.
        request: settings that affect the measurement, JSON-serializable.
        measure: function that runs the measurement and calls its argument with (sequences done, total sequences).
    """

    name: str
    request: Mapping[str, Any]
    measure: Callable[[Progress], Measurement]

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
        unknown = None in (before.get(FILES), self.request.get(FILES))  # the model was or is now loaded from the hub
        check_request(folder, "a measurement", before, self.request, {FILES} if unknown else set())
        return Measurement.load(folder)


@dataclass(frozen=True)
class Outcome:
    """Measurements of a survey, and reasons for failures, by name of the measurement."""

    measured: dict[str, Measurement] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def check_any(self, what: str) -> None:
        """Raise InputError with the first failure if all measurements failed."""
        if not self.measured:
            name, failure = next(iter(self.failed.items()))
            raise InputError(f"none of the {len(self.failed)} {what} could be measured; {name}: {failure}")


def measure_all(
    items: Sequence[Item],
    result_of: Callable[[Outcome], AnyDocument],
    out: Path | None,
    document: str,
    observe: Observer = ignore,
    *,
    prepare: Callable[[Sequence[str]], object] = lambda unfinished: None,
    stop_at_failure: bool = False,
) -> AnyDocument:
    """Run the unfinished measurements of a survey, save all results, and return them.

    Args:
        items: the measurements, in the order of the results.
        result_of: function that builds the survey's result from the measurements so far.
        out: output directory; a repeated call resumes. None saves nothing.
        document: name of the file for the survey's result, which is written after every measurement.
        prepare: callback, called before the first measurement with the names of the unfinished items, if there are any.
        stop_at_failure: raise the error of a failed item; `document` is then written only when all items are measured.
            By default, failures are recorded in the result, and the other items are measured.

    Raises:
        InputError: before any measurement, if `out` cannot be written, the subdirectory of an item is a run directory,
            or existing files were not written by sinklab, are damaged, or contain results with other settings.
        HeldError: if another process writes the same document.
        UnsavedError: if a result cannot be saved; the exception contains the results so far.
        SinklabError: if `out` cannot be locked.
        Exception: the error of `prepare`; with `stop_at_failure`, the error of an item.
    """
    ledger = Ledger[AnyDocument](out, document)
    if out is not None:
        check_results(out, (REPORT,))
        for item in items:
            check_results(out / item.name, (*MEASUREMENT, REQUEST))
    measured, failed = dict[str, Measurement](), dict[str, str]()

    def result() -> AnyDocument:
        return result_of(Outcome({item.name: measured[item.name] for item in items if item.name in measured}, failed))

    def save() -> None:
        if not stop_at_failure or len(measured) == len(items):
            ledger.save(result())

    def run(item: Item, progress: StepProgress) -> str:
        gc.collect()  # frees the memory of models that are no longer referenced
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        measured[item.name] = item.measure(progress.reach)
        if out is not None:
            with unsaved(result):
                write_json(out / item.name / REQUEST, item.request)
                measured[item.name].save(out / item.name)
        save()
        return summary_line(measured[item.name])

    def fail(name: str, why: str) -> None:
        failed[name] = why
        save()

    with ledger.locked():
        if out is not None:
            measured |= {item.name: found for item in items if (found := item.finished(out / item.name)) is not None}
        if unfinished := [item.name for item in items if item.name not in measured]:
            prepare(unfinished)
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


def deciding_request(
    model: str, place: Path | None, text: str | None, loading: Loading, request: Request
) -> dict[str, Any]:
    """Return all settings that affect a measurement, as a JSON-serializable dict (request.json).

    Args:
        place: directory or file of the model, whose files are hashed; for a model on the hub, None or a missing path.
        text: hash of the measured text (`text_hash`); None if no text is used.

    Raises:
        InputError: if a file of the model cannot be read.
    """
    files = None if place is None else model_files(place)
    loaded = {"revision": loading.revision, "dtype": loading.dtype}
    loaded |= {} if loading.tokenizer == "auto" else {"tokenizer": loading.tokenizer}
    named = name_in_results(model, loading.subfolder)
    return json.loads(json.dumps({"model": named, FILES: files, "text": text, **loaded, **request.document()}))


@dataclass(frozen=True)
class Survey:
    """Result of a survey: measurements and reasons for failures, and the layout of the survey's JSON document.

    Attributes:
        kind: schema of the document.
        header: settings in the document, such as model and text.
        row_of: function (name, measurement) -> row of the measurement in the document.
    """

    kind: type[SuiteDocument]
    header: Mapping[str, Any]
    row_of: Callable[[str, Measurement], dict[str, Any]]
    outcome: Outcome

    def document(self) -> dict[str, Any]:
        """Return the content of domains.json, families.json or checkpoints.json."""
        rows = {name: self.row_of(name, measured) for name, measured in self.outcome.measured.items()}
        key = str(self.kind.model_fields["measured"].alias)
        return {"schema": 1, **self.header, key: rows, "failed": self.outcome.failed}
