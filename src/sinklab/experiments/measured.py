"""Run experiments on existing models: forward passes, measurements, and verdicts on claims.

Cells that differ only in eps and length share their forward passes (`Pass`), which are run on each draw of sequences.
Each measurement is saved in OUT/PASS/seed_DRAW, and a repeated call runs only missing measurements
(`survey/measure_many.py`). If models are the replicates, all of them are measured on the same draw, and the
measurements are saved in OUT/PASS/MODEL.

A `Pass` is named after its cell or, if several cells share it, after their kind of inputs. With `each`, the name is
prefixed with the domain or model: SUBJECT/CELL. If the name is in use already, the name of the first cell is appended.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sinklab.evaluating.evaluate_model import measure_and_evaluate
from sinklab.evaluating.tasks import ChosenTask, chosen_task
from sinklab.experiments.claims import Claim, OverSubjects, Undecidable, Within
from sinklab.experiments.definition import Experiment, MeasuredCell
from sinklab.experiments.documents import SUMMARY, CellRun, ExperimentSummary, Summary
from sinklab.experiments.paper import published_tables
from sinklab.experiments.passes import ModelChoice, Pass, Subject, enumerated, passes_of, subjects_of, with_models
from sinklab.experiments.quantities import RunNumbers
from sinklab.experiments.results import CellResults, measured_numbers, named_values
from sinklab.experiments.summary import summarise, summary_entry
from sinklab.jobs import Observer, ignore
from sinklab.measuring.findings import Propositions
from sinklab.measuring.measurement import Measurement
from sinklab.models.hooks import Progress
from sinklab.models.huggingface.loading import AS_IT_IS, Loading, check_name
from sinklab.opening import Model, open_model
from sinklab.survey.compare import labels
from sinklab.survey.measure_many import Item, Outcome, deciding_request, measure_all, text_hash
from sinklab.survey.measure_one import check_loadable, check_measurable, measure_loaded
from sinklab.survey.open_models import EVERY, OpenModel, models_of, setting

FEWEST_MODELS = 3
"""Minimum number of models of a family for a comparison across sizes."""

PaperRows = dict[str, dict[str, dict[str, float]]]
"""Numbers by model, cell and quantity."""


def downstream_tasks(experiment: Experiment) -> list[str]:
    """Return the names of the downstream tasks of the experiment's cells, without duplicates."""
    return list(dict.fromkeys(cell.task.name for cell in experiment.requests.values() if cell.task))


