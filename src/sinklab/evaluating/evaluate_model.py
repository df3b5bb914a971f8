"""Evaluate a model on downstream tasks with lm-eval, and measure its sink.

Tasks are loaded by name, with items from the hub or, for HellaSwag, from a local file. HellaSwag (1905.07830) asks for
the most plausible of four endings.
"""

import difflib
import hashlib
import json
import logging
import os
import random
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sinklab.data.corpora import documents
from sinklab.data.textfiles import expanded, read_rows
from sinklab.errors import InputError, SinklabError, UnsavedError, cause, is_out_of_memory, require_extra
from sinklab.evaluating.evaluation import (
    EVALUATION,
    DownstreamScores,
    ItemRecord,
    TaskMetric,
    TaskRequest,
    TaskScores,
    TextSink,
    load_scores,
)
from sinklab.files import sha256_of, write_gzip
from sinklab.jobs import JobEvent, JobStep, Ledger, Observer, StepProgress, check_request, ignore, run_steps, unsaved
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.options import Options, Request
from sinklab.models.hooks import Progress
from sinklab.models.huggingface.loading import AS_IT_IS, Loading, check_name
from sinklab.opening import Model, open_model
from sinklab.schema import ReadDocument
from sinklab.survey.measure import measure_loaded, text_hash

HUB = "hub"
SCORES = {"acc": "accuracy", "acc_norm": "accuracy_norm"}
"""Names of the accuracies in `Measurement.scores`, by lm-eval's names of the metrics."""


@dataclass(frozen=True)
class ChosenTask:
    """A task with its items.

    Attributes:
        name: name of the task in lm-eval; not the name of a group or tag.
        task: task object of lm-eval.
        data: name of the file with the items, or "hub".
        sha256: SHA-256 of the file; None for the hub.
    """

    name: str
    task: Any
    data: str
    sha256: str | None = None

    @property
    def size(self) -> int:
        """Number of items in the task's evaluation split."""
        return len(self.task.eval_docs)

    @property
    def identity(self) -> str:
        """Identity of the items: the SHA-256 of their file, or "hub"."""
        return self.sha256 or self.data


def chosen_tasks(names: Sequence[str], data: Path | None) -> list[ChosenTask]:
    """Load tasks by name, with their items. A group or tag is replaced by its tasks.

    Args:
        names: names of tasks, groups or tags in lm-eval.
        data: file with the items of HellaSwag; None: the file in SINKLAB_DATA/eval, else the hub.

    Raises:
        InputError: if a name is unknown, a package is not installed, items cannot be read or downloaded, or `data` is
            set and HellaSwag is not in `names`.
    """
    require_extra("eval", ("lm_eval", "accelerate"), "a downstream task")
    from lm_eval.tasks import TaskManager  # an extra

    if data is not None and HELLASWAG not in names:
        raise InputError(
            f"--data {data} can only supply the items of {HELLASWAG}, which is not in --tasks {','.join(names)}: "
            "add it, or remove --data"
        )
    file = (data or hellaswag_file()) if HELLASWAG in names else None
    found: dict[str, ChosenTask] = {}
    with inside_lm_eval():
        manager = None
        for name in names:
            if file and name == HELLASWAG:
                continue
            manager = manager or TaskManager()  # slow, because lm-eval reads thousands of files
            if name not in manager.all_tasks:
                near = difflib.get_close_matches(name, manager.all_tasks, n=3)
                like = f"; similar names: {', '.join(near)}" if near else ""
                raise InputError(
                    f"--tasks: lm-eval has no task {name!r}{like}. `lm-eval ls tasks` lists all of them; "
                    f"{HELLASWAG} with --data FILE needs no network"
                )
        for name in dict.fromkeys(names):
            if file and name == HELLASWAG:
                found[name] = ChosenTask(name, hellaswag_task(file), file.name, sha256_of(file))
            else:
                found |= _from_hub(manager, name)
    return list(found.values())


def chosen_task(name: str, data: Path | None) -> ChosenTask:
    """Load one task by its name, with its items (see `chosen_tasks`).

    Raises:
        InputError: if the task is unusable, or the name is that of a group or tag with several tasks.
    """
    found = chosen_tasks([name], data)
    if len(found) != 1:
        raise InputError(f"{name} is a group of {len(found)} tasks: choose one of them")
    return found[0]


