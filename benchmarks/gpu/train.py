"""Training steps of the paper's 60M and 1B models on one GPU: tokens per second, MFU, memory.

    python -m benchmarks.gpu.train [--only 60m] [--out train.jsonl] [--rounds 5] [--steps 4]
    python -m benchmarks.gpu.train --dry-run      tiny sizes on a GPU or CPU, to check that it runs

The step is that of `sinklab train` (bf16 autocast, compiled blocks, chunked loss, fused AdamW, prefetched batches, loss
read one step late), on synthetic tokens with context 2,048, with softmax, K biases and sigmoid one after the other.
`utilisation` is the MFU, with the FLOP count of `sinklab/train/planning.py`.

Goals on an H100 or H200 with a peak of 990 TFLOP/s, estimated and not measured yet: with softmax an MFU of 30 to 35 %
for 60M (width 768 with heads of 96 allows no more; 350,000 tokens a second) and 45 % for 1B; at most 1.2 times the step
of softmax for K biases and 1.3 times for sigmoid; memory below `estimated_memory_mb`.
"""

import argparse
import gc
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.cases import options_of, run_cases
from sinklab.data.loader import TokenDataset
from sinklab.data.prepare import prepare, settings_of
from sinklab.train.planning import memory_estimate, model_flops, peak_flops
from sinklab.train.recipe import Recipe, load_recipe
from sinklab.train.run import open_run
from sinklab.train.update import Updater
from sinklab.train.world import compile_blocks

VARIANTS = {"softmax": [], "k_biases": ["model.attention.bias=k"], "sigmoid": ["model.attention.operation=sigmoid"]}
BATCHES = {"60m": (64, 32), "1b": (16, 8)}  # sequences per step and per micro-batch
DRY = {"layers": 2, "width": 64, "heads": 2, "ffn_width": 64, "vocab_size": 512, "context": 64}
DRY_BATCH = (4, 2)


def recipe_of(model: str, variant: str, dry: bool) -> Recipe:
    """Return the shipped recipe of a model with the variant's changes and a small batch; `dry` for tiny sizes."""
    batch, micro = DRY_BATCH if dry else BATCHES[model]
    sizes = [f"model.{key}={value}" for key, value in DRY.items()] if dry else []
    settings = [f"train.batch_size={batch}", f"train.micro_batch={micro}", "train.precision=bf16"]
    return load_recipe(model, [*VARIANTS[variant], *sizes, *settings])


def tokens_of(context: int, folder: Path) -> TokenDataset:
    """Prepare synthetic text in chunks of context + 1 tokens; its vocabulary may be smaller than the model's."""
    return prepare(
        settings_of(f"synthetic:bigram_backcopy:length={context + 1},documents=400", "words", valid_fraction=0.1),
        folder,
    )


def measure(recipe: Recipe, data: TokenDataset, folder: Path, rounds: int, steps: int) -> dict[str, float | None]:
    """Time rounds of `steps` steps; return the median seconds per step with the throughput and memory by name."""
    gc.collect()  # frees the previous model, which is in reference cycles of blocks and their compiled methods
    updater = Updater(open_run(recipe, data, folder))
    compile_blocks(updater.model, recipe.train.compile, updater.device)
    _several(updater, steps)  # compiles
    if updater.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(updater.device)
    waited = updater.batches.waited
    seconds = [_several(updater, steps) / steps for _ in range(rounds)]
    step, config, train = statistics.median(seconds), updater.recipe.model, recipe.train
    peak, flops = peak_flops(updater.device), model_flops(config).total * train.batch_size
    estimate = sum(memory_estimate(updater.recipe).values())
    return {
        "step_seconds": step,
        "tokens_per_second": train.batch_size * config.context / step,
        "tflops": flops / step / 1e12,
        "utilisation": None if peak is None else flops / step / peak,
        "stall_share": (updater.batches.waited - waited) / (sum(seconds) * steps),
        "peak_memory_mb": torch.cuda.max_memory_allocated() / 2**20 if updater.device.type == "cuda" else None,
        "estimated_memory_mb": estimate / 2**20,
    }


def _several(updater: Updater, steps: int) -> float:
    start = time.perf_counter()
    for _ in range(steps):
        updater.update()
    updater.settle()
    if updater.device.type == "cuda":
        torch.cuda.synchronize(updater.device)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="updates per round")
    given = options_of(parser)
    rounds, steps = (2, 2) if given.dry_run else (given.rounds, given.steps)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = tokens_of(DRY["context"] if given.dry_run else 2048, folder / "tokens")

        def case(model: str, variant: str) -> dict[str, Any]:
            return measure(recipe_of(model, variant, given.dry_run), data, folder / model / variant, rounds, steps)

        cases = [(f"{model} {variant}", partial(case, model, variant)) for model in BATCHES for variant in VARIANTS]
        sys.exit(run_cases(cases, given) > 0)


if __name__ == "__main__":
    main()
