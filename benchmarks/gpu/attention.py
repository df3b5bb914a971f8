"""Time of every attention operation with the flex backend on a GPU in bfloat16, relative to PyTorch's fused attention.

    python -m benchmarks.gpu.attention [--lengths 2048 8192] [--rounds 20] [--save]
    python -m benchmarks.gpu.attention --dry-run      tiny sizes on a GPU or CPU, to check that it runs

Kernel attention uses its default backend. Goal: forward and backward pass take at most 1.3 times as long as
`scaled_dot_product_attention` for one `attend` call, and 2.2 times for two. At the first length, output and gradients
are also compared with the chunked backend in float64; the printed error is the largest relative difference (`error`).
"""

import argparse
import json
from typing import Any

import torch

from benchmarks.attention import CASES, KEY_WIDTHS, forget_gates, forward_and_backward, goal
from benchmarks.timing import RESULTS, environment, in_turn, ratios
from sinklab.attention.config import AttentionConfig
from sinklab.attention.layer_call import AttentionCore
from sinklab.files import write_json

SHAPE = (4, 16, 64)
DRY_SHAPE = (1, 2, 16)
FUSED = "softmax_fused"


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


def compare(tokens: int, shape: tuple[int, int, int], rounds: int, device: str) -> dict[str, Any]:
    """Return median `milliseconds` and the median ratio to the fused kernel (`relative`) at one length, by case."""
    backend = "flex" if device == "cuda" else "chunked"
    variants = {FUSED: {"backend": "sdpa"}}
    for name, values in CASES.items():
        kernel = AttentionConfig.model_validate(values).operation.has_logits is False
        variants[name] = values if kernel else {**values, "backend": backend}
    contestants = {
        name: forward_and_backward(values, tokens, shape, torch.bfloat16, device, KEY_WIDTHS.get(name, 1.0))
        for name, values in variants.items()
    }
    seconds = in_turn(contestants, rounds, warm_up=3)
    relative = ratios(seconds, FUSED)
    return {
        name: {"milliseconds": 1000 * sorted(times)[len(times) // 2], "relative": relative[name]}
        for name, times in seconds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, also on a CPU")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}/gpu_attention.json")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.dry_run:
        parser.error("this benchmark needs a CUDA device; --dry-run shows on a CPU that it works")
    shape, lengths, rounds = SHAPE, options.lengths, options.rounds
    if options.dry_run:
        shape, lengths, rounds = DRY_SHAPE, [64], 2
    result: dict[str, Any] = {"environment": environment(), "shape": shape, "rounds": rounds}
    print(json.dumps(result["environment"]))
    errors = {name: error(values, lengths[0], shape, torch.bfloat16, device) for name, values in CASES.items()}
    result["errors"] = errors
    for tokens in lengths:
        rows = compare(tokens, shape, rounds, device)
        result[str(tokens)] = rows
        print(f"\nT {tokens}, bfloat16\n{'operation':24}{'ms':>10}{'x fused':>9}{'goal':>6}{'error':>10}")
        for name, row in rows.items():
            limit = goal(name, by_passes=(1.3, 2.2)) or ""
            found = f"{errors[name]:.1e}" if name in errors else ""
            print(f"{name:24}{row['milliseconds']:10.2f}{row['relative']:9.2f}{limit:>6}{found:>10}")
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        write_json(RESULTS / "gpu_attention.json", result)


if __name__ == "__main__":
    main()
