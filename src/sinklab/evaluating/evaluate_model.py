"""Evaluate a model on downstream tasks and measure its sink, as a resumable job."""

import json
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sinklab.data.sources.corpora import documents
from sinklab.errors import InputError, SinklabError, UnsavedError
from sinklab.evaluating.evaluation import (
    EVALUATION,
    RECORDS,
    DownstreamScores,
    TaskRequest,
    TaskScores,
    TextSink,
    load_scores,
    write_records,
)
from sinklab.evaluating.scoring import ScoredTask, draw_items, score_task
from sinklab.evaluating.tasks import SCORES, ChosenTask, chosen_tasks, lm_eval_version, quiet
from sinklab.jobs.ledger import JobStep, Ledger, LineLedger, check_request, run_steps, unsaved
from sinklab.jobs.progress import JobEvent, Observer, StepProgress, ignore
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.options import Options
from sinklab.models.hooks import Progress
from sinklab.models.huggingface.loading import AS_IT_IS, Loading, check_name
from sinklab.opening import Model, open_model
from sinklab.survey.measure_one import measure_loaded
from sinklab.survey.request import Request

EPS, SEQUENCES, LENGTH = 0.3, 100, 64
"""Settings of the sink metric, as in the paper's tables of pretrained models."""


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
        name: a run directory, a model directory, a .gguf file, or a name on the Hugging Face hub.
        request: tasks, number of items and other settings.
        loading: options for loading the model.
        out: directory for evaluation.json and the items of each task; a repeated call resumes and may add tasks.
        observe: callback for progress and results.

    Raises:
        InputError: if lm-eval is not installed, model, task or file is unusable, no item of a task fits the model's
            context, or `out` has an evaluation with other settings.
        HeldError: if another process writes an evaluation to `out`.
        UnsavedError: if a result cannot be saved; the exception contains the scores so far.
        SinklabError: if the model cannot be measured, lm-eval cannot evaluate it on a task, or answers cannot be saved.
    """
    check_name(name)
    if request.text is not None:
        next(documents(str(request.text)))
    lm_eval_version()
    ledger = Ledger[DownstreamScores](out, EVALUATION)
    with ledger.locked():
        chosen = chosen_tasks(request.tasks, request.data)
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
    new = DownstreamScores(model=model.name, asked=decided, lm_eval=lm_eval_version(), notes=notes)
    found = _resumed(ledger, new, chosen, request)

    def run(task: ChosenTask, progress: StepProgress) -> str:
        nonlocal found
        plain = re.sub(r"[^\w-]", "_", task.name)
        path = None if ledger.path is None else ledger.path.with_name(f"answers_{plain}.jsonl")
        answers = LineLedger(path, "answers", decided)
        scored = _scored(model, task, request, answers, progress)
        records = None if ledger.path is None else ledger.path.with_name(f"items_{plain}{RECORDS}")
        scores = scored.scores.model_copy(update={"records": records and records.name})
        found = found.model_copy(update={"tasks": {**found.tasks, task.name: scores}})
        if records is not None:
            with unsaved(lambda: found):
                write_records(records, scored.records)
        ledger.save(found)
        answers.remove()
        return _items(scores)

    kept = {name: _items(scores) for name, scores in found.tasks.items()}
    run_steps([JobStep(task.name, partial(run, task), kept.get(task.name)) for task in chosen], observe)
    return found


def _items(scores: TaskScores) -> str:
    return f"{scores.items:,} items"


def _resumed(
    ledger: Ledger[DownstreamScores], new: DownstreamScores, chosen: Sequence[ChosenTask], request: TaskRequest
) -> DownstreamScores:
    """Return the scores of an earlier call, or `new` if there are none.

    Raises:
        InputError: if the model or the settings of a chosen task were different.
    """
    earlier = ledger.earlier(load_scores)
    if earlier is None or ledger.path is None:
        return new
    before, now = ({f"{key} of the model": value for key, value in one.asked.items()} for one in (earlier, new))
    for task in chosen:
        if scores := earlier.tasks.get(task.name):
            text = "task" if request.text is None else str(request.text)
            wanted = {"limit": request.limit, "seed": request.seed, "data": task.sha256 or task.data, "text": text}
            before |= {f"{key} of {task.name}": value for key, value in scores.settings.items()}
            now |= {f"{key} of {task.name}": value for key, value in wanted.items()}
    check_request(ledger.path, "an evaluation", before, now)
    return earlier


def _scored(
    model: Model, task: ChosenTask, request: TaskRequest, answers: LineLedger, progress: StepProgress
) -> ScoredTask:
    from sinklab.evaluating.language_model import AnsweringModel

    with quiet():
        answering = AnsweringModel(model, request.batch_size, answers, progress.advance)
    drawn = draw_items(task, answering, request.limit, request.seed, model.name)
    context = answering.max_length
    sink = None if request.text is None else _sink(model, context, request.text, str(request.text))
    progress.begin(drawn.requests, f"{drawn.requests:,} requests")
    scored = score_task(task, drawn, answering, request.limit, request.seed)
    sink = sink or _sink_of_items(model, context, drawn.texts)
    return ScoredTask(scored.scores.model_copy(update={"sink": sink}), scored.records)


def _sink_of_items(model: Model, context: int, texts: Sequence[str]) -> TextSink | None:
    """Measure the sink on the texts of a task's items; None if they are unusable, such as too short."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "items.jsonl"
        file.write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts), encoding="utf-8")
        try:
            return _sink(model, context, file, "task")
        except InputError:
            return None


