"""Forward passes of experiments on existing models: the models, inputs and cells of each pass."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sinklab.errors import InputError
from sinklab.experiments.definition import CellTask, Experiment, MeasuredCell
from sinklab.measuring.options import Options, Study
from sinklab.models.huggingface.loading import Loading
from sinklab.survey.compare import labels
from sinklab.survey.domains import domain_files
from sinklab.survey.request import Request
from sinklab.tables import plural

PARAMETERS = re.compile(r"(?<![\d.a-z])(\d+(?:\.\d+)?)([MB])(?![a-z\d])", re.I)
"""Pattern of a parameter count in a model's name. The first match is used: 1.4B in OSP-1.4B-100B-Adam."""

MOST_NAMED = 6
"""Maximum number of models that are listed by name."""


@dataclass(frozen=True)
class Subject:
    """A domain or model for which all cells are measured; its name is empty if the experiment does not set `each`.

    Attributes:
        models: model names or paths by role (base, chat); empty if the cells set `models`.
        text: file or folder of text, for a domain its file; None without --text.
    """

    name: str
    models: Mapping[str, str]
    text: Path | None

    def cell_name(self, cell: str) -> str:
        """Return the name of a cell in the results: SUBJECT/CELL, or CELL for a subject without a name."""
        return f"{self.name}/{cell}" if self.name else cell


@dataclass(frozen=True)
class ModelChoice:
    """A model to load: Hugging Face id, directory, .gguf file or run directory.

    Attributes:
        revision: branch, tag or commit on the Hub; empty to use the revision of the loading settings.
        subfolder: subfolder of the model; empty for none.
    """

    name: str
    revision: str = ""
    subfolder: str = ""

    def __str__(self) -> str:
        """Return NAME/SUBFOLDER@REVISION; empty parts are omitted."""
        name = f"{self.name}/{self.subfolder}" if self.subfolder else self.name
        return f"{name}@{self.revision}" if self.revision else name

    def loaded_by(self, loading: Loading) -> Loading:
        """Return a copy of the loading settings with this model's subfolder, and its revision if it is not empty."""
        return replace(loading, revision=self.revision or loading.revision, subfolder=self.subfolder or None)


def model_choice(given: str, cell: MeasuredCell) -> ModelChoice:
    """Parse a model given as NAME or NAME@REVISION; the name of an existing file or directory may contain an @.

    Default revision and subfolder are those of the cell. For a model directory, the revision is the name of a folder in
    it, which becomes the model.

    Raises:
        InputError: if the directory has no such folder.
    """
    name, _, revision = given.rpartition("@") if "@" in given and not Path(given).exists() else (given, "", "")
    revision = revision or cell.revision or ""
    if revision and Path(name).is_dir():
        folder = Path(name) / revision
        if not folder.is_dir():
            raise InputError(
                f"{name} has no folder {revision}: the revision of a model directory is the name of a folder in it; "
                "pass a directory with this folder, or another revision"
            )
        name, revision = str(folder), ""
    return ModelChoice(name, revision, cell.subfolder or "")


@dataclass(frozen=True)
class Pass:
    """Forward passes over the same sequences for one cell, or for several cells that differ only in eps and length.

    Attributes:
        models: models by name of the results folder; several models are replicates, a single model is measured on
            several draws.
        text: file or folder of text for natural inputs; None for other inputs.
        cells: cells by their names in the results.
        fewer: value of `Request.fewer`: True for an experiment over domains.
    """

    name: str
    models: Mapping[str, ModelChoice]
    text: Path | None
    cells: Mapping[str, MeasuredCell]
    fewer: bool

    def replicates(self, most: int) -> range:
        """Return the indices of the replicates: `most` draws of a single model, or at most `most` of several models."""
        return range(most if len(self.models) == 1 else min(most, len(self.models)))

    def folder(self, replicate: int) -> str:
        """Return a replicate's results folder, relative to the output directory: NAME/seed_DRAW or NAME/MODEL."""
        return f"{self.name}/{f'seed_{replicate}' if len(self.models) == 1 else list(self.models)[replicate]}"

    def model(self, replicate: int) -> ModelChoice:
        """Return the model of a replicate."""
        return list(self.models.values())[0 if len(self.models) == 1 else replicate]

    @property
    def task(self) -> CellTask | None:
        """Downstream task of the cells; None if they have none."""
        return next(iter(self.cells.values())).task

    def request(self, draw: int) -> Request:
        """Return the measurement request for a draw (index from 0), with the thresholds and lengths of all cells."""
        first, lengths = next(iter(self.cells.values())), sorted({cell.length for cell in self.cells.values()})
        return Request(
            options=Options(
                eps=tuple(dict.fromkeys(cell.eps for cell in self.cells.values())),
                lengths=tuple(lengths[:-1]),
                loss=first.loss,
                details=first.details,
                inputs=first.inputs,
            ),
            sequences=first.sequences,
            length=lengths[-1],
            seed=draw,
            fewer=self.fewer,
            drawn_text=first.inputs == "natural",
            study=Study(swap_position=first.swap_position, replace_position=first.replace_position),
        )


