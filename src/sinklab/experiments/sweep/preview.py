"""Preview of a sweep: finished runs, and estimated hours of the missing runs. No file is written.

The throughput is that of finished runs. If there are none, updates are timed, or matrix products if the model is large.
The cost of a run is counted in FLOPs (`train/planning.py`): three forward passes per training sequence, one per
evaluated sequence, and two per sequence of the sink metric.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch

from sinklab.data.prepare import known_vocabulary
from sinklab.device import pick_device
from sinklab.errors import SinklabError
from sinklab.experiments.documents import RunRecord, read_record
from sinklab.experiments.sweep.local import jobs_here
from sinklab.experiments.sweep.store import SweepPlan
from sinklab.model.config import ModelConfig
from sinklab.model.transformer import Transformer
from sinklab.schema import leaves
from sinklab.train.optim import build_optimizer
from sinklab.train.planning import FORWARD_AND_BACKWARD, model_flops
from sinklab.train.recipe import UNHASHED_TRAIN_KEYS, Recipe, load_recipe
from sinklab.train.run import resolved_precision

TIMED_S = 1.0  # total duration of the timed updates
MATRICES_S = 0.3
MATRIX = 1024  # rows and columns of the timed matmuls
UNKNOWN_VOCABULARY = 1024
LONGEST_UPDATE_S = 1.0  # longer updates are not timed, because such large models also take long to initialise
BY_RUNS = "estimated from the finished runs in the directory of the sweep"
BY_UPDATES = "estimated from updates timed on this machine without compilation"
BY_PRODUCTS = "at the speed of matmuls on this machine, which no run reaches"

Finished = Sequence[tuple[RunRecord, Recipe]]


@dataclass(frozen=True)
class Pace:
    """Throughput of one run on its share of the machine in FLOP/s, and a phrase on how it was estimated."""

    operations_per_second: float
    estimated: str


@dataclass(frozen=True)
class CellPreview:
    """Preview of a cell: requested and finished seeds (diverged ones included), and estimated hours.

    Attributes:
        change: recipe keys (dotted) that differ from the base, with their values.
        hours: estimated hours of one run; None if the throughput is unknown (a cluster without finished runs).
        same_as: name of the first cell with the same recipe, if this is another cell; else empty.
    """

    name: str
    change: Mapping[str, object]
    seeds: int
    done: int
    hours: float | None
    same_as: str


@dataclass(frozen=True)
class Preview:
    """Preview of a sweep: its cells, number of runs and estimated hours.

    Attributes:
        runs: number of distinct runs.
        missing: number of distinct runs that are not finished and have not diverged.
        jobs: number of concurrent runs; None if the cluster decides.
        hours: estimated hours for the missing runs, with `jobs` concurrent runs; None if `jobs` is None or the
            throughput is unknown.
        estimated: phrase on how the hours were estimated (`Pace.estimated`); empty if the throughput is unknown.
    """

    cells: Sequence[CellPreview]
    runs: int
    missing: int
    engine: str
    jobs: int | None
    hours: float | None
    estimated: str

    def document(self) -> dict[str, Any]:
        """Return the preview as a JSON-serializable dict."""
        return asdict(self)


def read_finished(found: Mapping[str, Path]) -> Finished:
    """Return record and recipe of the finished and failed runs among directories by hash, of those that can be read."""
    runs = []
    for run_hash, directory in found.items():
        try:
            record, recipe = read_record(directory), load_recipe(str(directory / "recipe.yaml"))
        except SinklabError:
            continue
        if record is not None and record.hash == run_hash:  # a run that extends a shorter one has the record of that
            runs.append((record, recipe))
    return runs


def preview(
    plan: SweepPlan,
    finished: Finished,
    engine: str,
    pace: Pace | None,
    jobs: int | None,
    shard: tuple[int, int] = (0, 1),
) -> Preview:
    """Return the preview of a plan: its finished runs, and the estimated hours of the missing runs.

    No data is prepared: finished runs are recognised by their recipes. `reproduce` trains them again if the text that
    it prepares differs from theirs.

    Args:
        pace: throughput of a run on the engine; None if unknown.
        jobs: number of concurrent runs; None if unknown.
        shard: number I of the shard of N, and N; only these runs are counted.
    """
    recorded = {_key(recipe, record.seed) for record, recipe in finished}
    keys = {(name, seed): _key(plan.cells[name].recipe, seed) for name, seed in plan.order}
    runs = list(dict.fromkeys(keys.values()))[shard[0] :: shard[1]]
    missing = [key for key in runs if key not in recorded]
    same = {name: cell.recipe.model_dump_json(exclude={"name"}) for name, cell in plan.cells.items()}
    first: dict[str, str] = {}
    cells: list[CellPreview] = []
    hours_of: dict[str, float] = {}
    for name, cell in plan.cells.items():
        own = {keys[name, seed] for seed in cell.seeds}
        hours = None if pace is None else operations(cell.recipe) / pace.operations_per_second / 3600
        other = first.setdefault(same[name], name)
        hours_of |= dict.fromkeys(own, hours or 0.0)
        done = len(own & recorded)
        cells.append(CellPreview(name, cell.change, len(cell.seeds), done, hours, "" if other == name else other))
    left = sum(hours_of[key] for key in missing)
    whole = None if pace is None or jobs is None else left / max(1, min(jobs, len(missing), jobs_here()))
    return Preview(cells, len(runs), len(missing), engine, jobs, whole, pace.estimated if pace else "")


def _key(recipe: Recipe, seed: int) -> str:
    """Return a key of a run, from recipe and seed; a recipe has the same key before and after `resolve`."""
    device = pick_device(recipe.train.device) if recipe.train.precision == "auto" else torch.device("cpu")
    precision = resolved_precision(recipe.train.precision, device)
    values = recipe.model_dump(
        mode="json", exclude={"name": True, "seed": True, "train": {*UNHASHED_TRAIN_KEYS, "precision"}}
    )
    kept = {key: value for key, value in leaves(values).items() if not key.endswith(("vocab_size", "eos_id"))}
    return json.dumps([seed, precision, kept], sort_keys=True)


def operations(recipe: Recipe, like: Recipe | None = None) -> float:
    """Return the FLOPs of a run: updates, evaluations and sink measurements.

    Args:
        like: recipe of a similar model, whose FLOPs per token are used to save time; default: `recipe`.
    """
    train, metric, like = recipe.train, recipe.metric, like or recipe
    of_sequence = _of_model(_sized(like).model_dump_json()) * recipe.model.context / like.model.context
    evaluations = train.steps // train.eval_every + 1 + (train.steps % train.eval_every > 0)
    measured = metric.sequences * metric.length / recipe.model.context
    forward = evaluations * (max(train.eval_sequences, metric.sequences) + 2 * measured) + 2 * measured
    return of_sequence * (train.steps * train.batch_size + forward / FORWARD_AND_BACKWARD)


def pace_of_runs(finished: Finished) -> Pace | None:
    """Return the median training throughput of finished runs, also of other machines; None if there are none."""
    found = [
        _of_model(_sized(recipe).model_dump_json()) * recipe.train.steps * recipe.train.batch_size / record.seconds
        for record, recipe in finished
        if record.status == "done" and record.seconds
    ]
    return Pace(median(found), BY_RUNS) if found else None


def pace_here(base: Recipe, threads: int) -> Pace:
    """Return the estimated throughput of one run of a base recipe with this number of CPU threads on this machine.

    Raises:
        InputError: if the device of the recipe is not usable on this machine.
    """
    device = pick_device(base.train.device)
    dtype = torch.bfloat16 if resolved_precision(base.train.precision, device) == "bf16" else torch.float32
    update = _of_model(_sized(base).model_dump_json()) * base.train.batch_size
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        of_products = _flops_of_products(device, dtype, threads)
        if update / of_products > LONGEST_UPDATE_S:
            return Pace(of_products, BY_PRODUCTS)
        return Pace(update / _seconds_of_update(base, device, dtype == torch.bfloat16), BY_UPDATES)
    finally:
        torch.set_num_threads(before)


def _sized(recipe: Recipe) -> ModelConfig:
    """Return the model's config with its vocabulary size; `UNKNOWN_VOCABULARY` if it is unknown."""
    try:
        known = recipe.model.vocab_size or known_vocabulary(recipe.data)
    except SinklabError:  # a damaged data.json is reported when the data is prepared
        known = None
    return recipe.model.model_copy(update={"vocab_size": known or UNKNOWN_VOCABULARY})