def _sink(model: Model, context: int, text: Path, name: str) -> TextSink:
    request = Request(
        options=Options(eps=(EPS,), loss=False), sequences=SEQUENCES, length=min(LENGTH, context), fewer=True
    )
    found = measure_loaded(model, text, request)
    return TextSink(
        text=name,
        sequences=found.sequences,
        length=found.length,
        eps=found.eps,
        bos=found.bos,
        sink_1=found.sink_rate[0],
        bias=found.sink_rate_bias,
    )


@dataclass(frozen=True)
class TaskOfCell:
    """Downstream task on which the model of an experiment's cell is evaluated.

    Attributes:
        chosen: the task.
        items: number of items drawn with the seed of the measurement; None for all.
    """

    chosen: ChosenTask
    items: int | None

    def document(self) -> dict[str, object]:
        """Return the settings that affect the scores, except the model, as a JSON-serializable dict."""
        return {"name": self.chosen.name, "items": self.items, "data": self.chosen.sha256 or self.chosen.data}


def measure_and_evaluate(
    model: Model, task: TaskOfCell, text: Path | None, request: Request, out: Path, progress: Progress
) -> Measurement:
    """Measure a Hugging Face model and add its accuracies on a task (percent) to the measurement.

    Args:
        text: text of the measurement; None if its inputs are random or repeated tokens.
        out: directory for evaluation.json and the items; saved answers and scores are reused.
        progress: callback, called with the number of answered requests and the total number of requests.

    Raises:
        HeldError: if another process writes an evaluation to `out`.
        InputError: if the text is unusable, no item of the task fits the model's context, the task has no accuracy, or
            `out` has an evaluation with other settings.
        SinklabError: if the model cannot be measured or evaluated, or a result cannot be saved.
    """
    measurement, chosen = measure_loaded(model, text, request), task.chosen

    def observe(event: JobEvent) -> None:
        if event.kind == "advanced":
            progress(event.done, event.total or 0)

    ledger = Ledger[DownstreamScores](out, EVALUATION)
    wanted = TaskRequest(tasks=(chosen.name,), limit=task.items, seed=request.seed)
    try:
        with ledger.locked():
            found = _evaluate(model, [chosen], wanted, ledger, observe)
    except UnsavedError as error:  # its `result` is not a Measurement
        raise SinklabError(str(error)) from error
    metrics = found.tasks[chosen.name].metrics
    scores = {score: 100 * metrics[name].value for name, score in SCORES.items() if name in metrics}
    if not scores:
        raise InputError(f"{chosen.name} reports none of {' and '.join(SCORES)}; its metrics are {', '.join(metrics)}")
    return measurement.model_copy(update={"scores": scores})
