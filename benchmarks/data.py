"""Preparing text: `sinklab data prepare` beside encoding row by row, as the code released with the paper does.

    python -m benchmarks.data [--rounds 5] [--save]

Row by row: one process reads a row, encodes it with one call of the tokenizer and appends the ids and EOS to an
array. Both sides start from the files and the tokenizer's name, in turn, round after round, and end with the same ids
on the disk. Text: the folder domains/ of SINKLAB_DATA; tokenizer: GPT-NeoX. Goal: 5 times the tokens per second.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.timing import RESULTS, environment, in_turn, ratios
from sinklab.data.prepare import prepare
from sinklab.data.tokenizers import load_tokenizer
from sinklab.files import write_json

GOAL = 5.0
DATA = Path(os.environ.get("SINKLAB_DATA", Path(__file__).parents[2] / "shared" / "data"))
ROW_BY_ROW, OURS = "row by row", "data prepare"


def row_by_row(source: Path, tokenizer: str, out: Path) -> None:
    """One call of the tokenizer per row, in one process."""
    loaded = load_tokenizer(tokenizer)
    with out.open("wb") as shard:
        for path in sorted(source.glob("*.jsonl")):
            with path.open(encoding="utf-8") as rows:
                for row in rows:
                    ids = loaded.backend.encode(json.loads(row)["text"], add_special_tokens=False).ids
                    shard.write(np.array([*ids, loaded.eos_id], np.uint16).tobytes())


def ours(source: Path, tokenizer: str, out: Path) -> None:
    """`data prepare` into a fresh folder."""
    shutil.rmtree(out, ignore_errors=True)
    prepare(str(source), tokenizer, out)


def ids_in(*shards: Path) -> np.ndarray:
    """(tokens,) all ids of some shards."""
    return np.concatenate([np.fromfile(shard, np.uint16) for shard in shards])


def main() -> None:
    """Measure, print, and keep the result where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/data_cpu.json")
    args = parser.parse_args()
    tokenizer = str(DATA / "tokenizers" / "gptneox")
    with tempfile.TemporaryDirectory() as folder:
        rows, out = Path(folder) / "rows", Path(folder) / "ours"
        contestants: dict[str, Callable[[], object]] = {
            ROW_BY_ROW: lambda: row_by_row(DATA / "domains", tokenizer, rows),
            OURS: lambda: ours(DATA / "domains", tokenizer, out),
        }
        seconds = in_turn(contestants, args.rounds)
        theirs = ids_in(rows)
        assert np.array_equal(np.bincount(theirs), np.bincount(ids_in(out / "train.bin", out / "valid.bin")))
    speed = 1 / ratios(seconds, ROW_BY_ROW)[OURS]
    for name, times in seconds.items():
        median = statistics.median(times)
        print(f"{name:12} {median:7.2f} s  {len(theirs) / median:12,.0f} tokens/s")
    print(f"{speed:.1f} times as fast; goal {GOAL}: {'reached' if speed >= GOAL else 'missed'}")
    if args.save:
        document = {
            "environment": environment(),
            "tokens": len(theirs),
            "seconds": seconds,
            "speed": speed,
            "goal": GOAL,
        }
        write_json(RESULTS / "data_cpu.json", document)


if __name__ == "__main__":
    main()
