"""Checks of a model's files before transformers reads them: sizes that cannot be built, and weights elsewhere."""

import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from sinklab.errors import InputError
from sinklab.files import read_mapping

INDEX = "model.safetensors.index.json"
MOST_PARTS = 10_000
"""Maximum number of layers or experts in a config. transformers builds each of them, or a list entry for each."""

_NUMBER_OF_PARTS = re.compile(r"(layers?|experts|blocks|stages)$")


def check_counts(name: str, config: Mapping[str, Any], path: str = "") -> None:
    """Check that a config has no absurd number of layers or experts, which would take hours to build.

    Args:
        name: name of the model, for the message.
        config: content of config.json.
        path: key of `config` in the whole config, followed by a dot; empty for the whole.

    Raises:
        InputError: if a number of layers, blocks, stages or experts is greater than `MOST_PARTS`.
    """
    for key, value in config.items():
        if isinstance(value, Mapping):
            check_counts(name, value, f"{path}{key}.")
        elif isinstance(value, int) and value > MOST_PARTS and _NUMBER_OF_PARTS.search(str(key)):
            raise InputError(
                f"the config of {name} cannot be right: {path}{key} is {value:,}, and no model has more than "
                f"{MOST_PARTS:,}. Use the config.json that belongs to the weights"
            )


def check_index(folder: Path) -> None:
    """Check that the index of the weights of a local model names only files in the model's folder.

    Raises:
        InputError: if the index cannot be read, or names a file outside the folder.
    """
    if not (folder / INDEX).is_file():
        return
    weights = read_mapping(folder / INDEX, "copy the whole model again").get("weight_map")
    for tensor, file in weights.items() if isinstance(weights, dict) else ():
        if not isinstance(file, str) or file.startswith("/") or ".." in PurePosixPath(file).parts:
            raise InputError(
                f"{folder / INDEX} points outside the model's folder: {tensor} is in {file}. Copy the whole model "
                "again, with all of its .safetensors files in one folder"
            )
