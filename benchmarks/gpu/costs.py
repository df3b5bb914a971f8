"""Estimated cost of the paper's runs and of measuring large models on GPUs, from formulae. Nothing is run.

    python -m benchmarks.gpu.costs

Training: FLOPs of `sinklab/train/planning.py` over the assumed MFU (`MFU`) of a card's dense bfloat16 peak. The runs
are the distinct recipes of the shipped experiments of 2410.10781, one seed each, as in the paper.

Measuring a Llama of L layers, width E, H heads of width D, feed-forward width F and P parameters on T tokens in
bfloat16, with the layers spread over n cards (`--device map`), which work one after the other:

    memory of a card  2 P / n + 2 T (16 E + 4 F) + 4 T 6 L H / n bytes: weights, activations of one block, recorded sums
                      (`Sizes.bytes_per_sequence` with 2-byte activations); there is no KV cache, and logits are chunked
    forward pass      2 P T operations in matrices, 4 D H L T^2 / 2 in attention
    measuring         the same and 4 D H L T^2 / 2 more: the scores twice, for log-normalisers and column sums

at `MATRICES` and `ATTENTION` of the peak. Reading the weights is not counted.
"""

from collections.abc import Iterator
from functools import cache

from sinklab.experiments.shipped import experiment_ids, load_experiment
from sinklab.experiments.sweep.store import cells_of
from sinklab.train.planning import PEAKS, model_flops
from sinklab.train.recipe import Recipe

PEAK = PEAKS["H100"]
MFU = {"60m": 0.32, "1b": 0.45}
MATRICES, ATTENTION = 0.5, 0.35
GB = 1e9
MODELS = {
    "Llama 2 7B": {"layers": 32, "width": 4096, "heads": 32, "ffn": 11008, "parameters": 6.74e9},
    "Llama 3 70B": {"layers": 80, "width": 8192, "heads": 64, "ffn": 28672, "parameters": 70.6e9},
}
LENGTHS = {"8k": 2**13, "128k": 2**17}
CARDS = (1, 2, 4)


@cache
def recipes(scale: str) -> list[Recipe]:
    """Return the distinct recipes of the paper's experiments at a scale."""
    found: dict[str, Recipe] = {}
    for experiment in map(load_experiment, experiment_ids()):
        if experiment.source.startswith("2410.10781") and scale in experiment.base:
            for cell in cells_of(experiment, scale, 1, {}).values():
                found.setdefault(cell.recipe.model_dump_json(exclude={"name"}), cell.recipe)
    return list(found.values())


def hours(recipe: Recipe, scale: str) -> float:
    """Return the estimated hours of a run on one card."""
    flops = model_flops(recipe.model).total * recipe.train.batch_size * recipe.train.steps
    return flops / (MFU[scale] * PEAK) / 3600


def paper() -> Iterator[str]:
    """Yield a row per scale of the paper's runs."""
    yield "| scale | assumed MFU | tokens a run | hours a run | runs | card-hours |"
    yield "|---|---|---|---|---|---|"
    for scale in MFU:
        runs = recipes(scale)
        base = next(recipe for recipe in runs if recipe.model.attention.operation.kind == "softmax")
        tokens = base.train.steps * base.train.batch_size * base.model.context
        every = [hours(recipe, scale) for recipe in runs]
        yield (
            f"| {scale} | {MFU[scale]:.0%} | {tokens / 1e9:.0f} B | {hours(base, scale):.0f} | {len(runs)} "
            f"| {sum(every):,.0f} |"
        )


def memory(model: str, tokens: int, cards: int) -> float:
    """Return the estimated memory of a card in bytes."""
    one = MODELS[model]
    recorded = 4 * tokens * 6 * one["layers"] * one["heads"]
    return (2 * one["parameters"] + recorded) / cards + 2 * tokens * (16 * one["width"] + 4 * one["ffn"])


def seconds(model: str, tokens: int, measured: bool) -> float:
    """Return the estimated time of a pass over one sequence, in seconds."""
    one = MODELS[model]
    attention = 2 * one["width"] * one["layers"] * tokens**2
    return (2 * one["parameters"] * tokens / MATRICES + (1 + measured) * attention / ATTENTION) / PEAK


def large_models() -> Iterator[str]:
    """Yield a row per model and length."""
    cards = " | ".join(f"{count} card{'s' * (count > 1)}" for count in CARDS)
    yield f"| model | tokens | {cards} | `measure`, a sequence | over a forward pass |"
    yield "|---|---|" + "---|" * (len(CARDS) + 2)
    for model in MODELS:
        for name, tokens in LENGTHS.items():
            needed = " | ".join(f"{memory(model, tokens, count) / GB:.0f} GB" for count in CARDS)
            took, bare = (seconds(model, tokens, measured) for measured in (True, False))
            yield f"| {model} | {name} | {needed} | {took:{'.0f' if took > 10 else '.2g'}} s | {took / bare:.2f} |"


if __name__ == "__main__":
    print("\n".join([*paper(), "", *large_models()]))
