"""Exclusive self-attention removes the own value from every head's output, and nothing else."""

from typing import Any

import pytest
import torch
from closeness import assert_close
from torch import Tensor

from sinklab.assessing.parts.key_ablations import SelectedKeys
from sinklab.attention.masks import Dense
from sinklab.measuring.surgery import masked_first_keys
from sinklab.model.config import initialise
from sinklab.model.transformer import Transformer
from sinklab.model.values import without_own_value
from sinklab.models.adapter import adapt
from sinklab.models.hooks import intercept
from sinklab.train.recipe import build_recipe

SMALL = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn_width": 48, "vocab_size": 97, "context": 32}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def head_outputs(model: Transformer, tokens_BT: Tensor) -> Tensor:
    """Input of the last layer's output projection: (B, L, H D)."""
    seen: list[Tensor] = []

    def reads(_: Any, args: tuple[Tensor, ...]) -> None:
        seen.append(args[0])

    with model.get_submodule("blocks.1.attention.out").register_forward_pre_hook(reads):
        model(tokens_BT)
    return seen[0]


def test_exclusive_outputs_are_orthogonal_to_the_own_value_of_the_key_head() -> None:
    out, v = random(2, 4, 5, 6), random(2, 2, 5, 6, seed=1)
    left = without_own_value(out, v)
    for head in range(4):
        own = v[:, head // 2]
        projection = torch.einsum("btd,bte->btde", own, own) / (own * own).sum(-1)[..., None, None]
        expected = torch.einsum("btde,bte->btd", torch.eye(6, dtype=torch.float64) - projection, out[:, head])
        torch.testing.assert_close(left[:, head], expected, rtol=0, atol=1e-12)


def test_the_output_of_a_token_that_sees_only_itself_is_exactly_zero() -> None:
    v = torch.randn(2, 3, 5, 16, generator=torch.Generator().manual_seed(2))
    assert not without_own_value(v.repeat_interleave(2, dim=1), v).any()


def test_a_following_norm_does_not_amplify_rounding() -> None:
    norm = {"placement": "sandwich", "head_norm": True}
    parts = {"model": {**SMALL, "exclusive": True, "norm": norm}, "metric": {"length": 32}}
    model = Transformer(build_recipe(parts).model)
    initialise(model, model.config, seed=0)
    tokens_BT = torch.randint(97, (2, 32), generator=torch.Generator().manual_seed(1))
    single = model(tokens_BT).double()
    assert_close(single, model.double()(tokens_BT), 1e-4)


def test_a_value_of_zero_removes_nothing_and_has_a_finite_gradient() -> None:
    out, v = random(1, 1, 3, 4).requires_grad_(), torch.zeros(1, 1, 3, 4, dtype=torch.float64, requires_grad=True)
    left = without_own_value(out, v)
    assert torch.equal(left, out)
    left.sum().backward()
    assert v.grad is not None
    assert v.grad.isfinite().all()


def test_the_gradient_of_exclusive_outputs_passes_gradcheck() -> None:
    out, v = random(1, 4, 3, 5).requires_grad_(), random(1, 2, 3, 5, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(without_own_value, (out, v))


def test_half_precision_is_computed_in_single_and_returned_in_half() -> None:
    out, v = random(2, 4, 5, 16), random(2, 4, 5, 16, seed=1)
    left = without_own_value(out.bfloat16(), v.bfloat16())
    assert left.dtype == torch.bfloat16
    torch.testing.assert_close(left.double(), without_own_value(out, v), rtol=0.05, atol=0.05)


ROUNDED: dict[str, dict[str, Any]] = {
    "sink logit": {"bias": "sink_logit"},
    "off by one": {"bias": "off_by_one"},
    "k bias": {"bias": "k"},
    "k bias of norm 0": {"bias": {"kind": "k", "value": {"direction": "first", "norm": 0.0}}},
    "forgetting, sink logit": {"operation": "forgetting", "bias": "sink_logit"},
    "sigmoid": {"operation": {"kind": "sigmoid", "normalised": False}},
    "normalised elu1": {"operation": {"kind": "elu1", "normalised": True}},
    "relu": {"operation": "relu"},
    "softpick behind a sink token": {"operation": "softpick", "bias": "sink_token"},
    "kernel": {"operation": {"kind": "elu_kernel", "normalised": True}},
    "stick-breaking": {"operation": "stick_breaking"},
}
"""Attention whose row of one token gives a multiple of its value, and not the value itself to the last bit."""


def normed(**attention: Any) -> Transformer:
    """Model with exclusive attention and head_norm, with all weights perturbed."""
    parts = {**SMALL, "exclusive": True, "norm": {"head_norm": True}, "attention": attention}
    model, source = Transformer(build_recipe({"model": parts, "metric": {"length": 8}}).model), torch.Generator()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=source.manual_seed(3))
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ROUNDED)
@torch.no_grad()
def test_the_output_of_a_token_that_sees_only_itself_is_zero_for_any_share(name: str, dtype: torch.dtype) -> None:
    model, tokens = normed(**ROUNDED[name]).to(dtype), torch.arange(16).view(2, 8)
    outputs = head_outputs(model, tokens)
    assert not outputs[:, 0].any()
    assert outputs[:, 1:].any(-1).all()


