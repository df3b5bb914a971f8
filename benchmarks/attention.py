"""Forward and backward time of every attention operation and bias, relative to softmax on the same backend; and of
whole layers with changes around the attention core, relative to the plain layer.

    python -m benchmarks.attention [--lengths 64 2048 8192] [--rounds 5] [--dtype float32] [--only softpick ...]
                                   [--around exclusive ...] [--save]

`gated_delta` is the delta rule of `model.mixer: gated_delta` on queries, keys and values of the same widths, and
`linear` is a layer with it. At 8,192 tokens, only cases whose time is linear in T and the baselines are timed.

Goals at T = 2048 on a CPU, relative to the baseline: at most 2.0 for one `attend` call, 3.0 for two, 2.0 for a layer.
Cases that are linear in T take at most 5 times as long at T = 8192. The fused kernel `softmax_fused` has no goal.

MB is the peak memory of one step above that before it, in 2**20 bytes. One T x T matrix of all heads is 128 MB at 2048.
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.memory import peak_mb
from benchmarks.timing import RESULTS, environment, in_turn, ratios
from sinklab.attention.config import AttentionConfig, examples_of
from sinklab.attention.layer_call import AttentionCore
from sinklab.attention.operations.kernel import Kernel
from sinklab.files import write_json
from sinklab.model.block import DecoderBlock, LayerInputs, LinearBlock
from sinklab.model.config import ModelConfig, initialise
from sinklab.model.mixer import GatedDelta, gated_delta

SHAPES = {64: (32, 4, 32), 2048: (1, 8, 64), 8192: (1, 8, 64)}  # length -> batch, heads, head width

CASES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softcap": {"softcap": 30},
    **{name: {"bias": example.values} for name, example in examples_of("bias").items()},
    **{name: {"operation": example.values} for name, example in examples_of("operation").items()},
    "mla": {},
}
"""The baseline, all examples of biases and operations, and softmax with the widths of `model.projection: latent`."""

RULE = "gated_delta"

LINEAR = (
    RULE,
    *(name for name, values in CASES.items() if isinstance(AttentionConfig.model_validate(values).operation, Kernel)),
)
"""Cases whose time is linear in T: the delta rule and kernel attention."""

TWO_PASSES = {
    *("clipped_softmax", "softpick", "elastic_softmax", "entmax15"),
    *("differential", "differential_v2", "threshold_differential"),
}
"""Kinds with two `attend` calls, for a separate normaliser or a second softmax. `p` other than 1 also needs two."""

JUDGED, LONGEST = 2048, 8192
AT_MOST = 5.0
"""Maximum ratio of the times at 8,192 and 2,048 tokens for cases that are linear in T; ideally it is 4."""

KEY_WIDTHS = {"mla": 1.5}
"""Width of queries and keys divided by that of values, for the cases in which they differ."""

AROUND: dict[str, dict[str, Any]] = {
    "exclusive": {"exclusive": True},
    "head_norm": {"norm": {"head_norm": True}},
    "gated_norm": {"norm": {"gate_rank": 16}},
    "value_residual": {"value_residual": {"kind": "fixed"}},
    "value_residual_learned": {"value_residual": {"kind": "learned"}},
    "linear": {"mixer": {"kind": "gated_delta"}},
}
"""Changes around the attention core, as the model section of a recipe."""


def forward_and_backward(
    values: dict[str, Any],
    tokens: int,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: str,
    key_width: float = 1.0,
) -> Callable[[], None]:
    """Return a function that runs forward and backward pass of the attention core on fixed random inputs.

    Args:
        values: attention section of a recipe.
        tokens: sequence length.
        shape: batch size, number of heads, and head width (of values).
        key_width: width of queries and keys divided by the head width.
    """
    batch, heads, width = shape
    wide = int(key_width * width)
    core = AttentionCore(AttentionConfig.model_validate(values), heads, wide, context=tokens, value_width=width)
    generator = torch.Generator().manual_seed(0)
    for parameter in core.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    core = core.to(device)
    q, k, v, gradient = (
        torch.randn(batch, heads, tokens, w, generator=generator).to(device, dtype)
        for w in (wide * core.operation.queries_per_head, wide, width, width)
    )
    inputs = [x.requires_grad_() for x in (q, k, v)]
    kept = forget_gates(batch, tokens, heads).to(device).requires_grad_()
    beside = (None, kept) if core.operation.forgets or core.operation.weighs else ()
    wanted = [*inputs, *core.parameters(), *([kept] if beside else [])]

    def step() -> None:
        torch.autograd.grad(core(*inputs, *beside), wanted, gradient, allow_unused=True)

    return step


def forget_gates(batch: int, tokens: int, heads: int) -> torch.Tensor:
    """Return cumulative log forget gates if all gates are 1/2, as before training: (batch, tokens, heads)."""
    return torch.full((batch, tokens, heads), 0.5).log().cumsum(1)


def layer_forward_and_backward(
    values: dict[str, Any], tokens: int, shape: tuple[int, int, int], dtype: torch.dtype
) -> Callable[[], None]:
    """Return a function that runs forward and backward pass of a whole layer on fixed random inputs.

    Args:
        values: model section of a recipe, without sizes.
        tokens: sequence length.
        shape: batch size, number of heads, and head width.
    """
    batch, heads, width = shape
    sizes = {"width": heads * width, "heads": heads, "ffn_width": 2 * heads * width, "context": tokens}
    config = ModelConfig.model_validate({**sizes, "position": {"kind": "none"}, **values})
    mixer = config.mixer
    block = LinearBlock(config, mixer) if isinstance(mixer, GatedDelta) else DecoderBlock(config, None, layer=2)
    initialise(block, config, seed=0)
    block = block.to(dtype)
    generator = torch.Generator().manual_seed(0)
    x, gradient = (torch.randn(batch, tokens, heads * width, generator=generator).to(dtype) for _ in range(2))
    first = torch.randn(batch, heads, tokens, width, generator=generator).to(dtype).requires_grad_()
    mixes = config.value_residual.kind != "none"
    inputs = LayerInputs(first=[first] if mixes else None)
    wanted = [x.requires_grad_(), *block.parameters(), *([first] if mixes else [])]

    def step() -> None:
        torch.autograd.grad(block(x, inputs), wanted, gradient)

    return step


def rule_forward_and_backward(tokens: int, shape: tuple[int, int, int], dtype: torch.dtype) -> Callable[[], None]:
    """Return a function that runs forward and backward pass of the gated delta rule (see `forward_and_backward`)."""
    batch, heads, width = shape
    generator = torch.Generator().manual_seed(0)
    q, k, v, gradient = (torch.randn(batch, heads, tokens, width, generator=generator).to(dtype) for _ in range(4))
    log_decay, rate = -torch.rand(2, batch, heads, tokens, generator=generator)
    inputs = [x.requires_grad_() for x in (q / width, F.normalize(k, dim=-1), v, log_decay, -rate)]

    def step() -> None:
        torch.autograd.grad(gated_delta(*inputs)[0], inputs, gradient)

    return step


def compare_around(tokens: int, names: list[str], rounds: int, dtype: torch.dtype) -> dict[str, Any]:
    """Time the plain layer `layer` and the layer with each named change of `AROUND`; return rows as `compare`."""
    variants = {"layer": {}, **{name: AROUND[name] for name in names}}
    contestants = {
        name: layer_forward_and_backward(values, tokens, SHAPES[tokens], dtype) for name, values in variants.items()
    }
    return _rows(contestants, rounds, "layer")


def compare(tokens: int, names: list[str], rounds: int, dtype: torch.dtype) -> dict[str, Any]:
    """Time softmax, the named cases and `softmax_fused` at one length.

    Returns:
        By name, the median `milliseconds`, the median ratio to softmax (`relative`), and `peak_mb`.
    """
    variants = {"softmax": {}, **{name: CASES[name] for name in names if name in CASES}}
    contestants = {
        name: forward_and_backward(
            {**values, "backend": "chunked"}, tokens, SHAPES[tokens], dtype, "cpu", KEY_WIDTHS.get(name, 1.0)
        )
        for name, values in variants.items()
    }
    if RULE in names:
        contestants[RULE] = rule_forward_and_backward(tokens, SHAPES[tokens], dtype)
    contestants["softmax_fused"] = forward_and_backward({"backend": "sdpa"}, tokens, SHAPES[tokens], dtype, "cpu")
    return _rows(contestants, rounds, "softmax")


def _rows(contestants: dict[str, Callable[[], None]], rounds: int, baseline: str) -> dict[str, Any]:
    seconds = in_turn(contestants, rounds)
    relative = ratios(seconds, baseline)
    return {
        name: {
            "milliseconds": 1000 * sorted(times)[len(times) // 2],
            "relative": relative[name],
            "peak_mb": peak_mb(contestants[name]),
        }
        for name, times in seconds.items()
    }


def goal(name: str, by_passes: tuple[float, float] = (2.0, 3.0)) -> float | None:
    """Return the maximum time of a case relative to the baseline; None for `layer` and `softmax_fused`.

    Args:
        by_passes: maximum for one and for two `attend` calls.
    """
    if name in CASES:
        operation = AttentionConfig.model_validate(CASES[name]).operation
        return by_passes[operation.kind in TWO_PASSES or getattr(operation, "p", 1) != 1]
    return by_passes[0] if name in AROUND or name == RULE else None


def print_table(title: str, rows: dict[str, Any], judged: bool) -> None:
    """Print one line per case; if `judged`, with its goal and a mark if the time is above it."""
    print(f"\n{title}\n{'':24}{'ms':>10}{f'x {next(iter(rows))}':>11}{'goal':>6}{'MB':>6}")
    for name, row in rows.items():
        limit = goal(name) if judged else None
        mark = "" if limit is None or row["relative"] <= limit else "  above"
        numbers = f"{row['milliseconds']:10.1f}{row['relative']:11.2f}{limit or '':>6}{row['peak_mb']:6.0f}"
        print(f"{name:24}{numbers}{mark}", flush=True)


def growth(rows: dict[str, Any], longest: dict[str, Any]) -> dict[str, float]:
    """Return the time at 8,192 tokens (`longest`) divided by that at 2,048 (`rows`), for cases timed at both."""
    return {name: row["milliseconds"] / rows[name]["milliseconds"] for name, row in longest.items() if name in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--only", nargs="+", choices=[*CASES, RULE], default=[*CASES, RULE])
    parser.add_argument("--around", nargs="*", choices=AROUND, default=list(AROUND))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}/attention_DTYPE.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result: dict[str, Any] = {"environment": environment(), "rounds": options.rounds, "dtype": options.dtype}
    print(json.dumps(result["environment"]))
    for tokens in options.lengths:
        batch, heads, width = SHAPES[tokens]
        only, around = options.only, options.around
        if tokens == LONGEST:
            only, around = [name for name in only if name in LINEAR], [name for name in around if name == "linear"]
        rows = compare(tokens, only, options.rounds, getattr(torch, options.dtype))
        sizes = f"T {tokens}, B {batch}, H {heads}, D {width}, {options.dtype}"
        print_table(f"{sizes}, chunked backend", rows, tokens == JUDGED)
        layers = compare_around(tokens, around, options.rounds, getattr(torch, options.dtype))
        print_table(f"{sizes}, a layer", layers, tokens == JUDGED)
        result[str(tokens)] = rows | layers
    if {str(JUDGED), str(LONGEST)} <= result.keys():
        result["growth"] = growth(result[str(JUDGED)], result[str(LONGEST)])
        print(f"\ntimes as long at {LONGEST} as at {JUDGED}")
        for name, times in result["growth"].items():
            print(f"{name:24}{times:10.1f}{'  above' if name in (*LINEAR, 'linear') and times > AT_MOST else ''}")
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        write_json(RESULTS / f"attention_{options.dtype}.json", result)


if __name__ == "__main__":
    main()
