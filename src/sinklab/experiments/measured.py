"""Run experiments on existing models: forward passes, measurements, and verdicts on claims.

Cells that differ only in eps and length share their forward passes (`Pass`), which are run on each draw of sequences.
Each measurement is saved in OUT/PASS/seed_DRAW, and a repeated call runs only missing measurements
(`survey/measure.py`). If models are the replicates, all of them are measured on the same draw, and the
measurements are saved in OUT/PASS/MODEL.

A `Pass` is named after its cell or, if several cells share it, after their kind of inputs. With `each`, the name is
prefixed with the domain or model: SUBJECT/CELL. If the name is in use already, the name of the first cell is appended.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from sinklab.errors import InputError
from sinklab.evaluating.evaluate_model import ChosenTask, chosen_task, measure_and_evaluate
from sinklab.experiments.claims import Claim, Equal, Monotone, Undecidable, Within
from sinklab.experiments.definition import CellTask, Experiment, MeasuredCell
from sinklab.experiments.documents import SUMMARY, CellRun, CellSummary, ExperimentSummary, Summary
from sinklab.experiments.paper import published_tables
from sinklab.experiments.summary import measured_numbers, named_values, summarise, summary_entry
from sinklab.jobs import Observer, ignore
from sinklab.measuring.findings import Propositions
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.options import Options, Request, Study
from sinklab.models.hooks import Progress
from sinklab.models.huggingface.loading import AS_IT_IS, Loading, check_name
from sinklab.opening import Model
from sinklab.survey.measure import Item, Outcome, labels, measure_all, text_hash
from sinklab.survey.open_models import OpenModel, families, setting
from sinklab.survey.suites import domain_files
from sinklab.tables import plural

FEWEST_MODELS = 3
"""Minimum number of models of a family for a comparison across sizes."""

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
            begins_like_text=first.begins_like_text,
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
    matches = [PARAMETERS.search(str(model).rpartition("/")[2]) for model in remote]
    known = [float(found[1]) * (1e9 if found[2] in "bB" else 1e6) for found in matches if found]
    size = f", about {2 * sum(known) / 1e9:,.1f} GB at 16 bits" if known else ""
    unknown = f" and {plural(len(remote) - len(known), 'model')} of unknown size" if len(known) < len(remote) else ""
    return f"{plural(len(remote), 'model')} to download unless cached{size}{unknown if known else ''}"


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

    def _cell(self, one: Pass, cell: MeasuredCell) -> CellSummary:
        """Return the replicates of a cell, and those of its settings that differ from the default or between cells."""
        runs: list[CellRun] = []
        for replicate in one.replicates(self.draws):
            folder = one.folder(replicate)
            measured = self.outcome.measured.get(folder)
            numbers = measured_numbers(cell, measured, replicate) if measured else None
            failed = self.outcome.failed.get(folder)
            values, never = named_values(numbers, self.experiment.columns) if numbers else ({}, [])
            runs.append(
                CellRun(
                    seed=replicate,
                    hash=self.hashes[folder],
                    directory=folder,
                    status="done" if numbers else "failed" if failed else "unfinished",
                    message=failed or "",
                    values=values,
                    never=never,
                    seconds=measured.seconds if measured else None,
                    numbers=numbers,
                )
            )
        dumped = [other.model_dump(mode="json") for other in self.experiment.requests.values()]
        varied = {name for name in MeasuredCell.model_fields if any(other[name] != dumped[0][name] for other in dumped)}
        shown = varied | cell.model_dump(exclude_defaults=True).keys()
        change = {name: value for name, value in cell.model_dump(mode="json").items() if name in shown}
        return CellSummary(change=change, runs=runs)


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
    texts = {path: text_hash(path) for path in {one.text for one in passes}}
    order = list(chosen)  # each model is loaded once
    planned = sorted(asked.values(), key=lambda pair: (order.index(pair[0].model(pair[1])), pair[1]))
    items = [_item(one, number, texts[one.text], loading, tasks, out) for one, number in planned]
    hashes = {item.name: hashlib.sha256(json.dumps(item.decides).encode()).hexdigest()[:16] for item in items}
    result_of: Callable[[Outcome], MeasuredResults] = partial(
        MeasuredResults, experiment, subjects, passes, draws, hashes
    )
    return measure_all(items, result_of, out, SUMMARY, observe)


def _item(
    one: Pass, replicate: int, source: str | None, loading: Loading, tasks: Mapping[str, ChosenTask], out: Path
) -> Item:
    request = one.request(replicate if len(one.models) == 1 else 0)  # models as replicates read the same draw
    folder, chosen = one.folder(replicate), one.model(replicate)
    loaded = replace(loading, revision=chosen.revision or loading.revision, subfolder=chosen.subfolder or None)
    item = Item(folder, chosen.name, loaded, one.text, source, request)
    if one.task is None:
        return item
    task, items = tasks[one.task.name], one.task.items

    def measure(model: Model, progress: Progress) -> Measurement:
        return measure_and_evaluate(model, task, items, one.text, request, out / folder, progress)

    about = {"task": {"name": task.name, "items": items, "data": task.identity}}
    return replace(item, measure=measure, as_transformers=True, more=about)


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
            yield from _about(claim, subjects, experiment.each)


def _about(claim: Claim, subjects: Sequence[Subject], each: str | None) -> Iterator[Claim | Undecidable]:
    match claim.check:
        case (Equal(cell=str(cell)) | Monotone(cell=str(cell))) as check if check.over_subjects:
            if each != "domain":
                yield from _by_family(claim, check, cell, subjects)
            elif len(subjects) < 2:
                yield Undecidable(claim, "The claim requires at least two domains.")
            else:
                yield claim.about(check.across(tuple(one.cell_name(cell) for one in subjects)))
        case Within() as check if subjects[0].name:
            for one in subjects:
                of_subject = check.model_copy(update={"cell": one.cell_name(check.cell)})
                yield claim.about(of_subject, re.sub(r"\W", "_", one.name))
        case _:
            yield claim


def _by_family(
    claim: Claim, check: Equal | Monotone, cell: str, subjects: Sequence[Subject]
) -> Iterator[Claim | Undecidable]:
    known = [(model, one) for one in subjects if (model := paper_model(one.models["base"]))]
    families: dict[str, list[Subject]] = {}
    for model, one in sorted(known, key=lambda pair: pair[0].parameters):
        families.setdefault(model.family, []).append(one)
    enough = {
        family: members
        for family, members in families.items()
        if len(members) >= FEWEST_MODELS
        and family in (check.families or families)
        and family not in check.without_families
    }
    for family, members in enough.items():
        yield claim.about(check.across(tuple(one.cell_name(cell) for one in members)), family)
    if not enough:
        wanted = f"of {' or '.join(check.families)}" if check.families else "of one family of the paper's list"
        excluded = f" other than {' and '.join(check.without_families)}" if check.without_families else ""
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
    known = [(one, paper_model(one.models["base"])) for one in subjects] if experiment.scatter else []
    return summary_entry(
        experiment,
        enumerated(list(labels(models))),
        cells,
        published,
        elsewhere=paper_rows(experiment),
        against=list(experiment.scatter or ()),
        families={
            subject.cell_name(cell): model.family for subject, model in known if model for cell in experiment.requests
        },
    )


def paper_model(given: str) -> OpenModel | None:
    """Return the model of the paper's list with this Hugging Face id, ignoring case; None if there is none.

    A name without organisation, or the last part of a local path, is compared with the ids without organisation.
    """
    label, known = next(iter(labels([given]))).lower(), (one for models in families().values() for one in models)
    return next((one for one in known if label in (one.id.lower(), one.id.rpartition("/")[2].lower())), None)


def published_numbers(experiment: Experiment, name: str, cell: MeasuredCell, given: str) -> dict[str, float]:
    """Return the paper's numbers, by quantity, for a model with the settings of a cell.

    The result is empty if the model is not in the paper's list, the settings differ from the paper's, or the paper has
    no number for the cell.

    Args:
        name: name of the cell in the experiment.
        given: model as passed by the user: Hugging Face id or path.
    """
    model, paper = paper_model(given), setting()
    if model is None or (cell.sequences, cell.length, cell.eps) != (paper.sequences, paper.length, paper.eps):
        return {}
    if experiment.published is not None and experiment.published.model is not None:
        of_this = model.id.lower().endswith(f"/{experiment.published.model.lower()}")
        return experiment.published.numbers_of(name) if of_this else {}
    changed = cell.swap_position or cell.replace_position or cell.begins_like_text
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
