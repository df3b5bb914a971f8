"""Patterns of layers: which layers differ and in which settings, and invalid patterns."""

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from closeness import assert_close
from torch import Tensor
from transformers import MiMoV2FlashConfig
from transformers.models.mimo_v2_flash.modeling_mimo_v2_flash import MiMoV2FlashForCausalLM

from sinklab.assessing.parts.streaming import RollingCache
from sinklab.attention.layer_call import LayerCall
from sinklab.errors import InputError
from sinklab.measuring.propositions import check_propositions
from sinklab.model.llama import llama_weights
from sinklab.model.transformer import Transformer
from sinklab.models.adapter import adapt
from sinklab.models.hooks import intercept
from sinklab.survey.api import measure
from sinklab.train.planning import model_flops
from sinklab.train.recipe import Recipe, build_recipe

SIZES = {"layers": 4, "width": 32, "heads": 4, "ffn_width": 48, "vocab_size": 97, "context": 32}
WINDOW = {"kind": "window", "width": 8}
MIMO: dict[str, Any] = {
    "attention": {"mask": WINDOW, "bias": "sink_logit"},
    "position": {"kind": "rotary", "theta": 50.0, "share": 0.5},
    "pattern": {
        "every": 3,
        "first": 1,
        "mask": "causal",
        "bias": "none",
        "position": {"kind": "rotary", "theta": 5e3, "share": 0.25},
    },
}


def recipe(**model: object) -> Recipe:
    return build_recipe({"model": SIZES, "metric": {"length": 32}}, {"model": model})


def model(**changes: object) -> Transformer:
    """With weights large enough for positions and biases to matter."""
    made = Transformer(recipe(**changes).model, seed=3).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.mul_(20 if ".bias." in name else 1 if "norm" in name else 2)
    return made


def tokens(length: int = 32) -> Tensor:
    return torch.randint(97, (2, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("layers", "pattern", "expected"),
    [
        (4, {"every": 2}, [2, 4]),
        (13, {"every": 6}, [6, 12]),
        (13, {"every": 6, "first": 1}, [1, 7, 13]),
        (4, {"every": 10, "first": 3}, [3]),
        (4, {"every": 1, "first": 3}, [3, 4]),
    ],
)
def test_every_nth_layer_is_counted_from_the_first(
    layers: int, pattern: Mapping[str, object], expected: list[int]
) -> None:
    config = recipe(layers=layers, attention={"mask": WINDOW}, pattern={**pattern, "mask": "causal"}).model
    kinds = [config.of_layer(layer).attention.mask.kind for layer in range(1, layers + 1)]
    assert [layer for layer, kind in enumerate(kinds, 1) if kind == "causal"] == expected


def test_a_pattern_does_not_change_the_initial_weights_of_the_layers() -> None:
    made, plain = (
        Transformer(recipe(**MIMO).model, seed=3).state_dict(),
        Transformer(recipe().model, seed=3).state_dict(),
    )
    assert sorted(set(made) - set(plain)) == [f"blocks.{i}.attention.core.bias.logit" for i in (1, 2)]
    assert all(torch.equal(made[name], weight) for name, weight in plain.items())


@torch.no_grad()
def test_a_model_equals_mimo_v2_flash_of_dense_layers() -> None:
    """MiMo's layers with windows have twice the key heads of the others, so each of our key heads is repeated."""
    ours = model(kv_heads=2, **MIMO)
    config = MiMoV2FlashConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        v_head_dim=8,
        sliding_window=8,
        attention_value_scale=None,
        rms_norm_eps=ours.config.norm.eps,
        pad_token_id=None,
        bos_token_id=None,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        mlp_layer_types=["dense"] * 4,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 5e3, "partial_rotary_factor": 0.25},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5},
        },
    )
    theirs, weights = MiMoV2FlashForCausalLM(config).eval(), llama_weights(ours)
    for layer in (1, 2):
        for name in ("k_proj", "v_proj"):
            weight = f"model.layers.{layer}.self_attn.{name}.weight"
            weights[weight] = weights[weight].unflatten(0, (2, 8)).repeat_interleave(2, 0).flatten(0, 1)
        logit = ours.get_parameter(f"blocks.{layer}.attention.core.bias.logit")
        weights[f"model.layers.{layer}.self_attn.sinks"] = logit
    theirs.load_state_dict(weights)
    assert_close(ours(tokens()), theirs(tokens()).logits)


