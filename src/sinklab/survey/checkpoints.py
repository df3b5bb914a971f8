"""The checkpoints of a model during training, ordered by step.

Checkpoints are revisions of a model on the hub, folders of a directory, or checkpoints of a run. Steps are parsed
from names such as those of Pythia (step1000), OLMo (stage1-step1000-tokens5B) and Hugging Face's Trainer
(checkpoint-1000). In names such as chck_100M, a number with M, B or T is a number of tokens (in BabyLM's names, of
words), by which the checkpoints are ordered.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from sinklab.errors import InputError
from sinklab.models.huggingface.loading import check_name, check_revision
from sinklab.opening import is_run
from sinklab.train.checkpoint import steps_saved

StepUnit = Literal["step", "tokens"]
"""Unit of the numbers in checkpoint names."""

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
    named: list[tuple[str, str, str | None]]
    if revisions:
        check_revision(model, revisions[0])
        named = [(name, model, name) for name in revisions]
    elif is_run(model):
        named = [(f"step_{step}", model, None) for step in steps_saved(folder / "checkpoints")]
    elif folder.is_dir():
        named = [(path.name, str(path), None) for path in sorted(folder.iterdir()) if (path / CONFIG).is_file()]
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
