"""Experiments on existing models: passes over sequences, measurements, and the claims that apply to the given models.

A pass reads one draw of sequences for all cells that differ in eps and length only. Its measurement is kept in
OUT/PASS/seed_DRAW, so that a repeated call measures only what is missing (`survey/measure_many.py`). A pass is named by
its cell, or by the kind of its inputs if several cells share it, after the domain or model that it is of.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sinklab.data.sources.corpora import identity
from sinklab.errors import InputError
from sinklab.evaluating.evaluate_model import TaskOfCell, measure_and_evaluate
from sinklab.evaluating.tasks import ChosenTask, chosen_task
from sinklab.experiments.claims import AlikeOverDomains, AlikeOverSizes, Claim, GrowsWithSize, Undecidable, Within
from sinklab.experiments.definition import CellTask, Experiment, MeasuredCell
from sinklab.experiments.documents import SUMMARY, CellRun, ExperimentSummary, Summary
from sinklab.experiments.paper import published_tables
from sinklab.experiments.quantities import RunNumbers
from sinklab.experiments.results import CellResults, measured_numbers, named_values
from sinklab.experiments.summary import summarise
from sinklab.experiments.verdicts.judging import Trial
from sinklab.jobs.progress import Observer, ignore
from sinklab.measuring.findings import Propositions
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.options import Options, Study
from sinklab.models.hooks import Progress
from sinklab.models.huggingface.loading import AS_IT_IS, Loading, check_name
from sinklab.opening import Model, open_model
from sinklab.survey.compare import labels
from sinklab.survey.measure_many import Item, Outcome, deciding_request, domain_files, measure_all
from sinklab.survey.measure_one import check_loadable, check_request, measure_loaded
from sinklab.survey.open_models import EVERY, OpenModel, models_of, setting
from sinklab.survey.request import Request

FEWEST_MODELS = 3
"""Of a family, for a trend over it."""

PaperRows = dict[str, dict[str, dict[str, float]]]
"""Numbers by model, cell and quantity."""


@dataclass(frozen=True)
class Subject:
    """A domain or a model that all cells are measured for.

    Attributes:
        name: empty if there is only one.
        models: by role.
    """

    name: str
    models: Mapping[str, str]
    text: Path | None

    def cell_name(self, cell: str) -> str:
        """The name of a cell in the results."""
        return f"{self.name}/{cell}" if self.name else cell


@dataclass(frozen=True)
class Pass:
    """Sequences of one kind, read once by one model for several cells.

    Attributes:
        name: of its folder.
        model: as it was given.
        text: that it reads; None for other inputs.
        cells: by their names in the results.
        fewer: accept fewer sequences.
    """

    name: str
    model: str
    text: Path | None
    cells: Mapping[str, MeasuredCell]
    fewer: bool

    def folder(self, draw: int) -> str:
        """The folder of a draw, relative to that of the results."""
        return f"{self.name}/seed_{draw}"

    @property
    def task(self) -> CellTask | None:
        """The downstream task, the same for all its cells."""
        return next(iter(self.cells.values())).task

    def request(self, draw: int) -> Request:
        """The sequences, and what is measured on them."""
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
    """The domains or models that every cell is measured for; a single subject has no name.

    Raises:
        InputError: no model, too many or a repeated one, or no text of the right kind.
    """
    _check_given(experiment, models, text)
    if experiment.each == "domain":
        assert text is not None
        return [Subject(name, {"base": models[0]}, file) for name, file in domain_files(text).items()]
    if experiment.each == "model":
        return [Subject(name, {"base": model}, text) for name, model in labels(models).items()]
    return [Subject("", dict(zip(("base", "chat"), models, strict=False)), text)]


def _check_given(experiment: Experiment, models: Sequence[str], text: Path | None) -> None:
    cells = experiment.requests.values()
    pair = experiment.each != "model" and any(cell.model == "chat" for cell in cells)
    if not models:
        raise InputError(
            f"{experiment.id} measures an existing model: give --model MODEL, a Hugging Face id, directory, .gguf file "
            f"or run directory{', and its chat model as a second --model where there is one' if pair else ''}"
        )
    if experiment.each != "model" and len(models) > 1 + pair:
        raise InputError(
            f"{experiment.id} takes {'a model and its chat model' if pair else 'one model'}: got {len(models)} --model"
        )
    labels(models)  # refuses a repeated one
    if experiment.each == "domain" and (text is None or not text.is_dir()):
        raise InputError(f"{experiment.id} needs --text FOLDER, a folder of .jsonl or .txt files, one per domain")
    if text is None and any(cell.inputs == "natural" for cell in cells):
        raise InputError(f"{experiment.id} measures on natural text: give --text FILE (.txt or .jsonl) or a folder")


def passes_of(experiment: Experiment, subjects: Sequence[Subject]) -> list[Pass]:
    """The passes, grouped by model."""
    found: dict[str, Pass] = {}
    for subject in subjects:
        groups: dict[str, dict[str, MeasuredCell]] = {}
        for name, cell in experiment.requests.items():
            if cell.model in subject.models:
                groups.setdefault(cell.pass_key, {})[name] = cell
        for cells in groups.values():
            first_name, first = next(iter(cells.items()))
            name = subject.cell_name(first_name if len(cells) == 1 else first.inputs)
            if name in found:
                name = f"{name}/{first_name}"
            found[name] = Pass(
                name=name,
                model=subject.models[first.model],
                text=subject.text if first.inputs == "natural" else None,
                cells={subject.cell_name(cell): request for cell, request in cells.items()},
                fewer=experiment.each == "domain",
            )
    models = [model for subject in subjects for model in subject.models.values()]
    return sorted(found.values(), key=lambda one: models.index(one.model))


def downstream_tasks(experiment: Experiment) -> list[str]:
    """The downstream tasks of its cells."""
    return list(dict.fromkeys(cell.task.name for cell in experiment.requests.values() if cell.task))


@dataclass(frozen=True)
class MeasuredResults:
    """The measurements of an experiment so far.

    Attributes:
        subjects: domains or models that its cells are measured for.
        hashes: hash of each measurement request, by folder.
    """

    experiment: Experiment
    subjects: Sequence[Subject]
    passes: Sequence[Pass]
    draws: int
    hashes: dict[str, str]
    outcome: Outcome

    def document(self) -> dict[str, Any]:
        """The content of summary.json."""
        return self.summary().model_dump(by_alias=True)

    def summary(self) -> Summary:
        """Cells with their numbers, and the claims judged."""
        results = {name: self._cell(one, cell) for one in self.passes for name, cell in one.cells.items()}
        found = next((one.propositions for one in self.outcome.measured.values() if one.propositions), None)
        claims = list(claims_about(self.experiment, self.subjects, found))
        trial = Trial(self.experiment, _described(self.experiment, self.subjects, list(results)), claims)
        return summarise([trial], results)

    def _cell(self, one: Pass, cell: MeasuredCell) -> CellResults:
        runs: list[CellRun] = []
        numbers: list[RunNumbers] = []
        for draw in range(self.draws):
            folder = one.folder(draw)
            measured = self.outcome.measured.get(folder)
            found = measured_numbers(cell, measured, draw) if measured else None
            numbers += [found] if found else []
            runs.append(self._run(folder, draw, found))
        return CellResults(self._change(cell), runs, numbers)

    def _change(self, cell: MeasuredCell) -> dict[str, object]:
        """The settings of a cell that are not the default, or not the same in all cells."""
        dumped = [one.model_dump(mode="json") for one in self.experiment.requests.values()]
        varied = {name for name in MeasuredCell.model_fields if any(one[name] != dumped[0][name] for one in dumped)}
        changed = cell.model_dump(exclude_defaults=True)
        return {name: value for name, value in cell.model_dump(mode="json").items() if name in varied | set(changed)}

    def _run(self, folder: str, draw: int, numbers: RunNumbers | None) -> CellRun:
        failed = self.outcome.failed.get(folder)
        values, never = named_values(numbers, self.experiment.columns) if numbers else ({}, [])
        return CellRun(
            seed=draw,
            hash=self.hashes[folder],
            directory=folder,
            status="done" if numbers else "failed" if failed else "unfinished",
            message=failed or "",
            values=values,
            never=never,
            seconds=numbers.seconds if numbers else None,
        )


def measure_experiment(
    experiment: Experiment,
    models: Sequence[str],
    text: Path | None,
    draws: int,
    *,
    loading: Loading = AS_IT_IS,
    out: Path,
    observe: Observer = ignore,
    data: Path | None = None,
) -> MeasuredResults:
    """Measure every cell on each draw of sequences, one model after the other, and judge the claims.

    Args:
        models: run directories, model directories, .gguf files or names on the Hugging Face hub.
        text: a file or folder; a folder with a file for each domain if the experiment is about domains.
        out: keeps each measurement in a folder, and summary.json; a repeated call measures only what is missing.
        data: HellaSwag's file, for an experiment with that task.

    Raises:
        InputError: no usable model or text, a model without the positions that the experiment changes, or measurements
            of other settings in `out`. A model after the first is listed as failed instead.
        UnsavedError: a result could not be saved; it holds the results so far.
    """
    subjects = subjects_of(experiment, models, text)
    passes = passes_of(experiment, subjects)
    for model in models:
        check_name(model)
    for one in passes:
        one.request(0).check(one.text)
    tasks = {task.name: task for name in downstream_tasks(experiment) for task in [chosen_task(name, data)]}
    loaded = _OneAtATime(passes, loading)
    texts = {path: identity(str(path)) for one in passes if (path := one.text) is not None}
    items = [
        _item(one, draw, texts.get(one.text) if one.text else None, loaded, _task_of(one, tasks), out)
        for model in dict.fromkeys(one.model for one in passes)
        for draw in range(draws)
        for one in passes
        if one.model == model
    ]
    hashes = {item.name: hashlib.sha256(json.dumps(item.request).encode()).hexdigest()[:16] for item in items}

    def prepare(unfinished: Sequence[str]) -> None:
        names = {one.folder(draw): one for one in passes for draw in range(draws)}
        for model in dict.fromkeys(names[name].model for name in unfinished):
            check_loadable(model, loading)
        loaded.get(names[unfinished[0]])

    result_of: Callable[[Outcome], MeasuredResults] = partial(
        MeasuredResults, experiment, subjects, passes, draws, hashes
    )
    return measure_all(items, result_of, out, SUMMARY, observe, prepare=prepare)


def _task_of(one: Pass, tasks: Mapping[str, ChosenTask]) -> TaskOfCell | None:
    """The downstream task that a pass evaluates beside its measurement."""
    return None if one.task is None else TaskOfCell(tasks[one.task.name], one.task.items)


def _item(one: Pass, draw: int, source: str | None, loaded: "_OneAtATime", task: TaskOfCell | None, out: Path) -> Item:
    request, folder = one.request(draw), one.folder(draw)

    def measure(progress: Progress) -> Measurement:
        model = loaded.get(one)
        if task is None:
            return measure_loaded(model, one.text, request, progress)
        return measure_and_evaluate(model, task, one.text, request, out / folder, progress)

    decides = deciding_request(one.model, Path(one.model).expanduser(), source, loaded.loading, request)
    return Item(folder, decides | ({} if task is None else {"task": task.document()}), measure)


class _OneAtATime:
    """Loads models lazily and keeps only the latest in memory."""

    def __init__(self, passes: Sequence[Pass], loading: Loading) -> None:
        self._passes, self.loading = passes, loading
        self._wanted: tuple[str, bool] | None = None
        self._model: Model | None = None

    def get(self, wanted: Pass) -> Model:
        """The model of a pass, prepared for downstream tasks if the pass has one.

        Raises:
            InputError: it cannot be loaded, or not be measured with these settings.
        """
        name, asks = wanted.model, wanted.task is not None
        if self._model is None or self._wanted != (name, asks):
            self._model = None  # its memory is needed
            model = open_model(name, self.loading, as_transformers=asks)
            for one in self._passes:
                if one.model == name and (one.task is not None) == asks:
                    check_request(model, one.request(0))
            self._wanted, self._model = (name, asks), model
        return self._model


def claims_about(
    experiment: Experiment, subjects: Sequence[Subject], found: Propositions | None
) -> Iterator[Claim | Undecidable]:
    """The claims that apply to these models, each about cells by their names in the results.

    Args:
        found: which proposition applies to the model, from repeated tokens; None if unknown.
    """
    roles = {role for one in subjects for role in one.models}
    for claim in experiment.claims:
        absent = sorted({experiment.requests[cell].model for cell in claim.cells} - roles)
        if absent:
            yield Undecidable(claim, f"no {absent[0]} model was given: it is the second --model")
        elif claim.proposition is not None and found is None:
            yield Undecidable(claim, "no proposition of the paper speaks of the model, or it is not measured yet")
        elif claim.positions is not None and found is None:
            yield Undecidable(claim, "how the model tells positions apart is not known before repeated tokens are read")
        elif _applies(claim, found):
            yield from _about(claim, subjects)


def _applies(claim: Claim, found: Propositions | None) -> bool:
    """No proposition applies to a model that adds positions to its embedding."""
    if claim.proposition is not None:
        return found is not None and found.number == claim.proposition
    return claim.positions is None or (found is not None and (claim.positions == "added") == (found.number is None))


def _about(claim: Claim, subjects: Sequence[Subject]) -> Iterator[Claim | Undecidable]:
    match claim.check:
        case AlikeOverDomains() as check:
            if len(subjects) < 2:
                yield Undecidable(claim, "it takes two domains or more")
            else:
                yield claim.about(check.over(tuple(one.cell_name(check.cell) for one in subjects)))
        case GrowsWithSize() | AlikeOverSizes() as check:
            yield from _by_family(claim, check, subjects)
        case Within() as check if subjects[0].name:
            for one in subjects:
                of_subject = check.model_copy(update={"cell": one.cell_name(check.cell)})
                yield claim.about(of_subject, re.sub(r"\W", "_", one.name))
        case _:
            yield claim


def _by_family(
    claim: Claim, check: GrowsWithSize | AlikeOverSizes, subjects: Sequence[Subject]
) -> Iterator[Claim | Undecidable]:
    known = [(model, one) for one in subjects if (model := paper_model(one.models["base"]))]
    families: dict[str, list[Subject]] = {}
    for model, one in sorted(known, key=lambda pair: pair[0].parameters):
        families.setdefault(model.family, []).append(one)
    enough = {
        family: members
        for family, members in families.items()
        if len(members) >= FEWEST_MODELS and check.is_about(family)
    }
    for family, members in enough.items():
        yield claim.about(check.over(tuple(one.cell_name(check.cell) for one in members)), family)
    if not enough:
        asked = f"of {' or '.join(check.families)}" if check.families else "of one family of the paper's list"
        besides = f", {' and '.join(check.but)} apart" if check.but else ""
        yield Undecidable(claim, f"it takes {FEWEST_MODELS} models {asked}{besides}")


def _described(experiment: Experiment, subjects: Sequence[Subject], cells: list[str]) -> ExperimentSummary:
    """The experiment's part of the summary. The model names, to which verdicts are limited, replace the scale."""
    models = dict.fromkeys(model for subject in subjects for model in subject.models.values())
    published = {
        subject.cell_name(name): published_numbers(experiment, name, cell, subject.models[cell.model])
        for subject in subjects
        for name, cell in experiment.requests.items()
        if cell.model in subject.models
    }
    known = [(one, paper_model(one.models["base"])) for one in subjects] if experiment.against else []
    return ExperimentSummary(
        title=experiment.title,
        question=experiment.question,
        source=experiment.source,
        scale=", ".join(labels(list(models))),
        cells=cells,
        columns=list(experiment.columns),
        published={cell: numbers for cell, numbers in published.items() if numbers},
        elsewhere=paper_rows(experiment),
        against=list(experiment.against or ()),
        families={
            subject.cell_name(cell): model.family for subject, model in known if model for cell in experiment.requests
        },
    )


