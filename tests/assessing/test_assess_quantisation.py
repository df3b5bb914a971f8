"""The quantiser, against computation by hand and PyTorch's, and the weights and positions that it does not change."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import transformers as hf
from assessed import ASSESSED, part_settings, run_part, small, some_tokens
from closeness import assert_close
from families import GROUPED

from sinklab.assessing.parts.quantisation import (
    QUICK,
    LinearMap,
    Quantisation,
    Rounding,
    linear_maps,
    on_grid,
    outliers_by_block,
    quantised_inputs,
    quantised_weight,
    quantised_weights,
    rotated,
    to_e4m3,
    to_nvfp4,
    watched_maxima,
)
from sinklab.assessing.reading import PairedReader, perturbed
from sinklab.models.huggingface.pretrained_adapter import HuggingFaceAdapter

TOKENS, OTHERS = some_tokens(2, 16), some_tokens(3, 12)[2:]


@contextmanager
def quantised(
    maps: list[LinearMap], weights: Any, activations: Any, maxima: Any, spared: int, rotate: bool = False
) -> Iterator[None]:
    setting = Rounding(weights, activations, rotate)
    with quantised_weights(maps, setting) as exact, quantised_inputs(maps, exact, setting, maxima, spared):
        yield


def by_hand(row: list[float], steps: int) -> list[float]:
    scale = max(abs(x) for x in row) / steps
    return [scale * max(-steps, min(steps, round(x / scale))) for x in row]


def test_a_row_is_rounded_to_the_grid_of_its_largest_value() -> None:
    row = [0.30, -1.27, 0.004, 0.0, 0.9949]
    x = torch.tensor(row, dtype=torch.float64)
    assert_close(on_grid(x, 8, x.abs().max()), by_hand(row, 127), 1e-6)
    assert_close(on_grid(x, 4, x.abs().max()), by_hand(row, 7), 1e-6)
    assert float(on_grid(torch.tensor(9.0), 8, torch.tensor(1.27))) == pytest.approx(1.27)  # beyond a static scale
    assert float(on_grid(torch.zeros(3), 8, torch.zeros(())).abs().max()) == 0


def test_weights_agree_with_pytorchs_own_fake_quantisation() -> None:
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    scale = weight.abs().amax(1) / 127
    zero = torch.zeros(6, dtype=torch.int32)
    expected = torch.fake_quantize_per_channel_affine(weight, scale, zero, 0, -127, 127)
    assert_close(quantised_weight(weight, "int8 per channel"), expected, 1e-6)
    groups = weight.view(12, 32)
    expected = torch.fake_quantize_per_channel_affine(
        groups, groups.abs().amax(1) / 7, torch.zeros(12, dtype=torch.int32), 0, -7, 7
    )
    assert_close(quantised_weight(weight, "int4 in groups of 32"), expected.view(6, 64), 1e-6)


def test_a_last_group_of_weights_may_be_shorter() -> None:
    weight = torch.randn(2, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = quantised_weight(weight, "int4 in groups of 32")
    for row, given in zip(found, weight, strict=True):
        assert_close(row, by_hand(given[:32].tolist(), 7) + by_hand(given[32:].tolist(), 7), 1e-6)


@pytest.mark.parametrize("activations", ["full", "int8 per token", "int8 dynamic per tensor", "int8 static per tensor"])
@pytest.mark.parametrize("spared", [0, 2])
@torch.no_grad()
def test_a_quantised_map_multiplies_rounded_weights_and_inputs(activations: Any, spared: int) -> None:
    linear = torch.nn.Linear(32, 5).double()
    maps = [LinearMap(linear, block=linear)]
    x = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    other = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    before, plain = linear.weight.detach().clone(), linear(x)
    with watched_maxima(maps, spared) as maxima:
        linear(other)
    with quantised(maps, "int8 per channel", activations, maxima, spared):
        found = linear(x)
    weight = torch.stack([torch.tensor(by_hand(row.tolist(), 127), dtype=torch.float64) for row in before])
    for n in range(2):
        rest = x[n, spared:]
        if activations == "int8 per token":
            rounded = torch.stack([torch.tensor(by_hand(row.tolist(), 127), dtype=torch.float64) for row in rest])
        elif activations == "full":
            rounded = rest
        else:
            largest = float((other[:, spared:] if activations == "int8 static per tensor" else rest).abs().max())
            rounded = (rest * 127 / largest).round().clamp(-127, 127) * largest / 127
        assert_close(found[n, spared:], rounded @ weight.T + linear.bias, 1e-12)
        assert_close(found[n, :spared], plain[n, :spared], 1e-12)
    assert torch.equal(linear.weight, before)


@pytest.mark.parametrize("activations", ["int8 dynamic per tensor", "int8 static per tensor"])
@torch.no_grad()
def test_an_input_shared_by_maps_is_rounded_by_each_maps_scale_and_again_after_a_change(
    activations: Any,
) -> None:
    linears: list[torch.nn.Module] = [torch.nn.Linear(32, 5) for _ in range(4)]
    maps = [LinearMap(linear, block=linear) for linear in linears]
    x = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(2))
    maxima = dict(zip(linears, map(torch.tensor, (1.0, 1.0, 2.0, 2.0)), strict=True))

    def outputs(together: bool) -> list[torch.Tensor]:
        here, found = x.clone(), []
        for number, one in enumerate(maps):
            if number == 3:
                here.mul_(0.5)
            alone = quantised([one], "int8 per channel", activations, maxima, 1)
            with nullcontext() if together else alone:
                found.append(one.module(here))
        return found

    with quantised(maps, "int8 per channel", activations, maxima, 1):
        found = outputs(together=True)
    for one, alone in zip(found, outputs(together=False), strict=True):
        assert torch.equal(one, alone)


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = [m * 2.0**-9 for m in range(8)] + [(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8)][:-1]


def nearest(x: float, values: list[float]) -> float:
    return math.copysign(min(values, key=lambda value: abs(abs(x) - value)), x)


def test_fp8_is_the_nearest_value_of_the_format() -> None:
    x = torch.randn(400, generator=torch.Generator().manual_seed(4), dtype=torch.float64).exp() - 1
    largest = x.abs().max() / 2  # half of the largest values are beyond a static scale
    scale = float(largest) / 448
    assert max(E4M3) == 448
    expected = [scale * nearest(float(one) / scale, E4M3) for one in x]
    assert_close(to_e4m3(x, largest), torch.tensor(expected, dtype=torch.float64), 1e-12)
    assert float(to_e4m3(torch.zeros(3), torch.zeros(())).abs().max()) == 0


def test_nvfp4_is_the_nearest_value_of_the_format_in_blocks_of_16() -> None:
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    x[0, :16] *= 1e6  # its block scale is the largest, and those of the others are as small as they may be
    x[1, 16:32] = 0
    whole = float(x.abs().max()) / (6 * 448)
    expected = []
    for row in x.tolist():
        for start in (0, 16, 32):
            block = row[start : start + 16]
            scale = nearest(max(2.0**-6, max(map(abs, block)) / 6 / whole), E4M3) * whole
            expected += [scale * nearest(one / scale, E2M1) for one in block]
    found = to_nvfp4(x, x.abs().max())
    assert_close(found.flatten(), torch.tensor(expected, dtype=torch.float64), 1e-12)
    assert found[1:].abs().max() == 0  # rounded to zero, because the first row has the scale of the tensor
    assert to_nvfp4(x[1:], x[1:].abs().max()).abs().max() > 0


@pytest.mark.parametrize("width", [64, 40, 7])
def test_a_rotation_keeps_products_and_spreads_a_large_channel(width: int) -> None:
    matrix = rotated(torch.eye(width, dtype=torch.float64))
    assert_close(matrix @ matrix.T, torch.eye(width), 1e-12)
    block = {64: 64, 40: 8, 7: 1}[width]
    assert_close(matrix[0, :block].abs(), torch.full((block,), block**-0.5, dtype=torch.float64), 1e-12)
    assert_close(rotated(torch.ones(2, 3, width, dtype=torch.float64)), matrix.sum(0).expand(2, 3, width), 1e-12)


@torch.no_grad()
def test_a_rotated_map_rounds_rotated_weights_and_inputs() -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(32, 5, bias=False).double()
    maps = [LinearMap(linear, block=linear)]
    x = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    x[..., 3] *= 100
    before, plain = linear.weight.detach().clone(), linear(x)
    kinds = ("int8 per channel", "int8 static per tensor")
    with watched_maxima(maps, 1, rotate=True) as turned, watched_maxima(maps, 1) as maxima:
        linear(x)
    assert turned[linear] == rotated(x[:, 1:]).abs().max()
    assert turned[linear] < maxima[linear] / 2
    with quantised(maps, *kinds, turned, 1, rotate=True):
        found = linear(x)
    with quantised(maps, *kinds, maxima, 1):
        unrotated = linear(x)
    weight = quantised_weight(rotated(before), "int8 per channel")
    assert_close(found[:, 1:], on_grid(rotated(x[:, 1:]), 8, turned[linear]) @ weight.T, 1e-12)
    assert_close(found[:, :1], plain[:, :1], 1e-12)
    assert (found - plain).norm() < (unrotated - plain).norm() / 2
    assert torch.equal(linear.weight, before)


def test_all_maps_of_the_blocks_are_quantised_and_restored() -> None:
    one = small("gate")
    maps = linear_maps(one.blocks)
    assert len(maps) == 2 * (1 + 1 + 1 + 2)  # qkv, gate, out, and the two of the feed-forward part
    before = [one.weight.clone() for one in maps]
    found = run_part(Quantisation, one, TOKENS, OTHERS)
    assert all(torch.equal(a, b.weight) for a, b in zip(before, maps, strict=True))
    assert [setting.name for setting in found.settings][-1] == "nvfp4"
    for setting in found.settings:
        assert setting.everything.kl > 0
        assert setting.due_to_sink == pytest.approx(setting.everything.loss - setting.without_sink.loss)


def test_huge_activations_at_the_sink_cause_the_cost_of_scales_per_tensor() -> None:
    one = small()
    embedding: Any = one.module.embedding
    tokens = TOKENS.clone()
    tokens[:, 0] = 23
    tokens[:, 1:] = tokens[:, 1:].clamp(max=22)
    with torch.no_grad():
        embedding.weight[23] = 0
        embedding.weight[23, 0] = 3e4  # one channel, so that norms leave the others at the first position alone
        for block in one.blocks:
            block.ffn_norm.weight[0] *= 30  # type: ignore[index, union-attr, operator]
    found = {row.name: row for row in run_part(Quantisation, one, tokens, tokens).settings}
    per_tensor, per_token = found["int8 dynamic per tensor"], found["int8 per token"]
    assert per_tensor.everything.kl > 10 * per_token.everything.kl
    assert per_tensor.without_sink.kl < per_tensor.everything.kl / 3


def test_outliers_are_counted_by_block() -> None:
    one = small()
    streams: list[torch.Tensor] = []

    def leaving(_: Any, __: Any, out: torch.Tensor) -> None:
        streams.append(out)

    handles = [block.register_forward_hook(leaving) for block in one.blocks]
    found = outliers_by_block(one, TOKENS)
    for handle in handles:
        handle.remove()
    assert [row.layer for row in found] == [1, 2]
    for row, x in zip(found, (stream.float() for stream in streams), strict=True):
        assert row.largest == pytest.approx(float(x.abs().max()))
        assert row.largest_norm == pytest.approx(float(x.norm(dim=-1).max()))
        far = (x - x.mean()).abs() > 6 * ((x - x.mean()) ** 2).mean().sqrt()
        assert row.channels == len({int(c) for _, _, c in far.nonzero()})
        centred = x - x.mean(-1, keepdim=True)
        assert row.kurtosis == pytest.approx(
            float(((centred**4).mean(-1) / (centred**2).mean(-1) ** 2).mean()), rel=1e-4
        )


def test_quantising_no_maps_does_not_change_the_model() -> None:
    one = small()
    reader = PairedReader(one, TOKENS)
    with quantised([], "int8 per channel", "full", {}, 0):
        effect = reader.under().effect()
    assert effect.kl == pytest.approx(0, abs=1e-12)


@torch.no_grad()
def test_opt_is_quantised_although_it_flattens_its_sequences() -> None:
    """Sparing every position but one, then all: nothing else is rounded, at any place of the flattened batch."""
    torch.manual_seed(0)
    config = hf.OPTConfig(
        vocab_size=24, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32
    )
    one = HuggingFaceAdapter(hf.OPTForCausalLM(config).double().eval())
    maps, inputs = linear_maps(one.blocks), list[torch.Tensor]()
    fc1: Any = one.blocks[0].fc1
    handle = fc1.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    with watched_maxima(maps, 3) as maxima:
        expected = one.hidden(TOKENS)
    handle.remove()
    assert inputs[0].shape == (TOKENS.numel(), 32)
    assert maxima[fc1] == inputs[0].view(*TOKENS.shape, 32)[:, 3:].abs().max()
    T = TOKENS.shape[1]
    with quantised(maps, "int8 per channel", "int8 dynamic per tensor", {}, T - 1):
        found = one.hidden(TOKENS)
    assert_close(found[:, :-1], expected[:, :-1], 1e-12)
    assert not torch.allclose(found[:, -1], expected[:, -1], atol=1e-6)
    assessed = run_part(Quantisation, one, TOKENS, OTHERS, part_settings())
    alone = run_part(Quantisation, one, TOKENS[:1], OTHERS)
    other = run_part(Quantisation, one, TOKENS[1:], OTHERS)
    for both, *each in zip(assessed.settings, alone.settings, other.settings, strict=True):
        assert both.without_sink.loss == pytest.approx(sum(row.without_sink.loss for row in each) / 2)


class Routed(torch.nn.Module):
    """Experts as linear layers that read the tokens routed to them, as in code of model repositories."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.linears = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(count))

    def forward(self, x_RE: torch.Tensor, chosen_RK: torch.Tensor, weights_RK: torch.Tensor) -> torch.Tensor:
        out_RE = torch.zeros_like(x_RE)
        for number, linear in enumerate(self.linears):
            rows, places = (chosen_RK == number).nonzero(as_tuple=True)
            out_RE.index_add_(0, rows, linear(x_RE[rows]) * weights_RK[rows, places, None])
        return out_RE


