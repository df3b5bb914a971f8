"""Hybrids with linear attention: equality with the published module, cache, measuring, initialisation, errors."""

import re
from typing import Any

import pytest
import torch
from closeness import assert_close
from torch import Tensor
from transformers import KimiLinearConfig, Qwen3NextConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from sinklab.errors import InputError
from sinklab.model.block import DecoderBlock, LinearBlock
from sinklab.model.llama import differences
from sinklab.model.mixer import LinearAttention
from sinklab.model.transformer import Transformer
from sinklab.survey.api import measure
from sinklab.train.recipe import build_recipe

E, T = 32, 100
SIZES = {"layers": 4, "width": E, "heads": 4, "ffn_width": 48, "vocab_size": 97, "context": 128}


def model(mixer: Any = "gated_delta", **parts: object) -> Transformer:
    recipe = build_recipe({"model": {**SIZES, "mixer": mixer, **parts}, "metric": {"length": 32}})
    return Transformer(recipe.model, seed=3).eval()


def linear(mixer: Any) -> LinearAttention:
    """A float64 layer with enlarged weights."""
    block = model(mixer).double().blocks[0]
    assert isinstance(block, LinearBlock)
    with torch.no_grad():
        block.attention.norm.weight.add_(torch.linspace(-0.5, 0.5, len(block.attention.norm.weight)))
        for name, weight in block.attention.named_parameters():
            if name.startswith(("qkv", "rates", "gate", "decay")):
                weight.mul_(3)
    return block.attention


def tokens(rows: int = 2, length: int = 20) -> Tensor:
    return torch.randint(97, (rows, length), generator=torch.Generator().manual_seed(0))


def their_weights(ours: LinearAttention, keys: int, values: int, D: int, V: int) -> dict[str, Tensor]:
    """Our weights in Qwen3-Next's order: for each key head its query, its key, its values and their gates."""
    q, k, v = ours.qkv.weight.split((keys * D, keys * D, values * V))
    z, (rate, step), each = ours.get_parameter("gate.weight"), ours.rates.weight.chunk(2), values // keys
    by_head = [
        torch.cat([part.unflatten(0, (keys, -1))[g] for part in (q, k, v, z)]) for g in range(keys)
    ]  # fmt: skip
    rates = [torch.cat((rate[g * each : (g + 1) * each], step[g * each : (g + 1) * each])) for g in range(keys)]
    return {
        "in_proj_qkvz.weight": torch.cat(by_head),
        "in_proj_ba.weight": torch.cat(rates),
        "conv1d.weight": ours.conv.weight,
        "A_log": ours.log_rate,
        "dt_bias": ours.step,
        "norm.weight": ours.norm.weight,
        "out_proj.weight": ours.out.weight,
    }


