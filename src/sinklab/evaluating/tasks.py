"""Load downstream tasks by name: HellaSwag from a local file, and all tasks of lm-eval."""

import difflib
import gzip
import importlib
import json
import logging
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sinklab.errors import InputError, cause
from sinklab.extras import install_command
from sinklab.files import parse_json, sha256_of
from sinklab.schema import ReadDocument

PACKAGES = ("lm_eval", "accelerate")
HUB = "hub"
SCORES = {"acc": "accuracy", "acc_norm": "accuracy_norm"}
"""Names of accuracies in experiments, by lm-eval's name of the metric."""


class ChoiceItem(ReadDocument):
    """A multiple-choice item: prompt, endings, and 0-based index of the correct ending."""

    query: str
    endings: list[str]
    label: int


HELLASWAG = "hellaswag"
HELLASWAG_FILES = ("hellaswag_val.jsonl.gz", "hellaswag_val.jsonl")
"""Names of the file in SINKLAB_DATA/eval; if both files exist, the first is used."""
HELLASWAG_KEYS = '"query" (or "activity_label", "ctx_a" and "ctx_b"), "endings" and "label"'


def local_hellaswag() -> Path | None:
    """Return the path of HellaSwag's file in SINKLAB_DATA/eval; None if it is missing or SINKLAB_DATA is not set."""
    data = os.environ.get("SINKLAB_DATA")
    places = [Path(data).expanduser() / "eval" / name for name in HELLASWAG_FILES] if data else []
    return next((place for place in places if place.is_file()), None)


def read_hellaswag(path: Path) -> list[ChoiceItem]:
    """Read HellaSwag items from a .jsonl or .jsonl.gz file.

    Raises:
        InputError: if the file cannot be read, has no items, or has a line that is not an item; the message names it.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            lines = [(number, line) for number, line in enumerate(file, start=1) if line.strip()]
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise InputError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if not lines:
        raise InputError(f"{path} has no items: pass the items of {HELLASWAG}, a .jsonl or .jsonl.gz file")
    return [_read_item(line, f"{path}, line {number}") for number, line in lines]


def load_hellaswag(path: Path) -> "ChosenTask":
    """Build lm-eval's HellaSwag task with the items of the file at `path`.

    Raises:
        InputError: see `read_hellaswag`.
    """
    items = read_hellaswag(path)
    from datasets import Dataset  # pyright: ignore[reportMissingImports]  # comes with lm-eval
    from lm_eval.api.task import ConfigurableTask  # pyright: ignore[reportMissingImports]

    rows = [item.model_dump() for item in items]
    config = {
        "task": HELLASWAG,
        "custom_dataset": lambda **_: {"validation": Dataset.from_list(rows)},
        "validation_split": "validation",
        "output_type": "multiple_choice",
        "doc_to_text": "query",
        "doc_to_choice": "endings",
        "doc_to_target": "label",
        "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in SCORES],
        "metadata": {"version": 1.0},
    }
    return ChosenTask(HELLASWAG, ConfigurableTask(config=config), path.name, sha256_of(path))


def _read_item(line: str, where: str) -> ChoiceItem:
    try:
        row = parse_json(line)
        if not isinstance(row, dict):
            raise ValueError(f"the line is {json.dumps(row)[:40]}, not an object")
        item = ChoiceItem.model_validate(row if "query" in row else _with_query(row))
        if not item.query or not 0 <= item.label < len(item.endings) or not all(item.endings):
            raise ValueError(
                f"label {item.label}, counted from 0, is not one of {len(item.endings)} endings, or a text is empty"
            )
        return item
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        said = f"{error} is missing" if isinstance(error, KeyError) else " ".join(str(error).splitlines()[:3])
        raise InputError(f"{where}: {said}; a line needs {HELLASWAG_KEYS}") from error


def _with_query(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert an item from HellaSwag's published format (1905.07830) to that of lm-eval, which has a `query`.

    query = clean(activity_label + ": " + ctx_a + " " + capitalised ctx_b)
    clean: replace " [title]" by ". ", remove other text in brackets, replace two spaces by one
    """

    def clean(text: str) -> str:
        return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

    query = clean(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}")
    return {**row, "query": query, "endings": [clean(ending) for ending in row["endings"]]}