@pytest.mark.parametrize("name", [name for name in ROUNDED if "sink token" not in name])  # a sink token stays visible
@torch.no_grad()
def test_a_token_of_which_all_earlier_keys_are_hidden_sees_only_itself(name: str) -> None:
    model, tokens = normed(**ROUNDED[name]), torch.arange(16).view(2, 8)
    hidings = (masked_first_keys(model, 1), intercept(adapt(model), edit=SelectedKeys("sink").hidden))
    for hiding in hidings:
        with hiding:
            outputs = head_outputs(model, tokens)
        assert not outputs[:, :2].any()
        assert outputs[:, 2:].any(-1).all()
    assert head_outputs(model, tokens)[:, 1:].any(-1).all()


@pytest.mark.parametrize("head", range(4))
@torch.no_grad()
def test_a_head_in_which_tokens_see_only_themselves_leaves_the_other_heads_unchanged(head: int) -> None:
    model, tokens = normed(bias="sink_logit"), torch.arange(16).view(2, 8)
    whole = head_outputs(model, tokens).unflatten(-1, (4, -1))
    causal, own = torch.ones(8, 8, dtype=torch.bool).tril(), torch.eye(8, dtype=torch.bool)
    mask = Dense(torch.stack([own if one == head else causal for one in range(4)])[None])
    with intercept(adapt(model), edit=lambda layer: layer.masked(mask) if layer.index == 2 else layer):
        edited = head_outputs(model, tokens).unflatten(-1, (4, -1))
    others = [other for other in range(4) if other != head]
    assert not edited[..., head, :].any()
    assert_close(edited[..., others, :], whole[..., others, :], 1e-6)


@pytest.mark.parametrize("backend", ["eager", "chunked", "auto"])
@torch.no_grad()
def test_tokens_that_see_only_themselves_follow_from_the_mask(backend: str) -> None:
    tokens, given = torch.tensor([[5, 3, 6, 7, 3, 8, 9, 10]]), {"bias": "sink_logit", "backend": backend}
    alone = {
        "window": ({"kind": "window", "width": 1}, range(8)),
        "documents": ({"kind": "document", "eos_id": 3}, [0, 2, 5]),
        "prefix": ({"kind": "prefix", "length": 1}, [0]),
        "longer prefix": ({"kind": "prefix", "length": 2}, []),
    }
    for name, (mask, expected) in alone.items():
        left = head_outputs(normed(**given, mask=mask), tokens)[0].any(-1)
        assert (~left).nonzero().flatten().tolist() == list(expected), name


@torch.no_grad()
def test_a_continued_sequence_has_the_same_tokens_that_see_only_themselves() -> None:
    model, tokens = (
        normed(bias="sink_logit", mask={"kind": "document", "eos_id": 3}),
        torch.tensor([[5, 3, 6, 7, 3, 8]]),
    )
    whole, past, seen = head_outputs(model, tokens), model.new_past(), []
    out = model.get_submodule("blocks.1.attention.out")
    with out.register_forward_pre_hook(lambda _, args: seen.append(args[0])):
        for piece in tokens.split((1, 1, 3, 1), 1):
            model.hidden(piece, past)
    pieces = torch.cat(seen, 1)
    assert_close(pieces, whole, 1e-4)
    assert torch.equal(pieces.any(-1), whole.any(-1))


def test_a_token_that_sees_only_itself_has_no_gradient() -> None:
    model = normed(bias="sink_logit", mask={"kind": "window", "width": 1})
    model.loss(torch.arange(18).view(2, 9)).backward()
    for name in ("qkv.weight", "core.bias.logit"):
        gradient = model.get_parameter(f"blocks.1.attention.{name}").grad
        assert gradient is not None
        assert not gradient.any()


def test_marking_an_output_equal_to_its_value_leaves_the_gradient_unchanged() -> None:
    v = torch.randn(2, 3, 5, 16, generator=torch.Generator().manual_seed(2))
    weight = torch.randn(2, 6, 5, 16, generator=torch.Generator().manual_seed(4))
    found: list[torch.Tensor] = []
    for alone in (None, torch.ones(1, 1, 5, dtype=torch.bool)):
        given = v.clone().requires_grad_()
        (without_own_value(given.repeat_interleave(2, dim=1), given, alone) * weight).sum().backward()
        assert given.grad is not None
        found.append(given.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("bias", ["none", "sink_token"])
@torch.no_grad()
def test_a_token_that_sees_only_itself_adds_nothing_to_the_stream(bias: str) -> None:
    recipe = build_recipe({"model": {**SMALL, "exclusive": True, "attention": {"bias": bias}}, "metric": {"length": 8}})
    model, tokens = Transformer(recipe.model, seed=1).double(), torch.arange(16).view(2, 8)
    outputs = head_outputs(model, tokens)
    assert outputs[:, 0].abs().max() < 1e-12 * outputs.abs().max()
    assert (outputs[:, 1:].abs().amax(-1) > 1e-3 * outputs.abs().max()).all()


@torch.no_grad()
def test_a_value_bias_is_part_of_the_exclusive_output() -> None:
    recipe = build_recipe({"model": {**SMALL, "exclusive": True, "attention": {"bias": "v"}}, "metric": {"length": 8}})
    model, tokens = Transformer(recipe.model, seed=1).double(), torch.arange(16).view(2, 8)
    core, seen = model.get_submodule("blocks.1.attention.core"), []
    with core.register_forward_hook(lambda _, given, out: seen.append((given[2], out))):
        outputs = head_outputs(model, tokens)
    v_BGTD, out_BHTD = seen[0]
    assert_close(outputs, without_own_value(out_BHTD, v_BGTD).transpose(1, 2).flatten(2))
