"""env.json of a run directory: run hash, data, package versions and machine."""

import platform
import subprocess
import sys
from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sinklab
from sinklab.device import pick_device, processor_name
from sinklab.errors import InputError, SinklabError, cause
from sinklab.files import parse_json
from sinklab.schema import leaves
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
