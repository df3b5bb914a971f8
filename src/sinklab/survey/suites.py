"""Suites: one model on several texts (domains), several models on one text, and the checkpoints of one model.

A suite is a `Survey` of `measure_all` with a document of all measurements: domains.json, comparison.json or
checkpoints.json (`FILES`), which reports read as a `SuiteDocument`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from sinklab.data.sources.rows import without_kind
from sinklab.data.sources.textfiles import notes_on_folder, text_files
from sinklab.errors import InputError
from sinklab.jobs import JobEvent, Observer, ignore
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.registry import compared
from sinklab.models.huggingface.loading import AS_IT_IS, Loading, check_name, check_revision, name_in_results
from sinklab.opening import is_run
from sinklab.schema import ReadDocument, finite_or_none
from sinklab.survey.checkpoints import StepUnit, saved_models
from sinklab.survey.measure_many import Item, Outcome, labels, measure_all, text_hash
from sinklab.survey.request import Request

SuiteKind = Literal["domains", "models", "checkpoints"]
FILES: Mapping[SuiteKind, str] = {
    "domains": "domains.json",
    "models": "comparison.json",
    "checkpoints": "checkpoints.json",
}
"""File of the document by kind; the measurements are listed in it under the name of the kind."""


class ComparedQuantity(ReadDocument):
    """A row of a comparison of models: one quantity.

    Attributes:
        values: value by model; None if it is missing or infinite.
        differences: value minus that of the first model, by model except the first. None if either value is None. For
            losses per token, also None if the vocabularies differ or are unknown.
        infinite: models with an infinite value.
    """

    quantity: str
    unit: str
    values: dict[str, float | None]
    differences: dict[str, float | None]
    infinite: list[str] = Field(default_factory=list)


class SavedCheckpoint(ReadDocument):
    """A checkpoint in checkpoints.json, which has its main numbers as well.

    Attributes:
        step: number of updates or, if `unit` is "tokens", of tokens, before the checkpoint.
        checkpoint: name of the revision or folder; `step_N` for a run.
    """

    step: int
    unit: StepUnit = "step"
    checkpoint: str


class SuiteDocument(ReadDocument):
    """The document of a suite, as read by reports; exactly one of the first three fields is set.

    Attributes:
        domains, models, checkpoints: entries of the measurements by name, in the order of display.
        model: the model of domains and checkpoints.
        rows: numbers that at least one of the compared models has, with differences from the first model.
        failed: reasons of failed measurements by name.
    """

    domains: dict[str, dict[str, object]] | None = None
    models: dict[str, dict[str, object]] | None = Field(default=None, min_length=1)
    checkpoints: dict[str, SavedCheckpoint] | None = None
    model: str = ""
    rows: list[ComparedQuantity] = Field(default_factory=list)
    failed: dict[str, str] = Field(default_factory=dict)

    @property
    def kind(self) -> SuiteKind:
        """Kind of the suite."""
        return next(kind for kind in FILES if getattr(self, kind) is not None)

    @property
    def measured(self) -> Mapping[str, object]:
        """Entries of the measurements by name."""
        return getattr(self, self.kind)

    @model_validator(mode="after")
    def _has_a_kind(self) -> Self:
        if sum(getattr(self, kind) is not None for kind in FILES) != 1:
            raise ValueError(f"expected one of {', '.join(FILES)}")
        return self


@dataclass(frozen=True)
class Survey:
    """Result of a suite.

    Attributes:
        header: settings in the document, such as model and text.
        saved: checkpoints by name of the measurement; empty for other suites.
    """

    kind: SuiteKind
    header: Mapping[str, Any]
    outcome: Outcome
    saved: Mapping[str, SavedCheckpoint] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """Return the content of the suite's file."""
        header, measured = {"schema": 1, **self.header}, self.outcome.measured
        found = {name: self._checkpoint(name, one) if self.saved else one.document() for name, one in measured.items()}
        if self.kind == "models":
            return {**header, "rows": [row.model_dump() for row in compared_rows(measured)], "models": found}
        return {**header, self.kind: found, "failed": self.outcome.failed}

    def _checkpoint(self, name: str, m: Measurement) -> dict[str, Any]:
        return {
            **self.saved[name].model_dump(),
            "sink_1": m.sink_rate[0],
            "sink_bias": m.sink_rate_bias,
            "uniform_ratio": m.uniform_ratio[0],
            "loss": m.loss,
            "norm_ratio": finite_or_none(max(m.hidden_norm_ratio or [], default=None)),
            "by_layer": m.sink_rate_of_heads().mean(1).tolist(),
        }


def compared_rows(measured: Mapping[str, Measurement]) -> list[ComparedQuantity]:
    """Return a row for each number that at least one model has; differences are relative to the first model.

    Losses per token are not subtracted if the vocabularies differ or are unknown.
    """
    rows = []
    first, *others = measured
    for quantity, unit, value_of in compared(measured[first]):
        found = {model: value_of(measurement) for model, measurement in measured.items()}
        values = {model: finite_or_none(number) for model, number in found.items()}
        infinite = [model for model, number in found.items() if number == math.inf]
        if not infinite and all(value is None for value in values.values()):
            continue
        differences: dict[str, float | None] = dict.fromkeys(others)
        for other in others:
            same_tokens = measured[other].vocabulary == measured[first].vocabulary is not None
            value, reference = values[other], values[first]
            if value is not None and reference is not None and (unit != "nats/token" or same_tokens):
                differences[other] = value - reference
        row = {"values": values, "differences": differences, "infinite": infinite}
        rows.append(ComparedQuantity(quantity=quantity, unit=unit, **row))
    return rows