@dataclass(frozen=True)
class MeasuredResults:
    """Results so far of an experiment on existing models.

    Attributes:
        experiment: the experiment, after `with_models`: --model may have replaced the `models` of its cells.
        draws: number of draws of sequences; if models are the replicates, maximum number of models.
        hashes: hash of each measurement's settings, by results folder (`Pass.folder`).
        outcome: measurements and error messages, by results folder.
    """

    experiment: Experiment
    subjects: Sequence[Subject]
    passes: Sequence[Pass]
    draws: int
    hashes: dict[str, str]
    outcome: Outcome

    def document(self) -> dict[str, Any]:
        """Return the content of summary.json."""
        return self.summary().model_dump(by_alias=True)

    def summary(self) -> Summary:
        """Return the results of each cell, and the claims that apply to the models, with their verdicts."""
        results = {name: self._cell(one, cell) for one in self.passes for name, cell in one.cells.items()}
        found = next((one.propositions for one in self.outcome.measured.values() if one.propositions), None)
        claims = list(claims_about(self.experiment, self.subjects, found))
        models = dict.fromkeys(model for one in self.passes for model in one.models.values())
        entry = _entry(self.experiment, self.subjects, list(results), [str(model) for model in models])
        summary = summarise([(self.experiment, entry, claims)], results)
        judged = []
        for claim in summary.claims:
            passes = [one for one in self.passes if not set(claim.cells).isdisjoint(one.cells)]
            used = {model for one in passes for model in one.models.values()}
            judged.append(claim.model_copy(update={"models": len(used)}))
        return summary.model_copy(update={"claims": judged})

    def _cell(self, one: Pass, cell: MeasuredCell) -> CellResults:
        """Return the replicates of a cell, and those of its settings that differ from the default or between cells."""
        runs: list[CellRun] = []
        numbers: list[RunNumbers] = []
        for replicate in one.replicates(self.draws):
            folder = one.folder(replicate)
            measured = self.outcome.measured.get(folder)
            found = measured_numbers(cell, measured, replicate) if measured else None
            numbers += [found] if found else []
            failed = self.outcome.failed.get(folder)
            values, never = named_values(found, self.experiment.columns) if found else ({}, [])
            runs.append(
                CellRun(
                    seed=replicate,
                    hash=self.hashes[folder],
                    directory=folder,
                    status="done" if found else "failed" if failed else "unfinished",
                    message=failed or "",
                    values=values,
                    never=never,
                    seconds=measured.seconds if measured else None,
                )
            )
        dumped = [other.model_dump(mode="json") for other in self.experiment.requests.values()]
        varied = {name for name in MeasuredCell.model_fields if any(other[name] != dumped[0][name] for other in dumped)}
        shown = varied | cell.model_dump(exclude_defaults=True).keys()
        change = {name: value for name, value in cell.model_dump(mode="json").items() if name in shown}
        return CellResults(change, runs, numbers)


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
    """Measure every cell on each draw of sequences or with each model, and return the results.

    Models are loaded one at a time. Each measurement is saved, and the claims are then judged again in summary.json.

    Args:
        models: run directories, model directories, .gguf files or Hugging Face ids; empty to measure the `models` of
            the cells.
        text: see `subjects_of`; may be None if no cell has natural inputs.
        draws: number of draws of sequences; if models are the replicates, the maximum number of models.
        out: directory for the measurements and summary.json; a repeated call runs only missing measurements.
        data: file with the items of the downstream task, for experiments that have one; default: see `chosen_task`.

    Raises:
        InputError: before any measurement: see `with_models`, `subjects_of`, `passes_of`, `chosen_task` and
            `measure_all`; also if a model or its config cannot be found, or the first unfinished model is unusable. The
            failure of a later model is recorded in the results instead.
        HeldError, UnsavedError: see `measure_all`.
        SinklabError: see `measure_all`; also if the first unfinished model cannot be loaded (`open_model`).
    """
    experiment = with_models(experiment, models)
    subjects = subjects_of(experiment, models, text)
    passes = passes_of(experiment, subjects)
    asked = {one.folder(number): (one, number) for one in passes for number in one.replicates(draws)}
    chosen = dict.fromkeys(one.model(number) for one, number in asked.values())
    for model in chosen:
        check_name(model.name)
    for one in passes:
        one.request(0).check(one.text)
    tasks = {name: chosen_task(name, data) for name in downstream_tasks(experiment)}
    loaded = _CurrentModel(passes, loading)
    texts = {path: text_hash(path) for path in {one.text for one in passes}}
    order = list(chosen)  # each model is loaded once
    planned = sorted(asked.values(), key=lambda pair: (order.index(pair[0].model(pair[1])), pair[1]))
    items = [_item(one, number, texts[one.text], loaded, tasks, out) for one, number in planned]
    hashes = {item.name: hashlib.sha256(json.dumps(item.request).encode()).hexdigest()[:16] for item in items}

    def prepare(unfinished: Sequence[str]) -> None:
        for model in dict.fromkeys(one.model(number) for name in unfinished for one, number in [asked[name]]):
            check_loadable(model.name, model.loaded_by(loading))
        loaded.get(*asked[unfinished[0]])

    result_of: Callable[[Outcome], MeasuredResults] = partial(
        MeasuredResults, experiment, subjects, passes, draws, hashes
    )
    return measure_all(items, result_of, out, SUMMARY, observe, prepare=prepare)


