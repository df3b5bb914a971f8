"""Run directories: self-contained, resumable, named by the hash of recipe and data.

env.json           run hash, data, package versions, machine
recipe.yaml        resolved recipe, defaults included
tokenizer.json, tokenizer_config.json    tokenizer of the run's data
metrics.jsonl      one JSON object per evaluation
checkpoints/       one folder step_N per checkpoint
failed.json        step and message of the error that ended the last training process, if any
lock               lock file of the training process
measurement.json, measurement.npz    measurement of the completed run

Extension: the number of steps is part of the run hash, because the learning rate may depend on it. A run with more
`train.steps` can extend a shorter run if both have the same learning rate at all steps so far: with a flat schedule, a
wsd schedule before its decay, or any schedule during warm-up. The steps of the shorter run are then also those of the
longer one, and the longer run takes over the directory: in env.json, `hash` is the hash of the longer run, and
`continues` lists hash and number of steps of the shorter runs, oldest first.
"""

import filecmp
import json
import math
import platform
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

import sinklab
from sinklab.data.loader import Loader, TokenDataset
from sinklab.data.prepare import prepared
from sinklab.device import float32_if_emulated, multiplies_natively, pick_device, processor_name
from sinklab.errors import InputError, SinklabError, cause
from sinklab.files import RECIPE, RUNS, parse_json, write_json, write_text, written_aside
from sinklab.measuring.registry import Evaluation
from sinklab.model.transformer import Transformer
from sinklab.schema import leaves
from sinklab.train.checkpoint import load_weights, steps_saved, take_newest
from sinklab.train.optim import learning_rate
from sinklab.train.recipe import DATA_ORIGIN, UNHASHED_TRAIN_KEYS, Recipe, load_recipe

ENVIRONMENT = "env.json"
UNHASHED_KEYS = {"name", *(f"train.{key}" for key in UNHASHED_TRAIN_KEYS)}
DATA_KEYS = {f"data.{key}" for key in DATA_ORIGIN}


def read_environment(directory: Path) -> dict[str, Any]:
    """Return the content of a run directory's env.json; an empty dict if the file is missing.

    Raises:
        InputError: if the file cannot be accessed, for example because access is denied or a parent is a file.
        SinklabError: if env.json is not valid JSON or contains no run hash.
    """
    path = directory / ENVIRONMENT
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
        if not all(isinstance(run["hash"], str) for run in (found, *found.get("continues", ()))):
            raise TypeError
        return found
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InputError(f"{directory} cannot be a run directory: {error.strerror}. Choose another --out") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        why = cause(error) if isinstance(error, ValueError) else "it does not contain a run hash"
        raise SinklabError(f"{path} cannot be read ({why}): restore it, or use another directory") from error


def recorded_hash(directory: Path) -> str | None:
    """Return the run hash of a directory; None if env.json is missing. Raises the same errors as `read_environment`."""
    return read_environment(directory).get("hash")


def recorded_hashes(directory: Path) -> tuple[str, ...]:
    """Return the run hash of a directory, then those of the shorter runs that the run extends.

    The tuple is empty if env.json is missing. Raises the same errors as `read_environment`.
    """
    found = read_environment(directory)
    return tuple(run["hash"] for run in (found, *found.get("continues", ())) if run)


def difference(path: Path, recipe: Recipe) -> str:
    """Describe the first three differences of `recipe` from the recipe file at `path`, in parentheses.

    Keys that the data fingerprint covers (`DATA_ORIGIN`) are last, and keys that do not change the result are omitted.
    If no key differs, the description names other possible causes of a different run hash. It is empty if the file is
    not a valid recipe.
    """
    try:
        there = load_recipe(str(path))
    except InputError:
        return ""
    old, new = (leaves(one.model_dump(mode="json")) for one in (there, recipe))
    changed = [key for key in {**new, **old} if old.get(key) != new.get(key) and not _is_below(key, UNHASHED_KEYS)]
    differing = sorted(changed, key=lambda key: _is_below(key, DATA_KEYS))
    shown = ", ".join(f"{key} is {new.get(key)}, not {old.get(key)}" for key in differing[:3])
    return f" ({shown})" if shown else " (the text, the tokenizer or the sinklab version differs)"


