"""Norms, gates, summed heads and document masks: their formulas, and that they do not change the rest of the model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import assert_close
from torch import Tensor, nn

from sinklab.data.prepare import prepared
from sinklab.interventions import VARIANTS
from sinklab.model.block import Attention, LayerInputs
from sinklab.model.norm import DynamicTanh, RmsNorm
from sinklab.model.position import rotary_tables, rotate
from sinklab.model.transformer import Transformer
from sinklab.model.values import OutputGating, ValueGating, ValueScaling
from sinklab.survey.api import measure
from sinklab.train.recipe import Recipe, build_recipe, load_recipe
from sinklab.train.run import open_run

SMALL = {
    "model": {"layers": 2, "width": 32, "heads": 4, "ffn_width": 48, "vocab_size": 97, "context": 32},
    "metric": {"length": 32},
}


def recipe(**model: object) -> Recipe:
    return build_recipe(SMALL, {"model": model})


def tokens(rows: int = 2, length: int = 20) -> Tensor:
    return torch.randint(1, 97, (rows, length), generator=torch.Generator().manual_seed(0))


def attention(**model: object) -> Attention:
    layer = Transformer(recipe(position="none", **model).model, seed=4).blocks[0].attention
    assert isinstance(layer, Attention)
    return layer


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def outputs_of(module: nn.Module) -> list[Tensor]:
    """A list to which every call of the module appends its output."""
    seen: list[Tensor] = []

    def record(_: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        seen.append(out)

    module.register_forward_hook(record)
    return seen


def test_dynamic_tanh_is_its_formula_and_starts_with_the_recipes_slope() -> None:
    model = Transformer(recipe(norm={"kind": "dynamic_tanh", "alpha": 0.7}).model)
    norm = model.final_norm
    assert isinstance(norm, DynamicTanh)
    x = random(2, 3, 32)
    torch.testing.assert_close(norm(x), torch.tanh(0.7 * x))


def test_the_second_norm_of_a_sandwich_gives_a_sublayers_output_unit_mean_square() -> None:
    model = Transformer(recipe(norm={"placement": "sandwich"}).model)
    added = outputs_of(model.get_submodule("blocks.1.ffn_post_norm"))
    with torch.no_grad():
        model(tokens())
    torch.testing.assert_close(added[0].square().mean(-1), torch.ones(2, 20), rtol=1e-2, atol=1e-2)


def test_summed_heads_are_the_sum_of_the_heads_through_one_matrix() -> None:
    summed, heads_BHTD = attention(head_outputs="sum"), random(2, 4, 10, 8)
    with torch.no_grad():
        out = summed.output(heads_BHTD, random(2, 10, 32), heads_BHTD)
        expected = sum((summed.out(heads_BHTD[:, h]) for h in range(4)), torch.zeros(()))
    assert summed.out.weight.shape == (32, 8)
    assert_close(out, expected)


@pytest.mark.parametrize(
    ("gate", "read", "numbers"), [("head", 32, 1), ({"kind": "head", "channels": 5}, 5, 1), ("element", 32, 8)]
)
def test_an_output_gate_scales_heads_by_a_sigmoid_of_the_layers_input(gate: Any, read: int, numbers: int) -> None:
    gating = attention(gate=gate).output_gate
    assert isinstance(gating, OutputGating)
    x, out = random(2, 10, 32), random(2, 4, 10, 8)
    with torch.no_grad():
        opened = torch.sigmoid(x[..., :read] @ gating.linear.weight.T).view(2, 10, 4, numbers).transpose(1, 2)
        torch.testing.assert_close(gating(out, x), out * opened)


def test_a_value_gate_scales_each_value_by_a_sigmoid_of_itself() -> None:
    gating = attention(gate="value").value_gate
    assert isinstance(gating, ValueGating)
    v = random(2, 4, 10, 8)
    with torch.no_grad():
        expected = torch.stack([v[:, g] * torch.sigmoid(v[:, g] @ gating.weight[g])[..., None] for g in range(4)], 1)
        torch.testing.assert_close(gating(v), expected)
    assert (gating.bias == 0).all()


@pytest.mark.parametrize("init", ["declared", "torch"])
@pytest.mark.parametrize("projection", ["full", "latent"])
def test_v_scale_starts_at_the_mean_square_of_the_values(init: str, projection: str) -> None:
    """C = E d sigma^2 (2603.17771), with sigma of our own initialisation, so that a value of mean size is halved."""
    layer = attention(gate="v_scale", width=512, heads=2, kv_heads=None, init=init, projection=projection)
    gate, layer.value_gate = layer.value_gate, None
    assert isinstance(gate, ValueScaling)
    v = layer.inputs(random(8, 32, 512), LayerInputs())[2]
    assert v.square().sum(-1).mean().item() == pytest.approx(gate.start, rel=0.05)
    assert not gate.theta.any()


def test_v_scale_has_the_gradient_that_the_paper_derives() -> None:
    gate = ValueScaling(2, start=3.0).double()
    with torch.no_grad():
        gate.theta.copy_(torch.tensor([0.4, -1.0]))
    v = random(1, 2, 1, 5).double()
    for g, C in enumerate((3 * torch.e**0.4, 3 / torch.e)):
        of_head = torch.autograd.functional.jacobian(
            lambda x, g=g: gate(torch.stack([x, x])[None, :, None])[0, g, 0], v[0, g, 0]
        )
        r = v[0, g, 0].square().sum().item()
        expected = sorted([r / (r + C)] * 4 + [(r**2 + 3 * C * r) / (r + C) ** 2])
        assert torch.linalg.eigvalsh(of_head).tolist() == pytest.approx(expected, rel=1e-6)  # theta was a float32


@pytest.mark.parametrize(
    "model",
    [
        {"gate": "head"},
        {"gate": "element"},
        {"gate": "value"},
        {"norm": {"placement": "sandwich"}},
        {"norm": {"qk_norm": True}},
        {"norm": {"head_norm": True}},
        {"norm": {"gate_rank": 3}},
        {"value_residual": "learned"},
        {"position": "t5"},
        {"position": "learnable"},
    ],
    ids=str,
)
def test_an_added_tensor_does_not_change_the_initial_values_of_the_others(model: dict[str, object]) -> None:
    plain = Transformer(recipe().model, seed=1).state_dict()
    changed = Transformer(recipe(**model).model, seed=1).state_dict()
    assert len(changed) > len(plain)
    assert all(torch.equal(changed[name], weight) for name, weight in plain.items())


@pytest.mark.parametrize(
    "model",
    [
        {"gate": "element"},
        {"gate": "value"},
        {"norm": {"qk_norm": True}},
        {"norm": {"head_norm": True, "gate_rank": 4}, "exclusive": True},
        {"value_residual": "learned", "gate": "value"},
        {"norm": {"kind": "dynamic_tanh", "placement": "sandwich", "gate_rank": 2}},
        {"position": "t5"},
        {"position": "absolute", "head_outputs": "sum"},
        {"attention": {"mask": "document", "bias": "sink_token"}},
    ],
    ids=str,
)
def test_parts_work_under_bfloat16_autocast_as_in_float32(model: dict[str, object]) -> None:
    transformer = Transformer(recipe(**model).model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = transformer.loss(tokens())
    loss.backward()
    torch.testing.assert_close(loss, transformer.loss(tokens()), rtol=2e-2, atol=0)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in transformer.parameters())


PROJECTED = ("embedding_projected", "outlier_safe")  # their stream begins with a linear layer, so it is bfloat16


@pytest.mark.parametrize("name", VARIANTS)
def test_under_bfloat16_autocast_the_residual_stream_final_norm_and_loss_are_float32(name: str) -> None:
    model = Transformer(build_recipe(SMALL, VARIANTS[name].overlay).model)
    blocks = [outputs_of(block) for block in model.blocks]
    normed = outputs_of(model.final_norm)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.loss(tokens(length=33))
    stream = {x.dtype for seen in blocks for x in seen}
    assert stream == {torch.bfloat16 if name in PROJECTED else torch.float32}
    assert loss.dtype == torch.float32
    assert name in PROJECTED or {x.dtype for x in normed} == {torch.float32}


@pytest.mark.parametrize("bias", ["none", "sink_token", "k"])
def test_documents_of_one_sequence_do_not_see_each_other(bias: str) -> None:
    model = Transformer(recipe(attention={"mask": "document", "bias": bias}, position="none").model).eval()
    packed = tokens()
    packed[:, 7] = packed[:, 15] = 0  # two documents end here, EOS included
    with torch.no_grad():
        logits = model(packed)
        for start, end in ((0, 8), (8, 16), (16, 20)):
            assert_close(logits[:, start:end], model(packed[:, start:end]))


def test_importance_under_a_document_mask_stays_within_documents() -> None:
    model = Transformer(recipe(attention={"mask": "document"}).model)
    packed = tokens()
    packed[:, 9] = 0
    alone = measure(model, packed[:, 10:])
    both = measure(model, packed)
    assert both.importance.shape[-1] == 20
    # A query of the other document gives nothing, and position k is averaged over the queries t >= k that see it.
    assert (both.importance[..., 10:] <= alone.importance + 1e-5).all()
    assert both.importance[..., 0].max() <= 0.5 + 1e-6


def test_a_run_uses_the_eos_of_its_data_for_document_masks(tmp_path: Path) -> None:
    source = "data.source=synthetic:bigram_backcopy:documents=50"
    loaded = load_recipe("backcopy", [source, "model.attention.mask={kind: document, eos_id: 77}"])
    mask = open_run(loaded, prepared(loaded.data, tmp_path / "cache"), tmp_path / "run").recipe.model.attention.mask
    assert mask.model_dump() == {"kind": "document", "eos_id": 0}


def test_norms_and_rotations_have_autograds_gradients_bit_for_bit() -> None:
    # The stream bypasses the norm, as in a block, because the order in which its gradients are added matters.
    x_BTE, up_BTE = random(2, 8, 16).requires_grad_(), random(2, 8, 16)
    norm, plain = RmsNorm(16, eps=1e-5), nn.RMSNorm(16, eps=1e-5)
    results = []
    for module in (norm, plain):
        nn.init.constant_(module.weight, 0.7)
        out_BTE = x_BTE.sin() + module(x_BTE)
        results.append((out_BTE, *torch.autograd.grad(out_BTE, (x_BTE, module.weight), up_BTE)))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))
    cos_TC, sin_TC = rotary_tables(8, 16, 100.0, torch.device("cpu"))
    for dtype in (torch.float32, torch.bfloat16):
        first, second = x_BTE.to(dtype).chunk(2, dim=-1)
        rotated = torch.cat((first * cos_TC - second * sin_TC, second * cos_TC + first * sin_TC), dim=-1).to(dtype)
        ours = rotate(x_BTE.to(dtype), cos_TC, sin_TC)
        assert torch.equal(ours, rotated)
        upstream = up_BTE.to(dtype)
        gradients = (torch.autograd.grad(out, x_BTE, upstream)[0] for out in (ours, rotated))
        assert torch.equal(*gradients)
