"""Time of every attention operation with the flex backend on a GPU in bfloat16, relative to PyTorch's fused attention.

    python -m benchmarks.gpu.attention [--lengths 2048 8192] [--only sigmoid] [--out attention.jsonl]
    python -m benchmarks.gpu.attention --dry-run      tiny sizes on a GPU or CPU, to check that it runs

Kernel attention uses its default backend. Goal: forward and backward pass take at most 1.3 times as long as
`scaled_dot_product_attention` for one `attend` call, and 2.2 times for two. Up to 2,048 tokens, output and
gradients are also compared with the chunked backend in float64; `error` is the largest relative difference.
"""

import argparse
import statistics
import sys
from functools import partial
from typing import Any

import torch

from benchmarks.attention import CASES, KEY_WIDTHS, forget_gates, forward_and_backward, goal
from benchmarks.gpu.cases import options_of, run_cases
from benchmarks.timing import in_turn, ratios
from sinklab.attention.config import AttentionConfig
from sinklab.attention.layer_call import AttentionCore

SHAPE = (4, 16, 64)
DRY_SHAPE = (1, 2, 16)
FUSED = "softmax_fused"
MOST_EXACT = 2048
"""Maximum number of tokens at which errors are computed, in float64."""


def error(values: dict[str, Any], tokens: int, shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> float:
    """Return the largest difference of output and gradients from those of the chunked backend in float64.

    The differences of a tensor are relative to its largest magnitude.
    """
    batch, heads, width = shape
    generator = torch.Generator().manual_seed(0)
    k, v, gradient, *queries = (torch.randn(batch, heads, tokens, width, generator=generator) for _ in range(5))
    results = []
    for forced, precision in ((values, dtype), ({**values, "backend": "chunked"}, torch.float64)):
        core = AttentionCore(AttentionConfig.model_validate(forced), heads, width, context=tokens).to(device)
        for i, parameter in enumerate(core.parameters()):
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator(device=device).manual_seed(i))
        core = core.double() if precision == torch.float64 else core
        q = torch.cat(queries[: core.operation.queries_per_head], dim=-1)
        inputs = [x.to(dtype).to(device, precision).requires_grad_() for x in (q, k, v)]
        kept = forget_gates(batch, tokens, heads).to(device)
        out = core(*inputs, *((None, kept) if core.operation.forgets or core.operation.weighs else ()))
        results.append([out, *torch.autograd.grad(out, inputs, gradient.to(dtype).to(device, precision))])
    return max(
        ((ours.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-9)).item()
        for ours, exact in zip(*results, strict=True)
    )


def compare(name: str, tokens: int, shape: tuple[int, int, int], rounds: int, device: str) -> dict[str, Any]:
    """Return milliseconds, ratio to the fused kernel and its goal, and at the first length the error of a case."""
    values = CASES[name]
    kernel = AttentionConfig.model_validate(values).operation.has_logits is False
    forced = values if kernel else {**values, "backend": "flex" if device == "cuda" else "chunked"}
    contestants = {
        case: forward_and_backward(config, tokens, shape, torch.bfloat16, device, KEY_WIDTHS.get(case, 1.0))
        for case, config in ((FUSED, {"backend": "sdpa"}), (name, forced))
    }
    seconds = in_turn(contestants, rounds, warm_up=3)
    return {
        "tokens": tokens,
        "milliseconds": 1000 * statistics.median(seconds[name]),
        "relative": ratios(seconds, FUSED)[name],
        "goal": goal(name, by_passes=(1.3, 2.2)),
        "error": error(values, tokens, shape, torch.bfloat16, device) if tokens <= MOST_EXACT else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--rounds", type=int, default=20)
    given = options_of(parser)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape, lengths, rounds = (DRY_SHAPE, [64], 2) if given.dry_run else (SHAPE, given.lengths, given.rounds)
    cases = [
        (f"{name} {tokens}", partial(compare, name, tokens, shape, rounds, device))
        for tokens in lengths
        for name in CASES
    ]
    sys.exit(run_cases(cases, given) > 0)


if __name__ == "__main__":
    main()