@contextmanager
def inside_lm_eval(name: str = "") -> Iterator[None]:
    """Hide lm-eval's messages below ERROR and its progress bars in the `with` block.

    With the name of a task, exceptions other than out-of-memory errors are converted to a SinklabError that names it.
    """
    from lm_eval.api import model, task  # an extra
    from lm_eval.models import huggingface

    logger, modules = logging.getLogger("lm_eval"), (task, model, huggingface)
    before, bars = logger.level, [module.tqdm for module in modules]
    logger.setLevel(logging.ERROR)
    for module, bar in zip(modules, bars, strict=True):
        module.tqdm = lambda *args, bar=bar, **settings: bar(*args, **{**settings, "disable": True})
    try:
        yield
    except SinklabError:
        raise
    except Exception as error:
        if not name or is_out_of_memory(error):
            raise
        raise SinklabError(
            f"lm-eval cannot evaluate this model on {name} ({type(error).__name__}: {cause(error)})"
        ) from error
    finally:
        logger.setLevel(before)
        for module, bar in zip(modules, bars, strict=True):
            module.tqdm = bar


def _from_hub(manager: Any, name: str) -> dict[str, ChosenTask]:
    """Load a task, or the tasks of a group or tag, with their items from the hub."""
    try:
        return {one: ChosenTask(one, task, HUB) for one, task in manager.load([name])["tasks"].items()}
    except ImportError as error:
        raise InputError(
            f"--tasks {name} needs a package that is not installed: {cause(error)}. Install it, or choose another task"
        ) from error
    except Exception as error:  # network, hub and format errors share no base class
        if name == HELLASWAG:
            file = HELLASWAG_FILES[-1]
            remedy = f"; or use a local file: --data {file}, or SINKLAB_DATA with the file in a folder eval/"
        else:
            remedy = f"; {HELLASWAG} can be read from a file instead (--data)"
        raise InputError(
            f"the items of --tasks {name} could not be loaded from the Hugging Face hub ({type(error).__name__}: "
            f"{cause(error)}): check the connection; or download them on another machine, copy its HF_HOME here "
            f"and set HF_HUB_OFFLINE=1{remedy}"
        ) from error


HELLASWAG = "hellaswag"
HELLASWAG_FILES = ("hellaswag_val.jsonl.gz", "hellaswag_val.jsonl")
ACCURACIES = ("acc", "acc_norm")
"""Metrics of lm-eval, averaged over items: accuracy of the ending with the highest log-likelihood (per character)."""
ITEM_KEYS = '"query" (or "activity_label", "ctx_a" and "ctx_b"), "endings" and "label"'


class ChoiceItem(ReadDocument):
    """A multiple-choice item: prompt, endings, and 0-based index of the correct ending."""

    query: str
    endings: list[str]
    label: int


def hellaswag_file() -> Path | None:
    """Return the path of HellaSwag's file in SINKLAB_DATA/eval; None if it is missing or SINKLAB_DATA is not set."""
    data = os.environ.get("SINKLAB_DATA")
    places = [expanded(data) / "eval" / name for name in HELLASWAG_FILES] if data else []
    return next((place for place in places if place.is_file()), None)


def read_items(path: Path) -> list[ChoiceItem]:
    """Read items from a .jsonl or .jsonl.gz file, in the published format or in that of lm-eval, which has a `query`.

    Raises:
        InputError: if the file cannot be read, has no items, or has a line that is not an item; the message names the
            file and the line.
    """
    items = [_item(row, where) for row, where in read_rows(path)]
    if not items:
        raise InputError(f"{path} has no items: pass the items of {HELLASWAG}, a .jsonl or .jsonl.gz file")
    return items


def hellaswag_task(path: Path) -> Any:
    """Return lm-eval's task object with the items of the file at `path`."""
    rows = [item.model_dump() for item in read_items(path)]
    from datasets import Dataset  # comes with lm-eval
    from lm_eval.api.task import ConfigurableTask

    config = {
        "task": HELLASWAG,
        "custom_dataset": lambda **_: {"validation": Dataset.from_list(rows)},
        "validation_split": "validation",
        "output_type": "multiple_choice",
        "doc_to_text": "query",
        "doc_to_choice": "endings",
        "doc_to_target": "label",
        "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ACCURACIES],
        "metadata": {"version": 1.0},
    }
    return ConfigurableTask(config=config)


