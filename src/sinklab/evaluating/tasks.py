"""Load downstream tasks of lm-eval by name, with items from the hub or, for HellaSwag, from a local file."""

import difflib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sinklab.errors import InputError, SinklabError, cause, is_out_of_memory, require_extra
from sinklab.evaluating import hellaswag
from sinklab.files import sha256_of

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
    from lm_eval.tasks import TaskManager  # an extra

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
    from lm_eval.api import model, task  # an extra
    from lm_eval.models import huggingface

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
