"""Preview of a sweep: finished runs, and estimated hours of the missing runs. No file is written.

The throughput is that of finished runs. If there are none, updates are timed, or matrix products if the model is large.
The cost of a run is counted in FLOPs (`train/flops.py`): three forward passes per training sequence, one per evaluated
sequence, and two per sequence of the sink metric.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import torch

from sinklab.data.prepare import find_prepared, known_vocabulary
from sinklab.data.shards import TokenDataset
from sinklab.device import pick_device
from sinklab.errors import SinklabError
from sinklab.experiments.documents import RunRecord, read_record, record_of
from sinklab.experiments.sweep.engines.local import jobs_here
from sinklab.experiments.sweep.plan import SweepPlan, data_key, place_sweep
from sinklab.model.config import ModelConfig
from sinklab.model.transformer import Transformer
from sinklab.schema import leaves
from sinklab.train.directory.run import resolved_precision
from sinklab.train.flops import FORWARD_AND_BACKWARD, model_flops
from sinklab.train.optim import build_optimizer
from sinklab.train.recipe import UNHASHED_TRAIN_KEYS, Recipe, load_recipe

TIMED_S = 1.0  # total duration of the timed updates
MATRICES_S = 0.3
MATRIX = 1024  # rows and columns of the timed matmuls
UNKNOWN_VOCABULARY = 1024
LONGEST_UPDATE_S = 1.0  # longer updates are not timed, because such large models also take long to initialise
SOURCES = {
    "runs": "estimated from the finished runs in the directory of the sweep",
    "updates": "estimated from updates timed on this machine without compilation",
    "products": "at the speed of matmuls on this machine, which no run reaches",
}
BY_RECIPE = "; finished runs are recognised by their recipes, as the text is not prepared here"


@dataclass(frozen=True)
class Pace:
    """Throughput of a run, for time estimates.

    Attributes:
        operations_per_second: FLOP/s of one run on its share of the machine.
        said: phrase on how the throughput was estimated, a value of `SOURCES`.
    """

    operations_per_second: float
    said: str


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
        estimated: phrase on how the hours were estimated (`Pace.said`), with a remark if finished runs were recognised
            by their recipes only; empty if the throughput is unknown.
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


def preview(
    plan: SweepPlan, out: Path, found: Mapping[str, Path], engine: str, pace: Pace | None, jobs: int | None
) -> Preview:
    """Return the preview of a plan: its finished runs, and the estimated hours of the missing runs.

    No data is prepared. If the data of a cell has not been prepared here, the cell's finished runs are recognised by
    their recipes alone. `reproduce` trains these runs again if the text that it prepares differs from theirs.

    Args:
        out, found: see `place_sweep`.
        pace: throughput of a run on the engine; None if unknown.
        jobs: number of concurrent runs; None if unknown.

    Raises:
        InputError: see `record_of` and `resolve`.
    """
    data: dict[str, TokenDataset] = {}
    for key, recipe in {data_key(cell.recipe): cell.recipe for cell in plan.cells.values()}.items():
        with suppress(SinklabError):  # reported when the data is prepared
            if (dataset := find_prepared(recipe.data)) is not None:
                data[key] = dataset
    known = {name: cell for name, cell in plan.cells.items() if data_key(cell.recipe) in data}
    order = tuple((name, seed) for name, seed in plan.order if name in known)
    placed = place_sweep(SweepPlan(known, order), data, out, found)
    done = {run.hash for run in placed.runs if record_of(run.directory, run.hash) is not None}
    ended = {pair for pair, run_hash in placed.hashes.items() if run_hash in done}
    unknown = {(name, seed): _key(plan.cells[name].recipe, seed) for name, seed in plan.order if name not in known}
    if unknown:  # while a run extends a shorter run, its directory has the record of the shorter run
        recorded = {_key(recipe, record.seed) for record, recipe in _read_runs(found.values()) if record.hash in found}
        ended |= {pair for pair, key in unknown.items() if key in recorded}
    same_runs = {name: cell.recipe.model_dump_json(exclude={"name"}) for name, cell in plan.cells.items()}
    first: dict[str, str] = {}
    cells, left, runs = [], 0.0, {(same_runs[name], seed): name for name, seed in reversed(plan.order)}
    missing = 0
    for name, cell in plan.cells.items():
        missed = [seed for seed in cell.seeds if (name, seed) not in ended]
        own = sum(runs[same_runs[name], seed] == name for seed in missed)
        hours = None if pace is None else operations(cell.recipe) / pace.operations_per_second / 3600
        missing, left = missing + own, left + own * (hours or 0.0)
        same_as = first.setdefault(same_runs[name], name)
        other, done_here = "" if same_as == name else same_as, len(cell.seeds) - len(missed)
        cells.append(CellPreview(name, cell.change, len(cell.seeds), done_here, hours, other))
    whole = None if pace is None or jobs is None else left / max(1, min(jobs, missing, jobs_here()))
    estimated = "" if pace is None else f"{pace.said}{BY_RECIPE if ended & unknown.keys() else ''}"
    return Preview(cells, len(runs), missing, engine, jobs, whole, estimated)


def _key(recipe: Recipe, seed: int) -> str:
    """Return a key of a run, from recipe and seed; a recipe has the same key before and after `resolve`."""
    auto = recipe.train.precision == "auto"
    precision = resolved_precision("auto", pick_device(recipe.train.device)) if auto else recipe.train.precision
    said = recipe.model_dump(
        mode="json", exclude={"name": True, "seed": True, "train": {*UNHASHED_TRAIN_KEYS, "precision"}}
    )
    kept = {key: value for key, value in leaves(said).items() if not key.endswith(("vocab_size", "eos_id"))}
    return json.dumps([seed, precision, kept], sort_keys=True)


def operations(recipe: Recipe, like: Recipe | None = None) -> float:
    """Return the FLOPs of a run: updates, evaluations and sink measurements.

    Args:
        like: recipe of a similar model, whose FLOPs per token are used to save time; default: `recipe`.
    """
    train, metric = recipe.train, recipe.metric
    of_sequence = (
        _of_sequence(recipe) if like is None else _of_sequence(like) * recipe.model.context / like.model.context
    )
    evaluations = train.steps // train.eval_every + 1 + (train.steps % train.eval_every > 0)
    measured = metric.sequences * metric.length / recipe.model.context
    forward = evaluations * (max(train.eval_sequences, metric.sequences) + 2 * measured) + 2 * measured
    return of_sequence * (train.steps * train.batch_size + forward / FORWARD_AND_BACKWARD)


def pace_here(base: Recipe, threads: int, finished: Iterable[Path] = ()) -> Pace:
    """Return the estimated throughput of one run of a base recipe on its share of this machine.

    Args:
        threads: number of PyTorch's CPU threads of a run.
        finished: run directories; if any run has finished, the throughput of finished runs is used (`pace_of_runs`).

    Raises:
        InputError: if the device of the recipe is not usable on this machine.
    """
    if found := pace_of_runs(finished):
        return found
    device = pick_device(base.train.device)
    dtype = torch.bfloat16 if resolved_precision(base.train.precision, device) == "bf16" else torch.float32
    update = _of_sequence(base) * base.train.batch_size
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        of_products = _flops_of_products(device, dtype, threads)
        if update / of_products > LONGEST_UPDATE_S:
            return Pace(of_products, SOURCES["products"])
        return Pace(update / _seconds_of_update(base, device, dtype == torch.bfloat16), SOURCES["updates"])
    finally:
        torch.set_num_threads(before)


def pace_of_runs(directories: Iterable[Path]) -> Pace | None:
    """Return the median training throughput of the finished runs among run directories; None if there are none.

    Runs that cannot be read are skipped. Runs that were trained on other machines are included.
    """
    found = [
        _of_sequence(recipe) * recipe.train.steps * recipe.train.batch_size / record.seconds
        for record, recipe in _read_runs(directories)
        if record.status == "done" and record.seconds
    ]
    return Pace(median(found), SOURCES["runs"]) if found else None


def _read_runs(directories: Iterable[Path]) -> Iterator[tuple[RunRecord, Recipe]]:
    """Yield record and recipe of the runs that have a record; runs that cannot be read are skipped."""
    for directory in directories:
        try:
            record, recipe = read_record(directory), load_recipe(str(directory / "recipe.yaml"))
        except SinklabError:
            continue
        if record is not None:
            yield record, recipe


def _sized(recipe: Recipe) -> ModelConfig:
    try:
        known = recipe.model.vocab_size or known_vocabulary(recipe.data)
    except SinklabError:  # a damaged data.json is reported when the data is prepared
        known = None
    return recipe.model.model_copy(update={"vocab_size": known or UNKNOWN_VOCABULARY})


def _of_sequence(recipe: Recipe) -> int:
    """Return the FLOPs of one training sequence (forward and backward pass).

    An unknown vocabulary size is assumed to be `UNKNOWN_VOCABULARY`.
    """
    return _of_model(_sized(recipe).model_dump_json())


@lru_cache(maxsize=4096)
def _of_model(config: str) -> int:
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
    generator = torch.Generator().manual_seed(0)
    shape = (train.micro_batch or train.batch_size, config.context + 1)
    tokens_BT = torch.randint(config.vocab_size or 1, shape, generator=generator).to(device)
    parts = train.batch_size // len(tokens_BT)

    def update() -> None:
        for _ in range(parts):
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                loss = model.loss(tokens_BT)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return _seconds_each(update, TIMED_S, device)


def _seconds_each(work: Callable[[], object], limit: float, device: torch.device) -> float:
    """Return the median duration of a call of `work` in seconds.

    After a warm-up call, `work` is called until the calls have taken `limit` seconds in total.
    """
    work()
    taken: list[float] = []
    while sum(taken) < limit or not taken:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return median(taken)
