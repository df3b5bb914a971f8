"""The experiments that come with sinklab, a YAML file each in `shipped/`, and those in files of one's own."""

import difflib
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from pydantic import ValidationError

from sinklab.errors import InputError
from sinklab.experiments.definition import Experiment
from sinklab.experiments.measured.definition import MeasuredExperiment
from sinklab.files import parse_yaml

FILE = ".yaml"
AnyExperiment = Experiment | MeasuredExperiment


def experiment_ids() -> list[str]:
    """The experiments that come with sinklab, most informative first."""
    return [one.id for one in sorted((load_experiment(name) for name in _shipped()), key=lambda one: one.rank)]


def load_experiment(name: str) -> AnyExperiment:
    """An experiment that comes with sinklab, by its id, or one of your own, by its file.

    A file that says `kind: measured` is one on existing models. A base recipe that lies beside the file is found there,
    from whatever directory it is asked for.

    Raises:
        InputError: there is no such experiment (the nearest names are offered), or the file is no valid one; the
            message names the field.
    """
    file = Path(name) if name.endswith(FILE) else _shipped().get(name)
    if file is None or not file.is_file():
        near = difflib.get_close_matches(name, _shipped(), n=3, cutoff=0.5)
        meant = f": did you mean {', '.join(near)}?" if near else "."
        raise InputError(
            f"no experiment {name!r}{meant} `sinklab experiments` lists them; one of your own is given as a {FILE} file"
        )
    try:
        said = parse_yaml(file.read_text(encoding="utf-8"))
        measured = isinstance(said, dict) and said.get("kind") == "measured"
        if measured:
            return MeasuredExperiment.model_validate(said)
        return _with_recipes_beside(Experiment.model_validate(said), file)
    except ValidationError as error:
        lines = [f"  {'.'.join(map(str, one['loc'])) or 'experiment'}: {one['msg']}" for one in error.errors()]
        raise InputError("\n".join([f"{name} is not a valid experiment:", *lines])) from error
    except (OSError, ValueError) as error:
        raise InputError(f"{name} cannot be read: {error}") from error


def _with_recipes_beside(experiment: Experiment, file: Path | Traversable) -> Experiment:
    """The experiment with base recipes that are files beside its own by where these are."""
    if not isinstance(file, Path):
        return experiment
    found = {scale: file.parent / base for scale, base in experiment.base.items() if base.endswith(FILE)}
    beside = {scale: str(path) for scale, path in found.items() if path.is_file()}
    return experiment.model_copy(update={"base": {**experiment.base, **beside}})


def _shipped() -> dict[str, Traversable]:
    """The files by the ids of their experiments, whatever folder they lie in."""
    top = resources.files("sinklab") / "experiments" / "shipped"
    folders = [path for path in top.iterdir() if path.is_dir()]
    files = [path for folder in folders for path in folder.iterdir() if path.name.endswith(FILE)]
    return {path.name.removesuffix(FILE): path for path in sorted(files, key=lambda path: path.name)}
