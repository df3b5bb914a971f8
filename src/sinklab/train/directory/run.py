"""A run directory: self-contained, named by the hash of recipe and data, resumed rather than trained again.

env.json           the run's hash, its data, versions, device
recipe.yaml        the resolved recipe, defaults included
tokenizer.json     the tokenizer of its text
metrics.jsonl      one object per evaluation
checkpoints/       step_N folders
failed.json        step and message, where the last call ended with an error
lock               held by the process that trains
measurement.json, measurement.npz, when the run is done

Extension: a run with more `train.steps` continues a shorter one where the two agree so far. The number of steps is part
of the run's hash, because the learning rate may depend on it. Where the rates of all steps so far are those of the
longer run (a flat schedule; wsd before its decay; any during its warm-up), the shorter run is the beginning of the
longer one, bit for bit, and the directory becomes the longer run's. env.json records it: `hash` is the longer run's,
and `continues` lists hash and steps of the earlier ones.
"""

import shutil
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from sinklab.data.loader import Loader
from sinklab.data.prepare import prepared
from sinklab.data.shards import TokenDataset, TokenFile
from sinklab.device import multiplies_natively, pick_device
from sinklab.errors import InputError
from sinklab.files import write_json, write_text, written_aside
from sinklab.model.transformer import Transformer
from sinklab.train.directory.checkpoint import load_weights, steps_saved, take_newest
from sinklab.train.directory.environment import (
    ENVIRONMENT,
    difference,
    earlier_hashes,
    environment,
    read_environment,
    recorded_hash,
)
from sinklab.train.optim import learning_rate
from sinklab.train.recipe import Recipe, load_recipe

DEFAULT_ROOT = Path("runs")
RECIPE = "recipe.yaml"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
OWN = (RECIPE, *TOKENIZER, "metrics.jsonl", "checkpoints", "measurement.json", "measurement.npz")


@dataclass(frozen=True)
class Run:
    """An opened run directory.

    Attributes:
        directory: of all its files.
        recipe: resolved, with the vocabulary size set.
        dataset: its tokens.
        hash: of recipe and data; two runs with the same hash are the same run.
        earlier: hashes of the shorter runs that it extends.
        shorter: steps of a shorter run in the directory that this run will extend; None without such a run.
    """

    directory: Path
    recipe: Recipe
    dataset: TokenDataset
    hash: str
    earlier: tuple[str, ...] = ()
    shorter: int | None = None

    @property
    def hashes(self) -> tuple[str, ...]:
        """Hashes of the runs whose checkpoints it can continue."""
        return (self.hash, *self.earlier)

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.directory / "metrics.jsonl"

    @property
    def failure(self) -> Path:
        return self.directory / "failed.json"

    def loader(self, split: Literal["train", "valid"]) -> Loader:
        """Batches of the training or validation tokens under the recipe's data interventions."""
        recipe = self.recipe
        return Loader.of(
            self.dataset,
            split,
            context=recipe.model.context,
            batch_size=recipe.train.batch_size,
            seed=recipe.seed,
            config=recipe.data,
        )


def resolve(recipe: Recipe, dataset: TokenDataset) -> Recipe:
    """The recipe with its open values set: vocabulary size and EOS from the data, precision from the device.

    Raises:
        InputError: the model's vocabulary is smaller than the tokenizer's.
    """
    size, attention = recipe.model.vocab_size, recipe.model.attention
    if size is not None and size < dataset.vocab_size:
        raise InputError(f"model.vocab_size {size} is smaller than the tokenizer's {dataset.vocab_size}")
    pattern = recipe.model.pattern
    if attention.mask.kind == "document":
        mask = attention.mask.model_copy(update={"eos_id": dataset.eos_id})
        attention = attention.model_copy(update={"mask": mask})
    if pattern is not None and pattern.mask is not None and pattern.mask.kind == "document":
        mask = pattern.mask.model_copy(update={"eos_id": dataset.eos_id})
        pattern = pattern.model_copy(update={"mask": mask})
    found = {"vocab_size": size or dataset.vocab_size, "attention": attention, "pattern": pattern}
    model = recipe.model.model_copy(update=found)
    train = recipe.train
    precision = resolved_precision(train.precision, pick_device(train.device))
    return recipe.model_copy(update={"model": model, "train": train.model_copy(update={"precision": precision})})


