"""Preparing text: `sinklab data prepare` beside encoding row by row, as the code released with the paper does.

    python -m benchmarks.data [--rounds 5] [--workers 1 2] [--repeat 1] [--save]

Row by row: one process reads a row, encodes it with one call of the tokenizer and appends the ids and EOS to an
array. Both sides start from the files and the tokenizer's name, in turn, round after round, and end with the same ids
on the disk. Text: the folder domains/ of SINKLAB_DATA; tokenizer: GPT-NeoX. Goal: 5 times the tokens per second.

A corpus as large as the paper's has nearly all its words remembered: `--repeat 8` reads the text so often, for a
glimpse of that; the goal is judged without it.
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
ROW_BY_ROW = "row by row"


def row_by_row(source: Path, tokenizer: str, out: Path) -> int:
    """One call of the tokenizer per row, in one process; returns the number of tokens."""
    loaded = load_tokenizer(tokenizer)
    tokens = 0
    with out.open("wb") as shard:
        for path in sorted(source.glob("*.jsonl")):
            with path.open(encoding="utf-8") as rows:
                for row in rows:
                    ids = loaded.backend.encode(json.loads(row)["text"], add_special_tokens=False).ids
                    shard.write(np.array([*ids, loaded.eos_id], np.uint16).tobytes())
                    tokens += len(ids) + 1
    return tokens


def ours(source: Path, tokenizer: str, out: Path, workers: int) -> int:
    """`data prepare` into a fresh folder; returns the number of tokens."""
    shutil.rmtree(out, ignore_errors=True)
    data = prepare(str(source), tokenizer, out, workers=workers)
    return len(data.train) + len(data.valid)


def repeated(source: Path, times: int, out: Path) -> Path:
    """The text of a folder several times over."""
    for turn in range(times):
        for path in source.glob("*.jsonl"):
            shutil.copy(path, out / f"{turn}-{path.name}")
    return out


def main() -> None:
    """Measure, print, and keep the result where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/data_cpu.json")
    args = parser.parse_args()
    tokenizer = str(DATA / "tokenizers" / "gptneox")
    with tempfile.TemporaryDirectory() as folder:
        (text := Path(folder) / "text").mkdir()
        source = repeated(DATA / "domains", args.repeat, text)
        tokens: dict[str, int] = {}

        def contestant(name: str, work: Callable[[], int]) -> Callable[[], None]:
            def run() -> None:
                tokens[name] = work()

            return run

        contestants = {ROW_BY_ROW: contestant(ROW_BY_ROW, lambda: row_by_row(source, tokenizer, Path(folder) / "rows"))}
        for n in args.workers:
            name = f"{n} workers"
            contestants[name] = contestant(name, lambda n=n: ours(source, tokenizer, Path(folder) / "ours", n))
        seconds = in_turn(contestants, args.rounds)
    assert len(set(tokens.values())) == 1, f"the two sides disagree: {tokens}"
    speed = {name: 1 / ratio for name, ratio in ratios(seconds, ROW_BY_ROW).items()}
    for name, times in seconds.items():
        rate = tokens[name] / statistics.median(times)
        print(f"{name:12} {statistics.median(times):7.2f} s  {rate:12,.0f} tokens/s  {speed[name]:5.2f} x")
    best = max(speed.values())
    print(f"goal {GOAL} x: {'reached' if best >= GOAL else 'missed'} ({best:.2f} x)")
    if args.save:
        document = {
            "environment": environment(),
            "tokens": tokens[ROW_BY_ROW],
            "repeat": args.repeat,
            "seconds": seconds,
            "speed": speed,
            "goal": GOAL,
        }
        write_json(RESULTS / "data_cpu.json", document)


if __name__ == "__main__":
    main()
