"""Suites: one model on several texts (domains), several models on one text, and the checkpoints of one model.

A suite is a `Survey` of `measure_all` with a document of all measurements: domains.json, comparison.json or
checkpoints.json (`FILES`), which reports read as a `SuiteDocument`.

The checkpoints of a model during training, ordered by step.

Checkpoints are revisions of a model on the hub, folders of a directory, or checkpoints of a run. Steps are parsed
from names such as those of Pythia (step1000), OLMo (stage1-step1000-tokens5B) and Hugging Face's Trainer
(checkpoint-1000). In names such as chck_100M, a number with M, B or T is a number of tokens (in BabyLM's names, of
words), by which the checkpoints are ordered.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from sinklab.data.textfiles import notes_on_folder, text_files, without_kind
from sinklab.errors import InputError
from sinklab.jobs import JobEvent, Observer, ignore
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.options import Request
from sinklab.measuring.registry import compared
from sinklab.models.huggingface.loading import AS_IT_IS, Loading, check_name, check_revision, name_in_results
from sinklab.opening import is_run
from sinklab.schema import ReadDocument, finite_or_none
from sinklab.survey.measure import Item, Outcome, labels, measure_all, text_hash, without_hash
from sinklab.train.checkpoint import steps_saved

StepUnit = Literal["step", "tokens"]
"""Unit of the numbers in checkpoint names."""

CONFIGS = ("config.json", "adapter_config.json")  # a directory with one of them is a model or a PEFT adapter
STEP = re.compile(
    r"(?:(?:^|[^a-z])(?:global[-_]?)?(?:step|checkpoint|ckpt|chck|iter)[-_]?|^(?=\d+k?$))(\d+)(k?)(?![a-z\d]|\.\d)",
    re.I,
)
TOKENS = re.compile(r"(?:^|[^a-z])(?:checkpoint|ckpt|chck|tokens?)[-_]?(\d+(?:\.\d+)?)([MBT])(?![a-z\d])", re.I)
MAGNITUDES = {"m": 10**6, "b": 10**9, "t": 10**12}


@dataclass(frozen=True)
class SavedModel:
    """A checkpoint of a model during training.

    Attributes:
        step: number of updates or, if `unit` is "tokens", of tokens, before the checkpoint.
        name: name of the revision or folder; `step_N` for a run.
        model: Hugging Face id, model directory or run directory.
        revision: revision on the hub; None for a local model.
    """

    step: int
    unit: StepUnit
    name: str
    model: str
    revision: str | None

    @property
    def key(self) -> str:
        """Key in checkpoints.json and name of the measurement's subdirectory, such as step_100 or tokens_100000000."""
        return f"{self.unit}_{self.step}"


def saved_models(model: str, revisions: Sequence[str]) -> list[SavedModel]:
    """List the checkpoints of a model, ordered by step or by tokens.

    A folder is skipped if its name contains neither a step nor a number of tokens, or if it is neither a model
    (config.json) nor a PEFT adapter (adapter_config.json).

    Args:
        model: Hugging Face id if `revisions` are passed; else a folder of checkpoints or a run directory.
        revisions: revisions on the hub, each named after a step or number of tokens; empty for local models.

    Raises:
        InputError: if the model is neither local nor a valid hub name, revisions of a local model or none of a model on
            the hub are passed, a revision has no number, two checkpoints have the same number, steps and tokens are
            mixed, or there are no checkpoints.
    """
    check_name(model)
    folder = Path(model)
    named: list[tuple[str, str, str | None]]
    if revisions:
        check_revision(model, revisions[0])
        named = [(name, model, name) for name in revisions]
    elif is_run(model):
        named = [(f"step_{step}", model, None) for step in steps_saved(folder / "checkpoints")]
    elif folder.is_dir():
        named = [(name, str(folder / name), None) for name in _model_folders(folder)]
    else:
        raise InputError(
            f"{model} is not a folder of checkpoints or a run: select the checkpoints of a model on the hub by branch "
            "or tag, --revision step1000 --revision step2000"
        )
    found = [SavedModel(*known, *one) for one in named if (known := step_in(one[0])) is not None]
    if unknown := [name for name in revisions if step_in(name) is None]:
        raise InputError(
            f"--revision {unknown[0]} does not contain its step or number of tokens, which several revisions need: "
            "pass names such as step1000, stage1-step1000-tokens5B or chck_100M"
        )
    if not found:
        raise InputError(
            f"{model} contains no checkpoints: expected folders such as checkpoint-100, step1000 or chck_100M with a "
            "config.json or adapter_config.json each, or a run directory with checkpoints"
        )
    found.sort(key=lambda one: one.step)
    for one, other in pairwise(found):
        if one.unit != other.unit:
            steps, tokens = (one, other) if one.unit == "step" else (other, one)
            raise InputError(
                f"{steps.name} contains a step and {tokens.name} a number of tokens, which cannot share an axis: "
                "pass checkpoints of one kind"
            )
        if one.step == other.step:
            raise InputError(f"{one.name} and {other.name} have the same {one.unit}, {one.step}: pass one of them")
    return found


