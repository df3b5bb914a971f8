"""The engines by name, and from `--engine-option KEY=VALUE` to their options."""

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pydantic import ValidationError

from sinklab.errors import InputError
from sinklab.schema import Part

if TYPE_CHECKING:
    from sinklab.experiments.sweep.engines.base import Engine

OptionsOfEngine = TypeVar("OptionsOfEngine", bound=Part)


class EngineName(StrEnum):
    """Where the runs of a sweep are trained."""

    local = "local"
    slurm = "slurm"
    ray = "ray"


def open_engine(name: EngineName, jobs: int, sweep: Path, settings: Sequence[str] = ()) -> "Engine":
    """An engine that takes runs.

    Args:
        jobs: runs at a time, of local.
        sweep: its directory, below which slurm and ray have a folder of their own.
        settings: KEY=VALUE, each a field of the options of slurm or ray.

    Raises:
        InputError: what it needs is not installed, no cluster answers, or an option is not one of its own.
    """
    if name == EngineName.slurm:
        from sinklab.experiments.sweep.engines.on_slurm import SlurmEngine, SlurmOptions

        return SlurmEngine(sweep / name, read_options(SlurmOptions, name, settings))
    if name == EngineName.ray:
        from sinklab.experiments.sweep.engines.on_ray import RayEngine, RayOptions

        return RayEngine(sweep / name, read_options(RayOptions, name, settings))
    if settings:
        raise InputError(f"--engine-option {settings[0]}: --engine local has none; --jobs says how many runs at a time")
    from sinklab.experiments.sweep.engines.local import LocalEngine

    return LocalEngine(jobs)


def read_options(kind: type[OptionsOfEngine], engine: str, settings: Sequence[str]) -> OptionsOfEngine:
    """Options from KEY=VALUE, of which the last counts.

    Raises:
        InputError: it says which options there are, or what one may be.
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
