"""Execution engines by name, with options (`--engine-option KEY=VALUE`). Only the engine in use is imported."""

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pydantic import ValidationError

from sinklab.errors import InputError, cause
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
        InputError: if an option is invalid, a dependency or command of the engine is missing, or no cluster answers.
    """
    if name == EngineName.local:
        from sinklab.experiments.sweep.engines.local import LocalEngine

        if settings:
            raise InputError(
                f"--engine-option {settings[0]}: --engine local has no options; set --jobs for the number of "
                "concurrent runs, or choose --engine slurm or ray"
            )
        return LocalEngine(jobs)
    from sinklab.experiments.sweep.engines import cluster

    if name == EngineName.slurm:
        return cluster.SlurmEngine(sweep / name, read_options(cluster.SlurmOptions, name, settings))
    return cluster.RayEngine(sweep / name, read_options(cluster.RayOptions, name, settings))


def read_options(kind: type[OptionsOfEngine], engine: str, settings: Sequence[str]) -> OptionsOfEngine:
    """Return the options of an engine, parsed from KEY=VALUE; of a repeated key, the last value is used.

    Raises:
        InputError: if a key is unknown or a value invalid; the message lists all keys.
    """
    try:
        return kind.model_validate({key: value for key, _, value in (one.partition("=") for one in settings)})
    except ValidationError as error:
        known = ", ".join(kind.model_fields)
        raise InputError(
            f"--engine-option {' '.join(settings)}: {cause(error)}; --engine {engine} has the options {known}"
        ) from error
