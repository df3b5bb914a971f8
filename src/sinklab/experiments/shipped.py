"""The experiments that come with sinklab, a YAML file each in `shipped/`, and those in files of one's own."""

import difflib
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from pydantic import ValidationError

from sinklab.errors import InputError
from sinklab.experiments.claims import Claim
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
        return _with_recipes_beside(_with_references(Experiment.model_validate(said)), file)
    except ValidationError as error:
        lines = [f"  {'.'.join(map(str, one['loc'])) or 'experiment'}: {one['msg']}" for one in error.errors()]
        raise InputError("\n".join([f"{name} is not a valid experiment:", *lines])) from error
    except (OSError, ValueError) as error:
        raise InputError(f"{name} cannot be read: {error}") from error


def _with_references(experiment: Experiment) -> Experiment:
    """The experiment with the check of every claim that its references name.

    Raises:
        ValueError: there is no such claim, or it is a reference itself.
    """
    if not any(claim.same_as for claim in experiment.claims):
        return experiment
    claims = [_looked_up(claim, experiment) if claim.same_as else claim for claim in experiment.claims]
    return experiment.model_copy(update={"claims": tuple(claims)})


def _looked_up(claim: Claim, experiment: Experiment) -> Claim:
    name, _, wanted = (claim.same_as or "").rpartition(".")
    files = _shipped()
    if name != experiment.id and name not in files:
        raise ValueError(f"claim {claim.id} is the same as {claim.same_as}, and there is no experiment {name!r}")
    own = name == experiment.id
    other = experiment if own else Experiment.model_validate(parse_yaml(files[name].read_text("utf-8")))
    found = next((one for one in other.claims if one.id == wanted), None)
    if found is None or found.check is None:
        why = "there is no such claim" if found is None else f"that refers to {found.same_as} itself"
        raise ValueError(f"claim {claim.id} is the same as {claim.same_as}, and {why}")
    scales = claim.scales or (found.scales and tuple(scale for scale in found.scales if scale in experiment.base))
    condition = other.massive_cell(found) or False if claim.asks_massive is None else claim.asks_massive
    return claim.model_copy(update={"check": found.check, "scales": scales, "asks_massive": condition})


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
