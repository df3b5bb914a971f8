"""Counted operations and estimated memory, against PyTorch's own counter, formulas on paper, and measured peaks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from independent_recipes import random_recipe
from torch.utils.flop_counter import FlopCounterMode

from sinklab.model.transformer import Transformer
from sinklab.train.planning import PEAKS, memory_estimate, model_flops, peak_flops, shape_of
from sinklab.train.recipe import Recipe, build_recipe

SIZES = {"layers": 2, "width": 32, "heads": 4, "ffn_width": 48, "vocab_size": 97, "context": 32}
CPU = torch.device("cpu")


def recipe(**model: object) -> Recipe:
    return build_recipe({"model": {**SIZES, **model}, "train": {"batch_size": 16}, "metric": {"length": 32}})


def counted(wanted: Recipe, length: int) -> int:
    """PyTorch's FLOP count of a forward and backward pass over one sequence."""
    model = Transformer(wanted.model)
    with FlopCounterMode(display=False) as counter:
        model.loss(torch.randint(97, (1, length + 1))).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"kv_heads": 2},
        {"ffn": "gelu"},
        {"gate": "element"},
        {"gate": "value"},
        {"head_outputs": "sum"},
        {"norm": {"qk_norm": True}},
        {"attention": {"bias": "sink_token"}},
        {"attention": {"bias": "kv"}},
        {"attention": {"operation": "sigmoid"}},
        {"projection": {"kind": "latent", "kv_rank": 12, "q_rank": 6, "nope_width": 5, "value_width": 7}},
    ],
    ids=str,
)
def test_the_flop_count_equals_pytorchs_if_every_query_sees_every_key(model: dict[str, object]) -> None:
    # The eager backend computes all pairs, so those that the causal mask hides are added to our count.
    attention = {**dict(model.get("attention", {})), "backend": "eager"}  # type: ignore[call-overload]
    causal = recipe(**{**model, "attention": attention})
    positions = SIZES["context"] + shape_of(causal.model).leading
    ours = model_flops(causal.model)
    unseen = positions * (positions - 1) // 2
    widths = causal.model.query_width + causal.model.value_width
    in_square = 3 * SIZES["layers"] * 2 * SIZES["heads"] * widths * unseen
    assert ours.total + in_square == counted(causal, SIZES["context"])


def test_the_flops_of_a_60m_model_are_those_of_the_formula() -> None:
    sizes = {"layers": 10, "width": 768, "heads": 8, "ffn_width": 1536, "vocab_size": 50432, "context": 2048}
    flops = model_flops(build_recipe({"model": sizes}).model)
    assert flops.matrices == 6 * 2048 * 10 * (4 * 768 * 768 + 3 * 768 * 1536)
    assert flops.attention == 12 * 10 * 768 * 2048 * 2049 // 2
    assert flops.head == 6 * 2048 * 768 * 50432