def resolved_precision(name: Literal["auto", "fp32", "bf16"], device: torch.device) -> Literal["fp32", "bf16"]:
    """`train.precision` with auto replaced by the precision for a device."""
    if name == "auto":
        return "bf16" if multiplies_natively(torch.bfloat16, device) else "fp32"
    return name


def open_run(recipe: Recipe, dataset: TokenDataset, out: Path | None = None) -> Run:
    """The run of a recipe on data: new, existing, or extending a shorter one. Nothing is written (see `establish`).

    Args:
        out: default `runs/NAME-HASH`.

    Raises:
        InputError: `out` holds another run, also one with fewer steps that this one does not extend, or files that no
            run has written.
        SinklabError: its env.json is damaged.
    """
    recipe = resolve(recipe, dataset)
    run_hash = recipe.content_hash(dataset.fingerprint)
    run = Run(out or DEFAULT_ROOT / f"{recipe.name}-{run_hash}", recipe, dataset, run_hash)
    try:
        if run.directory.exists() and not run.directory.is_dir():
            raise InputError(f"{run.directory} is a file: choose another --out")
        with suppress(FileNotFoundError):
            (run.directory / ENVIRONMENT).stat()
    except OSError as error:  # below a file, no permission, too long a name
        reason = f"{run.directory} cannot be a run directory: {error.strerror}"
        raise InputError(f"{reason}. Choose another --out") from error
    found = recorded_hash(run.directory)
    if found is None and (strange := [name for name in OWN if (run.directory / name).exists()]):
        raise InputError(f"{run.directory} holds {strange[0]}, which no run has written: choose another --out")
    earlier = earlier_hashes(run.directory)
    if found in (None, run_hash):
        return replace(run, earlier=earlier)
    shorter = shorter_run(run.directory, recipe, dataset.fingerprint, found)
    if shorter is None:
        raise InputError(
            f"{run.directory} holds run {found}, and this recipe on this data is run {run_hash}"
            f"{difference(run.directory / RECIPE, recipe)}: choose another --out"
        )
    return replace(run, earlier=(*earlier, found), shorter=shorter)


def existing_run(recipe: Recipe, dataset: TokenDataset, out: Path | None = None) -> Run:
    """The run of `open_run`, which must have been started.

    Raises:
        InputError: there is no such run, or `out` holds another one.
    """
    run = open_run(recipe, dataset, out)
    if recorded_hash(run.directory) is None:
        raise InputError(f"{run.directory} holds no run: train it first, or give its --out")
    return run


def establish(run: Run) -> None:
    """Write the missing ones of env.json, recipe.yaml and the tokenizer's files; needs the run's lock.

    env.json is first: a directory that has it belongs to the run, and files that a kill left out are written next time.

    Raises:
        InputError: another run has been started there meanwhile.
        SinklabError: a file cannot be written.
    """
    open_run(run.recipe, run.dataset, run.directory)
    if (run.directory / ENVIRONMENT).exists():
        _extend(run)
    else:
        data = {"fingerprint": run.dataset.fingerprint, "source": run.recipe.data.source}
        write_json(run.directory / ENVIRONMENT, {"hash": run.hash, "data": data, **environment(run.recipe)})
    if not (run.directory / RECIPE).exists():
        write_text(run.directory / RECIPE, run.recipe.to_yaml())
    for name in TOKENIZER:
        if not (run.directory / name).exists():
            with written_aside(run.directory / name) as aside:
                shutil.copyfile(run.dataset.tokenizer_path.with_name(name), aside)


@dataclass(frozen=True)
class TrainedRun:
    """A finished or interrupted run at one of its checkpoints."""

    model: Transformer
    recipe: Recipe
    tokenizer_path: Path
    step: int


