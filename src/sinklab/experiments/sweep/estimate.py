"""How long runs will take here: by finished runs, by some updates that are timed, or by how fast matrices multiply.

What a run costs is counted in operations (`train/planning/flops.py`): three forward passes per sequence of an update,
one per sequence whose loss is evaluated, and two where sinks are measured, too.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Literal

import torch

from sinklab.data.tokenizers import trained_size
from sinklab.device import pick_device
from sinklab.errors import SinklabError
from sinklab.experiments.documents import read_record
from sinklab.experiments.sweep.store import found_runs
from sinklab.model.config import ModelConfig
from sinklab.model.transformer import Transformer
from sinklab.train.directory.run import resolved_precision
from sinklab.train.optim import build_optimizer
from sinklab.train.planning.flops import FORWARD_AND_BACKWARD, model_flops
from sinklab.train.recipe import Recipe, load_recipe

TIMED_S = 1.0  # of updates
MATRICES_S = 0.3
MATRIX = 1024  # rows and columns
UNKNOWN_VOCABULARY = 1024
LONGEST_UPDATE_S = 1.0  # longer ones are not tried: a model of that size takes a while to draw, too
SOURCES = {
    "runs": "by the finished runs of that directory",
    "updates": "by some updates timed on this machine",
    "products": "at the speed of this machine's matrix products, which no run reaches",
}


@dataclass(frozen=True)
class Pace:
    """How fast runs are here.

    Attributes:
        operations_per_second: of one run.
        source: how that is known (SOURCES).
    """

    operations_per_second: float
    source: Literal["runs", "updates", "products"]

    def seconds(self, recipe: Recipe) -> float:
        """Of one run of a recipe."""
        return operations(recipe) / self.operations_per_second

    @property
    def said(self) -> str:
        """How it is known, for people."""
        return SOURCES[self.source]


def operations(recipe: Recipe, like: Recipe | None = None) -> float:
    """Of a whole run: its updates, evaluations and measurements.

    Args:
        like: a recipe whose model needs as many operations per token; to count the one and not every one.
    """
    train, metric = recipe.train, recipe.metric
    of_sequence = (
        _of_sequence(recipe) if like is None else _of_sequence(like) * recipe.model.context / like.model.context
    )
    evaluations = train.steps // train.eval_every + 1 + (train.steps % train.eval_every > 0)
    measured = metric.sequences * metric.length / recipe.model.context
    forward = evaluations * (max(train.eval_sequences, metric.sequences) + 2 * measured) + 2 * measured
    return of_sequence * (train.steps * train.batch_size + forward / FORWARD_AND_BACKWARD)


def pace_here(base: Recipe, threads: int, out: Path | None = None) -> Pace:
    """The pace of runs that are like a base recipe, on one share of this machine.

    Args:
        threads: of PyTorch on a CPU.
        out: of a sweep; its finished runs are the best estimate.
    """
    if out is not None and (found := pace_of_runs(out)):
        return found
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return _timed(base)
    finally:
        torch.set_num_threads(before)


def pace_of_runs(out: Path) -> Pace | None:
    """The pace of the finished runs of a sweep, wherever they were trained; None where there are none."""
    recorded = _recorded(out)
    return Pace(median(recorded), "runs") if recorded else None


def _timed(base: Recipe) -> Pace:
    device = pick_device(base.train.device)
    precision = resolved_precision(base.train.precision, device)
    of_products = _speed_of_products(device, torch.bfloat16 if precision == "bf16" else torch.float32)
    update = _of_sequence(base) * base.train.batch_size
    if update / of_products > LONGEST_UPDATE_S:
        return Pace(of_products, "products")
    return Pace(update / _seconds_of_update(base, device, precision == "bf16"), "updates")


def _sized(recipe: Recipe) -> ModelConfig:
    size = recipe.model.vocab_size or trained_size(recipe.data.tokenizer) or UNKNOWN_VOCABULARY
    return recipe.model.model_copy(update={"vocab_size": size})


def _of_sequence(recipe: Recipe) -> int:
    """Operations of one training sequence."""
    return _of_model(_sized(recipe).model_dump_json())


@lru_cache(maxsize=4096)
def _of_model(config: str) -> int:
    return model_flops(ModelConfig.model_validate_json(config)).total


def _recorded(out: Path) -> list[float]:
    """Operations per second of every finished run in a directory."""
    found = []
    for directory in found_runs(out).values():
        try:
            record, recipe = read_record(directory), load_recipe(str(directory / "recipe.yaml"))
        except SinklabError:
            continue
        if record is not None and record.status == "done" and record.seconds:
            updates = recipe.train.steps * recipe.train.batch_size
            found.append(_of_sequence(recipe) * updates / record.seconds)
    return found


def _speed_of_products(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of square matrix products."""
    square = torch.randn(MATRIX, MATRIX, device=device).to(dtype)
    return 2 * MATRIX**3 / _seconds_each(lambda: square @ square, MATRICES_S, device)


def _seconds_of_update(base: Recipe, device: torch.device, bf16: bool) -> float:
    """Of forward pass, backward pass and optimiser's step on random tokens."""
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
    """Median seconds of a piece of work, done again and again for so long, at least twice; the first is not counted."""
    work()
    taken: list[float] = []
    while sum(taken) < limit or not taken:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return median(taken)