@pytest.mark.parametrize(
    ("mask", "pairs"),
    [
        ({"kind": "causal"}, 32 * 33 // 2),
        ({"kind": "window", "width": 8}, 8 * 9 // 2 + 24 * 8),
        ({"kind": "prefix", "length": 8}, 8 * 8 + sum(range(9, 33))),
    ],
)
def test_attention_counts_the_pairs_that_its_mask_allows(mask: dict[str, object], pairs: int) -> None:
    flops = model_flops(recipe(attention={"mask": mask}).model)
    assert flops.attention == 3 * 2 * 4 * 32 * pairs
    predicted = 32 - (7 if mask["kind"] == "prefix" else 0)
    assert flops.head == 6 * 32 * 97 * predicted


def test_two_queries_per_head_cost_two_scores_and_one_value_per_pair() -> None:
    softmax, pairs = (model_flops(recipe(attention={"operation": o}).model) for o in ("softmax", "differential_v2"))
    assert pairs.attention * 2 == softmax.attention * 3
    wider = 2 * 3 * SIZES["layers"] * SIZES["context"] * SIZES["width"] * (SIZES["width"] + SIZES["heads"])
    assert pairs.matrices == softmax.matrices + wider


def test_a_kernel_is_linear_in_the_length_and_quadratic_under_a_window() -> None:
    kernel = {"operation": {"kind": "identity"}}
    head_width = 8
    assert model_flops(recipe(attention=kernel).model).attention == 3 * 2 * 4 * (4 * head_width**2) * 32
    windowed = recipe(attention={**kernel, "mask": {"kind": "window", "width": 8}})
    assert model_flops(windowed.model).attention == 3 * 2 * 4 * 32 * (8 * 9 // 2 + 24 * 8)


def test_a_linear_layer_costs_three_passes_over_its_state_and_its_convolution() -> None:
    mixer = {"kind": "gated_delta", "key_heads": 2, "value_width": 6, "conv": 3}
    flops, plain = (model_flops(recipe(mixer=one).model) for one in (mixer, "attention"))
    channels = 2 * 2 * 8 + 4 * 6
    linear = 32 * (6 * 4 * 8 * 6 + 2 * 3 * channels)
    assert flops.attention == plain.attention // 2 + 3 * linear
    matrices = 32 * (channels + 4 * 6 + 2 * 4) + 4 * 6 * 32
    assert plain.matrices - flops.matrices == 3 * 2 * 32 * (4 * 32 * 32 - matrices)


def test_the_shape_of_the_1b_model_takes_no_memory() -> None:
    sizes = {"layers": 22, "width": 2048, "heads": 16, "ffn_width": 5632, "vocab_size": 50432}
    model = shape_of(build_recipe({"model": sizes}).model)
    assert sum(p.numel() for p in model.parameters()) == 1_337_026_560
    assert all(p.is_meta for p in model.parameters())


def test_the_peak_flops_of_a_card_are_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = {
        "NVIDIA H200": 990e12,
        "NVIDIA H200 NVL": 835e12,
        "NVIDIA H100 80GB HBM3": 990e12,
        "NVIDIA H100 PCIe": 756e12,
        "Unknown": None,
    }
    cards |= {"NVIDIA L4": 121e12, "NVIDIA L40": 181e12, "NVIDIA L40S": 362e12}
    for name, peak in cards.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(torch.device("cuda", 0)) == peak
    assert peak_flops(CPU) is None
    assert all(1e14 < peak < 1e16 for peak in PEAKS.values())


SCRIPT = """
import json, sys
import torch
from sinklab.train.recipe import build_recipe
from sinklab.model.transformer import Transformer
from sinklab.train.planning import memory_estimate
from sinklab.train.optim import build_optimizer
from sinklab.train.world import recompute_blocks

def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))

torch.set_num_threads(1)
recipe = build_recipe(json.loads(sys.argv[1]))
estimate = sum(memory_estimate(recipe).values())
open("/proc/self/clear_refs", "w").write("5")  # the high-water mark starts again from here
before = status("VmRSS")
model = Transformer(recipe.model)
recompute_blocks(model, recipe.train.recompute)
optimizer = build_optimizer(model, recipe.optim)
for _ in range(2):
    with torch.autocast("cpu", torch.bfloat16, enabled=recipe.train.precision == "bf16"):
        loss = model.loss(torch.randint(recipe.model.vocab_size, (recipe.train.batch_size, recipe.model.context + 1)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
print(json.dumps([estimate / 2**20, (status("VmHWM") - before) / 1024]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
@pytest.mark.parametrize(
    ("precision", "changes", "recompute"),
    [
        ("fp32", {"attention": {"bias": "k"}}, "none"),
        ("bf16", {}, "none"),
        ("fp32", {"layers": 12}, "blocks"),
        ("bf16", {"layers": 12}, "blocks"),
    ],
    ids=str,
)
def test_the_estimate_is_near_the_measured_peak(precision: str, changes: dict[str, object], recompute: str) -> None:
    model = {"layers": 4, "width": 128, "heads": 4, "ffn_width": 256, "vocab_size": 4096, "context": 256}
    train = {"batch_size": 24, "precision": precision, "recompute": recompute}
    values = {"model": {**model, **changes}, "train": train}
    unfragmented = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}  # glibc's heap adds 10 to 100 %, by chance
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(values)], capture_output=True, text=True, check=True, env=unfragmented
    )
    estimate, measured = json.loads(run.stdout)
    assert measured / 2.5 < estimate < measured * 2.5


@pytest.mark.parametrize("seed", range(20))
def test_memory_and_operations_of_any_recipe_are_estimated(seed: int) -> None:
    wanted = random_recipe(seed)
    assert min(memory_estimate(wanted).values()) > 0
    assert model_flops(wanted.model).total > 0


def test_recomputation_and_sharding_lower_the_estimate() -> None:
    plain = recipe(layers=8)
    kept = memory_estimate(plain)
    again = memory_estimate(build_recipe(plain.model_dump(), {"train": {"recompute": "blocks"}}))
    assert again["activations"] < kept["activations"] / 2
    assert again["weights"] == kept["weights"]
    sharded = memory_estimate(build_recipe(plain.model_dump(), {"train": {"parallel": "fsdp"}}), 4)
    assert sharded["weights"] == kept["weights"] // 4
    assert sharded["activations"] < kept["activations"] / 2
