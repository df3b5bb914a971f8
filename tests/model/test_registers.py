"""Registers: several learned tokens in front of the sequence; a single one equals the sink token bit for bit."""

from typing import Any

import numpy as np
import pytest
import torch
from closeness import assert_close
from torch import Tensor

import sinklab
from sinklab.errors import InputError
from sinklab.measuring.surgery import zeroed
from sinklab.model.transformer import Transformer
from sinklab.train.recipe import build_recipe

SMALL = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn_width": 48, "vocab_size": 97, "context": 32}


def model(count: int | None, **others: Any) -> Transformer:
    bias = {"kind": "none"} if count is None else {"kind": "sink_token", "count": count}
    attention = {"bias": bias, **others.pop("attention", {})}
    recipe = build_recipe({"model": {**SMALL, "attention": attention, **others}, "metric": {"length": 8}})
    return Transformer(recipe.model, seed=3).eval()


def tokens(length: int = 20) -> Tensor:
    return torch.randint(97, (2, length), generator=torch.Generator().manual_seed(0))


def test_one_register_is_the_sink_token_bit_for_bit() -> None:
    plain, one = model(1), model(None, attention={"bias": "sink_token"})
    assert plain.config == one.config
    assert all(torch.equal(weight, one.state_dict()[name]) for name, weight in plain.state_dict().items())
    assert plain.state_dict()["sink_token"].shape == (1, 1, 32)
    assert sinklab.measure(plain, tokens()).importance_registers is None


@pytest.mark.parametrize("position", ["none", "alibi", "relative", "t5", "rotary"])
@torch.no_grad()
def test_registers_have_the_positions_of_tokens_before_the_first(position: str) -> None:
    led, longer = model(3, position=position), model(None, position=position)
    led.get_parameter("sink_token").copy_(longer.embedding.weight[[5, 6, 7]][None])
    batch = torch.cat((torch.tensor([[5, 6, 7]] * 2), tokens()), 1)
    assert_close(led(tokens()), longer(batch)[:, 3:])


@pytest.mark.parametrize("position", ["absolute", "learnable"])
@torch.no_grad()
def test_registers_have_no_position_vector_and_real_tokens_keep_theirs(position: str) -> None:
    plain, led, seen = model(None, position=position), model(3, position=position), []
    for transformer in (plain, led):
        transformer.blocks[0].register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        transformer(tokens())
    assert torch.equal(seen[1][:, 3:], seen[0])
    assert torch.equal(seen[1][:, :3], led.get_parameter("sink_token").expand(2, -1, -1))


@pytest.mark.parametrize("mask", [{"kind": "window", "width": 2}, {"kind": "prefix", "length": 4}, {"kind": "causal"}])
@torch.no_grad()
def test_every_query_sees_all_registers_and_they_see_each_other_causally(mask: dict[str, Any]) -> None:
    core, seen = model(3, attention={"mask": mask}).get_submodule("blocks.1.attention.core"), []
    core.register_forward_pre_hook(lambda _, given: seen.append(given))
    whole = model(3, attention={"mask": mask})
    whole.blocks[1].attention.core = core  # type: ignore[union-attr]
    whole(tokens(9))
    shares = torch.zeros(2, 4, 12, 12)
    for rows in core.layer_call(*seen[0][:3]).rows():  # type: ignore[operator]
        block = rows.block
        shares[:, :, block.start : block.stop, block.low : block.high] = rows.weights_BHQS
    assert (shares[..., 3:, :3] > 0).all()
    assert ((shares[..., :3, :] > 0) == torch.ones(3, 12).tril().bool()).all()


def test_the_share_of_the_bias_is_the_sum_over_registers() -> None:
    found = sinklab.measure(model(3).double(), tokens(), batch_size=1)
    assert found.importance_registers is not None
    assert found.importance_bias is not None
    assert found.importance_registers.shape == (2, 4, 3)
    np.testing.assert_allclose(found.importance_registers.sum(-1), found.importance_bias, rtol=1e-5)
    # Every row of a real query adds up to one: over the registers and over the tokens.
    taken = (found.importance * np.arange(20, 0, -1)).sum(-1) / 20
    np.testing.assert_allclose(taken + found.importance_bias, np.ones((2, 4)), rtol=1e-5)


@torch.no_grad()
def test_each_register_is_a_separate_term_of_the_entropy() -> None:
    led, seen = model(3), []
    cores = [led.get_submodule(f"blocks.{layer}.attention.core") for layer in (0, 1)]
    hooks = [core.register_forward_pre_hook(lambda core, given: seen.append((core, given))) for core in cores]
    led(tokens())
    for hook in hooks:
        hook.remove()
    expected = []
    for core, given in seen:
        shares = torch.zeros(len(tokens()), 4, 23, 23)
        for rows in core.layer_call(*given[:3]).rows():
            shares[:, :, rows.block.start : rows.block.stop, rows.block.low : rows.block.high] = rows.weights_BHQS
        terms = -torch.where(shares > 0, shares * shares.clamp(min=1e-30).log(), 0)
        expected.append(terms[:, :, 3:].sum(-1).mean((0, 2)))  # of real queries, over registers and tokens
    found = sinklab.measure(led, tokens(), details=True).details
    assert found is not None
    np.testing.assert_allclose(found.entropy, torch.stack(expected), rtol=1e-5)


def test_a_register_can_be_zeroed_by_its_position_from_the_first_token_backwards() -> None:
    led, seen = model(3), []
    with torch.no_grad(), zeroed(led, 2, 0, 7), zeroed(led, 2, -2, 5), zeroed(led, 2, 2, 4):
        handle = led.blocks[1].register_forward_hook(lambda _, __, output: seen.append(output))
        led(tokens())
        handle.remove()
    assert ((seen[0] == 0).nonzero()[:, 1:].unique(dim=0) == torch.tensor([[0, 5], [2, 7], [4, 4]])).all()
    with pytest.raises(InputError, match="positions start at -2"), zeroed(led, 2, -3, 7):
        pass


def test_the_ablation_of_a_massive_activation_names_its_register() -> None:
    led = model(3)
    with torch.no_grad():
        led.get_parameter("sink_token")[0, 1, 4] = 500.0
    [ablation] = sinklab.measure(led, tokens(), ablate=["zero_massive"]).ablations or []
    assert "register 2 of 3" in ablation.what
