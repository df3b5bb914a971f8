"""Evaluate a model on downstream tasks and measure its sink, as a resumable job."""

import json
import re
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

from sinklab.data.sources.corpora import documents
from sinklab.errors import InputError, SinklabError, UnsavedError
from sinklab.evaluating.evaluation import EVALUATION, DownstreamScores, TaskRequest, TaskScores, load_scores
from sinklab.evaluating.scoring import score_task
from sinklab.evaluating.tasks import SCORES, ChosenTask, chosen_tasks
from sinklab.files import write_gzip
from sinklab.jobs.ledger import JobStep, Ledger, LineLedger, check_request, run_steps, unsaved
from sinklab.jobs.progress import JobEvent, Observer, StepProgress, ignore
from sinklab.measuring.measurement import Measurement
from sinklab.models.hooks import Progress
from sinklab.models.huggingface.loading import AS_IT_IS, Loading, check_name
from sinklab.opening import Model, open_model
from sinklab.survey.measure_many import text_hash
from sinklab.survey.measure_one import measure_loaded
from sinklab.survey.request import Request


def evaluate_model(
    name: str,
    request: TaskRequest,
    *,
    loading: Loading = AS_IT_IS,
    out: Path | None = None,
    observe: Observer = ignore,
) -> DownstreamScores:
    """Evaluate a model on downstream tasks, and measure its sink.

    Args:
        name: a run directory, a model directory, a .gguf file, or a name on the Hugging Face hub. The newest checkpoint
            of a run is evaluated as a Hugging Face model, as `sinklab export` writes it.
        request: tasks, number of items and other settings.
        loading: options for loading the model.
        out: output directory of evaluation.json and, for each task, the records of its items. A repeated call computes
            the missing answers and scores, and may add tasks. None saves nothing.
        observe: callback for progress events.

    Returns:
        The contents of evaluation.json, with the scores of earlier calls.

    Raises:
        InputError: see `open_model`, `chosen_tasks`, `load_scores` and `score_task`; also if the text of `request` is
            unusable, or `out` cannot be written or has an evaluation with other settings.
        HeldError: if another process writes an evaluation to `out`.
        UnsavedError: if a result cannot be saved; the exception contains the scores so far.
        SinklabError: see `open_model` and `score_task`; also if `out` cannot be locked.
    """
    check_name(name)
    if request.text is not None:
        next(documents(str(request.text)))
    chosen = chosen_tasks(request.tasks, request.data)
    ledger = Ledger[DownstreamScores](out, EVALUATION)
    with ledger.locked():
        return _evaluate(open_model(name, loading, as_transformers=True), chosen, request, ledger, observe)


def _evaluate(
    model: Model,
    chosen: Sequence[ChosenTask],
    request: TaskRequest,
    ledger: Ledger[DownstreamScores],
    observe: Observer,
) -> DownstreamScores:
    decided = {"model": model.name, "files": model.files, "commit": model.commit, "dtype": model.loading.dtype}
    notes = [*model.notes]
    if model.step is not None:
        notes.append(f"the run was evaluated at step {model.step}, as {type(model.module).__name__}")
    found = DownstreamScores(model=model.name, asked=decided, lm_eval=version("lm_eval"), notes=notes)
    if (earlier := ledger.earlier(load_scores)) is not None and ledger.path is not None:
        before, now = (
            dict[str, object]({f"{key} of the model": value for key, value in one.asked.items()})
            for one in (earlier, found)
        )
        if any(task.name not in earlier.tasks for task in chosen):
            before["version of lm-eval"], now["version of lm-eval"] = earlier.lm_eval, found.lm_eval
        text = text_hash(request.text)
        for task in chosen:
            if scores := earlier.tasks.get(task.name):
                for key, was, wanted in (
                    ("limit", scores.limit, request.limit),
                    ("seed", scores.seed, request.seed),
                    ("data", scores.sha256 or scores.data, task.identity),
                    ("text", scores.sink and scores.sink.sha256, text),
                ):
                    before[f"{key} of {task.name}"], now[f"{key} of {task.name}"] = was, wanted
        check_request(ledger.path, "an evaluation", before, now)
        found = earlier

    def run(task: ChosenTask, progress: StepProgress) -> str:
        nonlocal found
        plain = re.sub(r"[^\w-]", "_", task.name)
        path, items = (
            ledger.path and ledger.path.with_name(name)
            for name in (f"answers_{plain}.jsonl", f"items_{plain}.jsonl.gz")
        )
        answers = LineLedger(path, decided)
        scores, records = score_task(model, task, request, answers, progress)
        scores = scores.model_copy(update={"records": items and items.name})
        found = found.model_copy(update={"tasks": {**found.tasks, task.name: scores}})
        if items is not None:
            with unsaved(lambda: found):
                lines = (json.dumps(one.model_dump(mode="json"), ensure_ascii=False) for one in records)
                write_gzip(items, "".join(f"{line}\n" for line in lines))
        ledger.save(found)
        answers.remove()
        return _items(scores)

    kept = {name: _items(scores) for name, scores in found.tasks.items()}
    run_steps([JobStep(task.name, partial(run, task), kept.get(task.name)) for task in chosen], observe)
    return found


def _items(scores: TaskScores) -> str:
    return f"{scores.items:,} items"


def measure_and_evaluate(
    model: Model,
    chosen: ChosenTask,
    items: int | None,
    text: Path | None,
    request: Request,
    out: Path,
    progress: Progress,
) -> Measurement:
    """Measure a Hugging Face model and evaluate it on a task; return the measurement with the accuracies in percent.

    Args:
        chosen: task on which the model is evaluated.
        items: number of items, drawn with the seed of `request`; None for all items.
        text: text of the measurement; None if the inputs of `request` are random or repeated tokens.
        request: settings of the measurement.
        out: output directory of evaluation.json and the records of the items. Saved answers and scores are reused.
        progress: callback, called with the number of answered requests and the total number of requests.

    Raises:
        HeldError: if another process writes an evaluation to `out`.
        InputError: see `measure_loaded`, `load_scores` and `score_task`; also if the task reports no accuracy, or `out`
            cannot be written or has an evaluation with other settings.
        SinklabError: see `measure_loaded` and `score_task`; also if a result cannot be saved.
    """
    measurement = measure_loaded(model, text, request)

    def observe(event: JobEvent) -> None:
        if event.kind == "advanced":
            progress(event.done, event.total or 0)

    ledger = Ledger[DownstreamScores](out, EVALUATION)
    wanted = TaskRequest(tasks=(chosen.name,), limit=items, seed=request.seed)
    try:
        with ledger.locked():
            found = _evaluate(model, [chosen], wanted, ledger, observe)
    except UnsavedError as error:  # its `result` is not a Measurement
        raise SinklabError(str(error)) from error
    metrics = found.tasks[chosen.name].metrics
    scores = {score: 100 * metrics[name].value for name, score in SCORES.items() if name in metrics}
    if not scores:
        raise InputError(f"{chosen.name} reports neither {' nor '.join(SCORES)}; its metrics are {', '.join(metrics)}")
    return measurement.model_copy(update={"scores": scores})