def _item(
    one: Pass, replicate: int, source: str | None, loaded: "_CurrentModel", tasks: Mapping[str, ChosenTask], out: Path
) -> Item:
    request = one.request(replicate if len(one.models) == 1 else 0)  # models as replicates read the same draw
    folder, chosen = one.folder(replicate), one.model(replicate)

    def measure(progress: Progress) -> Measurement:
        model = loaded.get(one, replicate)
        if one.task is None:
            return measure_loaded(model, one.text, request, progress)
        task = tasks[one.task.name]
        return measure_and_evaluate(model, task, one.task.items, one.text, request, out / folder, progress)

    place = Path(chosen.name)
    decides = deciding_request(chosen.name, place, source, chosen.loaded_by(loaded.loading), request)
    if one.task is not None:
        task = tasks[one.task.name]
        decides["task"] = {"name": task.name, "items": one.task.items, "data": task.identity}
    return Item(folder, decides, measure)


class _CurrentModel:
    """Model loader that keeps only the most recent model in memory."""

    def __init__(self, passes: Sequence[Pass], loading: Loading) -> None:
        self._passes, self.loading = passes, loading
        self._wanted: tuple[ModelChoice, bool] | None = None
        self._model: Model | None = None

    def get(self, wanted: Pass, replicate: int) -> Model:
        """Return the model of a replicate, loading it if necessary; for downstream tasks, as a transformers model."""
        chosen, asks = wanted.model(replicate), wanted.task is not None
        if self._model is None or self._wanted != (chosen, asks):
            self._model = None  # frees the memory of the previous model
            model = open_model(chosen.name, chosen.loaded_by(self.loading), as_transformers=asks)
            for one in self._passes:
                if chosen in one.models.values() and (one.task is not None) == asks:
                    check_measurable(model, one.request(0))
            self._wanted, self._model = (chosen, asks), model
        return self._model


def claims_about(
    experiment: Experiment, subjects: Sequence[Subject], found: Propositions | None
) -> Iterator[Claim | Undecidable]:
    """Yield the claims that apply to the given models; the checks of these claims name the cells of the results.

    A claim that compares domains is converted to a claim about the cells of these domains, and a claim that compares
    model sizes to one claim per family. With `each: model`, a `within` claim is converted to one claim per model. A
    claim that requires models, domains or measurements that are missing is yielded as `Undecidable`.

    Args:
        found: check of the paper's proposition on repeated tokens; None if no such check was made.
    """
    roles = {role for one in subjects for role in one.models}
    for claim in experiment.claims:
        asked = [experiment.requests[cell] for cell in claim.cells]
        absent = sorted({cell.model for cell in asked if not cell.models} - roles)
        if absent:
            yield Undecidable(claim, f"No {absent[0]} model was given. Pass it as the second --model.")
        elif found is None and claim.proposition is not None:
            yield Undecidable(
                claim, "No proposition of the paper applies to this model, or repeated tokens have not been measured."
            )
        elif found is None and claim.positions is not None:
            yield Undecidable(
                claim, "The kind of positional embedding is known only after a measurement on repeated tokens."
            )
        elif found is None or (
            claim.proposition in (None, found.number)
            and claim.positions in (None, "added" if found.number is None else "other")
        ):
            yield from _about(claim, subjects)


def _about(claim: Claim, subjects: Sequence[Subject]) -> Iterator[Claim | Undecidable]:
    match claim.check:
        case OverSubjects(kind="alike_over_domains") as check:
            if len(subjects) < 2:
                yield Undecidable(claim, "The claim requires at least two domains.")
            else:
                yield claim.about(check.across(tuple(one.cell_name(check.cell) for one in subjects)))
        case OverSubjects() as check:
            yield from _by_family(claim, check, subjects)
        case Within() as check if subjects[0].name:
            for one in subjects:
                of_subject = check.model_copy(update={"cell": one.cell_name(check.cell)})
                yield claim.about(of_subject, re.sub(r"\W", "_", one.name))
        case _:
            yield claim


