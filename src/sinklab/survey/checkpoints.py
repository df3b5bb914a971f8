"""Measure a model over its training: one measurement per checkpoint, ordered by step.

Checkpoints are revisions of a model on the hub, folders of a directory, or checkpoints of a run. Steps are parsed
from names such as those of Pythia (step1000), OLMo (stage1-step1000-tokens5B) and Hugging Face's Trainer
(checkpoint-1000). A number with M, B or T is read as a number of tokens (chck_100M; BabyLM's count words), by which the
checkpoints are then ordered.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from sinklab.data.sources.corpora import identity
from sinklab.errors import InputError
from sinklab.jobs.progress import Observer, ignore
from sinklab.measuring.measurement import Measurement
from sinklab.models.hooks import Progress
from sinklab.models.huggingface.loading import AS_IT_IS, Loading, check_name, check_revision, name_in_results
from sinklab.opening import is_run
from sinklab.schema import finite_or_none
from sinklab.survey.measure_many import Item, Outcome, deciding_request, measure_all
from sinklab.survey.measure_one import load_model, measure_loaded
from sinklab.survey.request import Request
from sinklab.survey.suites import MeasuredCheckpoint, StepUnit
from sinklab.train.directory.checkpoint import steps_saved

CHECKPOINTS = "checkpoints.json"
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
        step: number of updates or tokens at the checkpoint.
        name: name of the revision or folder; `step_N` for a run.
        model: Hugging Face id, model directory or run directory.
        revision: revision on the hub; None for a local model.
        place: directory of the checkpoint; None for a model on the hub.
        unit: unit of `step`.
    """

    step: int
    name: str
    model: str
    revision: str | None = None
    place: Path | None = None
    unit: StepUnit = "step"

    @property
    def key(self) -> str:
        """Key of the checkpoint in the results, and name of its directory: step_100, tokens_100000000."""
        return f"{self.unit}_{self.step}"


@dataclass(frozen=True)
class Checkpoints:
    """Measurements of a model's checkpoints, by key (`step_N` or `tokens_N`).

    Attributes:
        model: name or path of the model.
        text: path or name of the text; None without a text.
        saved: checkpoints by key, ordered by step (or tokens).
        outcome: measurements and reasons for failures, by key.
    """

    model: str
    text: str | None
    saved: dict[str, SavedModel]
    outcome: Outcome

    def rows(self) -> dict[str, MeasuredCheckpoint]:
        """Return the main numbers of each measured checkpoint by key, in the order of `saved`."""
        return {name: _row(self.saved[name], one) for name, one in self.outcome.measured.items()}

    def document(self) -> dict[str, Any]:
        """Return the content of checkpoints.json."""
        return {
            "schema": 1,
            "model": self.model,
            "text": self.text,
            "checkpoints": {name: row.model_dump() for name, row in self.rows().items()},
            "failed": self.outcome.failed,
        }


def measure_checkpoints(
    model: str,
    revisions: Sequence[str],
    text: Path | None,
    request: Request,
    *,
    loading: Loading = AS_IT_IS,
    out: Path | None = None,
    observe: Observer = ignore,
) -> Checkpoints:
    """Measure checkpoints of a model at several steps of its training, on the same sequences.

    Args:
        model: Hugging Face id with `revisions`; else a folder of checkpoints or a run directory.
        revisions: revisions of the model, whose names contain a step or number of tokens; they replace that of
            `loading`.
        out: output directory: checkpoints.json and one directory per checkpoint; a repeated call resumes.

    Raises:
        InputError: see `saved_models`; also if text or an option is unusable, `out` cannot be written or has results
            with other settings, or all checkpoints fail. If only some checkpoints fail, they are listed in the results.
        HeldError: if another process writes to `out`.
        UnsavedError: if a result cannot be saved; the exception contains the results so far.
    """
    saved = {one.key: one for one in saved_models(model, revisions)}
    request.check(text)
    source = None if text is None else identity(str(text))

    def measure(one: SavedModel, how: Loading, progress: Progress) -> Measurement:
        step = one.step if is_run(one.model) else None
        return measure_loaded(load_model(one.model, how, step, request=request, text=text), text, request, progress)

    items = []
    for name, one in saved.items():
        how = replace(loading, revision=one.revision)
        decides = deciding_request(one.model, one.place, source, how, request) | {"step": one.step}
        items.append(Item(name, decides, partial(measure, one, how)))
    result_of = partial(
        Checkpoints, name_in_results(model, loading.subfolder), None if text is None else str(text), saved
    )
    found = measure_all(items, result_of, out, CHECKPOINTS, observe)
    found.outcome.check_any("checkpoints")
    return found


def saved_models(model: str, revisions: Sequence[str]) -> list[SavedModel]:
    """List the checkpoints of a model, ordered by step or by tokens.

    Folders without a step or number of tokens in the name, or without a config.json, are skipped.

    Raises:
        InputError: if the model is neither local nor a valid hub name, revisions of a local model are requested, the
            name of a revision lacks a step, two checkpoints have the same step, steps and tokens are mixed, a folder or
            run has no checkpoints, or a model on the hub (or a file) is passed without revisions.
    """
    check_name(model)
    folder = Path(model).expanduser()
    if revisions:
        check_revision(model, revisions[0])
        found = [_revision(model, name) for name in revisions]
    elif is_run(model):
        kept = folder / "checkpoints"
        found = [SavedModel(step, f"step_{step}", model, place=kept / f"step_{step:08d}") for step in steps_saved(kept)]
    elif folder.is_dir():
        found = list(_folders(folder))
    else:
        raise InputError(
            f"{model} is not a folder of checkpoints or a run: select the checkpoints of a model on the hub by branch "
            "or tag, --revision step1000 --revision step2000"
        )
    if not found:
        raise InputError(
            f"{model} contains no checkpoints: expected folders such as checkpoint-100, step1000 or chck_100M with a "
            "config.json each, or a run directory with checkpoints"
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


def step_in(name: str) -> tuple[int, StepUnit] | None:
    """Parse the step (50K is 50,000) or number of tokens in a checkpoint name, with its unit; None without either."""
    if found := STEP.search(name):
        return int(found[1]) * (1000 if found[2] else 1), "step"
    if found := TOKENS.search(name):
        return round(float(found[1]) * MAGNITUDES[found[2].lower()]), "tokens"
    return None


def _revision(model: str, name: str) -> SavedModel:
    if (known := step_in(name)) is None:
        raise InputError(
            f"--revision {name} does not contain its step or number of tokens, over which several revisions are "
            "plotted: pass names such as step1000, stage1-step1000-tokens5B or chck_100M"
        )
    return SavedModel(known[0], name, model, revision=name, unit=known[1])


def _folders(folder: Path) -> Iterator[SavedModel]:
    for path in sorted(folder.iterdir()):
        known = step_in(path.name)
        if known is not None and (path / "config.json").is_file():
            yield SavedModel(known[0], path.name, str(path), place=path, unit=known[1])


def _row(saved: SavedModel, measured: Measurement) -> MeasuredCheckpoint:
    return MeasuredCheckpoint(
        step=saved.step,
        unit=saved.unit,
        checkpoint=saved.name,
        sink_1=measured.sink_rate[0],
        uniform_ratio=measured.uniform_ratio[0],
        sink_bias=measured.sink_rate_bias,
        loss=measured.loss,
        norm_ratio=finite_or_none(max(measured.hidden_norm_ratio or [], default=None)),
        by_layer=[
            float(100 * (first_NH > measured.eps).mean()) for first_NH in measured.importance_first.swapaxes(0, 1)
        ],
    )
