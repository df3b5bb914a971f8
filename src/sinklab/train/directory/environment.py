"""env.json: which run a directory holds, and with what it was begun."""

import json
import platform
import subprocess
import sys
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

import sinklab
from sinklab.device import pick_device, processor_name
from sinklab.errors import InputError, SinklabError
from sinklab.schema import leaves
from sinklab.train.recipe import DATA_ORIGIN, MANNER, Recipe, load_recipe

T = TypeVar("T")

ENVIRONMENT = "env.json"
INDIFFERENT = {"name", *(f"train.{key}" for key in MANNER)}
ORIGIN = {f"data.{key}" for key in DATA_ORIGIN}


def recorded_hash(directory: Path) -> str | None:
    """The hash of the run that a directory holds, None where it holds none.

    Raises:
        SinklabError: env.json is damaged.
    """
    return _recorded(directory, lambda found: str(found["hash"]))


def earlier_hashes(directory: Path) -> tuple[str, ...]:
    """Of the shorter runs that the run in a directory has gone on from, whose checkpoints are its own.

    Raises:
        SinklabError: env.json is damaged.
    """
    return _recorded(directory, lambda found: tuple(str(run["hash"]) for run in found.get("continues", ()))) or ()


def read_environment(directory: Path) -> dict[str, Any]:
    """env.json of a run directory; empty where there is none.

    Raises:
        SinklabError: it is damaged.
    """
    return _recorded(directory, lambda found: dict(found)) or {}


def _recorded(directory: Path, read: Callable[[dict[str, Any]], T]) -> T | None:
    path = directory / ENVIRONMENT
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise TypeError(f"a {type(found).__name__} in the place of a mapping of keys to values")
        return read(found)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SinklabError(f"{path} cannot be read ({error}): restore it, or choose another --out") from error


def difference(path: Path, recipe: Recipe) -> str:
    """In brackets, the first settings in which the run of a recipe differs from that of the recipe in a file.

    Where the data came from is named after what decides more than that, and how the work is done not at all.
    """
    try:
        there = load_recipe(str(path))  # with the defaults of keys that it is older than
    except InputError:
        return ""
    old, new = (leaves(one.model_dump(mode="json")) for one in (there, recipe))
    differing = sorted(
        (key for key in {**new, **old} if old.get(key) != new.get(key) and not _is_below(key, INDIFFERENT)),
        key=lambda key: _is_below(key, ORIGIN),
    )
    shown = ", ".join(f"{key} is {old.get(key)} there and {new.get(key)} here" for key in differing[:3])
    return f" ({shown})" if shown else " (the text, the tokenizer or the version of sinklab is another)"


def _is_below(key: str, parts: Collection[str]) -> bool:
    return any(f"{key}.".startswith(f"{part}.") for part in parts)


def environment(recipe: Recipe) -> dict[str, Any]:
    """With what and when a run is begun here: versions, device, threads, commit, command, time (UTC)."""
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
    """What git says of the package's folder; None where sinklab does not run from a checkout."""
    try:
        package = Path(sinklab.__file__).parent
        result = subprocess.run(["git", "-C", package, *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()