def load_run(directory: Path, step: int | None = None) -> TrainedRun:
    """The model of a run directory at its newest valid checkpoint, in evaluation mode.

    The run may be in progress.

    Args:
        step: of the checkpoint; the newest unless given.

    Raises:
        InputError: not a run directory, nothing has been saved there yet, or no valid checkpoint of that step is kept.
        SinklabError: none of its checkpoints is valid, or its env.json is damaged.
    """
    if not (directory / RECIPE).is_file():
        raise InputError(f"{directory} is not a run directory: it has no {RECIPE}")
    recipe = load_recipe(str(directory / RECIPE))
    if recipe.model.vocab_size is None:
        raise InputError(
            f"{directory} is not a run directory: its {RECIPE} has no model.vocab_size, so no run has written it"
        )
    model = Transformer(recipe.model)
    recorded = recorded_hash(directory)
    hashes = None if recorded is None else (recorded, *earlier_hashes(directory))
    found = take_newest(directory / "checkpoints", model, lambda path: load_weights(path, model), hashes, at_most=step)
    if step is not None and (found is None or found[1].step != step):
        raise InputError(f"{directory} has no valid checkpoint of step {step:,}: give a step that it has kept")
    if found is None:
        raise InputError(f"{directory} has no checkpoint yet: train it with `sinklab train` first")
    return TrainedRun(model.eval(), recipe, directory / "tokenizer.json", found[1].step)


def validation_tokens(directory: Path) -> TokenFile:
    """The validation tokens of a run; its data is prepared again where it is not in the cache.

    Raises:
        InputError: its text cannot be read, or has changed since the run was trained.
    """
    recipe = load_recipe(str(directory / RECIPE))
    dataset = prepared(recipe.data)
    if recipe.content_hash(dataset.fingerprint) != recorded_hash(directory):
        raise InputError(
            f"the text of {directory} ({recipe.data.source}) or its recipe has changed since the run was trained: "
            "give another text"
        )
    return dataset.valid


MEASURED = ("measurement.json", "measurement.npz", "record.json")
"""Final results of a run, removed when a longer one extends it."""


def shorter_run(directory: Path, recipe: Recipe, data: str, found: str) -> int | None:
    """The steps of a directory's run where `recipe` is the same run with more steps, else None.

    Args:
        recipe: resolved.
        data: fingerprint of its data.
        found: hash of the directory's run.

    Raises:
        InputError: the longer run has another learning rate at a step that was made.
    """
    steps, longer = _steps(directory), recipe.train.steps
    if steps is None or steps >= longer or with_steps(recipe, steps).content_hash(data) != found:
        return None
    reached = max(steps_saved(directory / "checkpoints"), default=0)
    for step in range(min(reached + 1, steps)):  # metrics have the rate of the next update
        peak, schedule = recipe.optim.lr, recipe.schedule
        if learning_rate(step, steps, peak, schedule) != learning_rate(step, longer, peak, schedule):
            raise InputError(
                f"{directory} holds a run of {steps} steps, which has reached step {reached}; from step {step + 1} on "
                f"its learning rate differs from that of {longer} steps (schedule.shape {schedule.shape}), so it "
                "cannot be extended. Choose another --out, or schedule.shape flat for runs to be extended"
            )
    return steps


def with_steps(recipe: Recipe, steps: int) -> Recipe:
    """The recipe with another number of steps."""
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": steps})})


def _extend(run: Run) -> None:
    """Make the directory of a shorter run that of the longer one; the next call completes an interrupted one."""
    found, steps = read_environment(run.directory), _steps(run.directory)
    if found["hash"] != run.hash:
        earlier = [*found.get("continues", ()), {"hash": found["hash"], "steps": steps}]
        write_json(run.directory / ENVIRONMENT, {**found, "hash": run.hash, "continues": earlier})
    if steps is not None and steps != run.recipe.train.steps:
        for name in MEASURED:
            (run.directory / name).unlink(missing_ok=True)
        write_text(run.directory / RECIPE, run.recipe.to_yaml())


def _steps(directory: Path) -> int | None:
    """`train.steps` of the recipe in a run directory; None if it cannot be read."""
    try:
        return load_recipe(str(directory / RECIPE)).train.steps
    except InputError:
        return None
