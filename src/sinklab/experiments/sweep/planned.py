"""What goes between a sweep and the engine that trains its runs: runs to be trained, and what becomes of them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from sinklab.train.recipe import Recipe, build_recipe

Ending = Literal["done", "failed", "stopped", "busy"]
ENDINGS: tuple[Ending, ...] = ("done", "failed", "stopped", "busy")


@dataclass(frozen=True)
class PlannedRun:
    """A run to be trained. It can be pickled, and read on another machine that sees the directory.

    Attributes:
        name: for people; no other run of the sweep has it.
        recipe: resolved, as YAML.
        directory: of the run.
        hash: of the run; who trains it and finds another one, because the text is another there, refuses.
        processes: that train it together; as many as there are cards for it where it is trained unless given.
    """

    name: str
    recipe: str
    directory: Path
    hash: str
    processes: int | None = None

    def read_recipe(self) -> Recipe:
        """The recipe as a value."""
        return build_recipe(yaml.safe_load(self.recipe), origin=self.name)


@dataclass(frozen=True)
class Event:
    """Something a run reports.

    Attributes:
        run: its name.
        kind: `ready` when the model is there, `step` after an update, `row` after an evaluation, and at the end one of
            `done`, `stopped` (it was asked to, and goes on when it is submitted again), `busy` (another process trains
            it) and `failed`.
        step: updates done.
        row: the evaluation, for `row`.
        message: why, for `failed`; who, for `busy`.
    """

    run: str
    kind: Literal["ready", "step", "row"] | Ending
    step: int = 0
    row: dict[str, Any] | None = None
    message: str = ""

    @property
    def is_last(self) -> bool:
        """Whether the run has ended, for this engine."""
        return self.kind in ENDINGS