def _by_family(claim: Claim, check: OverSubjects, subjects: Sequence[Subject]) -> Iterator[Claim | Undecidable]:
    known = [(model, one) for one in subjects if (model := paper_model(one.models["base"]))]
    families: dict[str, list[Subject]] = {}
    for model, one in sorted(known, key=lambda pair: pair[0].parameters):
        families.setdefault(model.family, []).append(one)
    enough = {
        family: members
        for family, members in families.items()
        if len(members) >= FEWEST_MODELS and family in (check.families or families) and family not in check.but
    }
    for family, members in enough.items():
        yield claim.about(check.across(tuple(one.cell_name(check.cell) for one in members)), family)
    if not enough:
        wanted = f"of {' or '.join(check.families)}" if check.families else "of one family of the paper's list"
        excluded = f" other than {' and '.join(check.but)}" if check.but else ""
        yield Undecidable(claim, f"The claim requires {FEWEST_MODELS} models {wanted}{excluded}.")


def _entry(
    experiment: Experiment, subjects: Sequence[Subject], cells: list[str], models: Sequence[str]
) -> ExperimentSummary:
    """Return the experiment's entry in summary.json, with the model names as `scale`."""
    published = {
        subject.cell_name(name): published_numbers(experiment, name, cell, subject.models[cell.model])
        for subject in subjects
        for name, cell in experiment.requests.items()
        if cell.model in subject.models
    }
    known = [(one, paper_model(one.models["base"])) for one in subjects] if experiment.against else []
    return summary_entry(
        experiment,
        enumerated(list(labels(models))),
        cells,
        published,
        elsewhere=paper_rows(experiment),
        against=list(experiment.against or ()),
        families={
            subject.cell_name(cell): model.family for subject, model in known if model for cell in experiment.requests
        },
    )


def paper_model(given: str) -> OpenModel | None:
    """Return the model of the paper's list with this Hugging Face id, ignoring case; None if there is none.

    A name without organisation, or the last part of a local path, is compared with the ids without organisation.
    """
    label = next(iter(labels([given]))).lower()
    return next(
        (one for one in models_of([EVERY]) if label in (one.id.lower(), one.id.rpartition("/")[2].lower())), None
    )


def published_numbers(experiment: Experiment, name: str, cell: MeasuredCell, given: str) -> dict[str, float]:
    """Return the paper's numbers, by quantity, for a model with the settings of a cell.

    The result is empty if the model is not in the paper's list, the settings differ from the paper's, or the paper has
    no number for the cell.

    Args:
        name: name of the cell in the experiment.
        given: model as passed by the user: Hugging Face id or path.
    """
    model = paper_model(given)
    if model is None or not setting().applies(cell.sequences, cell.length, [cell.eps]):
        return {}
    if experiment.published is not None and experiment.published.model is not None:
        of_this = model.id.lower().endswith(f"/{experiment.published.model.lower()}")
        return experiment.published.numbers_of(name) if of_this else {}
    changed = cell.swap_position or cell.replace_position
    return {"sink_1": model.published[cell.inputs]} if cell.inputs in model.published and not changed else {}


def paper_rows(experiment: Experiment) -> PaperRows:
    """Return the numbers of the experiment's table in the paper, by model, cell and quantity; empty without a table.

    If each row of the table is a model, only the numbers for the experiment's cells are returned.
    """
    if experiment.published is None:
        return {}
    rows = published_tables()[experiment.published.table]
    if experiment.published.model is not None:
        return {experiment.published.model: dict(rows)}
    return {
        model: {cell: {"sink_1": value} for cell, value in row.items() if cell in experiment.cells}
        for model, row in rows.items()
    }