def subjects_of(experiment: Experiment, models: Sequence[str], text: Path | None) -> list[Subject]:
    """Return the domains or models for which every cell is measured; without `each`, a single subject without a name.

    Args:
        models: values of --model; ignored if the cells set `models`.
        text: file or folder of text; for an experiment over domains, a folder with a file per domain.

    Raises:
        InputError: if models are missing, repeated or too many, or the text is missing or not such a folder.
    """
    _check_inputs(experiment, models, text)
    if experiment.names_models:
        return [Subject("", {}, text)]
    if experiment.each == "domain":
        assert text is not None
        return [Subject(name, {"base": models[0]}, file) for name, file in domain_files(text).items()]
    if experiment.each == "model":
        return [Subject(name, {"base": model}, text) for name, model in labels(models).items()]
    return [Subject("", dict(zip(("base", "chat"), models, strict=False)), text)]


def with_models(experiment: Experiment, models: Sequence[str]) -> Experiment:
    """Return a copy of the experiment in which `models`, if there are any, replaces the models that its cells set.

    Raises:
        InputError: if the cells set different models or a single model each, or `models` has fewer than two entries or
            duplicates.
    """
    if not models or not experiment.names_models:
        return experiment
    if len({cell.models for cell in experiment.requests.values()}) > 1 or experiment.replicate != "model":
        raise InputError(f"{experiment.id} has a fixed list of models: remove --model {models[0]}")
    labels(models)  # raises InputError for duplicates
    if len(models) < 2:
        raise InputError(f"{experiment.id} uses models as replicates: pass at least two --model, five for verdicts")
    cells = {name: cell.model_copy(update={"models": tuple(models)}) for name, cell in experiment.requests.items()}
    return experiment.model_copy(update={"cells": cells})


def _check_inputs(experiment: Experiment, models: Sequence[str], text: Path | None) -> None:
    cells, of_each = experiment.requests.values(), experiment.each == "model"
    pair = any(cell.model == "chat" for cell in cells)
    if not experiment.names_models:
        if not models:
            raise InputError(
                f"{experiment.id} measures an existing model: pass --model MODEL, a Hugging Face id, directory, .gguf "
                f"file or run directory{', and optionally its chat model with a second --model' if pair else ''}"
            )
        if not of_each and len(models) > 1 + pair:
            wanted = "a model and its chat model" if pair else "one model"
            raise InputError(f"{experiment.id} takes {wanted}, but --model was passed {len(models)} times")
        labels(models)  # raises InputError for duplicates
    if experiment.each == "domain" and (text is None or not text.is_dir()):
        raise InputError(f"{experiment.id} needs --text FOLDER, a folder of text files, one per domain")
    if text is None and any(cell.inputs == "natural" for cell in cells):
        raise InputError(f"{experiment.id} measures on natural text: pass --text FILE or a folder")


def passes_of(experiment: Experiment, subjects: Sequence[Subject]) -> list[Pass]:
    """Group the cells of all subjects into forward passes, ordered by model; chat cells need a second --model.

    Raises:
        InputError: if a model directory has no folder of a revision's name, or two models of a cell are the same.
    """
    found: dict[str, Pass] = {}
    for subject in subjects:
        groups: dict[str, dict[str, MeasuredCell]] = {}
        for name, cell in experiment.requests.items():
            if cell.models or cell.model in subject.models:
                groups.setdefault(cell.model_dump_json(exclude={"eps", "length"}), {})[name] = cell
        for cells in groups.values():
            first_name, first = next(iter(cells.items()))
            choices = [model_choice(one, first) for one in first.models or (subject.models[first.model],)]
            named = labels([str(choice) for choice in choices])  # raises InputError for duplicates
            name = subject.cell_name(first_name if len(cells) == 1 else first.inputs)
            if name in found:
                name = f"{name}/{first_name}"
            found[name] = Pass(
                name=name,
                models={label.replace("/", "_"): choice for label, choice in zip(named, choices, strict=True)},
                text=subject.text if first.inputs == "natural" else None,
                cells={subject.cell_name(cell): request for cell, request in cells.items()},
                fewer=experiment.each == "domain",
            )
    given = [model for subject in subjects for model in subject.models.values()]

    def place(one: Pass) -> int:
        cell = next(iter(one.cells.values()))
        return next((at for at, model in enumerate(given) if model_choice(model, cell) == one.model(0)), len(given))

    return sorted(found.values(), key=place)


def enumerated(names: Sequence[str]) -> str:
    """Join the names of models: `a, b`, or `9 models, a to i` if there are more than MOST_NAMED."""
    return ", ".join(names) if len(names) <= MOST_NAMED else f"{len(names)} models, {names[0]} to {names[-1]}"


def download_of(models: Sequence[ModelChoice]) -> str:
    """Return a phrase with the number and total size of the models to download, or that all of them are local.

    The size is estimated from the parameter counts in the names, at two bytes per parameter.
    """
    remote = [model for model in models if not Path(model.name).exists()]
    if not remote:
        return f"{plural(len(models), 'model')}, all on this machine"
    said = [PARAMETERS.search(str(model).rpartition("/")[2]) for model in remote]
    known = [float(found[1]) * (1e9 if found[2] in "bB" else 1e6) for found in said if found]
    size = f", about {2 * sum(known) / 1e9:,.1f} GB at 16 bits" if known else ""
    unknown = f" and {plural(len(remote) - len(known), 'model')} of unknown size" if len(known) < len(remote) else ""
    return f"{plural(len(remote), 'model')} to download unless cached{size}{unknown if known else ''}"
