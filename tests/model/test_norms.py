"""Norms of heads and gates behind norms: placement, formula, initialisation."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from closeness import assert_close
from torch import Tensor, nn

from sinklab.model.block import Attention, LayerInputs
from sinklab.model.norm import LowRankGate, NormConfig, build_norm
from sinklab.model.transformer import Transformer
from sinklab.model.values import without_own_value
from sinklab.train.recipe import build_recipe

SMALL = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn_width": 48, "vocab_size": 97, "context": 32}


def transformer(**model: Any) -> Transformer:
    recipe = build_recipe({"model": {**SMALL, "position": "none", **model}, "metric": {"length": 8}})
    return Transformer(recipe.model, seed=1).double()


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def moved(module: nn.Module) -> None:
    """Perturb every parameter."""
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter += 0.3 * random(*parameter.shape, seed=seed)


@torch.no_grad()
def test_every_head_is_normed_without_its_own_value_and_before_the_gate() -> None:
    attention = transformer(norm={"head_norm": True}, exclusive=True, gate="element").blocks[1].attention
    assert isinstance(attention, Attention)
    moved(attention)
    out, v, x = random(2, 4, 5, 8), random(2, 2, 5, 8, seed=1), random(2, 5, 32, seed=2)
    left = without_own_value(out, v)
    normed = attention.get_parameter("head_norm.weight") * left / (left.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert attention.output_gate is not None
    assert_close(
        attention.output(out, x, v), attention.out(attention.output_gate(normed, x).transpose(1, 2).flatten(2))
    )


def test_an_untrained_head_norm_gives_large_heads_unit_mean_square() -> None:
    attention = transformer(norm={"head_norm": True}).blocks[0].attention
    assert isinstance(attention, Attention)
    normed = attention.head_norm(1e3 * random(2, 4, 5, 8))
    torch.testing.assert_close(normed.square().mean(-1), torch.ones(2, 4, 5, dtype=torch.float64))


def test_per_head_weights_start_as_shared_ones_and_are_then_independent() -> None:
    x = random(2, 5, 32, seed=2)
    shared, own = (
        transformer(norm={"qk_norm": norm, "head_norm": norm}).blocks[1].attention for norm in (True, "per_head")
    )
    assert isinstance(shared, Attention)
    assert isinstance(own, Attention)
    for mine, other in zip(own.inputs(x, LayerInputs()), shared.inputs(x, LayerInputs()), strict=True):
        assert_close(mine, other)
    out = random(2, 4, 5, 8)
    assert_close(own.head_norm(out), shared.head_norm(out))
    sizes = {name: len(own.get_parameter(f"{name}.weight")) for name in ("q_norm", "k_norm", "head_norm")}
    assert sizes == {"q_norm": 4 * 8, "k_norm": 2 * 8, "head_norm": 4 * 8}
    with torch.no_grad():
        own.get_parameter("head_norm.weight")[8:16] *= 3
    factor = torch.tensor([1.0, 3.0, 1.0, 1.0]).view(4, 1, 1)
    assert_close(own.head_norm(out), factor * shared.head_norm(out))


def test_the_halves_of_a_differential_head_have_separate_norm_weights() -> None:
    attention = transformer(norm={"qk_norm": "per_head"}, attention={"operation": "differential"}).blocks[1].attention
    assert isinstance(attention, Attention)
    x = random(2, 5, 32, seed=2)
    before = attention.inputs(x, LayerInputs())[0]
    with torch.no_grad():
        attention.get_parameter("q_norm.weight")[12:16] *= 3  # the second half of the second head
    after = attention.inputs(x, LayerInputs())[0]
    factor = torch.ones(4, 1, 8, dtype=torch.float64)
    factor[1, :, 4:] = 3
    assert_close(after, factor * before)


@pytest.mark.parametrize("kind", ["rmsnorm", "rmsnorm_single", "layernorm", "dynamic_tanh"])
def test_a_gate_multiplies_the_output_of_the_norm(kind: str) -> None:
    plain, gated = (
        build_norm(NormConfig.model_validate({"kind": kind, "gate_rank": rank}), 12).double() for rank in (None, 3)
    )
    for norm in (plain, gated):
        for name, parameter in norm.named_parameters():
            nn.init.normal_(parameter, 1.0, 0.3, generator=torch.Generator().manual_seed(len(name)))
    x = random(2, 5, 12)
    y, gate = plain(x), gated.gate
    assert isinstance(gate, LowRankGate)
    torch.testing.assert_close(gated(x), y * torch.sigmoid(F.silu(y @ gate.down.weight.T) @ gate.up.weight.T))


@pytest.mark.parametrize(("placement", "norms"), [("pre", 5), ("post", 4), ("sandwich", 9)])
def test_every_norm_of_the_stream_and_no_other_has_a_gate(placement: str, norms: int) -> None:
    model = transformer(norm={"placement": placement, "gate_rank": 2, "qk_norm": True, "head_norm": True})
    gates = {name.removesuffix(".gate") for name, module in model.named_modules() if isinstance(module, LowRankGate)}
    assert len(gates) == norms
    assert all(name == "final_norm" or name.split(".")[-1] in STREAM for name in gates)


STREAM = ("attention_norm", "ffn_norm", "attention_post_norm", "ffn_post_norm")


def test_the_gates_of_the_papers_2b_model_have_3_7_million_weights() -> None:
    """Dense 2B model: 28 layers of width 2048 (2601.22966, section 3.4)."""
    with torch.device("meta"):
        norm = build_norm(NormConfig(gate_rank=16), 2048)
    gate = sum(parameter.numel() for parameter in norm.gate.parameters())  # type: ignore[union-attr]
    assert round((2 * 28 + 1) * gate / 1e6, 1) == 3.7


def test_norms_start_as_one_and_gates_like_linear_layers() -> None:
    model = transformer(norm={"head_norm": True, "gate_rank": 16}, width=512, heads=4)
    assert all((p == 1).all() for name, p in model.named_parameters() if name.endswith("norm.weight"))
    gates = dict(model.named_parameters())
    down = torch.cat([gates[f"blocks.{i}.ffn_norm.gate.down.weight"] for i in range(2)])
    assert down.std().item() == pytest.approx((2 / (5 * 512)) ** 0.5, rel=0.03)
    up = torch.cat([gates[f"blocks.{i}.ffn_norm.gate.up.weight"] for i in range(2)])
    assert up.std().item() == pytest.approx((2 / (5 * 16)) ** 0.5, rel=0.03)


def test_a_norm_with_one_gain_has_one_number_and_is_rmsnorm_before_training() -> None:
    single, vectors = (transformer(norm={"kind": kind}) for kind in ("rmsnorm_single", "rmsnorm"))
    assert {len(p) for name, p in single.named_parameters() if name.endswith("norm.weight")} == {1}
    tokens = torch.randint(single.config.vocab_size or 1, (2, 7), generator=torch.Generator().manual_seed(0))
    assert_close(single(tokens), vectors(tokens))
    norm = single.final_norm
    with torch.no_grad():
        norm.get_parameter("weight").fill_(-2.5)
    x = random(2, 5, 32)
    assert_close(norm(x), -2.5 * x / (x.square().mean(-1, keepdim=True) + single.config.norm.eps).sqrt())


def test_projections_of_embeddings_start_orthogonal_and_leave_other_weights_unchanged() -> None:
    plain, projected = (transformer(embedding=kind) for kind in ("plain", "projected"))
    assert isinstance(projected.embedding_map, nn.Linear)
    assert isinstance(projected.head_map, nn.Linear)
    first, last = projected.embedding_map.weight, projected.head_map.weight
    for matrix in (first, last):
        torch.testing.assert_close(matrix @ matrix.T, torch.eye(32, dtype=matrix.dtype), rtol=0, atol=1e-6)
    assert not torch.allclose(first, last)
    weights = dict(projected.named_parameters())
    assert all(torch.equal(p, weights[name]) for name, p in plain.named_parameters())
    assert set(weights) - {name for name, _ in plain.named_parameters()} == {"embedding_map.weight", "head_map.weight"}
