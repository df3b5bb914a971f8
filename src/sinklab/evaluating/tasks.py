"""Tasks of lm-eval by their names; HellaSwag from a file where there is one."""

import difflib
import importlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sinklab.errors import InputError, cause
from sinklab.evaluating.hellaswag import METRICS, NAME, local_file, read_items
from sinklab.extras import install_command
from sinklab.files import sha256_of

PACKAGES = ("lm_eval", "accelerate")
HUB = "hub"


@dataclass(frozen=True)
class ChosenTask:
    """A task that is ready to be asked.

    Attributes:
        name: of lm-eval; a group or tag has become its tasks.
        task: lm-eval's.
        data: the file that its items are read from, or "hub".
        sha256: of the file.
    """

    name: str
    task: Any
    data: str
    sha256: str | None = None

    @property
    def size(self) -> int:
        """How many items it has."""
        return len(self.task.eval_docs)

    @property
    def version(self) -> str:
        """Of the task."""
        return str(self.task.VERSION)


def lm_eval_version() -> str:
    """Of the package that is installed.

    Raises:
        InputError: it is not, or what it needs is not; says which command installs it.
    """
    for package in PACKAGES:
        try:
            importlib.import_module(package)
        except ImportError as error:
            name = package.replace("_", "-")
            raise InputError(
                f"downstream tasks need the package {name}, and it is not installed: {install_command('eval')}"
            ) from error
    from importlib.metadata import version

    return version("lm_eval")


def chosen_tasks(names: Sequence[str], data: Path | None) -> list[ChosenTask]:
    """The tasks of these names, each with its items.

    Args:
        data: HellaSwag's file; that in SINKLAB_DATA unless given, and the hub where there is none.

    Raises:
        InputError: lm-eval is not installed, a name that it does not know, a file that cannot be read, or items that
            cannot be fetched.
    """
    lm_eval_version()
    if data is not None and NAME not in names:
        raise InputError(f"--data {data} is the file of {NAME}, which is not among --tasks {','.join(names)}")
    found: dict[str, ChosenTask] = {}
    with quiet():
        file = data or local_file()
        here = {NAME: file} if file is not None else {}
        others = [name for name in names if name not in here]
        hub = _Hub(others) if others else None
        for name in dict.fromkeys(names):
            if hub is None or name in here:
                found[name] = _from_file(here[name])
            else:
                found |= {one.name: one for one in hub.tasks(name)}
    return list(found.values())


@contextmanager
def quiet() -> Iterator[None]:
    """lm-eval speaks to a log and draws bars on standard error; what matters of that is in our own words."""
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


def _from_file(path: Path) -> ChosenTask:
    """HellaSwag, asked as lm-eval's task of that name asks it."""
    items = read_items(path)
    from datasets import Dataset  # pyright: ignore[reportMissingImports]  # comes with lm-eval
    from lm_eval.api.task import ConfigurableTask  # pyright: ignore[reportMissingImports]

    rows = [item.model_dump() for item in items]
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
    return ChosenTask(NAME, ConfigurableTask(config=config), path.name, sha256_of(path))


class _Hub:
    """lm-eval's own tasks. To know them all it reads thousands of files, which takes a while.

    Raises:
        InputError: it has no task of one of the names.
    """

    def __init__(self, names: Sequence[str]) -> None:
        from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]  # an extra

        self._manager = TaskManager()
        for name in names:
            if name not in self._manager.all_tasks:
                near = difflib.get_close_matches(name, self._manager.all_tasks, n=3)
                like = f"; near it are {', '.join(near)}" if near else ""
                raise InputError(
                    f"--tasks: lm-eval has no task {name!r}{like}. `lm-eval ls tasks` lists those that it has; "
                    f"{NAME} needs no network where its file is given with --data"
                )

    def tasks(self, name: str) -> list[ChosenTask]:
        """The task, or those of a group, with their items."""
        try:
            return [ChosenTask(one, task, HUB) for one, task in self._manager.load([name])["tasks"].items()]
        except ImportError as error:
            raise InputError(f"--tasks {name} needs a package that is not installed: {cause(error)}") from error
        except Exception as error:  # network, hub and format errors share no base class
            file = (
                "; or give its file: --data hellaswag_val.jsonl, or a folder eval/ with it in SINKLAB_DATA"
                if name == NAME
                else f"; {NAME} can be read from a file instead (--data)"
            )
            raise InputError(
                f"the items of --tasks {name} could not be fetched from the Hugging Face hub ({type(error).__name__}: "
                f"{cause(error)}): check the connection, and where the network is closed fetch them elsewhere into "
                f"HF_HOME and set HF_HUB_OFFLINE=1{file}"
            ) from error