@dataclass(frozen=True)
class ChosenTask:
    """A task with its items.

    Attributes:
        name: name of the task in lm-eval; not the name of a group or tag.
        task: task object of lm-eval.
        data: name of the file with the items, or "hub".
        sha256: SHA-256 of that file; None for the hub.
    """

    name: str
    task: Any
    data: str
    sha256: str | None = None

    @property
    def size(self) -> int:
        """Number of items in the task's evaluation split."""
        return len(self.task.eval_docs)

    @property
    def identity(self) -> str:
        """Identity of the items: the SHA-256 of their file, or "hub"."""
        return self.sha256 or self.data


def lm_eval_version() -> str:
    """Return the version of lm-eval.

    Raises:
        InputError: if lm-eval or accelerate is not installed; the message contains the install command.
    """
    for package in PACKAGES:
        try:
            importlib.import_module(package)
        except ImportError as error:
            name = package.replace("_", "-")
            raise InputError(
                f"downstream tasks need the package {name}, and it is not installed: {install_command('eval')}"
            ) from error
    return version("lm_eval")


def chosen_tasks(names: Sequence[str], data: Path | None) -> list[ChosenTask]:
    """Load tasks by name, with their items. A group or tag is replaced by its tasks.

    Args:
        names: names of tasks, groups or tags in lm-eval.
        data: file with the items of HellaSwag; None: the file in SINKLAB_DATA/eval, else the hub.

    Raises:
        InputError: see `lm_eval_version` and `read_hellaswag`; also if a name is unknown, a task needs a package that
            is not installed, items cannot be downloaded, or `data` is set and `names` does not contain hellaswag.
    """
    lm_eval_version()
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]  # an extra

    if data is not None and HELLASWAG not in names:
        raise InputError(
            f"--data {data} has the items of {HELLASWAG}, and --tasks {','.join(names)} does not contain that task"
        )
    file = (data or local_hellaswag()) if HELLASWAG in names else None
    found: dict[str, ChosenTask] = {}
    with quiet():
        manager = None
        for name in names:
            if name == HELLASWAG and file is not None:
                continue
            manager = manager or TaskManager()  # slow, because lm-eval reads thousands of files
            if name not in manager.all_tasks:
                near = difflib.get_close_matches(name, manager.all_tasks, n=3)
                like = f"; similar names: {', '.join(near)}" if near else ""
                raise InputError(
                    f"--tasks: lm-eval has no task {name!r}{like}. `lm-eval ls tasks` lists all of them; "
                    f"{HELLASWAG} with --data FILE needs no network"
                )
        for name in dict.fromkeys(names):
            if name == HELLASWAG and file is not None:
                found[name] = load_hellaswag(file)
            else:
                found |= _from_hub(manager, name)
    return list(found.values())


def chosen_task(name: str, data: Path | None) -> ChosenTask:
    """Load one task by its name, with its items (see `chosen_tasks`).

    Raises:
        InputError: see `chosen_tasks`; also if the name is a group or tag with several tasks.
    """
    found = chosen_tasks([name], data)
    if len(found) != 1:
        raise InputError(f"{name} is a group of {len(found)} tasks: choose one of them")
    return found[0]


@contextmanager
def quiet() -> Iterator[None]:
    """Hide lm-eval's log messages below ERROR, and its progress bars for building requests, in the `with` block."""
    from lm_eval.api import task  # pyright: ignore[reportMissingImports]  # an extra

    logger, bars = logging.getLogger("lm_eval"), task.tqdm
    before = logger.level
    logger.setLevel(logging.ERROR)
    task.tqdm = partial(bars, disable=True)
    try:
        yield
    finally:
        logger.setLevel(before)
        task.tqdm = bars


def _from_hub(manager: Any, name: str) -> dict[str, ChosenTask]:
    """Load a task, or the tasks of a group or tag, with their items from the hub."""
    try:
        return {one: ChosenTask(one, task, HUB) for one, task in manager.load([name])["tasks"].items()}
    except ImportError as error:
        raise InputError(f"--tasks {name} needs a package that is not installed: {cause(error)}") from error
    except Exception as error:  # network, hub and format errors share no base class
        if name == HELLASWAG:
            file = HELLASWAG_FILES[-1]
            remedy = f"; or use a local file: --data {file}, or SINKLAB_DATA with the file in a folder eval/"
        else:
            remedy = f"; {HELLASWAG} can be read from a file instead (--data)"
        raise InputError(
            f"the items of --tasks {name} could not be loaded from the Hugging Face hub ({type(error).__name__}: "
            f"{cause(error)}): check the connection; or download them on another machine, copy its HF_HOME here "
            f"and set HF_HUB_OFFLINE=1{remedy}"
        ) from error
