"""Score a model on a task: draw items, evaluate them with lm-eval, and measure the sink on natural text."""

import json
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sinklab.errors import InputError, SinklabError, cause, is_out_of_memory
from sinklab.evaluating.evaluation import ItemRecord, TaskMetric, TaskRequest, TaskScores, TextSink
from sinklab.evaluating.tasks import ChosenTask, quiet
from sinklab.jobs.ledger import LineLedger
from sinklab.jobs.progress import StepProgress
from sinklab.measuring.options import Options
from sinklab.opening import Model
from sinklab.survey.measure_many import text_hash
from sinklab.survey.measure_one import measure_loaded
from sinklab.survey.request import Request

RESAMPLED = 1000
"""Number of bootstrap samples for the standard error of metrics that are not means."""


def score_task(
    model: Model, chosen: ChosenTask, request: TaskRequest, answers: LineLedger, progress: StepProgress
) -> tuple[TaskScores, list[ItemRecord]]:
    """Evaluate a model on a task, and measure its sink on `request.text`, by default on the items of the task.

    Items are left out if one of their answers does not fit in the model's context.

    Args:
        answers: ledger of the model's answers; saved answers are reused and new ones added.
        progress: receives the total number of requests, and the number of answered requests.

    Returns:
        The scores, and the record of each scored item in the order of the task.

    Raises:
        InputError: if no item fits in the context, or `request.text` is unusable.
        SinklabError: if lm-eval cannot evaluate the model on the task, the sink cannot be measured, or answers cannot
            be saved.
    """
    from lm_eval.evaluator import evaluate  # pyright: ignore[reportMissingImports]  # an extra

    from sinklab.evaluating.language_model import AnsweringModel

    with quiet():
        answering = AnsweringModel(model, request.batch_size, answers, progress.advance)
    with quiet(), _as_sentence(chosen.name):
        requests = _drawn(chosen, request)
    pairs = {item: [one.args for one in of if one.request_type == "loglikelihood"] for item, of in requests.items()}
    kept = [item for item in requests if not any(answering.overlong(*pair) for pair in pairs[item])]
    if not kept:
        raise InputError(
            f"--tasks {chosen.name}: every item has an answer that is longer than the context of {model.name}, which "
            f"is {answering.max_length} tokens: choose a task with shorter answers, or a model with a longer context"
        )
    sink = _sink(model, answering.max_length, request.text, [_text(requests[item]) for item in kept])
    count = sum(len(requests[item]) for item in kept)
    progress.begin(count, f"{count:,} requests")
    start = time.perf_counter()
    with quiet(), _as_sentence(chosen.name):
        found = evaluate(
            answering,
            {"tasks": {chosen.name: chosen.task}, "groups": {}, "group_map": {}},
            samples={chosen.name: _samples(kept, chosen)},
            bootstrap_iters=RESAMPLED,
        )
    scores = TaskScores(
        version=str(chosen.task.VERSION),
        data=chosen.data,
        sha256=chosen.sha256,
        limit=request.limit,
        seed=request.seed,
        items=len(kept),
        available=chosen.size,
        left_out=len(requests) - len(kept),
        cut=sum(any(answering.cuts(*pair) for pair in pairs[item]) for item in kept),
        metrics=_metrics(found["results"][chosen.name]),
        sink=sink,
        seconds=round(time.perf_counter() - start, 1),
    )
    return scores, _records(found["samples"][chosen.name])


def _drawn(chosen: ChosenTask, request: TaskRequest) -> dict[int, list[Any]]:
    """Draw items of a task without replacement, and return lm-eval's requests by item index, in ascending order."""
    task, limit, every = chosen.task, request.limit, range(chosen.size)
    items = sorted(random.Random(request.seed).sample(every, limit)) if limit and limit < chosen.size else list(every)
    if task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=request.seed)
    task.build_all_requests(samples=_samples(items, chosen), rank=0, world_size=1)
    requests: defaultdict[int, list[Any]] = defaultdict(list)
    for one in task.instances:
        requests[items[one.doc_id]].append(one)
    return dict(sorted(requests.items()))


def _samples(items: list[int], chosen: ChosenTask) -> list[int] | None:
    """Return the item indices as lm-eval's argument `samples`: None for all items, which is faster than a full list."""
    return None if len(items) == chosen.size else items


def _sink(model: Model, context: int, text: Path | None, items: Sequence[str]) -> TextSink | None:
    """Measure the sink on `text`, or on the items' texts if `text` is None, with the default settings of `Request`.

    Returns None if the sink cannot be measured on the items, usually because they are too short.
    """
    request = Request(options=Options(loss=False), length=min(Request().length, context), fewer=True)
    with tempfile.TemporaryDirectory() as folder:
        file = text or Path(folder) / "items.jsonl"
        if text is None:
            file.write_text("".join(f"{json.dumps({'text': one})}\n" for one in items), encoding="utf-8")
        try:
            found = measure_loaded(model, file, request)
        except InputError:
            if text is None:
                return None
            raise
    return TextSink(
        text="task" if text is None else str(text),
        sha256=text_hash(text),
        sequences=found.sequences,
        length=found.length,
        eps=found.eps,
        bos=found.bos,
        sink_1=found.sink_rate[0],
        bias=found.sink_rate_bias,
    )


@contextmanager
def _as_sentence(task: str) -> Iterator[None]:
    """Convert exceptions of lm-eval in the `with` block to a SinklabError that names the task.

    Out-of-memory errors are not converted.
    """
    try:
        yield
    except SinklabError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise SinklabError(
            f"lm-eval cannot evaluate this model on {task} ({type(error).__name__}: {cause(error)})"
        ) from error


def _text(requests: Sequence[Any]) -> str:
    target = requests[0].doc.get("label") if isinstance(requests[0].doc, dict) else None
    right = [one for one in requests if one.idx == target] or requests
    return "".join(part for part in right[0].args if isinstance(part, str))


def _metrics(results: dict[str, Any]) -> dict[str, TaskMetric]:
    """Return the metrics in lm-eval's results by name, with their standard errors.

    lm-eval's keys, such as `acc,none` and `acc_stderr,none`, end in the name of a filter. The filter is part of the
    returned name unless it is `none`.
    """
    found: dict[str, TaskMetric] = {}
    for key, value in results.items():
        name, _, kind = key.partition(",")
        if not kind or name.endswith("_stderr") or not isinstance(value, int | float):
            continue
        stderr = results.get(f"{name}_stderr,{kind}")
        known = float(stderr) if isinstance(stderr, int | float) else None
        found[name if kind == "none" else f"{name},{kind}"] = TaskMetric(value=float(value), stderr=known)
    return found


def _records(samples: Sequence[dict[str, Any]]) -> list[ItemRecord]:
    """Return the record of each item, sorted by item index; if lm-eval applied several filters, with the first one."""
    first = {sample["doc_id"]: sample for sample in reversed(samples)}
    return [
        ItemRecord(
            item=number,
            doc_hash=sample["doc_hash"],
            target=sample["target"],
            responses=list(sample["filtered_resps"]),
            metrics={name: sample[name] for name in sample["metrics"]},
        )
        for number, sample in sorted(first.items())
    ]
