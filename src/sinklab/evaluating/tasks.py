"""Load downstream tasks of lm-eval by name, with items from the hub or, for HellaSwag, from a local file.

HellaSwag (1905.07830): choose the most plausible of four endings.
"""

import difflib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sinklab.data.sources.rows import read_rows
from sinklab.errors import InputError, SinklabError, cause, is_out_of_memory, require_extra
from sinklab.evaluating import tasks as hellaswag
from sinklab.files import sha256_of
from sinklab.schema import ReadDocument

HUB = "hub"
SCORES = {"acc": "accuracy", "acc_norm": "accuracy_norm"}
"""Names of the accuracies in `Measurement.scores`, by lm-eval's names of the metrics."""


@dataclass(frozen=True)
class ChosenTask:
    """A task with its items.

    Attributes:
        name: name of the task in lm-eval; not the name of a group or tag.
        task: task object of lm-eval.
        data: name of the file with the items, or "hub".
        sha256: SHA-256 of the file; None for the hub.
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


def chosen_tasks(names: Sequence[str], data: Path | None) -> list[ChosenTask]:
    """Load tasks by name, with their items. A group or tag is replaced by its tasks.

    Args:
        names: names of tasks, groups or tags in lm-eval.
        data: file with the items of HellaSwag; None: the file in SINKLAB_DATA/eval, else the hub.

    Raises:
        InputError: if a name is unknown, a package is not installed, items cannot be read or downloaded, or `data` is
            set and HellaSwag is not in `names`.
    """
    require_extra("eval", ("lm_eval", "accelerate"), "a downstream task")
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]  # an extra

    if data is not None and hellaswag.NAME not in names:
        raise InputError(
            f"--data {data} can only supply the items of {hellaswag.NAME}, which is not in --tasks {','.join(names)}: "
            "add it, or remove --data"
        )
    file = (data or hellaswag.local_file()) if hellaswag.NAME in names else None
    found: dict[str, ChosenTask] = {}
    with inside_lm_eval():
        manager = None
        for name in names:
            if file and name == hellaswag.NAME:
                continue
            manager = manager or TaskManager()  # slow, because lm-eval reads thousands of files
            if name not in manager.all_tasks:
                near = difflib.get_close_matches(name, manager.all_tasks, n=3)
                like = f"; similar names: {', '.join(near)}" if near else ""
                raise InputError(
                    f"--tasks: lm-eval has no task {name!r}{like}. `lm-eval ls tasks` lists all of them; "
                    f"{hellaswag.NAME} with --data FILE needs no network"
                )
        for name in dict.fromkeys(names):
            if file and name == hellaswag.NAME:
                found[name] = ChosenTask(name, hellaswag.load(file), file.name, sha256_of(file))
            else:
                found |= _from_hub(manager, name)
    return list(found.values())


def chosen_task(name: str, data: Path | None) -> ChosenTask:
    """Load one task by its name, with its items (see `chosen_tasks`).

    Raises:
        InputError: if the task is unusable, or the name is that of a group or tag with several tasks.
    """
    found = chosen_tasks([name], data)
    if len(found) != 1:
        raise InputError(f"{name} is a group of {len(found)} tasks: choose one of them")
    return found[0]


@contextmanager
def inside_lm_eval(name: str = "") -> Iterator[None]:
    """Hide lm-eval's messages below ERROR and its progress bars in the `with` block.

    With the name of a task, exceptions other than out-of-memory errors are converted to a SinklabError that names it.
    """
    from lm_eval.api import model, task  # pyright: ignore[reportMissingImports]  # an extra
    from lm_eval.models import huggingface  # pyright: ignore[reportMissingImports]

    logger, modules = logging.getLogger("lm_eval"), (task, model, huggingface)
    before, bars = logger.level, [module.tqdm for module in modules]
    logger.setLevel(logging.ERROR)
    for module, bar in zip(modules, bars, strict=True):
        module.tqdm = lambda *args, bar=bar, **settings: bar(*args, **{**settings, "disable": True})
    try:
        yield
    except SinklabError:
        raise
    except Exception as error:
        if not name or is_out_of_memory(error):
            raise
        raise SinklabError(
            f"lm-eval cannot evaluate this model on {name} ({type(error).__name__}: {cause(error)})"
        ) from error
    finally:
        logger.setLevel(before)
        for module, bar in zip(modules, bars, strict=True):
            module.tqdm = bar


def _from_hub(manager: Any, name: str) -> dict[str, ChosenTask]:
    """Load a task, or the tasks of a group or tag, with their items from the hub."""
    try:
        return {one: ChosenTask(one, task, HUB) for one, task in manager.load([name])["tasks"].items()}
    except ImportError as error:
        raise InputError(f"--tasks {name} needs a package that is not installed: {cause(error)}") from error
    except Exception as error:  # network, hub and format errors share no base class
        if name == hellaswag.NAME:
            file = hellaswag.FILES[-1]
            remedy = f"; or use a local file: --data {file}, or SINKLAB_DATA with the file in a folder eval/"
        else:
            remedy = f"; {hellaswag.NAME} can be read from a file instead (--data)"
        raise InputError(
            f"the items of --tasks {name} could not be loaded from the Hugging Face hub ({type(error).__name__}: "
            f"{cause(error)}): check the connection; or download them on another machine, copy its HF_HOME here "
            f"and set HF_HUB_OFFLINE=1{remedy}"
        ) from error


NAME = "hellaswag"
FILES = ("hellaswag_val.jsonl.gz", "hellaswag_val.jsonl")
METRICS = ("acc", "acc_norm")
"""Metrics of lm-eval, averaged over items: accuracy of the ending with the highest log-likelihood (per character)."""
KEYS = '"query" (or "activity_label", "ctx_a" and "ctx_b"), "endings" and "label"'


class ChoiceItem(ReadDocument):
    """A multiple-choice item: prompt, endings, and 0-based index of the correct ending."""

    query: str
    endings: list[str]
    label: int


def local_file() -> Path | None:
    """Return the path of HellaSwag's file in SINKLAB_DATA/eval; None if it is missing or SINKLAB_DATA is not set."""
    data = os.environ.get("SINKLAB_DATA")
    places = [Path(data).expanduser() / "eval" / name for name in FILES] if data else []
    return next((place for place in places if place.is_file()), None)


