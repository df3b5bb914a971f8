"""Value residuals: later layers attend to the first layer's values mixed with their own."""

from typing import Any

import pytest
import torch
from closeness import assert_close
from torch import Tensor

from sinklab.model.transformer import Transformer
from sinklab.train.recipe import build_recipe

SMALL = {"layers": 3, "width": 32, "heads": 4, "kv_heads": 2, "ffn_width": 48, "vocab_size": 97, "context": 32}


def model(value_residual: Any, **others: Any) -> Transformer:
    recipe = build_recipe({"model": {**SMALL, "value_residual": value_residual, **others}, "metric": {"length": 8}})
    return Transformer(recipe.model, seed=3).double()


def tokens(length: int = 12) -> Tensor:
    return torch.randint(97, (2, length), generator=torch.Generator().manual_seed(0))


def values(transformer: Transformer) -> list[tuple[Tensor, Tensor]]:
    """For each layer, the values from its own projection and gate, and the values that its core attends to."""
    seen: list[tuple[Tensor, Tensor]] = []
    own: list[Tensor] = []
    for block in transformer.blocks:
        inputs = block.attention.inputs  # type: ignore[union-attr]

        def noted(*given: Any, inputs: Any = inputs) -> Any:
            found = inputs(*given)
            own.append(found[2])
            return found

        block.attention.inputs = noted  # type: ignore[union-attr]
        block.attention.core.register_forward_pre_hook(  # type: ignore[union-attr]
            lambda _, given: seen.append((own[-1], given[2]))
        )
    with torch.no_grad():
        transformer(tokens())
    return seen


@pytest.mark.parametrize("gate", ["none", "value"])
def test_all_layers_but_the_first_attend_to_the_mixed_values(gate: str) -> None:
    (first, kept), *later = values(model({"kind": "fixed", "first": 0.7, "own": -0.2}, gate=gate))
    assert torch.equal(kept, first)
    assert len(later) == 2
    for own, mixed in later:
        assert_close(mixed, 0.7 * first - 0.2 * own)
        assert not torch.allclose(own, first)


def test_learned_lambdas_start_at_the_recipes_values_and_the_first_layer_has_none() -> None:
    learned = model({"kind": "learned", "start_first": 0.25, "start_own": 0.75})
    found = {name: weight.tolist() for name, weight in learned.named_parameters() if "value_residual" in name}
    layer = {"first": [0.25], "own": [0.75]}
    assert found == {f"blocks.{i}.attention.value_residual.{name}": layer[name] for i in (1, 2) for name in layer}
    fixed = model({"kind": "fixed", "first": 0.25, "own": 0.75})
    assert_close(learned(tokens()), fixed(tokens()))


def test_the_gradient_of_a_learned_lambda_equals_its_finite_difference() -> None:
    learned = model("learned")
    learned.loss(tokens()).backward()
    weight = learned.get_parameter("blocks.1.attention.value_residual.first")
    losses = []
    for step in (-1e-5, 1e-5):
        with torch.no_grad():
            weight += step
            losses.append(learned.loss(tokens()).item())
            weight -= step
    assert weight.grad is not None
    assert weight.grad.item() == pytest.approx((losses[1] - losses[0]) / 2e-5, rel=1e-4)


def test_later_value_projections_have_no_gradient_if_only_the_first_values_are_used() -> None:
    shared = model({"kind": "fixed", "first": 1.0, "own": 0.0})
    shared.loss(tokens()).backward()
    rows = slice(4 * 8 + 2 * 8, None)  # behind those of queries and keys
    gradients = [shared.get_parameter(f"blocks.{i}.attention.qkv.weight").grad for i in range(3)]
    assert all(gradient is not None for gradient in gradients)
    sizes = [gradient[rows].abs().sum() for gradient in gradients if gradient is not None]
    assert sizes[0] > 0
    assert sizes[1] == sizes[2] == 0


def test_forward_passes_are_independent() -> None:
    mixing = model("fixed")
    with torch.no_grad():
        expected = mixing(tokens())
        mixing(tokens(5).flip(0))
        assert torch.equal(mixing(tokens()), expected)
