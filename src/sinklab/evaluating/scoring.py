"""Score a model on a task: draw items, and evaluate them with lm-eval."""

import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError, SinklabError, cause, is_out_of_memory
from sinklab.evaluating.evaluation import ItemRecord, TaskMetric, TaskScores
from sinklab.evaluating.tasks import ChosenTask, quiet

if TYPE_CHECKING:
    from sinklab.evaluating.language_model import AnsweringModel

CHOICES = "loglikelihood"
RESAMPLED = 1000
"""Number of bootstrap samples for the standard error of metrics that are not means."""


@dataclass(frozen=True)
class DrawnItems:
    """Items of a task that a model will answer.

    Attributes:
        items: indices of the items in the task, ascending.
        left_out: number of drawn items excluded because an answer is longer than the model's context.
        cut: number of scored items whose prompt is truncated to the model's context.
        requests: number of requests to the model.
        texts: text of each item with its correct answer, or with that of its first request.
    """

    items: list[int]
    left_out: int
    cut: int
    requests: int
    texts: list[str]


@dataclass(frozen=True)
class ScoredTask:
    """Scores of a model on a task, and the results of the task's items."""

    scores: TaskScores
    records: list[ItemRecord]


def draw_items(chosen: ChosenTask, model: "AnsweringModel", limit: int | None, seed: int, name: str) -> DrawnItems:
    """Draw items of a task without replacement, and exclude those with an answer longer than the model's context.

    Args:
        limit: number of items, capped at the size of the task; None for all items.
        name: name of the model.

    Raises:
        InputError: if every item has an answer longer than the context.
        SinklabError: if lm-eval cannot evaluate the model on the task.
    """
    every = range(chosen.size)
    items = sorted(random.Random(seed).sample(every, limit)) if limit and limit < chosen.size else list(every)
    task = chosen.task
    with quiet(), _as_sentence(chosen.name):
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=seed)
        task.build_all_requests(samples=_samples(items, chosen), rank=0, world_size=1)
    requests: defaultdict[int, list[Any]] = defaultdict(list)
    for one in task.instances:
        requests[items[one.doc_id]].append(one)
    pairs = {item: [one.args for one in of if one.request_type == CHOICES] for item, of in requests.items()}
    kept = [item for item in items if not any(model.overlong(*pair) for pair in pairs[item])]
    if not kept:
        raise InputError(
            f"--tasks {chosen.name}: every item has an answer that is longer than the context of {name}, which is "
            f"{model.max_length} tokens: choose a task with shorter answers, or a model with a longer context"
        )
    return DrawnItems(
        items=kept,
        left_out=len(items) - len(kept),
        cut=sum(any(model.cuts(*pair) for pair in pairs[item]) for item in kept),
        requests=sum(len(requests[item]) for item in kept),
        texts=[_text(requests[item]) for item in kept],
    )


def score_task(
    chosen: ChosenTask, drawn: DrawnItems, model: "AnsweringModel", limit: int | None, seed: int
) -> ScoredTask:
    """Evaluate a model on the drawn items of a task.

    Raises:
        SinklabError: if lm-eval cannot evaluate the model on the task, or answers cannot be saved.
    """
    from lm_eval.evaluator import evaluate  # pyright: ignore[reportMissingImports]  # an extra

    start = time.perf_counter()
    with quiet(), _as_sentence(chosen.name):
        found = evaluate(
            model,
            {"tasks": {chosen.name: chosen.task}, "groups": {}, "group_map": {}},
            samples={chosen.name: _samples(drawn.items, chosen)},
            bootstrap_iters=RESAMPLED,
        )
    scores = TaskScores(
        version=chosen.version,
        data=chosen.data,
        sha256=chosen.sha256,
        limit=limit,
        seed=seed,
        items=len(drawn.items),
        available=chosen.size,
        left_out=drawn.left_out,
        cut=drawn.cut,
        metrics=_metrics(found["results"][chosen.name]),
        seconds=round(time.perf_counter() - start, 1),
    )
    return ScoredTask(scores, _records(found["samples"][chosen.name]))


@contextmanager
def _as_sentence(task: str) -> Iterator[None]:
    """Convert lm-eval's exceptions in the `with` block, except out-of-memory, to a SinklabError that names the task."""
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


def _samples(items: list[int], chosen: ChosenTask) -> list[int] | None:
    """Return the drawn item indices; None for all items, because lm-eval searches the list for every item."""
    return None if len(items) == chosen.size else items


def _text(requests: Sequence[Any]) -> str:
    target = requests[0].doc.get("label") if isinstance(requests[0].doc, dict) else None
    right = [one for one in requests if one.idx == target] or requests
    return "".join(part for part in right[0].args if isinstance(part, str))


def _metrics(results: dict[str, Any]) -> dict[str, TaskMetric]:
    """Return lm-eval's metrics (`acc,none`, `acc_stderr,none`) by name; a filter other than none stays in the name."""
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
    """Return the record of each item, sorted by item index; of several lm-eval filters, only the first is used."""
    first: dict[int, dict[str, Any]] = {}
    for sample in samples:
        first.setdefault(sample["doc_id"], sample)
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
