"""Training of 60M softmax and sigmoid models on the Python sources of this machine, on a GPU: sink rate by step.

    python -m benchmarks.gpu.sources [--steps 4000] [--minutes M] [--out DIR] [--set KEY=VALUE ...] [--save]
    python -m benchmarks.gpu.sources --dry-run      a tiny model and little text, on a GPU or CPU

The recipe is `60m` with changes so that training takes minutes: 64 sequences of 512 tokens per step, a tokenizer
trained on the text, BOS first, and a peak learning rate of 1e-3. The text is the standard library and all installed
packages. The same command resumes after an interruption or after --minutes. DIR/result.json contains the evaluations
so far.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import RESULTS, environment
from sinklab.data.loader import TokenDataset
from sinklab.data.prepare import prepare, settings_of
from sinklab.files import write_json
from sinklab.train.loop import Trainer
from sinklab.train.recipe import Recipe, load_recipe
from sinklab.train.run import open_run, read_metrics

VARIANTS = {"softmax": [], "sigmoid": ["model.attention.operation=sigmoid"]}
SOURCE, TOKENIZER, TEXT_BYTES = "stdlib+site-packages", "train:16384", 400_000_000  # about one epoch
SETTINGS = ["model.vocab_size=null", "model.context=512", "data.bos=true", "optim.lr=1e-3", "train.keep=1"]
BATCH = ["train.batch_size=64", "train.micro_batch=null", "train.eval_every=100", "train.save_every=500"]
DRY_STEPS, DRY_BYTES = 4, 300_000
DRY = {"layers": 2, "width": 32, "heads": 2, "ffn_width": 32, "context": 64}
DRY_BATCH = ["train.batch_size=4", "train.eval_every=2", "train.save_every=2", "metric.sequences=8"]
SHOWN = ("train_loss", "valid_loss", "hidden_norm_ratio", "tokens_per_second", "mfu", "stall_share")


def recipe_of(variant: str, tokens: Path, steps: int, settings: list[str], dry: bool) -> Recipe:
    """Return the recipe of a variant on the prepared tokens in `tokens`, for `steps` updates."""
    sizes = [f"model.{key}={value}" for key, value in DRY.items()] + DRY_BATCH if dry else []
    where = [f"data.source={tokens}", f"train.steps={steps}"]
    return load_recipe("60m", [*SETTINGS, *BATCH, *sizes, *where, *VARIANTS[variant], *settings])


def tokens_of(folder: Path, dry: bool) -> TokenDataset:
    """Prepare the Python sources of this machine in `folder`, or open them if they are already prepared."""
    if dry:
        return prepare(settings_of("stdlib", "train:512", valid_fraction=0.2, text_limit_bytes=DRY_BYTES), folder)
    return prepare(settings_of(SOURCE, TOKENIZER, text_limit_bytes=TEXT_BYTES), folder)


def train(recipe: Recipe, data: TokenDataset, folder: Path, should_stop: Callable[[], bool]) -> dict[str, Any]:
    """Train to the last step, or until `should_stop` returns True; return status, step, hash and all evaluations."""
    gc.collect()  # frees the previous model, which is in reference cycles of blocks and their compiled methods

    def watch(step: int, row: dict[str, Any] | None) -> None:
        if row is not None:
            print(json.dumps({"run": folder.name, **_point(row)}), flush=True)

    run = open_run(recipe, data, folder)
    outcome = Trainer(run, watch, should_stop).train()
    points = [_point(row) for row in read_metrics(run.metrics)]
    return {"status": outcome.status, "step": outcome.step, "hash": run.hash, "points": points}


def _point(row: dict[str, Any]) -> dict[str, Any]:
    """Return the step, Sink_1 in percent, largest norm ratio, losses and throughput of an evaluation."""
    point = {"step": row["step"], "sink_1": row["sink_rate"][0], **{key: row[key] for key in SHOWN}}
    return point | {"hidden_norm_ratio": max(row["hidden_norm_ratio"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--minutes", type=float, help="save and stop after this time; the same command resumes")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_sources"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the recipe")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, also on a CPU")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}/gpu_sources.json")
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.dry_run:
        parser.error("this benchmark needs a CUDA device; --dry-run shows on a CPU that it works")
    end = time.monotonic() + 60 * options.minutes if options.minutes is not None else float("inf")
    steps, out = (DRY_STEPS, options.out / "dry") if options.dry_run else (options.steps, options.out)
    data = tokens_of(out / "tokens", options.dry_run)
    text = {"bytes": data.manifest.text_bytes, "tokens": len(data.train), "vocab_size": data.vocab_size}
    result: dict[str, Any] = {"environment": environment(), "text": text, "runs": {}}
    print(json.dumps({"environment": result["environment"], "text": text}), flush=True)
    for variant in VARIANTS:
        recipe = recipe_of(variant, out / "tokens", steps, options.set, options.dry_run)
        run = train(recipe, data, out / variant, lambda: time.monotonic() > end)
        result["runs"][variant] = run | {"recipe": recipe.model_dump(mode="json")}
        write_json(out / "result.json", result)
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        write_json(RESULTS / "gpu_sources.json", result)
    unfinished = [name for name, run in result["runs"].items() if run["status"] != "done"]
    print(f"not finished, call again: {', '.join(unfinished)}" if unfinished else f"done: {out / 'result.json'}")


if __name__ == "__main__":
    main()
