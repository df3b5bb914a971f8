"""`sinklab runs`: the training runs below a directory, how far each has come, and in what they differ."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sinklab.errors import InputError, SinklabError
from sinklab.files import parse_json
from sinklab.measuring.statistics.highest import elsewhere_text
from sinklab.report.collect import folders_with, read_mapping
from sinklab.report.data import WrittenRecipe
from sinklab.report.grouping import changes
from sinklab.schema import leaves
from sinklab.train.directory.checkpoint import steps_saved
from sinklab.train.directory.history import Evaluation, read_history
from sinklab.train.directory.lock import is_held

State = Literal["running", "done", "stopped", "failed", "not begun", "damaged"]


@dataclass(frozen=True)
class ListedRun:
    """A run directory in a line.

    Attributes:
        state: running, a process holds it; done; stopped, it has a checkpoint and the same command continues it;
            failed, it ended with an error, `why`; not begun, nothing has been saved; damaged, it cannot be read, `why`.
        step, steps: reached (evaluated or saved) and in the recipe.
        sink_rate, sink_rate_bias: of the first position and of the bias at the last evaluation, percent.
        valid_loss: then, nats per token.
        sink_elsewhere: then, where the highest sink is at another position than the first.
        differs: settings as `--set` takes them, against the recipe of its name that comes with sinklab, or where there
            is none against the other runs listed.
    """

    directory: str
    state: State
    name: str = ""
    seed: int | None = None
    step: int = 0
    steps: int | None = None
    sink_rate: float | None = None
    sink_rate_bias: float | None = None
    valid_loss: float | None = None
    differs: tuple[str, ...] = ()
    why: str = ""
    sink_elsewhere: str = ""


def list_runs(folders: Sequence[Path]) -> list[ListedRun]:
    """The runs in and below some directories, by path.

    Raises:
        InputError: one is no directory, or there is no run in any.
    """
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"{folder} is not a directory: expected one with runs in it or below it")
    found = list(dict.fromkeys(path for folder in folders for path in folders_with(folder, _is_run)))
    if not found:
        raise InputError(f"no run in or below {', '.join(map(str, folders))}: a run has a recipe.yaml and an env.json")
    recipes = {path: _recipe(path) for path in found}
    return [_listed(path, recipes) for path in found]


def _is_run(folder: Path) -> bool:
    return (folder / "recipe.yaml").is_file() and (folder / "env.json").is_file()


def _recipe(path: Path) -> WrittenRecipe:
    """Empty where it cannot be read."""
    try:
        return WrittenRecipe(read_mapping(path / "recipe.yaml"))
    except InputError:
        return WrittenRecipe({})


def _listed(path: Path, recipes: dict[Path, WrittenRecipe]) -> ListedRun:
    recipe = recipes[path]
    steps, seed = recipe.steps, recipe.seed
    if steps is None:
        return ListedRun(str(path), "damaged", why=f"{path / 'recipe.yaml'} cannot be read, or has no train.steps")
    name = str(recipe.values.get("name", ""))
    try:
        history = read_history(path / "metrics.jsonl")
    except SinklabError as error:
        return ListedRun(str(path), "damaged", name, seed, steps=steps, why=str(error))
    last = history[-1] if history else Evaluation(step=0)
    saved = steps_saved(path / "checkpoints")
    why = _failure(path)
    if is_held(path):
        state, why = "running", ""
    elif (path / "measurement.json").is_file() and last.step >= steps:
        state, why = "done", ""
    elif why:
        state = "failed"
    else:
        state = "stopped" if saved else "not begun"
    return ListedRun(
        str(path),
        state,
        name,
        seed,
        max([last.step, *saved]),
        steps,
        next(iter(last.sink_rate), None),
        last.sink_rate_bias,
        last.valid_loss,
        _differences(path, recipes),
        why,
        elsewhere_text(last.sink_rate),
    )


def _failure(path: Path) -> str:
    """The message of a failed run, empty for others."""
    try:
        return str(parse_json((path / "failed.json").read_text(encoding="utf-8"))["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _differences(path: Path, recipes: dict[Path, WrittenRecipe]) -> tuple[str, ...]:
    recipe = recipes[path]
    try:
        return tuple(changes(recipe.values, str(recipe.values.get("name"))))
    except InputError:
        own = leaves(recipe.values)
        others = [leaves(other.values) for other in recipes.values() if other.values]
        return tuple(
            f"{key}={value}"
            for key, value in own.items()
            if key not in ("seed", "name") and any(other.get(key) != value for other in others)
        )
