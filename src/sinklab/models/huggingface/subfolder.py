"""`--subfolder`: a model in a folder of a directory or of a repository of the hub, its tokenizer there or above.

A folder of a directory is joined to its path. The hub is asked for a name and a subfolder, which stay apart until a
result is named.
"""

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from sinklab.errors import InputError

TOKENIZER_FILES = ("tokenizer*", "*.model", "*.tiktoken", "vocab*", "merges.txt", "spiece*")


def in_subfolder(name: str, subfolder: str | None) -> str:
    """The path of the subfolder of a directory that lies here; a name on the hub stays as it is.

    Raises:
        InputError: the subfolder is empty, absolute or leads upwards; the name is that of a file.
    """
    if subfolder is None:
        return name
    parts = PurePosixPath(subfolder).parts
    if not parts or subfolder.startswith("/") or ".." in parts:
        raise InputError(f"--subfolder {subfolder!r}: give a folder below {name}, such as checkpoints/final")
    place = Path(name).expanduser()
    if place.is_file():
        raise InputError(f"--subfolder {subfolder}: {name} is a file; give the directory, or leave --subfolder out")
    return str(Path(name, *parts)) if place.is_dir() else name


def name_in_results(name: str, subfolder: str | None) -> str:
    """What a model is called in results: with its subfolder, which a path already ends with."""
    return name if subfolder is None or _lies_here(name) else f"{name}/{subfolder.strip('/')}"


def commit_of(name: str, revision: str | None, subfolder: str | None) -> str | None:
    """Which commit of the hub has been read, from where it was put; None for a model that lies here."""
    from huggingface_hub import try_to_load_from_cache

    if _lies_here(name):
        return None
    config = PurePosixPath(subfolder or "", "config.json")
    found = try_to_load_from_cache(name, str(config), revision=revision)
    return Path(found).parents[len(config.parts) - 1].name if isinstance(found, str) else None


def tokenizer_options(name: str, place: str, options: Mapping[str, Any], subfolder: str | None) -> dict[str, Any]:
    """Where the tokenizer is read from, as arguments of from_pretrained: beside the weights, else above the subfolder.

    Without any file of a tokenizer transformers makes one that knows no text.

    Args:
        name: as the user calls the model.
        place: the weights' folder here, or a name on the hub.
        options: with which the weights are read.

    Raises:
        InputError: there is no tokenizer here.
    """
    beside = {"pretrained_model_name_or_path": place, **options}
    folder = Path(place).expanduser()
    if not folder.is_dir():
        if subfolder is None or _on_the_hub(place, options):
            return beside
        return {**beside, "subfolder": ""}
    places = [folder] if subfolder is None else [folder, folder.parents[len(PurePosixPath(subfolder).parts) - 1]]
    for one in places:
        if any(path for pattern in TOKENIZER_FILES for path in one.glob(pattern)):
            return {**beside, "pretrained_model_name_or_path": str(one)}
    if options["trust_remote_code"]:
        return beside  # it may need no file
    above = "" if len(places) == 1 else f", nor has {places[1]}"
    raise InputError(
        f"{name} has no tokenizer{above}: put the files of its tokenizer (such as tokenizer.json) beside the weights"
    )


def _on_the_hub(name: str, options: Mapping[str, Any]) -> bool:
    from transformers.utils.hub import cached_file

    where = {key: options[key] for key in ("revision", "subfolder")}
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    return any(cached_file(name, file, **where, **quiet) for file in ("tokenizer_config.json", "tokenizer.json"))


def _lies_here(name: str) -> bool:
    return Path(name).expanduser().exists()
