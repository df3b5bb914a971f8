"""Execution engines by name, with options (`--engine-option KEY=VALUE`). Only the engine in use is imported."""

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pydantic import ValidationError

from sinklab.errors import InputError
from sinklab.schema import Part

if TYPE_CHECKING:
    from sinklab.experiments.sweep.engine import Engine

OptionsOfEngine = TypeVar("OptionsOfEngine", bound=Part)


class EngineName(StrEnum):
    """Names of the engines that train the runs of a sweep."""

    local = "local"
    slurm = "slurm"
    ray = "ray"


def open_engine(name: EngineName, jobs: int, sweep: Path, settings: Sequence[str] = ()) -> "Engine":
    """Create the execution engine with this name.

    Args:
        jobs: number of concurrent runs of the local engine; other engines ignore it.
        sweep: directory of the sweep, in which slurm and ray create a folder.
        settings: options of slurm or ray, as KEY=VALUE (`read_options`); the local engine has none.

    Raises:
        InputError: see `read_options`; also if a dependency or command of the engine is missing, or no cluster answers.
    """
    if name == EngineName.slurm:
        from sinklab.experiments.sweep.engines.on_slurm import SlurmEngine, SlurmOptions

        return SlurmEngine(sweep / name, read_options(SlurmOptions, name, settings))
    if name == EngineName.ray:
        from sinklab.experiments.sweep.engines.on_ray import RayEngine, RayOptions

        return RayEngine(sweep / name, read_options(RayOptions, name, settings))
    if settings:
        raise InputError(
            f"--engine-option {settings[0]}: --engine local has no options; set --jobs for the number of concurrent "
            "runs, or choose --engine slurm or ray"
        )
    from sinklab.experiments.sweep.engines.local import LocalEngine

    return LocalEngine(jobs)


def read_options(kind: type[OptionsOfEngine], engine: str, settings: Sequence[str]) -> OptionsOfEngine:
    """Return the options of an engine, parsed from KEY=VALUE; of a repeated key, the last value is used.

    Raises:
        InputError: if a setting is not KEY=VALUE, its key is unknown (the message lists all keys), or its value is
            invalid.
    """
    values: dict[str, str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or key not in kind.model_fields:
            known = ", ".join(kind.model_fields)
            raise InputError(
                f"--engine-option {setting}: expected KEY=VALUE; --engine {engine} has the options {known}"
            )
        values[key] = value
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        raise InputError(f"--engine-option {key}={values[key]}: {first['msg']}") from error