@cache
def _of_model(config: str) -> int:
    """Return the FLOPs of one training sequence (forward and backward pass)."""
    return model_flops(ModelConfig.model_validate_json(config)).total


@cache
def _flops_of_products(device: torch.device, dtype: torch.dtype, threads: int) -> float:
    """Return the measured FLOPS of matmuls, with the threads that are set: `threads` only distinguishes the results."""
    square = torch.randn(MATRIX, MATRIX, device=device).to(dtype)
    return 2 * MATRIX**3 / _seconds_each(lambda: square @ square, MATRICES_S, device)


def _seconds_of_update(base: Recipe, device: torch.device, bf16: bool) -> float:
    """Return the measured duration of a training update on random tokens, in seconds."""
    config, train = _sized(base), base.train
    model = Transformer(config, base.seed).to(device)
    optimizer = build_optimizer(model, base.optim)
    shape = (train.micro_batch or train.batch_size, config.context + 1)
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(config.vocab_size or 1, shape, generator=generator).to(device)

    def update() -> None:
        for _ in range(train.batch_size // len(tokens_BT)):
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                loss = model.loss(tokens_BT)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return _seconds_each(update, TIMED_S, device)


def _seconds_each(work: Callable[[], object], limit: float, device: torch.device) -> float:
    """Return the median duration of a call of `work` in seconds, over calls of `limit` seconds after a first one."""
    work()
    taken: list[float] = []
    while sum(taken) < limit or not taken:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return median(taken)