def paper_model(given: str) -> OpenModel | None:
    """The paper's model that matches a given model: by hub name, or a folder named like the last part of it."""
    label = next(iter(labels([given]))).lower()
    return next(
        (one for one in models_of([EVERY]) if label in (one.id.lower(), one.id.rpartition("/")[2].lower())), None
    )


def published_numbers(experiment: Experiment, name: str, cell: MeasuredCell, given: str) -> dict[str, float]:
    """The paper's numbers for a given model with the settings of a cell; empty if it prints none.

    Args:
        name: of the cell in its experiment.
    """
    model, wanted = paper_model(given), setting()
    same = (cell.sequences, cell.length, cell.eps) == (wanted.sequences, wanted.length, wanted.eps)
    if model is None or not same:
        return {}
    if experiment.published is not None and experiment.published.model is not None:
        of_this = model.id.lower().endswith(f"/{experiment.published.model.lower()}")
        return experiment.published.numbers_of(name) if of_this else {}
    changed = cell.swap_position or cell.replace_position
    return {"sink_1": model.published[cell.inputs]} if cell.inputs in model.published and not changed else {}


def paper_rows(experiment: Experiment) -> PaperRows:
    """The rows of the experiment's table, by the model that they are of."""
    if experiment.published is None:
        return {}
    rows = {name: row.numbers for name, row in published_tables()[experiment.published.table].rows.items()}
    if experiment.published.model is not None:
        return {experiment.published.model: rows}
    return {
        model: {cell: {"sink_1": value} for cell, value in row.items() if cell in experiment.cells}
        for model, row in rows.items()
    }
