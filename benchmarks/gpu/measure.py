"""Cost of measuring relative to a bare forward pass on a GPU, in bfloat16, up to 131,072 tokens.

    python -m benchmarks.gpu.measure [--lengths 1024 8192 32768 131072] [--rounds 5] [--out measure.jsonl]
    python -m benchmarks.gpu.measure --dry-run      one short length on a GPU or CPU, to check that it runs

The model is the 8-layer Llama of benchmarks/measure.py, on one sequence. The bare forward pass computes the logits of
one position only, because all logits would not fit into memory at the longest lengths; the measurement computes its
loss from chunks of logits. On CUDA, the attention output is that of PyTorch's fused attention, and importance is
computed by two calls of FlexAttention. Goal: at most 1.5 forward passes at 1,024 tokens, 3 at 131,072 (estimated).
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.cases import options_of, run_cases
from benchmarks.measure import figures, llama, measured, peak_mb
from benchmarks.timing import in_turn

LENGTHS = [1024, 8192, 32768, 131072]
DRY_LENGTHS = [64]


def bare(model: Any, tokens_NT: Tensor) -> None:
    """Run a forward pass with the logits of one position only."""
    with torch.no_grad():
        model(tokens_NT, use_cache=False, logits_to_keep=1)


def compare(model: Any, length: int, rounds: int) -> dict[str, Any]:
    """Return the row of one length: `figures` of the bare forward pass and the measurement."""
    tokens = torch.randint(3, 30000, (1, length), device=model.device)
    sides = {"forward": partial(bare, model, tokens), "measured": partial(measured, model, tokens)}
    for run in sides.values():
        run()  # the first call of a kernel allocates memory that it keeps
    peak = _card_peak_mb if model.device.type == "cuda" else peak_mb
    peaks = {side: peak(run) for side, run in sides.items()}
    return {"length": length, **figures(in_turn(sides, rounds), peaks)}


def _card_peak_mb(run: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--rounds", type=int, default=5)
    given = options_of(parser)
    lengths, rounds = (DRY_LENGTHS, 1) if given.dry_run else (given.lengths, given.rounds)
    model = llama().to("cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16)
    cases = [(f"{length} tokens", partial(compare, model, length, rounds)) for length in lengths]
    sys.exit(run_cases(cases, given) > 0)


if __name__ == "__main__":
    main()