def read_items(path: Path) -> list[ChoiceItem]:
    """Read items from a .jsonl or .jsonl.gz file, in the published format or in that of lm-eval, which has a `query`.

    Raises:
        InputError: if the file cannot be read, has no items, or has a line that is not an item; the message names the
            file and the line.
    """
    items = [_item(row, where) for row, where in read_rows(path)]
    if not items:
        raise InputError(f"{path} has no items: pass the items of {NAME}, a .jsonl or .jsonl.gz file")
    return items


def load(path: Path) -> Any:
    """Return lm-eval's task object with the items of the file at `path`."""
    rows = [item.model_dump() for item in read_items(path)]
    from datasets import Dataset  # pyright: ignore[reportMissingImports]  # comes with lm-eval
    from lm_eval.api.task import ConfigurableTask  # pyright: ignore[reportMissingImports]

    config = {
        "task": NAME,
        "custom_dataset": lambda **_: {"validation": Dataset.from_list(rows)},
        "validation_split": "validation",
        "output_type": "multiple_choice",
        "doc_to_text": "query",
        "doc_to_choice": "endings",
        "doc_to_target": "label",
        "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in METRICS],
        "metadata": {"version": 1.0},
    }
    return ConfigurableTask(config=config)


def _item(row: Any, where: str) -> ChoiceItem:
    try:
        if not isinstance(row, dict):
            raise ValueError(f"the row is {json.dumps(row)[:40]}, not an object")
        item = ChoiceItem.model_validate(row if "query" in row else _converted(row))
        if not item.query or not 0 <= item.label < len(item.endings) or not all(item.endings):
            raise ValueError(
                f"label {item.label}, counted from 0, is not one of {len(item.endings)} endings, or a text is empty"
            )
        return item
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        said = f"{error} is missing" if isinstance(error, KeyError) else " ".join(str(error).splitlines()[:3])
        raise InputError(f"{where}: {said}; a line needs {KEYS}") from error


def _converted(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert an item from the published format to that of lm-eval.

    The query is clean(activity_label + ": " + ctx_a + " " + capitalised ctx_b), and an ending is clean(ending). The
    function clean strips a text, replaces " [title]" by ". ", removes other text in square brackets with the brackets,
    and replaces two spaces by one.
    """

    def clean(text: str) -> str:
        return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

    query = clean(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}")
    return {**row, "query": query, "endings": [clean(ending) for ending in row["endings"]]}