def _item(row: Any, where: str) -> ChoiceItem:
    try:
        if not isinstance(row, dict):
            raise ValueError(f"the row is {json.dumps(row)[:40]}, not an object")
        item = ChoiceItem.model_validate(row if "query" in row else _converted(row))
        if not item.query or not 0 <= item.label < len(item.endings) or not all(item.endings):
            raise ValueError(
                f"label {item.label}, counted from 0, is not one of {len(item.endings)} endings, or a text is empty"
            )
        return item
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else " ".join(str(error).splitlines()[:3])
        raise InputError(f"{where}: {reason}; a line needs {ITEM_KEYS}") from error


def _converted(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert an item from the published format to that of lm-eval.

    The query is clean(activity_label + ": " + ctx_a + " " + capitalised ctx_b), and an ending is clean(ending). The
    function clean strips a text, replaces " [title]" by ". ", removes other text in square brackets with the brackets,
    and replaces two spaces by one.
    """

    def clean(text: str) -> str:
        return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

    query = clean(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}")
    return {**row, "query": query, "endings": [clean(ending) for ending in row["endings"]]}


RESAMPLED = 1000
"""Number of bootstrap samples for the standard error of metrics that are not means."""


def evaluate_model(
    name: str, request: TaskRequest, *, loading: Loading = AS_IT_IS, out: Path | None = None, observe: Observer = ignore
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
        InputError: if the model, a task or the text of `request` is unusable, no item fits in the model's context, or
            `out` cannot be written or has an evaluation with other settings.
        HeldError: if another process writes an evaluation to `out`.
        UnsavedError: if a result cannot be saved; the exception contains the scores so far.
        SinklabError: if the model cannot be loaded, lm-eval cannot evaluate it on a task, the sink cannot be measured,
            or `out` cannot be locked.
    """
    check_name(name)
    if request.text is not None:
        next(documents(str(request.text)))
    chosen = chosen_tasks(request.tasks, request.data)
    ledger = Ledger[DownstreamScores](out, EVALUATION)
    with ledger.locked():
        return _evaluate(open_model(name, loading, as_transformers=True), chosen, request, ledger, observe)


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
        HeldError, InputError, SinklabError: as for `evaluate_model`; InputError also if the task reports no accuracy.
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


def _evaluate(
    model: Model,
    chosen: Sequence[ChosenTask],
    request: TaskRequest,
    ledger: Ledger[DownstreamScores],
    observe: Observer,
) -> DownstreamScores:
    decided = {"model": model.name, "files": model.files, "commit": model.commit, **model.loading.precision}
    notes = [*model.notes]
    if model.step is not None:
        notes.append(f"the run was evaluated at step {model.step}, as {type(model.module).__name__}")
    found = DownstreamScores(model=model.name, asked=decided, lm_eval=version("lm_eval"), notes=notes)
    if (earlier := ledger.earlier(load_scores)) is not None and ledger.path is not None:
        pairs = {f"{key} of the model": (was, decided.get(key)) for key, was in earlier.asked.items()}
        if any(task.name not in earlier.tasks for task in chosen):
            pairs["version of lm-eval"] = earlier.lm_eval, found.lm_eval
        for task in chosen:
            if scores := earlier.tasks.get(task.name):
                pairs |= {
                    f"limit of {task.name}": (scores.limit, request.limit),
                    f"seed of {task.name}": (scores.seed, request.seed),
                    f"data of {task.name}": (scores.sha256 or scores.data, task.identity),
                    f"text of {task.name}": (scores.sink and scores.sink.sha256, text_hash(request.text)),
                }
        before, now = ({key: pair[side] for key, pair in pairs.items()} for side in (0, 1))
        check_request(ledger.path, "an evaluation", before, now)
        found = earlier
    identity = hashlib.sha256(json.dumps(decided).encode()).hexdigest()[:8]

    def run(task: ChosenTask, progress: StepProgress) -> str:
        nonlocal found
        plain = re.sub(r"[^\w-]", "_", task.name)
        names = f"answers_{plain}_{identity}.db", f"items_{plain}.jsonl.gz"
        answers, items = (ledger.path and ledger.path.with_name(name) for name in names)
        scores, records = _score(model, task, request, answers, progress)
        scores = scores.model_copy(update={"records": items and items.name})
        found = found.model_copy(update={"tasks": {**found.tasks, task.name: scores}})
        if items is not None:
            with unsaved(lambda: found):
                lines = (json.dumps(one.model_dump(mode="json"), ensure_ascii=False) for one in records)
                write_gzip(items, "".join(f"{line}\n" for line in lines))
        ledger.save(found)
        if answers is not None:
            answers.unlink(missing_ok=True)
        return f"{scores.items:,} items"

    kept = {name: f"{scores.items:,} items" for name, scores in found.tasks.items()}
    run_steps([JobStep(task.name, partial(run, task), kept.get(task.name)) for task in chosen], observe)
    return found


def _score(
    model: Model, chosen: ChosenTask, request: TaskRequest, answers: Path | None, progress: StepProgress
) -> tuple[TaskScores, list[ItemRecord]]:
    """Evaluate a model on a task, and measure its sink on `request.text`, by default on the items of the task.

    Items are left out if one of their answers does not fit in the model's context.

    Args:
        answers: lm-eval's cache of the model's answers, which an interrupted call leaves behind; None for no cache.

    Returns:
        The scores, and the record of each scored item in the order of the task.
    """
    from lm_eval.api.model import CachingLM  # an extra
    from lm_eval.evaluator import evaluate

    from sinklab.evaluating.language_model import AnsweringModel

    task, name, every = chosen.task, chosen.name, range(chosen.size)
    items = sorted(random.Random(request.seed).sample(every, min(request.limit or chosen.size, chosen.size)))
    with inside_lm_eval(name):
        answering = AnsweringModel(model, request.batch_size, progress.advance)
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=request.seed)
        # None for all items is faster than a full list
        task.build_all_requests(samples=None if len(items) == len(every) else items, rank=0, world_size=1)
        requests: defaultdict[int, list[Any]] = defaultdict(list)
        for one in task.instances:
            requests[items[one.doc_id]].append(one)
    pairs = {item: [one.args for one in of if one.request_type == "loglikelihood"] for item, of in requests.items()}
    kept = sorted(item for item in requests if not any(answering.overlong(*pair) for pair in pairs[item]))
    if not kept:
        raise InputError(
            f"--tasks {name}: every item has an answer that is longer than the context of {model.name}, which is "
            f"{answering.max_length} tokens: choose a task with shorter answers, or a model with a longer context"
        )
    sink = _sink(model, answering.max_length, request.text, [_text(requests[item]) for item in kept])
    count = sum(len(requests[item]) for item in kept)
    progress.begin(count, f"{count:,} requests")
    start = time.perf_counter()
    cached = None if answers is None else CachingLM(answering, str(answers))
    try:
        with inside_lm_eval(name):
            found = evaluate(
                cached or answering,
                {"tasks": {name: task}, "groups": {}, "group_map": {}},
                samples={name: None if len(kept) == len(every) else kept},
                bootstrap_iters=RESAMPLED,
            )
    finally:
        if cached is not None:
            cached.dbdict.close()
    scores = TaskScores(
        version=str(task.VERSION),
        data=chosen.data,
        sha256=chosen.sha256,
        limit=request.limit,
        seed=request.seed,
        items=len(kept),
        available=chosen.size,
        left_out=len(requests) - len(kept),
        cut=sum(any(answering.cuts(*pair) for pair in pairs[item]) for item in kept),
        metrics=_metrics(found["results"][name]),
        sink=sink,
        seconds=round(time.perf_counter() - start, 1),
    )
    first = {sample["doc_id"]: sample for sample in reversed(found["samples"][name])}  # of several filters, the first
    records = [
        ItemRecord(
            item=number,
            doc_hash=sample["doc_hash"],
            target=sample["target"],
            responses=list(sample["filtered_resps"]),
            metrics={metric: sample[metric] for metric in sample["metrics"]},
        )
        for number, sample in sorted(first.items())
    ]
    return scores, records


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
