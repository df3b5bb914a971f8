"""Which measurements an experiment on existing models takes: a pass over each draw of sequences for all cells of it.

A measurement lies in OUT/PASS/seed_DRAW. A pass is named by its cell, or by the kind of its inputs where several cells
share it, after the domain or model that it is of.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sinklab.errors import InputError
from sinklab.experiments.measured.definition import CellTask, MeasuredCell, MeasuredExperiment
from sinklab.measuring.options import Options, Study
from sinklab.survey.compare import labels
from sinklab.survey.domains import domain_files
from sinklab.survey.request import Request


@dataclass(frozen=True)
class Pass:
    """Sequences of one kind, read once by one model for every cell that is about them.

    Attributes:
        name: of its folder.
        model: as it was given.
        text: that it reads; None for other inputs.
        cells: by their names in the results.
        fewer: be content with fewer sequences.
    """

    name: str
    model: str
    text: Path | None
    cells: Mapping[str, MeasuredCell]
    fewer: bool

    def folder(self, draw: int) -> str:
        """Where a draw is kept, below the directory of the results."""
        return f"{self.name}/seed_{draw}"

    @property
    def task(self) -> CellTask | None:
        """What the model is asked as well, the same for all its cells."""
        return next(iter(self.cells.values())).task

    def request(self, draw: int) -> Request:
        """What is asked of the model."""
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


@dataclass(frozen=True)
class Subject:
    """What cells are measured for.

    Attributes:
        name: of the domain or model; empty where there is only one.
        models: by role.
    """

    name: str
    models: Mapping[str, str]
    text: Path | None


def passes_of(experiment: MeasuredExperiment, subjects: Sequence[Subject]) -> list[Pass]:
    """The passes, those of one model after the other."""
    found: dict[str, Pass] = {}
    for subject in subjects:
        cells: dict[str, dict[str, MeasuredCell]] = {}
        for name, cell in experiment.cells.items():
            if cell.model in subject.models:
                cells.setdefault(cell.pass_key, {})[name] = cell
        for sharing in cells.values():
            one = _pass(subject, sharing, fewer=experiment.each == "domain", taken=found)
            found[one.name] = one
    models = [model for subject in subjects for model in subject.models.values()]
    return sorted(found.values(), key=lambda one: models.index(one.model))


def cell_name(subject: str, cell: str) -> str:
    """The name of a cell in the results."""
    return f"{subject}/{cell}" if subject else cell


def subjects_of(experiment: MeasuredExperiment, models: Sequence[str], text: Path | None) -> list[Subject]:
    """The domains or models that every cell is measured for; one without a name where there is only one.

    Raises:
        InputError: no model, too many or one twice, or no text of the right kind.
    """
    _check(experiment, models, text)
    if experiment.each == "domain":
        assert text is not None
        return [Subject(name, {"base": models[0]}, file) for name, file in domain_files(text).items()]
    if experiment.each == "model":
        return [Subject(name, {"base": model}, text) for name, model in labels(models).items()]
    return [Subject("", dict(zip(("base", "chat"), models, strict=False)), text)]


def _check(experiment: MeasuredExperiment, models: Sequence[str], text: Path | None) -> None:
    most = experiment.most_models
    pair = most == 2
    if not models:
        raise InputError(
            f"{experiment.id} measures an existing model: give --model MODEL, a Hugging Face id, directory, .gguf file "
            f"or run directory{', and its chat model as a second --model where there is one' if pair else ''}"
        )
    if most is not None and len(models) > most:
        raise InputError(
            f"{experiment.id} takes {'a model and its chat model' if pair else 'one model'}: got {len(models)} --model"
        )
    labels(models)  # none is there twice
    if experiment.each == "domain" and (text is None or not text.is_dir()):
        raise InputError(f"{experiment.id} needs --text FOLDER, a folder of .jsonl or .txt files, one per domain")
    if experiment.needs_text and text is None:
        raise InputError(f"{experiment.id} measures on natural text: give --text FILE (.txt or .jsonl) or a folder")


def _pass(subject: Subject, sharing: Mapping[str, MeasuredCell], fewer: bool, taken: Mapping[str, Pass]) -> Pass:
    first_name, first = next(iter(sharing.items()))
    name = cell_name(subject.name, first_name if len(sharing) == 1 else first.inputs)
    return Pass(
        name=name if name not in taken else cell_name(name, first_name),
        model=subject.models[first.model],
        text=subject.text if first.inputs == "natural" else None,
        cells={cell_name(subject.name, cell): option for cell, option in sharing.items()},
        fewer=fewer,
    )