def folders_without_step(folder: Path) -> list[str]:
    """Return the sorted names of the model folders that `saved_models` skips because of their names; none for a run."""
    return [] if is_run(str(folder)) else [name for name in _model_folders(folder) if step_in(name) is None]


def _model_folders(folder: Path) -> list[str]:
    return sorted({path.parent.name for name in CONFIGS for path in folder.glob(f"*/{name}")})


def step_in(name: str) -> tuple[int, StepUnit] | None:
    """Return the step (50K: 50,000) or number of tokens in a checkpoint name, with its unit; None if there is none."""
    if found := STEP.search(name):
        return int(found[1]) * (1000 if found[2] else 1), "step"
    if found := TOKENS.search(name):
        return round(float(found[1]) * MAGNITUDES[found[2].lower()]), "tokens"
    return None


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
        found = {name: one.document() for name, one in measured.items()}
        if self.saved:
            found = {
                name: {
                    **self.saved[name].model_dump(),
                    "sink_1": one.sink_rate[0],
                    "sink_bias": one.sink_rate_bias,
                    "uniform_ratio": one.uniform_ratio[0],
                    "loss": one.loss,
                    "norm_ratio": finite_or_none(max(one.hidden_norm_ratio or [], default=None)),
                    "by_layer": one.sink_rate_of_heads().mean(1).tolist(),
                }
                for name, one in measured.items()
            }
        if self.kind == "models":
            return {**header, "rows": [row.model_dump() for row in compared_rows(measured)], "models": found}
        return {**header, self.kind: found, "failed": self.outcome.failed}


def compared_rows(measured: Mapping[str, Measurement]) -> list[ComparedQuantity]:
    """Return a row for each number that at least one model has; differences are relative to the first model.

    Losses per token are subtracted only of models that read the same tokens (`same_tokens`).
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
            value, reference, same = values[other], values[first], same_tokens(measured[first], measured[other])
            if value is not None and reference is not None and (unit != "nats/token" or same):
                differences[other] = value - reference
        row = {"values": values, "differences": differences, "infinite": infinite}
        rows.append(ComparedQuantity(quantity=quantity, unit=unit, **row))
    return rows


def same_tokens(one: Measurement, other: Measurement) -> bool:
    """Return True if the vocabularies agree, and the first tokens up to a leading BOS, as without a chat template."""
    if one.vocabulary is None or one.vocabulary != other.vocabulary:
        return False
    if one.fed is None or other.fed is None:
        return True
    a, b = one.fed.ids, other.fed.ids
    return a == b or a[1:] == b[:-1] or a[:-1] == b[1:]


def named_models(models: Sequence[str]) -> dict[str, str]:
    """Return the models of a comparison by name: NAME of NAME=MODEL, else the label, without the hash of a run.

    Raises:
        InputError: if a model or a name is repeated.
    """
    pairs = [("", one) if Path(one).exists() or "=" not in one else tuple(one.split("=", 1)) for one in models]
    found = labels([model for _, model in pairs])
    short = {without_hash(label): model for label, model in found.items()}
    names = {model: label for label, model in (short if len(short) == len(found) else found).items()}
    named = {name or names[model]: model for name, model in pairs}
    if len(named) < len(models):
        raise InputError("two of the models have the same name: give each its own, as NAME=MODEL")
    return named


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

    Args:
        models: models, or NAME=MODEL (`named_models`).

    Raises:
        InputError: before any measurement, if there are fewer than two models, a model is repeated or its config cannot
            be loaded, or see `Request.check` and `measure_all`. Later, if a model cannot be loaded or measured on this
            text, for example because the text is too short.
    """
    if len(models) < 2:
        raise InputError("a comparison needs two models or more: sinklab compare A B --text FILE")
    named = named_models(models)
    for model in named.values():
        check_name(model)
    text = request.check(text)
    for model in named.values():
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
        for label, model in named.items()
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
