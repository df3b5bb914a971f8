"""Training steps of the paper's 60M and 1B models on one GPU: tokens per second, MFU, memory.

    python -m benchmarks.gpu.train [--models 60m 1b] [--rounds 5] [--steps 4] [--save]
    python -m benchmarks.gpu.train --dry-run      tiny sizes on a GPU or CPU, to check that it runs

The step is that of `sinklab train` (bf16 autocast, compiled blocks, chunked loss, fused AdamW, prefetched batches, loss
read one step late), on synthetic tokens with context 2,048, with softmax, K biases and sigmoid one after the other.
`utilisation` is the MFU, with the FLOP count of `sinklab/train/flops.py`.

Goals on an H200 with a peak of 990 TFLOP/s: an MFU of at least 50 % for 60M and 55 % for 1B with softmax, and at most
1.3 times the time of softmax for sigmoid.
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import RESULTS, environment
from sinklab.data.loader import TokenDataset
from sinklab.data.prepare import prepare, settings_of
from sinklab.files import write_json
from sinklab.train.planning import memory_estimate, model_flops, peak_flops
from sinklab.train.recipe import Recipe, load_recipe
from sinklab.train.run import open_run
from sinklab.train.update import Updater
from sinklab.train.world import compile_blocks

VARIANTS = {"softmax": [], "k_biases": ["model.attention.bias=k"], "sigmoid": ["model.attention.operation=sigmoid"]}
BATCHES = {"60m": (64, 32), "1b": (16, 8)}  # sequences per step and per micro-batch
UTILISATION = {"60m": 0.50, "1b": 0.55}
SIGMOID = 1.3
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


def print_rows(model: str, rows: dict[str, dict[str, float | None]]) -> None:
    """Print one line per variant, with a mark if it misses a goal."""
    print(
        f"\n{model}\n{'variant':12}{'ms/step':>10}{'tokens/s':>12}{'TFLOP/s':>9}{'of peak':>9}{'stalled':>9}{'MB':>9}"
    )
    softmax = rows["softmax"]["step_seconds"] or 1.0
    for name, row in rows.items():
        used, step = row["utilisation"], row["step_seconds"] or 0.0
        slow = used is not None and name == "softmax" and used < UTILISATION[model]
        mark = "  below" if slow or (name == "sigmoid" and step > SIGMOID * softmax) else ""
        print(
            f"{name:12}{1000 * step:10.1f}{row['tokens_per_second']:12,.0f}{row['tflops']:9.1f}"
            f"{'' if used is None else f'{used:.1%}':>9}{row['stall_share']:9.1%}"
            f"{'' if row['peak_memory_mb'] is None else round(row['peak_memory_mb']):>9}{mark}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=BATCHES, default=[*BATCHES])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="updates per round")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, also on a CPU")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}/gpu_train.json")
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.dry_run:
        parser.error("this benchmark needs a CUDA device; --dry-run shows on a CPU that it works")
    rounds, steps = (2, 2) if options.dry_run else (options.rounds, options.steps)
    result: dict[str, Any] = {"environment": environment(), "rounds": rounds, "steps": steps}
    print(json.dumps(result["environment"]))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        context = DRY["context"] if options.dry_run else 2048
        data = tokens_of(context, folder / "tokens")
        for model in options.models:
            rows = {}
            for variant in VARIANTS:
                recipe = recipe_of(model, variant, options.dry_run)
                rows[variant] = measure(recipe, data, folder / model / variant, rounds, steps)
            result[model] = rows
            print_rows(model, rows)
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        write_json(RESULTS / "gpu_train.json", result)


if __name__ == "__main__":
    main()
