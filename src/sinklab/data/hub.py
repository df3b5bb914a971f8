"""Datasets from the Hugging Face hub, streamed, through the `data` extra."""

import importlib
from collections.abc import Iterator
from typing import Any

from sinklab.data.textfiles import Render, plain_conversation, row_text
from sinklab.errors import InputError

PREFIX = "hf:"


def hub_documents(source: str, render: Render = plain_conversation) -> Iterator[str]:
    """The documents of `hf:NAME[:CONFIG[:SPLIT]]`, one row after the other; the split is `train` unless given.

    NAME may also be a local folder that `datasets` can read. Remote code is never run.

    Args:
        render: writes `messages` as text.

    Raises:
        InputError: the extra is missing, or the dataset cannot be fetched or has neither text nor messages.
    """
    name, config, split = _parts(source)
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise InputError(
            f"source {source} needs the package datasets: install sinklab with its data extra "
            '(pip install "sinklab[data]"), or give a .txt or .jsonl file'
        ) from error
    try:
        for number, row in enumerate(datasets.load_dataset(name, config, split=split, streaming=True), start=1):
            text = row_text(row, f"{source}, row {number}", render)
            if text.strip():
                yield text
    except InputError:
        raise
    except Exception as error:  # network, hub and format errors share no base class
        raise InputError(
            f"cannot read {source} (name {name}, config {config or 'default'}, split {split}): {error}. "
            "Check the name, the config, the split and the connection."
        ) from error


def _parts(source: str) -> tuple[str, str | None, str]:
    parts = source.removeprefix(PREFIX).split(":")
    if not parts[0] or len(parts) > 3:
        raise InputError(f"source {source!r}: a dataset is written hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT")
    name, config, split = (*parts, "", "")[:3]
    return name, config or None, split or "train"
