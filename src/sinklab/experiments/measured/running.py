"""Measures what an experiment on existing models asks for, keeps each measurement, and writes summary.json.

It is a survey (`survey/items.py`): the same call again keeps what is finished and goes on with the rest.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sinklab.data.sources.corpora import identity
from sinklab.evaluating.asked import AskableModel, AskedTask, chosen_task, load_askable
from sinklab.evaluating.tasks import ChosenTask
from sinklab.experiments.documents import SUMMARY, CellRun, Summary
from sinklab.experiments.measured.definition import MeasuredCell, MeasuredExperiment
from sinklab.experiments.measured.numbers import numbers_of
from sinklab.experiments.measured.planning import Pass, Subject, passes_of, subjects_of
from sinklab.experiments.measured.summary import summarise_measured
from sinklab.experiments.quantities import RunNumbers
from sinklab.experiments.results import CellResults, named_values
from sinklab.measuring.findings import Propositions
from sinklab.measuring.measurement import Measurement
from sinklab.models.hooks import Progress
from sinklab.models.huggingface.loading import AS_IT_IS, Loading, check_name
from sinklab.survey.items import Item, Listener, Outcome, measure_all, what_decides
from sinklab.survey.loaded import LoadedModel, check_loadable, load_model


@dataclass(frozen=True)
class MeasuredResults:
    """What came of an experiment's measurements so far.

    Attributes:
        subjects: domains or models that its cells are measured for.
        hashes: of what decides each measurement, by its folder.
    """

    experiment: MeasuredExperiment
    subjects: Sequence[Subject]
    passes: Sequence[Pass]
    draws: int
    hashes: dict[str, str]
    outcome: Outcome

    def document(self) -> dict[str, Any]:
        """What summary.json holds."""
        return self.summary().model_dump(by_alias=True)

    def summary(self) -> Summary:
        """Cells with their numbers, and the claims judged."""
        cells = {name: self._cell(one, option) for one in self.passes for name, option in one.cells.items()}
        return summarise_measured(self.experiment, self.subjects, cells, self._propositions(), self._sequences())

    def _sequences(self) -> dict[str, list[int]]:
        """How many each measurement of a cell has read: a text may have fewer than were asked for."""
        return {
            name: [
                found.sequences for draw in range(self.draws) if (found := self.outcome.measured.get(one.folder(draw)))
            ]
            for one in self.passes
            for name in one.cells
        }

    def _propositions(self) -> Propositions | None:
        """What repeated tokens have shown of the model; None before they are read."""
        return next((one.propositions for one in self.outcome.measured.values() if one.propositions), None)

    def _cell(self, one: Pass, option: MeasuredCell) -> CellResults:
        runs: list[CellRun] = []
        numbers: list[RunNumbers] = []
        for draw in range(self.draws):
            folder = one.folder(draw)
            found = self.outcome.measured.get(folder)
            if found is not None:
                numbers.append(numbers_of(option, found, draw))
            runs.append(self._run(folder, draw, numbers[-1] if found else None))
        return CellResults(self._said(option), runs, numbers)

    def _said(self, option: MeasuredCell) -> dict[str, object]:
        """How a cell is measured: what is not the default, or not the same in all cells."""
        dumped = [cell.model_dump(mode="json") for cell in self.experiment.cells.values()]
        varied = {name for name in MeasuredCell.model_fields if any(one[name] != dumped[0][name] for one in dumped)}
        changed = option.model_dump(exclude_defaults=True)
        return {name: value for name, value in option.model_dump(mode="json").items() if name in varied | set(changed)}

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
    experiment: MeasuredExperiment,
    models: Sequence[str],
    text: Path | None,
    draws: int,
    *,
    loading: Loading = AS_IT_IS,
    out: Path,
    listener: Listener | None = None,
    data: Path | None = None,
) -> MeasuredResults:
    """Measure every cell on so many draws of sequences, one model after the other, and judge the claims.

    Args:
        models: run directories, model directories, .gguf files or names on the Hugging Face hub.
        text: a file or folder; a folder with a file for each domain where the experiment is about domains.
        out: keeps each measurement in a folder, and summary.json; continues what it finds.
        data: HellaSwag's file, for an experiment that asks it.

    Raises:
        InputError: no model or text that can be used, a model that has not what the experiment changes, or
            measurements of other settings in `out`. A model after the first is among the failed ones instead.
        UnsavedError: a result could not be saved; it holds the results so far.
    """
    subjects = subjects_of(experiment, models, text)
    passes = passes_of(experiment, subjects)
    for model in models:
        check_name(model)
    for one in passes:
        one.request(0).check(one.text)
    tasks = {task.name: task for name in experiment.tasks for task in [chosen_task(name, data)]}
    loaded = _OneAtATime(passes, loading)
    texts = {path: identity(str(path)) for one in passes if (path := one.text) is not None}
    items = [
        _item(one, draw, texts.get(one.text) if one.text else None, loaded, _asked(one, tasks), out)
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
    return measure_all(items, result_of, out, SUMMARY, listener, prepare=prepare)


def _asked(one: Pass, tasks: Mapping[str, ChosenTask]) -> AskedTask | None:
    """What a pass asks the model beside its measurement."""
    return None if one.task is None else AskedTask(tasks[one.task.name], one.task.items)


def _item(one: Pass, draw: int, source: str | None, loaded: "_OneAtATime", asked: AskedTask | None, out: Path) -> Item:
    request, folder = one.request(draw), one.folder(draw)

    def measure(progress: Progress) -> Measurement:
        model = loaded.get(one)
        if asked is None:
            return model.measure(one.text, request, progress)
        assert isinstance(model, AskableModel)
        return model.measure_and_ask(asked, one.text, request, out / folder, progress)

    decides = what_decides(one.model, Path(one.model).expanduser(), source, loaded.loading, request)
    return Item(folder, decides | ({} if asked is None else {"task": asked.document()}), measure)


class _OneAtATime:
    """Models, each loaded when it is needed and asked whether it can answer, in the place of the one before."""

    def __init__(self, passes: Sequence[Pass], loading: Loading) -> None:
        self._passes, self.loading = passes, loading
        self._wanted: tuple[str, bool] | None = None
        self._model: LoadedModel | None = None

    def get(self, wanted: Pass) -> LoadedModel:
        """The model of a pass, one that can be asked tasks where the pass has one.

        Raises:
            InputError: it cannot be loaded, or not be measured like this.
        """
        name, asks = wanted.model, wanted.task is not None
        if self._model is None or self._wanted != (name, asks):
            self._model = None  # its memory is needed
            model = load_askable(name, self.loading) if asks else load_model(name, self.loading)
            for one in self._passes:
                if one.model == name and (one.task is not None) == asks:
                    model.check(one.request(0))
            self._wanted, self._model = (name, asks), model
        return self._model
