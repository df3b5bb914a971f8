"""Streaming of datasets from the Hugging Face hub (extra `data`)."""

import importlib
from collections.abc import Iterator
from typing import Any

from sinklab.data.sources.textfiles import ReadCounts, Render, expanded, plain_conversation, texts_of_rows
from sinklab.errors import InputError
from sinklab.extras import require_extra

PREFIX = "hf:"
_TEXTS = (
    ".jsonl",
    ".jsonl.gz",
    ".jsonl.zst",
    ".txt",
    ".csv",
    ".parquet",
)  # text formats that `datasets` can read file by file


def hub_documents(
    source: str,
    render: Render = plain_conversation,
    files: list[str] | None = None,
    counts: ReadCounts | None = None,
) -> Iterator[str]:
    """Stream the documents of `hf:NAME[:CONFIG[:SPLIT]]`, one per non-empty row; the default split is `train`.

    NAME may also be a local folder that `datasets` can read. Remote code is never executed.

    Args:
        render: function that renders a conversation as text.
        files: files of the dataset to read instead of the split; default: all files of the split.
        counts: counts to which the rows are added.

    Raises:
        InputError: if the source is malformed, `datasets` is not installed, the dataset cannot be fetched, a message
            is malformed, or no row has text.
    """
    name, config, split = _parts(source)
    require_extra("data", ("datasets",), f"source {source}")
    datasets: Any = importlib.import_module("datasets")
    selected: dict[str, Any] = {"split": split} if files is None else {"split": "train", "data_files": files}
    try:
        rows = enumerate(datasets.load_dataset(name, config, streaming=True, **selected), start=1)
        placed = ((row, f"{source}, row {number}") for number, row in rows)
        yield from texts_of_rows(placed, source, render, ReadCounts() if counts is None else counts)
    except InputError:
        raise
    except Exception as error:  # network, hub and format errors share no base class
        raise InputError(
            f"cannot read {source} (name {name}, config {config or 'default'}, split {split}): {error}. "
            "Check the name, the config, the split and the connection."
        ) from error


def hub_files(source: str) -> list[str]:
    """List the text files (`_TEXTS`) of a dataset on the hub or in a local folder, sorted.

    If any of these files is in a folder with the name of the split, only files in such folders are listed.

    Raises:
        InputError: if the source is malformed, the dataset cannot be listed, or it has no such file.
    """
    name, _, split = _parts(source)
    folder = expanded(name)
    try:
        if folder.is_dir():
            found = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        else:
            from huggingface_hub import HfApi

            found = HfApi().list_repo_files(name, repo_type="dataset")
    except Exception as error:  # network, hub and name errors share no base class
        raise InputError(
            f"cannot list the files of {source} ({type(error).__name__}): {error}. Check the name and the connection."
        ) from error
    texts = sorted(file for file in found if file.lower().endswith(_TEXTS))
    files = [file for file in texts if split in file.split("/")[:-1]] or texts
    if not files:
        raise InputError(f"source {source} has no files that can be mixed ({', '.join(_TEXTS)})")
    return files


def _parts(source: str) -> tuple[str, str | None, str]:
    parts = source.removeprefix(PREFIX).split(":")
    if not parts[0] or len(parts) > 3:
        raise InputError(f"invalid source {source!r}: use hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT")
    name, config, split = (*parts, "", "")[:3]
    return name, config or None, split or "train"
