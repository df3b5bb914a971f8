"""Measure a model over its training: one measurement per checkpoint, ordered by step.

Checkpoints are revisions of a model on the hub, folders of a directory, or checkpoints of a run. Steps are parsed
from names such as those of Pythia (step1000), OLMo (stage1-step1000-tokens5B) and Hugging Face's Trainer
(checkpoint-1000). In names such as chck_100M, a number with M, B or T is a number of tokens (in BabyLM's names, of
words), by which the checkpoints are ordered.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from sinklab.errors import InputError
from sinklab.jobs import Observer, ignore
from sinklab.measuring.measurement import Measurement
from sinklab.models.hooks import Progress
from sinklab.models.huggingface.loading import AS_IT_IS, Loading, check_name, check_revision, name_in_results
from sinklab.opening import is_run, open_model
from sinklab.schema import finite_or_none
from sinklab.survey.measure_many import Item, Survey, deciding_request, measure_all, text_hash
from sinklab.survey.measure_one import measure_loaded
from sinklab.survey.request import Request
from sinklab.survey.suites import CheckpointsDocument, MeasuredCheckpoint, StepUnit
from sinklab.train.directory.checkpoint import steps_saved

CONFIG = "config.json"
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
        place: directory of the checkpoint; None for a model on the hub.
    """

    step: int
    unit: StepUnit
    name: str
    model: str
    revision: str | None
    place: Path | None

    @property
    def key(self) -> str:
        """Key in checkpoints.json and name of the measurement's subdirectory, such as step_100 or tokens_100000000."""
        return f"{self.unit}_{self.step}"


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
        HeldError, UnsavedError, SinklabError: see `measure_all`.
    """
    saved = {one.key: one for one in saved_models(model, revisions)}
    request.check(text)
    source = text_hash(text)

    def measure(one: SavedModel, how: Loading, progress: Progress) -> Measurement:
        step = one.step if is_run(one.model) else None
        return measure_loaded(open_model(one.model, how, step=step), text, request, progress)

    items = []
    for name, one in saved.items():
        how = replace(loading, revision=one.revision)
        decides = deciding_request(one.model, one.place, source, how, request) | {"step": one.step}
        items.append(Item(name, decides, partial(measure, one, how)))

    def row_of(name: str, measured: Measurement) -> dict[str, Any]:
        return MeasuredCheckpoint(
            step=saved[name].step,
            unit=saved[name].unit,
            checkpoint=saved[name].name,
            sink_1=measured.sink_rate[0],
            uniform_ratio=measured.uniform_ratio[0],
            sink_bias=measured.sink_rate_bias,
            loss=measured.loss,
            norm_ratio=finite_or_none(max(measured.hidden_norm_ratio or [], default=None)),
            by_layer=measured.sink_rate_of_heads().mean(1).tolist(),
        ).model_dump()

    header = {"model": name_in_results(model, loading.subfolder), "text": None if text is None else str(text)}
    result_of = partial(Survey, CheckpointsDocument, header, row_of)
    found = measure_all(items, result_of, out, CheckpointsDocument.file, observe)
    found.outcome.check_any("checkpoints")
    return found


def saved_models(model: str, revisions: Sequence[str]) -> list[SavedModel]:
    """List the checkpoints of a model, ordered by step or by tokens.

    A folder is skipped if its name contains neither a step nor a number of tokens, or if it has no config.json.

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
    named: list[tuple[str, str, str | None, Path | None]]
    if revisions:
        check_revision(model, revisions[0])
        named = [(name, model, name, None) for name in revisions]
    elif is_run(model):
        kept = folder / "checkpoints"
        named = [(f"step_{step}", model, None, kept / f"step_{step:08d}") for step in steps_saved(kept)]
    elif folder.is_dir():
        named = [(path.name, str(path), None, path) for path in sorted(folder.iterdir()) if (path / CONFIG).is_file()]
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


def folders_without_step(folder: Path) -> list[str]:
    """Return the sorted names of the model folders that `saved_models` skips because of their names; none for a run."""
    folders = [] if is_run(str(folder)) else sorted(path.parent.name for path in folder.glob("*/config.json"))
    return [name for name in folders if step_in(name) is None]


def step_in(name: str) -> tuple[int, StepUnit] | None:
    """Return the step (50K: 50,000) or number of tokens in a checkpoint name, with its unit; None if there is none."""
    if found := STEP.search(name):
        return int(found[1]) * (1000 if found[2] else 1), "step"
    if found := TOKENS.search(name):
        return round(float(found[1]) * MAGNITUDES[found[2].lower()]), "tokens"
    return None
