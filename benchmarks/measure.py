"""Cost of measuring relative to a bare forward pass, and to the procedure released with the paper.

    python -m benchmarks.measure [--lengths 64 512 1024 2048 8192] [--rounds 5] [--models gpt2 llama] [--long] [--save]

The models have random float32 weights: GPT-2 with 124 M parameters (and more positions), and a Llama of 8 layers. All
sides run in one process, in turn; times are medians, and ratios are medians over the rounds with their 95 % confidence
interval (the whole range with fewer than six values). A round covers all models and lengths, so that slow periods of
the machine affect all of them; each side runs three times per round up to 512 tokens. Peak memory is that of the
process above its memory before the call (Linux). `ATEN_CPU_CAPABILITY=avx2` with `ONEDNN_MAX_CPU_ISA=AVX2` emulates a
CPU without AVX-512; its results are saved in a separate file.

The released procedure is reimplemented from its description: eager attention, one prompt at a time; the attention maps
of all layers and prompts are kept, written to a file and read back; alpha is computed from the maps, divided by a
tensor of counts of the same size. It computes no loss. `without_loss` is the measurement in the same setting: one
sequence at a time, without the loss.

Goals: at most the time of 1.15 forward passes (1.25 above 2,048 tokens), with the loss, and no more memory than one;
`without_loss` 4 times faster than the released procedure and in a tenth of its memory at 1,024 tokens, and 6 times
faster at 2,048; 32,768 tokens in at most 6,000 MB.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from benchmarks.memory import peak_mb
from benchmarks.timing import RESULTS, environment, in_turn, median_interval, over_rounds, ratios
from sinklab.files import write_json
from sinklab.survey.api import measure

SEQUENCES = {64: 16, 512: 4, 1024: 4, 2048: 2}  # sequences per batch, by length; one for other lengths
RELEASED = (1024, 2048)
MANY_ROUNDS = 512  # maximum length at which each side runs three times per round
SAVED = {True: "measure_cpu", False: "measure_forward_cpu"}  # file names, with the released procedure or without
LONG = 32768
LONG_LIMIT_MB = 6000


def gpt2(attention: str = "sdpa") -> Any:
    """Build GPT-2 with 124 M parameters, extended to 8,192 positions, with random weights."""
    return _model(GPT2Config(n_positions=8192), attention)


def llama(attention: str = "sdpa") -> Any:
    """Build a small Llama with random weights, in which attention has a larger share of compute than in large ones."""
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=131072,
    )
    return _model(config, attention)


def _model(config: Any, attention: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def bare(model: Any, tokens_NT: Tensor) -> None:
    """Run one forward pass over all sequences."""
    with torch.no_grad():
        model(tokens_NT, use_cache=False)


def measured(model: Any, tokens_NT: Tensor) -> None:
    """Measure with the loss, in one batch, as in the bare forward pass."""
    measure(model, tokens_NT, batch_size=len(tokens_NT))


def without_loss(model: Any, tokens_NT: Tensor) -> None:
    """Measure in the setting of the released procedure: one sequence at a time, without the loss."""
    measure(model, tokens_NT, batch_size=1, loss=False)


def released(model: Any, tokens_NT: Tensor, eps: float = 0.3) -> Tensor:
    """Run the released procedure (module docstring) and return Sink_k in percent, (T,)."""
    maps = []
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for tokens_T in tokens_NT:
            kept = {"output_attentions": True, "use_cache": False, "logits_to_keep": 1}
            maps.append(torch.cat(model(tokens_T[None], **kept).attentions))
        path = Path(folder) / "maps.npy"
        np.save(path, torch.stack(maps).numpy())
        maps.clear()
        maps_NLHTT = torch.from_numpy(np.load(path))
    queries_NLHTT = torch.arange(tokens_NT.shape[1], 0, -1).expand_as(maps_NLHTT).to(maps_NLHTT)
    alpha_NLHT = (maps_NLHTT / queries_NLHTT).sum(-2)
    return 100 * (alpha_NLHT > eps).float().mean((0, 1, 2))


@dataclass
class Comparison:
    """The sides for one model and length, their peak memory (MiB), and their seconds in all rounds so far."""

    name: str
    tokens_NT: Tensor
    sides: Mapping[str, Callable[[], Any]]
    peaks: Mapping[str, float]
    seconds: Mapping[str, list[float]]

    @classmethod
    def prepared(cls, name: str, length: int, with_released: bool) -> "Comparison":
        """Build the sides and measure their peak memory, after one call of each for allocations that are kept."""
        build = {"gpt2": gpt2, "llama": llama}[name]
        model, tokens_NT = build(), torch.randint(3, 30000, (SEQUENCES.get(length, 1), length))
        sides: dict[str, Callable[[], Any]] = {
            "forward": partial(bare, model, tokens_NT),
            "measured": partial(measured, model, tokens_NT),
        }
        if with_released and length in RELEASED:
            sides["without_loss"] = partial(without_loss, model, tokens_NT)
            sides["released"] = partial(released, build("eager"), tokens_NT)
        for run in sides.values():
            run()
        peaks = {side: peak_mb(run) for side, run in sides.items()}
        return cls(name, tokens_NT, sides, peaks, {side: [] for side in sides})

    def run(self) -> None:
        """Run one round and append its times to `seconds`."""
        times = 3 if self.tokens_NT.shape[1] <= MANY_ROUNDS else 1
        for side, seconds in in_turn(self.sides, times, warm_up=0).items():
            self.seconds[side].extend(seconds)

    def row(self) -> dict[str, Any]:
        """Return seconds, peak memory and ratios of the sides, and the missed goals."""
        sequences, length = self.tokens_NT.shape
        row: dict[str, Any] = {"model": self.name, "sequences": sequences, "length": length}
        row["rounds"] = len(self.seconds["forward"])
        row |= figures(self.seconds, self.peaks)
        if "released" in self.sides:
            row["times_faster_than_released"] = round(ratios(self.seconds, "without_loss")["released"], 2)
            row["times_faster_though_with_loss"] = round(ratios(self.seconds, "measured")["released"], 2)
            row["times_less_memory"] = round(self.peaks["released"] / max(self.peaks["without_loss"], 1), 1)
        return row | {"misses": misses(row)}


def figures(seconds: Mapping[str, list[float]], peaks: Mapping[str, float]) -> dict[str, Any]:
    """Return times and peak memory of every side, and ratio and difference of the sides "measured" and "forward"."""
    row: dict[str, Any] = {f"{side}_seconds": round(statistics.median(times), 4) for side, times in seconds.items()}
    row |= {f"{side}_peak_mb": round(peak) for side, peak in peaks.items()}
    over = over_rounds(seconds, "measured", "forward")
    row["times_forward"] = round(statistics.median(over), 2)
    row["times_forward_interval"] = [round(end, 2) for end in median_interval(over)]
    row["mb_over_forward"] = round(peaks["measured"] - peaks["forward"])
    return row


def misses(row: Mapping[str, Any]) -> list[str]:
    """Return the names of the goals that a row misses."""
    length = row["length"]
    reached = {
        "times_forward": row["times_forward"] <= (1.25 if length > 2048 else 1.15),
        "mb_over_forward": row["mb_over_forward"] <= 0,
    }
    if "times_less_memory" in row:
        reached["times_faster_than_released"] = row["times_faster_than_released"] >= (4 if length <= 1024 else 6)
        reached["times_less_memory"] = length > 1024 or row["times_less_memory"] >= 10
    return [goal for goal, is_reached in reached.items() if not is_reached]


def long_input(length: int) -> dict[str, Any]:
    """Measure the Llama once at this length; return its row."""
    model, tokens = llama(), torch.randint(3, 30000, (1, length))
    start = time.perf_counter()
    peak = peak_mb(partial(measured, model, tokens))
    row = {"model": "llama", "length": length, "seconds": round(time.perf_counter() - start, 1), "peak_mb": round(peak)}
    return row | {"misses": ["peak_mb"] if peak > LONG_LIMIT_MB else []}


def saved_in(with_released: bool) -> Path:
    """Return the path of the results, with ATEN_CPU_CAPABILITY in its name if it is set."""
    imitated = os.environ.get("ATEN_CPU_CAPABILITY", "")
    return RESULTS / f"{SAVED[with_released]}{'_' if imitated else ''}{imitated}.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 512, 1024, 2048, 8192])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=["gpt2", "llama"], default=["gpt2", "llama"])
    parser.add_argument("--long", action="store_true", help=f"also measure the Llama once at {LONG} tokens (minutes)")
    parser.add_argument("--without-released", action="store_true", help="leave out the released procedure")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--save", action="store_true", help=f"write {RESULTS.name}/{SAVED[True]}*.json, or {SAVED[False]}*.json"
    )
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    result: dict[str, Any] = {"environment": environment(), "rounds": given.rounds, "rows": []}
    print(json.dumps(result["environment"]), flush=True)
    compared = [
        Comparison.prepared(name, length, not given.without_released)
        for name in given.models
        for length in given.lengths
    ]
    for number in range(1, given.rounds + 1):
        for one in compared:
            one.run()
        print(f"round {number} of {given.rounds}", file=sys.stderr, flush=True)
    for row in [*(one.row() for one in compared), *([long_input(LONG)] if given.long else [])]:
        result["rows"].append(row)
        print(json.dumps(row), flush=True)
    if given.save:
        RESULTS.mkdir(exist_ok=True)
        write_json(saved_in(not given.without_released), result)


if __name__ == "__main__":
    main()