def _is_below(key: str, parts: Collection[str]) -> bool:
    return any(f"{key}.".startswith(f"{part}.") for part in parts)


def environment(recipe: Recipe) -> dict[str, Any]:
    """Return time (UTC), versions, machine, device, backend, threads, git state and command of a new run, for env.json.

    Raises the same errors as `pick_device`.
    """
    device = pick_device(recipe.train.device)
    return {
        "begun": datetime.now(UTC).isoformat(timespec="seconds"),
        "sinklab": sinklab.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "processor": processor_name(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})",
        "backend": recipe.model.attention.backend,
        "threads": torch.get_num_threads(),
        "git": _git("rev-parse", "HEAD"),
        "changed_files": None if (changed := _git("status", "--porcelain", ".")) is None else bool(changed),
        "command": sys.argv,
    }


def _git(*arguments: str) -> str | None:
    """Run git in the package's folder and return its output; None if git fails or is not installed."""
    try:
        package = Path(sinklab.__file__).parent
        git = ["git", "--no-optional-locks", "-C", package]
        result = subprocess.run([*git, *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()


TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
OWN = (RECIPE, *TOKENIZER, "metrics.jsonl", "checkpoints", "measurement.json", "measurement.npz")


@dataclass(frozen=True)
class Run:
    """An opened run directory.

    Attributes:
        directory: run directory.
        recipe: resolved recipe, with the vocabulary size set.
        dataset: tokenized dataset.
        hash: run hash, of recipe and data.
        earlier: hashes of the shorter runs that this run extends.
        shorter: number of steps of the shorter run in the directory, if this run will extend it; else None.
    """

    directory: Path
    recipe: Recipe
    dataset: TokenDataset
    hash: str
    earlier: tuple[str, ...] = ()
    shorter: int | None = None

    @property
    def hashes(self) -> tuple[str, ...]:
        """Hashes of the runs from whose checkpoints this run can resume, its own first."""
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
        """Return the loader of a split, with data interventions.

        Raises:
            InputError: see `Loader`; also if the validation text has fewer sequences than the sink metric needs.
        """
        recipe, data = self.recipe, self.dataset
        loader = Loader(
            data.train if split == "train" else data.valid,
            context=recipe.model.context,
            batch_size=recipe.train.batch_size,
            seed=recipe.seed,
            config=recipe.data,
            vocab_size=data.vocab_size,
            bos_id=data.bos_id,
            shuffle=split == "train",
        )
        if split == "valid" and loader.chunks < recipe.metric.sequences:
            raise InputError(
                f"the validation text has {loader.chunks} sequences of {loader.context} tokens, but the metric needs "
                f"{recipe.metric.sequences}: add text, increase data.valid_fraction (of prepared data "
                "--valid-fraction of `sinklab data prepare`) or decrease metric.sequences"
            )
        return loader


def resolve(recipe: Recipe, dataset: TokenDataset) -> Recipe:
    """Return the recipe with values filled in from data and device.

    These are the vocabulary size if it is not set, the EOS id of document masks, and the precision if it is "auto".

    Raises:
        InputError: if the model's vocabulary is smaller than the tokenizer's, or the device is not usable.
    """
    size = recipe.model.vocab_size
    if size is not None and size < dataset.vocab_size:
        raise InputError(f"model.vocab_size {size} is smaller than the tokenizer's {dataset.vocab_size}: remove it")
    found: dict[str, Any] = {"vocab_size": size or dataset.vocab_size}
    for name in ("attention", "pattern"):
        part = getattr(recipe.model, name)
        if part is not None and part.mask is not None and part.mask.kind == "document":
            mask = part.mask.model_copy(update={"eos_id": dataset.eos_id})
            found[name] = part.model_copy(update={"mask": mask})
    model = recipe.model.model_copy(update=found)
    train = recipe.train
    precision = resolved_precision(train.precision, pick_device(train.device))
    return recipe.model_copy(update={"model": model, "train": train.model_copy(update={"precision": precision})})


def resolved_precision(name: Literal["auto", "fp32", "bf16"], device: torch.device) -> Literal["fp32", "bf16"]:
    """Return the precision on a device: "auto" is resolved to "bf16" if supported natively, else to "fp32"."""
    if name == "auto":
        return "bf16" if multiplies_natively(torch.bfloat16, device) else "fp32"
    return name


def emulation_warning(recipe: Recipe) -> str:
    """Return a warning if the recipe trains in bf16 on a CPU that emulates it, else an empty string.

    Raises:
        InputError: if the recipe's device is not usable.
    """
    emulated = float32_if_emulated(torch.bfloat16, pick_device(recipe.train.device)) is torch.float32
    if recipe.train.precision != "bf16" or not emulated:
        return ""
    return (
        "warning: train.precision is bf16, and this CPU has no instructions for it: training takes many times as long "
        "as in fp32 (use a CPU with AVX512-BF16 or AMX, a GPU, or train.precision=fp32, which is another run)"
    )


def open_run(recipe: Recipe, dataset: TokenDataset, out: Path | None = None) -> Run:
    """Open a new run, an existing run, or an extension of a shorter run, without writing files (see `establish`).

    Args:
        out: run directory; default: `runs/NAME-HASH`.

    Raises:
        InputError: as `resolve`; also if the directory cannot be accessed, contains another run that this run cannot
            extend, or contains files of a run without env.json.
        SinklabError: if env.json is damaged.
    """
    recipe = resolve(recipe, dataset)
    run_hash = recipe.content_hash(dataset.fingerprint)
    run = Run(out or RUNS / f"{recipe.name}-{run_hash}", recipe, dataset, run_hash)
    found, *earlier = recorded_hashes(run.directory) or (None,)
    if found is None and (strange := [name for name in OWN if (run.directory / name).exists()]):
        raise InputError(f"{run.directory} has {strange[0]} but no env.json: choose another --out")
    if found is None or found == run_hash:
        return replace(run, earlier=tuple(earlier))
    shorter = shorter_run(run.directory, recipe, dataset.fingerprint, found)
    if shorter is None:
        raise InputError(
            f"{run.directory} contains run {found}, but recipe and data have the hash {run_hash}"
            f"{difference(run.directory / RECIPE, recipe)}: choose another --out"
        )
    return replace(run, earlier=(found, *earlier), shorter=shorter)


def existing_run(recipe: Recipe, dataset: TokenDataset, out: Path | None = None) -> Run:
    """Open an existing run; see `open_run`.

    Raises:
        InputError: if the directory contains no run; also as `open_run`.
        SinklabError: if env.json is damaged.
    """
    run = open_run(recipe, dataset, out)
    if recorded_hash(run.directory) is None:
        raise InputError(f"{run.directory} contains no run: train it first, or pass its --out")
    return run


def establish(run: Run, compiles_loss: bool = False) -> None:
    """Write env.json if it is missing, and recipe.yaml and the tokenizer files if they are missing or damaged.

    The caller must hold the lock. env.json is written first, because its hash assigns the directory to this run. After
    an interruption, the next call writes the missing files. The directory of a shorter run is converted to that of this
    run.

    Args:
        compiles_loss: True if the training loss is compiled; recorded in env.json, because it affects rounding.

    Raises:
        InputError: if another run was started in the directory since `open_run`.
        SinklabError: if a file cannot be written, or env.json cannot be read.
    """
    run = open_run(run.recipe, run.dataset, run.directory)
    if (run.directory / ENVIRONMENT).exists():
        _extend(run)
    else:
        data = {"fingerprint": run.dataset.fingerprint, "source": run.recipe.data.source}
        manner = {"compiles_loss": True} if compiles_loss else {}
        write_json(run.directory / ENVIRONMENT, {"hash": run.hash, "data": data, **environment(run.recipe), **manner})
    written = _recipe_in(run.directory)
    if written is None or written.content_hash(run.dataset.fingerprint) != run.hash:
        write_text(run.directory / RECIPE, run.recipe.to_yaml())
    for name in TOKENIZER:
        path, source = run.directory / name, run.dataset.tokenizer_path.with_name(name)
        try:
            same = path.exists() and filecmp.cmp(source, path, shallow=False)
        except OSError:  # the data's tokenizer is missing: that of the run is kept
            same = True
        if not same:
            with written_aside(path) as aside:
                shutil.copyfile(source, aside)


@dataclass(frozen=True)
class TrainedRun:
    """Model of a run, loaded from the checkpoint of `step`, with the run's recipe and tokenizer."""

    model: Transformer
    recipe: Recipe
    tokenizer_path: Path
    step: int


def load_run(directory: Path, step: int | None = None) -> TrainedRun:
    """Load the model of a run directory from a checkpoint, in evaluation mode. The run may be in progress.

    Args:
        step: step of the checkpoint; default: the newest valid checkpoint.

    Raises:
        InputError: if the directory has no valid recipe.yaml of a run, no checkpoint, or no valid checkpoint of `step`.
        SinklabError: if there are checkpoints (up to `step`) but none is valid, or env.json is damaged.
    """
    if not (directory / RECIPE).is_file():
        raise InputError(f"{directory} is not a run directory: it has no {RECIPE}")
    recipe = load_recipe(str(directory / RECIPE))
    if recipe.model.vocab_size is None:
        raise InputError(
            f"{directory} is not a run directory: its {RECIPE} has no model.vocab_size, so it was not written by a run"
        )
    model = Transformer(recipe.model)
    hashes = recorded_hashes(directory) or None
    found = take_newest(directory / "checkpoints", model, lambda path: load_weights(path, model), hashes, at_most=step)
    if step is not None and (found is None or found[1].step != step):
        steps = ", ".join(map(str, steps_saved(directory / "checkpoints"))) or "none"
        raise InputError(f"{directory} has no valid checkpoint of step {step:,} (saved: {steps}): choose another step")
    if found is None:
        raise InputError(f"{directory} has no checkpoint: train it with `sinklab train` first")
    return TrainedRun(model.eval(), recipe, directory / "tokenizer.json", found[1].step)


def recipe_and_data(directory: Path) -> tuple[Recipe, TokenDataset]:
    """Return the recipe and the data of a run. The data is prepared again if it is not in the cache.

    Raises:
        InputError: if the text cannot be read, or the text or the recipe has changed since the run was trained.
        SinklabError: if env.json or prepared data is damaged, or the data cannot be written.
    """
    recipe, env = load_recipe(str(directory / RECIPE)), read_environment(directory)
    dataset = prepared(recipe.data)
    if recipe.content_hash(dataset.fingerprint) != env.get("hash"):
        known = [f"{name} {env[key]}" for key, name in (("sinklab", "sinklab"), ("python", "Python")) if env.get(key)]
        versions = f" with {' and '.join(known)}" if known else ""
        raise InputError(
            f"the text ({recipe.data.source}) or the recipe of the run has changed since it was trained"
            f"{versions}: restore them, or use those versions"
        )
    return recipe, dataset


MEASURED = ("measurement.json", "measurement.npz", "record.json")
"""Files with the final results of a run. They are removed when a longer run extends it."""


def shorter_run(directory: Path, recipe: Recipe, data: str, found: str) -> int | None:
    """Return `train.steps` of the run in a directory if `recipe` differs from its recipe only by more steps, else None.

    Args:
        recipe: recipe of the longer run, resolved (`resolve`).
        data: fingerprint of the recipe's data.
        found: hash of the run in the directory.

    Raises:
        InputError: if the longer run has another learning rate at a step that is already completed.
    """
    written, longer = _recipe_in(directory), recipe.train.steps
    if written is None or written.train.steps >= longer:
        return None
    steps = written.train.steps
    shorter = recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": steps})})
    if shorter.content_hash(data) != found:
        return None
    reached = max(steps_saved(directory / "checkpoints"), default=0)
    for step in range(min(reached + 1, steps)):  # an evaluation records the learning rate of the next update
        peak, schedule = recipe.optim.lr, recipe.schedule
        if learning_rate(step, steps, peak, schedule) != learning_rate(step, longer, peak, schedule):
            raise InputError(
                f"{directory} contains a run of {steps} steps, which has reached step {reached}. It cannot be "
                f"extended to {longer} steps, because the learning rate differs from step {step + 1} on "
                f"(schedule.shape {schedule.shape}). Choose another --out; schedule.shape flat allows extending a run"
            )
    return steps


def _extend(run: Run) -> None:
    """Assign the directory of a shorter run, if it is one, to the longer run, and remove the results of the shorter.

    The caller then replaces recipe.yaml. Until it is replaced, the call may be repeated after an interruption.
    """
    found, written = read_environment(run.directory), _recipe_in(run.directory)
    if written is None or (shorter := written.content_hash(run.dataset.fingerprint)) not in run.earlier:
        return
    if found["hash"] != run.hash:
        earlier = [*found.get("continues", ()), {"hash": shorter, "steps": written.train.steps}]
        write_json(run.directory / ENVIRONMENT, {**found, "hash": run.hash, "continues": earlier})
    for name in MEASURED:
        (run.directory / name).unlink(missing_ok=True)


def _recipe_in(directory: Path) -> Recipe | None:
    """Return the recipe in a run directory; None if it is missing or damaged."""
    try:
        return load_recipe(str(directory / RECIPE))
    except InputError:
        return None


def rewrite_metrics(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Replace the content of metrics.jsonl by `rows` if it differs. A missing file is not created.

    Raises:
        SinklabError: if the file cannot be written.
    """
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.exists() and path.read_bytes() != text.encode():
        write_text(path, text)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the evaluations of a run as dicts, in file order. The list is empty if the file is missing.

    An incomplete last line is skipped.

    Raises:
        SinklabError: if the file cannot be read, or a line is not a JSON object with an integer step.
    """
    return list(_rows(path).values())


def read_history(path: Path) -> list[Evaluation]:
    """Read the evaluations of a run, ordered by step. If a step occurs twice, the later line is used.

    The list is empty if the file is missing. An incomplete last line is skipped.

    Raises:
        InputError: if the file cannot be read or a line is invalid.
    """
    by_step = {}
    try:
        for number, row in _rows(path).items():
            try:
                by_step[row["step"]] = Evaluation.model_validate(finite(row))
            except ValueError as error:
                raise _damaged(path, number, error) from error
    except SinklabError as error:
        raise InputError(str(error)) from error
    return [by_step[step] for step in sorted(by_step)]


def _rows(path: Path) -> dict[int, dict[str, Any]]:
    """Read the JSON objects of a file by line number, 1-based."""
    try:
        lines = path.read_text("utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise SinklabError(f"cannot read {path}: {error.strerror or error}.") from error
    rows: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line) if line.strip() else None
        except ValueError as error:
            if number == len(lines) and line.strip("\0")[:1] in ("{", ""):  # truncated, or zeros after a crash
                break
            raise _damaged(path, number, error) from error
        if row is not None:
            if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                raise _damaged(path, number, ValueError("expected an object with an integer step"))
            rows[number] = row
    return rows


def _damaged(path: Path, number: int, error: ValueError) -> SinklabError:
    return SinklabError(
        f"{path}, line {number}, is invalid ({cause(error)}): restore the file, or delete it to continue without its "
        "evaluations"
    )


def timed_intervals(history: Sequence[Evaluation]) -> Iterator[tuple[float, float]]:
    """Yield training tokens and seconds of the intervals between evaluations whose throughput is known."""
    before = 0.0
    for one in history:
        tokens = before if one.tokens is None else one.tokens
        if one.tokens_per_second:
            yield tokens - before, (tokens - before) / one.tokens_per_second
        before = tokens


def seconds_spent(history: Sequence[Evaluation]) -> float:
    """Estimate the training time in seconds from tokens and throughput, without intervals of unknown throughput."""
    return sum((seconds for _, seconds in timed_intervals(history)), 0.0)


def finite(value: Any) -> Any:
    """Return a nested value with NaN and infinity, which JSON does not support, replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return value
