"""Time of `sinklab measure` before it loads a model, and the time that `--out` adds, each in a fresh interpreter.

    python -m benchmarks.start [--rounds 7] [--save]

Four calls are timed in turn: `import torch` alone, a lower bound; `sinklab measure` on a model that does not exist,
which fails when it would be loaded; on a small random Llama; and on the same Llama with `--out`, which writes results
and report (the code of the charts is cached by the first call). Times are medians of the wall-clock time.

Goals: less than 2 s for the model that does not exist; less than 1 s added by `--out`.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.timing import RESULTS, environment, in_turn
from sinklab.files import write_json

LOADED, ADDED = 2.0, 1.0


def model_in(folder: Path) -> Path:
    """Write a random Llama with two layers and a tokenizer to `folder`/model, and return this path."""
    config = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    config.num_attention_heads = config.num_key_value_heads = 4
    words = {"<s>": 0} | {f"word{i}": i for i in range(1, config.vocab_size)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="<s>")), bos_token="<s>")
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder / "model"


def call(*command: str, status: int = 0) -> None:
    """Run Python with these arguments; raise SystemExit if its exit status is not `status`."""
    ran = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    if ran.returncode != status:
        raise SystemExit(f"{' '.join(command)} ended with {ran.returncode}: {ran.stderr}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}/start.json")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        measure = ("-m", "sinklab", "measure", str(model_in(folder)), "--inputs", "random", "--length", "64")
        sides = {
            "import torch": lambda: call("-c", "import torch"),
            "no model": lambda: call("-m", "sinklab", "measure", str(folder / "none"), status=2),
            "measure": lambda: call(*measure),
            "measure --out": lambda: call(*measure, "--out", str(folder / "out")),
        }
        seconds = in_turn(sides, given.rounds)
    medians = {side: round(statistics.median(times), 2) for side, times in seconds.items()}
    added = [with_out - without for with_out, without in zip(seconds["measure --out"], seconds["measure"], strict=True)]
    result: dict[str, Any] = {"environment": environment(), "rounds": given.rounds, "seconds": medians}
    result["added_by_out"] = round(statistics.median(added), 2)
    result["misses"] = [
        *(["no model"] if medians["no model"] >= LOADED else []),
        *(["added_by_out"] if result["added_by_out"] >= ADDED else []),
    ]
    print(json.dumps(result, indent=2))
    if given.save:
        write_json(RESULTS / "start.json", result)


if __name__ == "__main__":
    main()