def compare_models(
    models: Sequence[str],
    text: Path | None,
    request: Request,
    *,
    loading: Loading = AS_IT_IS,
    out: Path | None = None,
    observe: Observer = ignore,
) -> Survey:
    """Measure two or more models on the same text, or on random or repeated tokens, and save comparison.json.

    Each model uses its own tokenizer and chat template. A failure ends the comparison.

    Raises:
        InputError: before any measurement, if there are fewer than two models, a model is repeated or its config cannot
            be loaded, or see `Request.check` and `measure_all`. Later, if a model cannot be loaded or measured on this
            text, for example because the text is too short.
    """
    if len(models) < 2:
        raise InputError("a comparison needs two models or more: sinklab compare A B --text FILE")
    for model in models:
        check_name(model)
    text = request.check(text)
    for model in models:
        check_revision(model, loading.revision)
    source = text_hash(text)
    items = [
        Item(
            label if label != model else name_in_results(model, loading.subfolder),
            model,
            loading,
            text,
            source,
            request,
        )
        for label, model in labels(models).items()
    ]
    result_of = partial(Survey, "models", {"text": None if text is None else str(text)})
    return measure_all(items, result_of, out, FILES["models"], observe, stop_at_failure=True)


def measure_domains(
    model: str,
    folder: Path | None,
    request: Request,
    *,
    loading: Loading = AS_IT_IS,
    out: Path | None = None,
    observe: Observer = ignore,
) -> Survey:
    """Measure a model on every text file in or below a folder (`domain_files`), and save domains.json.

    A domain has fewer sequences than requested if its file is too short.

    Raises:
        InputError: see `measure_all` and `Request.check_options`; also if `folder` is not a folder of texts, the inputs
            are not natural, or all domains fail. If only some fail, the results list them with the reasons.
    """
    if folder is None or not folder.is_dir():
        got = "" if folder is None else f"; got {folder}"
        raise InputError(f"--by-domain needs --text FOLDER, a folder of text files{got}")
    if request.options.inputs != "natural":
        raise InputError(f"--by-domain measures text: remove --inputs {request.options.inputs}")
    check_name(model)
    request.check_options()
    request = request.model_copy(update={"fewer": True})
    items = [Item(name, model, loading, file, text_hash(file), request) for name, file in domain_files(folder).items()]
    for note in notes_on_folder(folder):
        observe(JobEvent("noted", text=note))
    header = {"model": name_in_results(model, loading.subfolder), "text": str(folder)}
    return _any(measure_all(items, partial(Survey, "domains", header), out, FILES["domains"], observe))


def measure_checkpoints(
    model: str,
    revisions: Sequence[str],
    text: Path | None,
    request: Request,
    *,
    loading: Loading = AS_IT_IS,
    out: Path | None = None,
    observe: Observer = ignore,
) -> Survey:
    """Measure checkpoints of a model (`saved_models`) with the same text and settings, and save checkpoints.json.

    `loading.revision` is not used.

    Raises:
        InputError: see `saved_models`, `Request.check` and `measure_all`; also if all checkpoints fail. If only some
            fail, the results list them with the reasons.
    """
    saved = {one.key: one for one in saved_models(model, revisions)}
    text = request.check(text)
    source = text_hash(text)
    items = [
        Item(
            name,
            one.model,
            replace(loading, revision=one.revision),
            text,
            source,
            request,
            one.step if is_run(one.model) else None,
            {"step": one.step},
        )
        for name, one in saved.items()
    ]
    listed = {key: SavedCheckpoint(step=one.step, unit=one.unit, checkpoint=one.name) for key, one in saved.items()}
    header = {"model": name_in_results(model, loading.subfolder), "text": None if text is None else str(text)}
    result_of = partial(Survey, "checkpoints", header, saved=listed)
    return _any(measure_all(items, result_of, out, FILES["checkpoints"], observe, check_first=False))


def _any(found: Survey) -> Survey:
    """Return the survey; raise InputError with the first failure if all of its measurements failed."""
    if not found.outcome.measured:
        name, failure = next(iter(found.outcome.failed.items()))
        raise InputError(f"none of the {len(found.outcome.failed)} {found.kind} could be measured; {name}: {failure}")
    return found


def domain_files(folder: Path) -> dict[str, Path]:
    """Return the text files in and below a folder by domain: the file's path in the folder.

    The suffixes are removed unless two files differ only in it, or a folder with texts has the same name.

    Raises:
        InputError: if the folder has no text file.
    """
    files = text_files(folder)
    bare = [without_kind(file.relative_to(folder)).as_posix() for file in files]
    nested = {parent.as_posix() for name in bare for parent in PurePosixPath(name).parents}
    return {
        name if bare.count(name) == 1 and name not in nested else file.relative_to(folder).as_posix(): file
        for name, file in zip(bare, files, strict=True)
    }