def test_models_with_experts_are_refused() -> None:
    torch.manual_seed(0)
    model: Any = hf.MixtralForCausalLM(hf.MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2)).eval()
    one = HuggingFaceAdapter(model)
    assert "more than two axes (mlp.experts.gate_up_proj)" in str(Quantisation.refusal(one, None))  # type: ignore[arg-type]
    model.model.layers[0].mlp.experts = torch.nn.Conv1d(4, 4, 3)
    assert "a convolution over channels" in str(Quantisation.refusal(one, None))  # type: ignore[arg-type]
    for layer in model.model.layers:
        layer.mlp.experts = Routed(GROUPED["hidden_size"], 4)
    with torch.no_grad():
        one.hidden(TOKENS)
    assert "processes only some of the tokens" in str(Quantisation.refusal(one, None))  # type: ignore[arg-type]


def test_models_with_quantised_weights_are_refused() -> None:
    model: Any = hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)).eval()
    assert Quantisation.refusal(HuggingFaceAdapter(model), None) is None  # type: ignore[arg-type]
    model.config.quantization_config = {"quant_method": "torchao"}
    assert "already quantised (torchao)" in str(Quantisation.refusal(HuggingFaceAdapter(model), None))  # type: ignore[arg-type]


@pytest.mark.parametrize("variant", ASSESSED)
def test_own_models_are_not_refused(variant: str) -> None:
    assert Quantisation.refusal(small(variant), None) is None  # type: ignore[arg-type]


def test_losses_of_rounded_activations_are_means_of_draws_the_first_of_which_is_unperturbed() -> None:
    one = small()
    found = run_part(Quantisation, one, TOKENS, OTHERS)
    alone = run_part(Quantisation, one, TOKENS, OTHERS, part_settings(quick=True))
    by_name = {one.name: one for one in found.settings}
    assert [one.name for one in alone.settings] == list(QUICK)
    for single in alone.settings:
        three = by_name[single.name]
        assert single.draws is None
        if three.name == "int4 weights":
            assert three.draws is None
            assert three.everything == single.everything
            continue
        assert three.draws is not None
        assert three.draws[0] == single.due_to_sink
        assert three.due_to_sink == pytest.approx(sum(three.draws) / 3)
        assert three.draws[1] != three.draws[2]


def test_a_perturbation_is_in_the_last_digits() -> None:
    one = small()
    expected = one.hidden(TOKENS)
    with perturbed(one, 1):
        found = one.hidden(TOKENS)
    assert 0 < float((found - expected).detach().abs().max()) < 1e-4
    with perturbed(one, 0):
        assert torch.equal(one.hidden(TOKENS), expected)
