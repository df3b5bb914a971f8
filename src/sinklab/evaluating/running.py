"""Tasks asked of one model, one after the other; what is answered is kept, and the same call goes on from it."""

import re
from collections.abc import Sequence
from pathlib import Path

from sinklab.data.sources.corpora import documents
from sinklab.errors import InputError, SinklabError, UnsavedError
from sinklab.evaluating.answers import Answers
from sinklab.evaluating.documents import EVALUATION, RECORDS, DownstreamScores, TaskScores, load_scores, write_records
from sinklab.evaluating.loading import Candidate, load_candidate
from sinklab.evaluating.request import TaskRequest
from sinklab.evaluating.scoring import Scored, draw_items, score_task
from sinklab.evaluating.sink import sink_of_file, sink_of_task
from sinklab.evaluating.tasks import ChosenTask, chosen_tasks, lm_eval_version, quiet
from sinklab.files import write_json
from sinklab.models.huggingface.loading import AS_IT_IS, Loading, check_name
from sinklab.outputs import check_results
from sinklab.train.directory.lock import one_writer


class TaskListener:
    """Is told how the work goes. This one says nothing."""

    def starts(self, task: str, requests: int) -> None:
        """The items of a task are asked, which are so many requests."""

    def advances(self, requests: int) -> None:
        """So many more are answered."""

    def ends(self, task: str, scores: TaskScores) -> None:
        """The task is scored."""

    def keeps(self, task: str, scores: TaskScores) -> None:
        """An earlier call has scored the task."""


def evaluate_model(
    name: str,
    request: TaskRequest,
    *,
    loading: Loading = AS_IT_IS,
    out: Path | None = None,
    listener: TaskListener | None = None,
) -> DownstreamScores:
    """How a model does on downstream tasks, with its sink.

    Args:
        name: a run directory, a model directory, a .gguf file, or a name on the Hugging Face hub.
        out: keeps evaluation.json and the items of each task; tasks that it has are kept, answers that it has are not
            asked for again.

    Raises:
        InputError: lm-eval is not installed, a model, task or file that cannot be used, or an evaluation of another
            model or with other settings in `out`; nothing has been written then.
        HeldError: another process writes an evaluation to `out`.
        UnsavedError: a result could not be saved; it holds the scores so far.
        SinklabError: lm-eval cannot ask a task of this model, or answers cannot be kept.
    """
    check_name(name)
    if request.text is not None:
        next(documents(str(request.text)))
    lm_eval_version()
    if out is not None:
        check_results(out, (EVALUATION,))
    with one_writer(_file(out, EVALUATION)):
        chosen = chosen_tasks(request.tasks, request.data)
        return _evaluated(load_candidate(name, loading), chosen, request, out, listener or TaskListener())


def evaluate_candidate(
    candidate: Candidate,
    chosen: Sequence[ChosenTask],
    request: TaskRequest,
    *,
    out: Path | None = None,
    listener: TaskListener | None = None,
) -> DownstreamScores:
    """The same of a model that is loaded, and tasks that have their items.

    Raises:
        InputError, HeldError, UnsavedError, SinklabError: as `evaluate_model`.
    """
    with one_writer(_file(out, EVALUATION)):
        return _evaluated(candidate, chosen, request, out, listener or TaskListener())


def _evaluated(
    candidate: Candidate,
    chosen: Sequence[ChosenTask],
    request: TaskRequest,
    out: Path | None,
    listener: TaskListener,
) -> DownstreamScores:
    new = DownstreamScores(
        model=candidate.name, asked=candidate.asked, lm_eval=lm_eval_version(), notes=candidate.pretrained.notes
    )
    found = _continued(new, chosen, request, out)
    for one in chosen:
        if kept := found.tasks.get(one.name):
            listener.keeps(one.name, kept)
            continue
        answers = Answers(_file(out, f"answers_{_plain(one.name)}.jsonl"), candidate.asked)
        scored = _scored(candidate, one, request, answers, listener)
        found = _kept(found, one.name, scored, out)
        answers.forget()
    return found


def _scored(
    candidate: Candidate, chosen: ChosenTask, request: TaskRequest, answers: Answers, listener: TaskListener
) -> Scored:
    from sinklab.evaluating.language_model import AnsweringModel

    with quiet():
        model = AnsweringModel(candidate.pretrained, request.batch_size, answers, listener.advances)
    drawn = draw_items(chosen, model, request.limit, request.seed, candidate.name)
    sink = None if request.text is None else sink_of_file(candidate, model.max_length, request.text)
    listener.starts(chosen.name, drawn.requests)
    scored = score_task(chosen, drawn, model, request.limit, request.seed)
    sink = sink or sink_of_task(candidate, model.max_length, drawn.texts)
    whole = Scored(scored.scores.model_copy(update={"sink": sink}), scored.records)
    listener.ends(chosen.name, whole.scores)
    return whole


def _continued(
    new: DownstreamScores, chosen: Sequence[ChosenTask], request: TaskRequest, out: Path | None
) -> DownstreamScores:
    """What an earlier call has left for the same model, or the new one."""
    path = _file(out, EVALUATION)
    if path is None or not path.is_file() or not path.stat().st_size:
        return new
    before = load_scores(path)
    for key in sorted({*new.asked, *before.asked}):
        _check_same(path, f"{key} of the model", before.asked.get(key), new.asked.get(key))
    for one in chosen:
        if there := before.tasks.get(one.name):
            wanted = {"limit": request.limit, "seed": request.seed, "data": one.sha256 or one.data}
            for key, value in there.settings.items():
                _check_same(path, f"{key} of {one.name}", value, wanted[key])
    return before


def _check_same(path: Path, what: str, before: object, now: object) -> None:
    if before != now:
        raise InputError(
            f"{path} holds an evaluation with other settings ({what} is {before} there and {now} now): "
            "choose another --out, or repeat the call that made it"
        )


def _kept(found: DownstreamScores, task: str, scored: Scored, out: Path | None) -> DownstreamScores:
    path, records = _file(out, EVALUATION), f"items_{_plain(task)}{RECORDS}"
    scores = scored.scores.model_copy(update={"records": None if path is None else records})
    found = found.model_copy(update={"tasks": {**found.tasks, task: scores}})
    if path is not None:
        try:
            write_records(path.with_name(records), scored.records)
            write_json(path, found.document())
        except SinklabError as error:
            raise UnsavedError(str(error), found) from error
    return found


def _file(out: Path | None, name: str) -> Path | None:
    return None if out is None else out / name


def _plain(task: str) -> str:
    """The name of a task as a part of a file's."""
    return re.sub(r"[^\w-]", "_", task)
