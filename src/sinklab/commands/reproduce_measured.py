"""`sinklab reproduce` of experiments on existing models: measure what is missing, summary.json, the report, a table."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from sinklab.commands.ending import stderr
from sinklab.commands.terminal.job_progress import JobProgress
from sinklab.commands.terminal.plans import print_passes
from sinklab.commands.terminal.results import print_summary
from sinklab.data.sources.corpora import documents
from sinklab.errors import InputError, SinklabError
from sinklab.experiments.definition import Experiment
from sinklab.experiments.measured import (
    MeasuredResults,
    downstream_tasks,
    measure_experiment,
    passes_of,
    subjects_of,
)
from sinklab.experiments.shipped import load_experiment
from sinklab.models.huggingface.loading import AS_IT_IS, Loading
from sinklab.outputs import REPORT, check_results
from sinklab.report import write_report
from sinklab.signals import keeping_what_is_finished
from sinklab.survey.compare import labels

MODELS = Path("runs/models")
ALL = "all"


def measured_command(
    experiments: Sequence[Experiment],
    models: Sequence[str],
    text: Path | None,
    out: Path | None,
    draws: int,
    dry_run: bool,
    as_json: bool,
    data: Path | None = None,
) -> None:
    """`sinklab reproduce` of experiments on existing models.

    Raises:
        InputError, SinklabError: as `reproduce_measured` and `preview_measured`.
    """
    if dry_run:
        preview_measured(experiments, models, text, draws, as_json, Console())
        return
    with keeping_what_is_finished():
        reproduce_measured(experiments, models, text, out, draws, as_json, stderr(), data=data)


def reproduce_measured(
    experiments: Sequence[Experiment],
    models: Sequence[str],
    text: Path | None,
    out: Path | None,
    draws: int,
    as_json: bool,
    console: Console,
    *,
    loading: Loading = AS_IT_IS,
    data: Path | None = None,
) -> None:
    """Measure what is missing and judge; progress goes to `console`, the result to standard output.

    Args:
        models: for each of the experiments.
        text: a file or folder of texts; a folder with a file for each domain for experiments on domains.
        out: of a single experiment, or the folder above those of several, each by its id; below runs/models, named by
            the model, unless given.
        draws: sets of sequences that each cell is measured on.
        data: HellaSwag's file, for experiments that ask it.

    Raises:
        InputError: no model or text, or one that cannot be used.
        SinklabError: something could not be measured; the rest is kept, summarised and printed.
        KeyboardInterrupt, PreemptedError: finished measurements are kept, and the same call resumes.
    """
    for one in experiments:
        subjects_of(one, models, text)
    if data is not None and not any(downstream_tasks(one) for one in experiments):
        raise InputError(
            f"--data {data} is the file of a downstream task, and {experiments[0].id} asks none: leave it out"
        )
    places = {one.id: _place(one.id, models, out, alone=len(experiments) == 1) for one in experiments}
    for place in places.values():
        check_results(place, (REPORT,))
    done = [_measured(one, models, text, places[one.id], draws, loading, console, data) for one in experiments]
    if as_json:
        written = [one.document() for one in done]
        print(json.dumps(written[0] if len(written) == 1 else written, indent=2))
    else:
        for one in done:
            print_summary(one.summary(), [one.experiment.id], Console())
    for place in places.values():
        if any(place.rglob("measurement.json")):
            console.print(f"report: {write_report([place])}", highlight=False, soft_wrap=True)
    if failed := [f"{name}: {why}" for one in done for name, why in one.outcome.failed.items()]:
        raise SinklabError("\n".join(failed))


def measured_among(names: Sequence[str], models: Sequence[str]) -> list[Experiment]:
    """The experiments on existing models among those named; none if they train.

    Raises:
        InputError: some are of one kind and some of the other, two that differ have the same id, or a --model is given
            for experiments that train their own.
    """
    loaded = {name: load_experiment(name) for name in dict.fromkeys(names) if name != ALL}
    found = {name: one for name, one in loaded.items() if one.requests}
    others = [name for name in names if name not in found]
    if found and others:
        raise InputError(
            f"{next(iter(found))} measures a --model, and {others[0]} trains models of its own: ask for them one after "
            "the other"
        )
    if models and not found:
        raise InputError(f"--model {models[0]}: {others[0]} trains models of its own; leave --model out")
    if len({one.id for one in found.values()}) < len(found):
        raise InputError(f"two different experiments have the same id: {', '.join(found)}")
    return list(found.values())


def preview_measured(
    experiments: Sequence[Experiment],
    models: Sequence[str],
    text: Path | None,
    draws: int,
    as_json: bool,
    console: Console,
) -> None:
    """Print the measurements that would be made; no model is loaded.

    Raises:
        InputError: no model or text, or one that cannot be used.
    """
    planned = {one.id: passes_of(one, subjects_of(one, models, text)) for one in experiments}
    if text is not None:
        next(documents(str(text)))
    if as_json:
        asked = {name: {one.name: one.request(0).document() for one in passes} for name, passes in planned.items()}
        print(json.dumps({"schema": 1, "draws": draws, "experiments": asked}, indent=2))
    else:
        print_passes(planned, draws, console)


def _measured(
    experiment: Experiment,
    models: Sequence[str],
    text: Path | None,
    place: Path,
    draws: int,
    loading: Loading,
    console: Console,
    data: Path | None,
) -> MeasuredResults:
    total = draws * len(passes_of(experiment, subjects_of(experiment, models, text)))
    with JobProgress(console, experiment.id, total) as observe:
        return measure_experiment(
            experiment,
            models,
            text,
            draws,
            loading=loading,
            out=place,
            observe=observe,
            data=data if downstream_tasks(experiment) else None,
        )


def _place(name: str, models: Sequence[str], out: Path | None, alone: bool) -> Path:
    if out is not None:
        return out if alone else out / name
    return MODELS / "+".join(label.replace("/", "_") for label in labels(models)) / name
