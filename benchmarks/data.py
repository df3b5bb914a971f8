"""Throughput of `sinklab data prepare`, compared with encoding row by row as in the code released with the paper.

    python -m benchmarks.data [--rounds 5] [--save]

The released procedure processes the files in a process pool, one file per task and at most one process per core. A task
loads the tokenizer; it encodes each row with one call, converts the ids to a tensor and an array, and appends them to a
shard. The second baseline does the same in one process that loads the tokenizer once. All three start from the files
and the tokenizer's name, run in turn, and write the same numbers of every token. The text is the folder domains/ of
SINKLAB_DATA, the tokenizer GPT-NeoX's. Goal: 5 times the tokens per second of the faster baseline.
"""

import argparse
import json
import multiprocessing as mp
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.timing import RESULTS, environment, in_turn, ratios
from sinklab.data.prepare import prepare, settings_of
from sinklab.data.tokenizers import Tokenizer, load_tokenizer
from sinklab.files import write_json

GOAL = 5.0
DATA = Path(os.environ.get("SINKLAB_DATA", Path(__file__).parents[2] / "shared" / "data"))
POOL, ALONE, OURS = "row by row, a pool", "row by row, one process", "data prepare"


def by_a_pool(source: Path, tokenizer: str, out: Path) -> None:
    """Encode the files in a process pool, one file per task."""
    files = sorted(source.glob("*.jsonl"))
    with mp.get_context("fork").Pool(min(os.cpu_count() or 1, len(files))) as pool:
        pool.starmap(file_by_itself, [(path, tokenizer, out) for path in files])


def by_one_process(source: Path, tokenizer: str, out: Path) -> None:
    """Encode the files one after the other in this process."""
    loaded = load_tokenizer(tokenizer)
    for path in sorted(source.glob("*.jsonl")):
        row_by_row(path, loaded, out)


def file_by_itself(path: Path, tokenizer: str, out: Path) -> None:
    """Load the tokenizer and encode one file (task of the pool)."""
    row_by_row(path, load_tokenizer(tokenizer), out)


def row_by_row(path: Path, tokenizer: Tokenizer, out: Path) -> None:
    """Encode every row of a .jsonl file separately, and append its ids and EOS to the shard in `out` as uint16."""
    with path.open(encoding="utf-8") as rows, (out / path.stem).open("wb") as shard:
        for row in rows:
            ids = tokenizer.backend.encode(json.loads(row)["text"], add_special_tokens=False).ids
            shard.write(torch.tensor([*ids, tokenizer.eos_id], dtype=torch.int).numpy().astype(np.uint16).tobytes())


def ours(source: Path, tokenizer: str, out: Path) -> None:
    """Run `prepare` into the folder `out`, which is deleted first."""
    shutil.rmtree(out, ignore_errors=True)
    prepare(settings_of(str(source), tokenizer), out)


def ids_in(*shards: Path) -> np.ndarray:
    """Return the ids of all shards, (tokens,)."""
    return np.concatenate([np.fromfile(shard, np.uint16) for shard in shards])


def main() -> None:
    """Run the benchmark, print the result, and save it with --save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/data_cpu.json")
    args = parser.parse_args()
    tokenizer = str(DATA / "tokenizers" / "gptneox")
    with tempfile.TemporaryDirectory() as folder:
        source, rows, out = DATA / "domains", Path(folder) / "rows", Path(folder) / "ours"
        rows.mkdir()
        contestants: dict[str, Callable[[], object]] = {
            POOL: lambda: by_a_pool(source, tokenizer, rows),
            ALONE: lambda: by_one_process(source, tokenizer, rows),
            OURS: lambda: ours(source, tokenizer, out),
        }
        seconds = in_turn(contestants, args.rounds)
        theirs = ids_in(*rows.iterdir())
        assert np.array_equal(np.bincount(theirs), np.bincount(ids_in(out / "train.bin", out / "valid.bin")))
    speeds = {name: 1 / ratios(seconds, name)[OURS] for name in (POOL, ALONE)}
    speed = min(speeds.values())
    for name, times in seconds.items():
        median = statistics.median(times)
        print(f"{name:24} {median:7.2f} s  {len(theirs) / median:12,.0f} tokens/s")
    print(f"{speed:.1f} times as fast; goal {GOAL}: {'reached' if speed >= GOAL else 'missed'}")
    if args.save:
        document = {
            "environment": environment(),
            "tokens": len(theirs),
            "seconds": seconds,
            "speed": speeds,
            "goal": GOAL,
        }
        write_json(RESULTS / "data_cpu.json", document)


if __name__ == "__main__":
    main()
