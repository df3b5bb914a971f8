"""The settings of an evaluation on downstream tasks."""

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, field_validator

from sinklab.errors import InputError
from sinklab.settings import MOST, CommandSettings, DrawSeed, Flag, Several


def _names(given: object) -> object:
    return tuple(name.strip() for name in given.split(",")) if isinstance(given, str) else given


class TaskRequest(CommandSettings, frozen=True):
    """What a model is asked."""

    tasks: Annotated[Several[str], BeforeValidator(_names), Flag(text=str)] = Field(
        description="Names of lm-eval, with commas: hellaswag, arc_easy, ..."
    )
    limit: int | None = Field(
        default=None, ge=1, le=MOST, description="Items of each task, drawn by --seed; all unless given."
    )
    data: Path | None = Field(
        default=None, description="HellaSwag's items, .jsonl or .jsonl.gz; SINKLAB_DATA's or the hub's else."
    )
    text: Path | None = Field(
        default=None, description=".txt or .jsonl that the sink is measured on; the task's items unless given."
    )
    batch_size: int = Field(default=4, ge=1, description="Texts at a time.")
    seed: DrawSeed = 0

    @field_validator("tasks")
    @classmethod
    def _are_named(cls, tasks: tuple[str, ...]) -> tuple[str, ...]:
        if not tasks or not all(tasks):
            raise InputError("--tasks: give the names of tasks of lm-eval with commas, such as hellaswag,arc_easy")
        return tasks
