"""Every variant on a GPU: loss and gradient norm with the automatic backend and the chunked one, time, memory.

    python -m benchmarks.gpu.variants [--only relu gate] [--out variants.jsonl]
    python -m benchmarks.gpu.variants --dry-run --only softmax      tiny sizes on a GPU or CPU

A variant is the shipped recipe `60m` with four layers and the variant's changes, in bfloat16. `ok` is whether both
numbers agree within 2 %. Goal: no line with `error`, all `ok`.
"""

import argparse
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.cases import options_of, run_cases
from benchmarks.gpu.train import DRY, tokens_of
from sinklab.data.loader import TokenDataset
from sinklab.interventions import VARIANTS
from sinklab.train.recipe import build_recipe, recipe_values
from sinklab.train.run import open_run
from sinklab.train.update import Updater
from sinklab.train.world import compile_blocks

SETTINGS: dict[str, Any] = {"train": {"batch_size": 8, "micro_batch": 4, "precision": "bf16"}, "model": {"layers": 4}}
TOLERANCE = 0.02
UPDATES = 3


def compare(name: str, data: TokenDataset, dry: bool) -> dict[str, Any]:
    """Return loss and gradient norm by backend, `ok`, milliseconds per update and peak memory of a variant."""
    row: dict[str, Any] = {}
    sizes = {**SETTINGS, "model": {**DRY}} if dry else SETTINGS
    for backend in ("auto", "chunked"):
        chosen = {"model": {"attention": {"backend": backend}}}
        recipe = build_recipe(recipe_values("60m"), sizes, VARIANTS[name].overlay, chosen)
        with tempfile.TemporaryDirectory() as folder:
            updater = Updater(open_run(recipe, data, Path(folder) / "run"))
            compile_blocks(updater.model, recipe.train.compile, updater.device)
            loss, norm = updater.gradient()
            row[backend] = [float(loss), float(norm)]
            if backend == "auto":
                row |= _timed(updater)
    row["ok"] = all(abs(a - b) <= TOLERANCE * abs(b) for a, b in zip(row["auto"], row["chunked"], strict=True))
    return row


def _timed(updater: Updater) -> dict[str, Any]:
    updater.optimizer.zero_grad()
    updater.update()
    updater.settle()
    cuda = updater.device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for _ in range(UPDATES):
        updater.update()
    updater.settle()
    if cuda:
        torch.cuda.synchronize()
    milliseconds = 1000 * (time.perf_counter() - start) / UPDATES
    return {"ms": milliseconds, "peak_memory_mb": torch.cuda.max_memory_allocated() / 2**20 if cuda else None}


def main() -> None:
    given = options_of(
        argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    )
    with tempfile.TemporaryDirectory() as folder:
        data = tokens_of(DRY["context"] if given.dry_run else 2048, Path(folder) / "tokens")
        cases = [(name, partial(compare, name, data, given.dry_run)) for name in VARIANTS]
        sys.exit(run_cases(cases, given) > 0)


if __name__ == "__main__":
    main()