@pytest.mark.parametrize(("keys", "values", "D", "V", "conv"), [(4, 4, 8, 8, 4), (2, 6, 5, 3, 3)])
@torch.no_grad()
def test_a_linear_layer_equals_qwen3_nexts(keys: int, values: int, D: int, V: int, conv: int) -> None:
    mixer = {"heads": values, "key_heads": keys, "key_width": D, "value_width": V, "conv": conv}
    ours = linear({"kind": "gated_delta", **mixer})
    config = Qwen3NextConfig(
        hidden_size=E, linear_num_value_heads=values, linear_num_key_heads=keys, linear_key_head_dim=D,
        linear_value_head_dim=V, linear_conv_kernel_dim=conv, rms_norm_eps=1e-5, num_hidden_layers=4,
    )  # fmt: skip
    theirs = Qwen3NextGatedDeltaNet(config, layer_idx=0).double().eval()
    theirs.load_state_dict(their_weights(ours, keys, values, D, V))
    x = torch.randn(2, T, E, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    inputs, _ = ours.inputs(x, None)
    assert_close(ours.output(ours.rule(inputs, None)[0], x), theirs(x))  # theirs computes the rule in float32


@torch.no_grad()
def test_a_layer_with_a_decay_per_channel_equals_kimi_linears() -> None:
    ours = linear({"kind": "kimi_delta", "heads": 3, "key_width": 8, "conv": 3})
    weights = dict(ours.named_parameters())
    config = KimiLinearConfig(
        hidden_size=E, linear_num_heads=3, linear_head_dim=8, linear_conv_kernel_dim=3, rms_norm_eps=1e-5,
        num_hidden_layers=4, layer_types=["linear_attention"] * 4,
    )  # fmt: skip
    theirs = KimiLinearDeltaAttention(config, layer_idx=0).double().eval()
    q, k, v = ours.qkv.weight.chunk(3)
    theirs.load_state_dict(
        {
            "q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v, "conv1d.weight": ours.conv.weight,
            "forget_gate.f_a_proj.weight": weights["decay.0.weight"],
            "forget_gate.f_b_proj.weight": weights["decay.1.weight"],
            "forget_gate.dt_bias": ours.step, "forget_gate.A_log": ours.log_rate.view(1, 1, -1, 1),
            "b_proj.weight": ours.rates.weight, "g_a_proj.weight": weights["gate.0.weight"],
            "g_b_proj.weight": weights["gate.1.weight"],
            "o_norm.weight": ours.norm.weight, "o_proj.weight": ours.out.weight,
        }
    )  # fmt: skip
    x = torch.randn(2, T, E, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    inputs, _ = ours.inputs(x, None)
    assert_close(ours.output(ours.rule(inputs, None)[0], x), theirs(x))  # theirs computes the rule in float32


@pytest.mark.parametrize(
    ("layers", "every", "expected"),
    [(48, 4, tuple(range(4, 49, 4))), (4, 4, (4,)), (10, 4, (2, 6, 10)), (1, 4, (1,)), (3, 1, (1, 2, 3))],
)
def test_one_of_every_n_layers_has_attention_and_so_has_the_last_layer(layers: int, every: int, expected: Any) -> None:
    made = model({"kind": "gated_delta", "every": every}, layers=layers)
    assert made.config.attention_layers == expected
    assert tuple(n for n, b in enumerate(made.blocks, 1) if isinstance(b, DecoderBlock)) == expected


def test_without_linear_layers_every_layer_has_attention() -> None:
    assert model("attention").config.attention_layers == (1, 2, 3, 4)


@pytest.mark.parametrize("bias", ["none", "sink_token", "sink_logit"])
def test_linear_layers_are_noted_and_excluded_from_sink_rates(bias: str) -> None:
    made = model({"kind": "gated_delta", "every": 2}, attention={"bias": bias})
    measured = measure(made, tokens(), details=True)
    assert measured.layers == 2
    assert measured.importance.shape == (2, 4, 20)
    assert measured.key_norm is not None
    assert measured.key_norm.shape == (2, 20)
    assert measured.hidden_norm is not None
    assert measured.hidden_norm.shape == (5, 20)
    assert "2 of 4 layers have attention (2, 4), here layers 1 to 2" in measured.notes[0]
    with torch.no_grad():
        assert measured.loss == pytest.approx(made.loss(tokens()).item(), rel=1e-5)
    assert not measure(model("attention"), tokens()).notes


def test_a_map_of_a_layer_without_attention_is_refused() -> None:
    with pytest.raises(InputError, match="the model has attention layers 1 to 1"):
        measure(model(), tokens(), maps=[(2, 1)])


def test_decay_and_step_start_as_published_and_the_rest_by_the_declared_laws() -> None:
    wide = model(width=512, heads=64)
    for number in range(3):
        layer = wide.get_submodule(f"blocks.{number}.attention")
        assert isinstance(layer, LinearAttention)
        rate, step = layer.log_rate.exp(), torch.nn.functional.softplus(layer.step)
        assert 0.01 <= rate.min() < 2
        assert 14 < rate.max() <= 16
        assert 0.00099 <= step.min() < 0.002
        assert 0.05 < step.max() <= 0.1001
        assert layer.qkv.weight.std().item() == pytest.approx((2 / (5 * 512)) ** 0.5, rel=0.02)
        assert layer.conv.weight.std().item() == pytest.approx((2 / (5 * 4)) ** 0.5, rel=0.05)
        assert (layer.norm.weight == 1).all()


def test_attention_layers_start_as_in_a_model_without_linear_layers() -> None:
    plain, hybrid = model("attention").state_dict(), model().state_dict()
    same = [name for name in hybrid if name in plain and ".attention.out" not in name and ".attention.qkv" not in name]
    assert len(same) > 15
    assert all(torch.equal(hybrid[name], plain[name]) for name in [*same, "blocks.3.attention.qkv.weight"])


def test_linear_layers_work_under_bfloat16_autocast_as_in_float32() -> None:
    made = model()
    with torch.autocast("cpu", torch.bfloat16):
        loss = made.loss(tokens())
    loss.backward()
    torch.testing.assert_close(loss, made.loss(tokens()), rtol=2e-2, atol=0)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in made.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"mixer": {"kind": "gated_delta", "heads": 6, "key_heads": 4}},
            "mixer.heads 6 is not a multiple of mixer.key_heads 4: change one of them, or leave key_heads out",
        ),
        ({"attention": {"mask": "document"}}, "the linear layers of mixer gated_delta carry their state"),
        ({"value_residual": "fixed"}, "has no attention values"),
    ],
)
def test_combinations_that_linear_layers_cannot_have_are_refused(changes: dict[str, Any], message: str) -> None:
    base = {"model": {**SIZES, "mixer": "gated_delta"}, "metric": {"length": 32}}
    with pytest.raises(InputError, match=re.escape(message)):
        build_recipe(base, {"model": changes})


def test_a_linear_mixer_is_listed_as_a_difference_from_llama() -> None:
    assert "model.mixer is gated_delta" in differences(model().config)["mixer"]
