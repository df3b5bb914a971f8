"""What to do where transformers could not load a part of a model, and what it said."""

from importlib.metadata import version
from pathlib import Path

from sinklab.errors import cause


def advice(error: Exception, place: str, revision: str | None, gguf: str | None) -> str:
    """A sentence for the user, with the error's own first line in brackets where that helps.

    Args:
        place: where it was looked for: a folder, or a name on the hub.
        revision: of the hub, that was asked for.
        gguf: the architecture of the gguf file that was read; None for other files.
    """
    said = str(error)
    if "ignore_mismatched_sizes" in said:  # which refers to a table that is not shown
        return "they have other shapes than its config.json says; put the config and the weights of one model there"
    return f"{_what_to_do(error, said, place, revision, gguf)} ({cause(error)})"


def _what_to_do(error: Exception, said: str, place: str, revision: str | None, gguf: str | None) -> str:
    if "trust_remote_code" in said:
        return "it brings code of its own; --trust-remote-code runs it, if you trust its author"
    if "does not recognize this architecture" in said:
        return f"transformers {version('transformers')} does not know this type of model; try a newer version"
    if isinstance(error, ImportError) or "pip install" in said:
        return "install the package that it needs"
    if gguf is not None:
        return f"transformers does not read this gguf file of architecture {gguf!r}"
    if Path(place).expanduser().is_dir():
        return "check that the directory is complete"
    asked = "" if revision is None else ", the revision"
    return f"check the name{asked} and the connection to the hub, or give the directory of a downloaded model"
