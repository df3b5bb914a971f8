"""The settings of an evaluation on downstream tasks."""

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, field_validator

from sinklab.errors import InputError
from sinklab.settings import MOST, CommandSettings, Flag, Seed, Several


def _names(given: object) -> object:
    return tuple(name.strip() for name in given.split(",")) if isinstance(given, str) else given


class TaskRequest(CommandSettings, frozen=True):
    """Tasks, their items, and the text for the sink metric."""

    tasks: Annotated[Several[str], BeforeValidator(_names), Flag(text=str)] = Field(
        description="Tasks of lm-eval, comma-separated: hellaswag, arc_easy, ..."
    )
    limit: int | None = Field(default=None, ge=1, le=MOST, description="Items per task, drawn by --seed; default: all.")
    data: Path | None = Field(
        default=None, description="HellaSwag's items, .jsonl or .jsonl.gz; default: from SINKLAB_DATA, else the hub."
    )
    text: Path | None = Field(
        default=None, description="Text for the sink metric, .txt or .jsonl; default: the task's items."
    )
    batch_size: int = Field(default=4, ge=1, description="Texts per batch.")
    seed: Seed = Field(default=0, description="Of the draw of items.")

    @field_validator("tasks")
    @classmethod
    def _are_named(cls, tasks: tuple[str, ...]) -> tuple[str, ...]:
        if not tasks or not all(tasks):
            raise InputError("--tasks: give the names of tasks of lm-eval with commas, such as hellaswag,arc_easy")
        return tasks