def test_measuring_reads_each_layer_under_its_own_mask_and_bias() -> None:
    made = model(**MIMO)
    got = measure(made, tokens())
    assert any("a sliding window of 8 tokens in layers 2..3" in note for note in got.notes)
    assert got.importance_visible is not None
    assert (got.importance_visible[[0, 3]] == got.importance[[0, 3]]).all()
    assert (got.importance_visible[[1, 2], :, 0] > got.importance[[1, 2], :, 0]).all()
    shares = []

    def observe(layer: LayerCall) -> None:
        bias_BH = layer.importance().bias_BH
        shares.extend([] if bias_BH is None else [bias_BH])

    with torch.no_grad(), intercept(adapt(made), observe=observe):
        made(tokens())
    assert len(shares) == 2
    assert got.sink_rate_bias == pytest.approx(100 * (torch.stack(shares) > 0.3).double().mean().item())


@torch.no_grad()
def test_a_rolling_cache_moves_the_positions_of_the_layers_that_have_them() -> None:
    """Queries and keys that are rotated again are twice as wide: a part for the first keys, and one for the others."""
    made = model(position="none", pattern={"every": 2, "position": {"kind": "rotary", "share": 0.5}})
    turned = []

    def observe(layer: LayerCall) -> None:
        turned.append(layer.shift_rope is not None)

    with intercept(adapt(made), observe=observe):
        made(tokens())
    assert turned == [False, True, False, True]

    changed: list[Tensor] = []
    edit = RollingCache(size=16, first=4)
    with intercept(adapt(made), edit=edit, observe=lambda layer: changed.append(layer.call.q_BHTD)):
        made(tokens())
    assert [q_BHTD.shape[-1] for q_BHTD in changed] == [8, 16, 8, 16]


def test_attention_flops_of_a_pattern_are_the_mean_over_its_layers() -> None:
    of = {name: model_flops(recipe(**changes).model).attention for name, changes in SIMPLE.items()}
    assert of["pattern"] == (of["causal"] + 3 * of["window"]) // 4


SIMPLE: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"attention": {"mask": WINDOW}},
    "pattern": {"attention": {"mask": WINDOW}, "pattern": {"every": 4, "mask": "causal"}},
}


def test_propositions_are_refused_for_models_whose_layers_differ() -> None:
    with pytest.raises(InputError, match="the same in every layer"):
        check_propositions(adapt(model(pattern={"every": 2, "position": "none"})), [5], length=64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pattern": {"every": 2}}, "pattern changes nothing: set the mask, bias or position of its layers"),
        (
            {"pattern": {"every": 6, "mask": "causal"}},
            "pattern begins at layer 6 and contains no attention layer",
        ),
        (
            {"pattern": {"every": 4, "first": 1, "mask": "causal"}, "mixer": "gated_delta"},
            "the layers with attention are 4",
        ),
        ({"pattern": {"every": 2, "bias": "sink_token"}}, "a sink token is part of the sequence in every layer"),
        (
            {"pattern": {"every": 2, "bias": "none"}, "attention": {"bias": "sink_token"}},
            "a sink token is part of the sequence in every layer",
        ),
        ({"pattern": {"every": 2, "position": "learnable"}}, "learnable positions are added to the token embeddings"),
        (
            {"pattern": {"every": 2, "position": "none"}, "position": "absolute"},
            "absolute positions are added to the token embeddings",
        ),
        (
            {"pattern": {"every": 2, "position": "alibi"}, "position": "t5"},
            "all layers share one relative position bias",
        ),
        (
            {"pattern": {"every": 2, "mask": {"kind": "document", "eos_id": 3}}, "attention": {"mask": "document"}},
            "pattern.mask.eos_id and attention.mask.eos_id differ",
        ),
        (
            {"pattern": {"every": 2, "bias": "sink_logit"}, "attention": {"operation": "identity"}},
            "pattern gives its layers an invalid config: bias sink_logit acts on logits",
        ),
        ({"position": {"kind": "rotary", "share": 0.3}}, "of the 8 channels of a key is 2.4, and rotary rotates pairs"),
        (
            {"position": {"kind": "rotary", "share": 0.5}, "projection": "latent"},
            "leave position.share out, and set projection.rope_width",
        ),
        (
            {"pattern": {"every": 2, "position": {"kind": "rotary", "share": 0.1}}},
            "pattern gives its layers an invalid config: position.share 0.1 of the 8 channels",
        ),
    ],
)
def test_invalid_patterns_are_refused_with_the_reason(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        recipe(**changes)
