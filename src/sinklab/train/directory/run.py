"""A run directory: self-contained, named by what it computes, continued rather than repeated.

env.json           the run's hash, its data, versions, device
recipe.yaml        the resolved recipe, defaults included
tokenizer.json     what turned its text into tokens
metrics.jsonl      one object per evaluation
checkpoints/       step_N folders
failed.json        step and message, where the last call ended with an error
lock               held by the process that trains
measurement.json, measurement.npz, when the run is done
"""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from sinklab.attention.config import AttentionConfig
from sinklab.data.loader import Loader, train_loader, valid_loader
from sinklab.data.prepare import prepared
from sinklab.data.shards import TokenDataset
from sinklab.data.tokenfile import TokenFile
from sinklab.device import multiplies_natively, pick_device
from sinklab.errors import InputError
from sinklab.files import write_json, write_text, written_aside
from sinklab.model.transformer import Transformer
from sinklab.train.directory.checkpoint import load_weights, take_newest
from sinklab.train.directory.environment import ENVIRONMENT, difference, earlier_hashes, environment, recorded_hash
from sinklab.train.directory.extend_run import become_longer, shorter_run
from sinklab.train.recipe import Recipe, load_recipe

DEFAULT_ROOT = Path("runs")
RECIPE = "recipe.yaml"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
OWN = (RECIPE, *TOKENIZER, "metrics.jsonl", "checkpoints", "measurement.json", "measurement.npz")


@dataclass(frozen=True)
class Run:
    """An opened run directory.

    Attributes:
        directory: where everything of the run is.
        recipe: resolved, with the vocabulary size set.
        dataset: its tokens.
        hash: of recipe and data; two runs with the same hash are the same run.
        earlier: hashes of the shorter runs that it goes on from in this directory (see `extend_run`).
        shorter: steps of the run that is there and is still to become this one, None where there is none.
    """

    directory: Path
    recipe: Recipe
    dataset: TokenDataset
    hash: str
    earlier: tuple[str, ...] = ()
    shorter: int | None = None

    @property
    def hashes(self) -> tuple[str, ...]:
        """Whose checkpoints are its own."""
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
        return (train_loader if split == "train" else valid_loader)(
            self.dataset,
            context=recipe.model.context,
            batch_size=recipe.train.batch_size,
            seed=recipe.seed,
            config=recipe.data,
        )


def resolve(recipe: Recipe, dataset: TokenDataset) -> Recipe:
    """The recipe with what it left open: the vocabulary size and the EOS from the data, the precision from the device.

    Raises:
        InputError: the model's vocabulary is smaller than the tokenizer's.
    """
    size = recipe.model.vocab_size
    if size is not None and size < dataset.vocab_size:
        raise InputError(f"model.vocab_size {size} is smaller than the tokenizer's {dataset.vocab_size}")
    model = recipe.model.model_copy(
        update={"vocab_size": size or dataset.vocab_size, "attention": _with_eos(recipe.model.attention, dataset)}
    )
    train = recipe.train
    precision = resolved_precision(train.precision, pick_device(train.device))
    return recipe.model_copy(update={"model": model, "train": train.model_copy(update={"precision": precision})})


def resolved_precision(name: Literal["auto", "fp32", "bf16"], device: torch.device) -> Literal["fp32", "bf16"]:
    """What `train.precision` means on a device."""
    if name == "auto":
        return "bf16" if multiplies_natively(torch.bfloat16, device) else "fp32"
    return name


def _with_eos(attention: AttentionConfig, dataset: TokenDataset) -> AttentionConfig:
    """A document mask learns from the data which token ends a document."""
    if attention.mask.kind != "document":
        return attention
    return attention.model_copy(update={"mask": attention.mask.model_copy(update={"eos_id": dataset.eos_id})})


def open_run(recipe: Recipe, dataset: TokenDataset, out: Path | None = None) -> Run:
    """The run of a recipe on data, new or there already, or to be gone on from; nothing is written (`establish` does).

    Args:
        out: default `runs/NAME-HASH`.

    Raises:
        InputError: `out` holds another run, also one with fewer steps that is no beginning of this one, or files that
            no run has written.
        SinklabError: its env.json is damaged.
    """
    recipe = resolve(recipe, dataset)
    run_hash = recipe.content_hash(dataset.fingerprint)
    run = Run(out or DEFAULT_ROOT / f"{recipe.name}-{run_hash}", recipe, dataset, run_hash)
    _check_reachable(run.directory)
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


def _check_reachable(directory: Path) -> None:
    try:
        if directory.exists() and not directory.is_dir():
            raise InputError(f"{directory} is a file: choose another --out")
        (directory / ENVIRONMENT).stat()
    except FileNotFoundError:
        return
    except OSError as error:  # below a file, in somebody else's folder, with too long a name
        raise InputError(f"{directory} cannot be a run directory: {error.strerror}. Choose another --out") from error


def existing_run(recipe: Recipe, dataset: TokenDataset, out: Path | None = None) -> Run:
    """The run as `open_run` has it, which must have been begun.

    Raises:
        InputError: it is not there, or `out` holds another run.
    """
    run = open_run(recipe, dataset, out)
    if recorded_hash(run.directory) is None:
        raise InputError(f"{run.directory} holds no run: train it first, or give its --out")
    return run


def establish(run: Run) -> None:
    """Write what identifies the run into its directory, as far as it is not there. Only who holds its lock may do so.

    env.json is first: a directory that has it belongs to the run, and what a kill has left out is written by the next.

    Raises:
        InputError: meanwhile another run has been begun there.
        SinklabError: it cannot be written.
    """
    open_run(run.recipe, run.dataset, run.directory)
    if (run.directory / ENVIRONMENT).exists():
        become_longer(run.directory, run.recipe, run.hash)
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
    """What measuring needs of a finished or interrupted run."""

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
            f"{directory} is not a run directory: its {RECIPE} is one to train from, and no run has been begun there"
        )
    model = Transformer(recipe.model)
    recorded = recorded_hash(directory)
    hashes = None if recorded is None else (recorded, *earlier_hashes(directory))
    found = take_newest(directory / "checkpoints", model, lambda path: load_weights(path, model), hashes, at_most=step)
    if step is not None and (found is None or found[1].step != step):
        raise InputError(f"{directory} has no valid checkpoint of step {step:,}: name one that it has kept")
    if found is None:
        raise InputError(f"{directory} has no checkpoint yet: train it with `sinklab train` first")
    return TrainedRun(model.eval(), recipe, directory / "tokenizer.json", found[1].step)


def validation_tokens(directory: Path) -> TokenFile:
    """The token ids that a run is validated on, from its data, which is prepared again where it is not at hand.

    Raises:
        InputError: its text cannot be had, or is not what it was when the run was trained.
    """
    recipe = load_recipe(str(directory / RECIPE))
    dataset = prepared(recipe.data)
    if recipe.content_hash(dataset.fingerprint) != recorded_hash(directory):
        raise InputError(
            f"the text of {directory} ({recipe.data.source}) is not what the run was trained on, or its recipe has "
            "been changed: give a text of your own"
        )
    return dataset.valid
