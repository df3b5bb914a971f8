"""Exclusive self-attention: the own value is gone from every head's output, and nothing else."""

from typing import Any

import pytest
import torch
from closeness import assert_close
from torch import Tensor

from sinklab.model.exclusive import without_own_value
from sinklab.model.init import initialise
from sinklab.model.transformer import Transformer
from sinklab.train.recipe import build_recipe

SMALL = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn_width": 48, "vocab_size": 97, "context": 32}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def head_outputs(model: Transformer, tokens_BT: Tensor) -> Tensor:
    """What the heads of the last layer give to the matrix behind them: (B, L, H D)."""
    seen: list[Tensor] = []

    def reads(_: Any, args: tuple[Tensor, ...]) -> None:
        seen.append(args[0])

    with model.get_submodule("blocks.1.attention.out").register_forward_pre_hook(reads):
        model(tokens_BT)
    return seen[0]


def test_what_is_left_is_the_output_orthogonal_to_the_own_value_of_the_heads_key_head() -> None:
    out, v = random(2, 4, 5, 6), random(2, 2, 5, 6, seed=1)
    left = without_own_value(out, v)
    for head in range(4):
        own = v[:, head // 2]
        projection = torch.einsum("btd,bte->btde", own, own) / (own * own).sum(-1)[..., None, None]
        expected = torch.einsum("btde,bte->btd", torch.eye(6, dtype=torch.float64) - projection, out[:, head])
        torch.testing.assert_close(left[:, head], expected, rtol=0, atol=1e-12)


def test_of_a_token_that_sees_itself_alone_exactly_nothing_is_left() -> None:
    v = torch.randn(2, 3, 5, 16, generator=torch.Generator().manual_seed(2))
    assert not without_own_value(v.repeat_interleave(2, dim=1), v).any()


def test_a_norm_behind_it_does_not_blow_up_rounding() -> None:
    norm = {"placement": "sandwich", "head_norm": True}
    parts = {"model": {**SMALL, "exclusive": True, "norm": norm}, "metric": {"length": 32}}
    model = Transformer(build_recipe(parts).model)
    initialise(model, model.config, seed=0)
    tokens_BT = torch.randint(97, (2, 32), generator=torch.Generator().manual_seed(1))
    single = model(tokens_BT).double()
    assert_close(single, model.double()(tokens_BT), 1e-4)


def test_a_value_of_zero_takes_nothing_away_and_has_a_finite_gradient() -> None:
    out, v = random(1, 1, 3, 4).requires_grad_(), torch.zeros(1, 1, 3, 4, dtype=torch.float64, requires_grad=True)
    left = without_own_value(out, v)
    assert torch.equal(left, out)
    left.sum().backward()
    assert v.grad is not None
    assert v.grad.isfinite().all()


def test_gradcheck_passes() -> None:
    out, v = random(1, 4, 3, 5).requires_grad_(), random(1, 2, 3, 5, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(without_own_value, (out, v))


def test_half_precision_is_computed_in_single_and_comes_back_as_it_was() -> None:
    out, v = random(2, 4, 5, 16), random(2, 4, 5, 16, seed=1)
    left = without_own_value(out.bfloat16(), v.bfloat16())
    assert left.dtype == torch.bfloat16
    torch.testing.assert_close(left.double(), without_own_value(out, v), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("bias", ["none", "sink_token"])
@torch.no_grad()
def test_a_token_that_sees_itself_alone_adds_nothing(bias: str) -> None:
    recipe = build_recipe({"model": {**SMALL, "exclusive": True, "attention": {"bias": bias}}, "metric": {"length": 8}})
    model, tokens = Transformer(recipe.model, seed=1).double(), torch.randint(97, (2, 8))
    outputs = head_outputs(model, tokens)
    assert outputs[:, 0].abs().max() < 1e-12 * outputs.abs().max()
    assert (outputs[:, 1:].abs().amax(-1) > 1e-3 * outputs.abs().max()).all()


@torch.no_grad()
def test_a_value_bias_is_part_of_what_is_made_exclusive() -> None:
    recipe = build_recipe({"model": {**SMALL, "exclusive": True, "attention": {"bias": "v"}}, "metric": {"length": 8}})
    model, tokens = Transformer(recipe.model, seed=1).double(), torch.randint(97, (2, 8))
    core, seen = model.get_submodule("blocks.1.attention.core"), []
    with core.register_forward_hook(lambda _, given, out: seen.append((given[2], out))):
        outputs = head_outputs(model, tokens)
    v_BGTD, out_BHTD = seen[0]
    assert_close(outputs, without_own_value(out_BHTD, v_BGTD).transpose(1, 2).flatten(2))
