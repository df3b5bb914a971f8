"""Multi-head latent attention: equality with DeepSeek's modules, refused combinations, initialisation, hashes."""

import math
import re
from typing import Any

import pytest
import torch
from closeness import assert_close
from torch import Tensor, nn
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3ForCausalLM

from sinklab.attention.config import examples_of
from sinklab.errors import InputError
from sinklab.model.llama import differences
from sinklab.model.transformer import Transformer
from sinklab.model.values import LatentHeads
from sinklab.survey.api import measure
from sinklab.train.recipe import build_recipe

E, H, T, ROPE, THETA = 32, 4, 24, 4, 10000.0
SIZES = {"layers": 2, "width": E, "heads": H, "ffn_width": 48, "vocab_size": 97, "context": 32, "norm": {"eps": 1e-6}}
WIDTHS = {"kv_rank": 12, "nope_width": 6, "rope_width": ROPE, "value_width": 10}


def model(q_rank: int | None = None, **parts: object) -> Transformer:
    """A float64 model with enlarged weights."""
    projection = {"kind": "latent", **WIDTHS, "q_rank": q_rank}
    recipe = build_recipe({"model": {**SIZES, "projection": projection, **parts}, "metric": {"length": 32}})
    made = Transformer(recipe.model, seed=3).double().eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.add_(0.2 * torch.randn_like(parameter)) if name.endswith("norm.weight") else parameter.mul_(2)
    return made


def tokens() -> Tensor:
    return torch.randint(97, (2, T), generator=torch.Generator().manual_seed(0))


def interleaved(rows: Tensor) -> Tensor:
    """Reorder the rows of a rotated part: DeepSeek's pairs are neighbours, ours half a width apart."""
    return torch.stack(rows.chunk(2), dim=1).flatten(0, 1)


def their_weights(ours: Transformer) -> dict[str, Tensor]:
    weights = {
        "model.embed_tokens.weight": ours.embedding.weight,
        "model.norm.weight": ours.get_parameter("final_norm.weight"),
        "lm_head.weight": ours.head.weight,
    }
    for i in range(2):
        of = dict(ours.get_submodule(f"blocks.{i}").named_parameters())
        by_head = of["attention.latent.q_up.weight"].unflatten(0, (H, -1))
        q = torch.cat([torch.cat((head[:-ROPE], interleaved(head[-ROPE:]))) for head in by_head])
        down = of["attention.latent.kv_down.weight"]
        gate, up = of["ffn.up.weight"].chunk(2)
        theirs = {
            "input_layernorm": of["attention_norm.weight"],
            "post_attention_layernorm": of["ffn_norm.weight"],
            "self_attn.kv_a_proj_with_mqa": torch.cat((down[:-ROPE], interleaved(down[-ROPE:]))),
            "self_attn.kv_a_layernorm": of["attention.latent.kv_norm.weight"],
            "self_attn.kv_b_proj": of["attention.latent.kv_up.weight"],
            "self_attn.o_proj": of["attention.out.weight"],
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": of["ffn.down.weight"],
        }
        if "attention.latent.q_down.weight" in of:
            theirs |= {
                "self_attn.q_a_proj": of["attention.latent.q_down.weight"],
                "self_attn.q_a_layernorm": of["attention.latent.q_norm.weight"],
                "self_attn.q_b_proj": q,
            }
        else:
            theirs["self_attn.q_proj"] = q
        weights |= {f"model.layers.{i}.{name}.weight": weight for name, weight in theirs.items()}
    return {name: weight.detach() for name, weight in weights.items()}


def arguments(q_rank: int | None) -> dict[str, Any]:
    return {
        "vocab_size": 97, "hidden_size": E, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": H, "num_key_value_heads": H, "first_k_dense_replace": 2, "kv_lora_rank": 12,
        "q_lora_rank": q_rank, "qk_nope_head_dim": 6, "qk_rope_head_dim": ROPE, "v_head_dim": 10,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA}, "attn_implementation": "sdpa",
    }  # fmt: skip


class Table(nn.Module):
    """DeepSeek's rotary table in float64, which transformers rounds to float32."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        frequency = THETA ** (-torch.arange(0, ROPE, 2, dtype=torch.float64) / ROPE)
        angle = (position_ids[..., None].double() * frequency).repeat(1, 1, 2)
        return angle.cos(), angle.sin()


@pytest.mark.parametrize("q_rank", [None, 14])
@torch.no_grad()
def test_a_whole_model_equals_deepseek_v3_in_float64(q_rank: int | None) -> None:
    ours = model(q_rank)
    theirs = DeepseekV3ForCausalLM(DeepseekV3Config(**arguments(q_rank))).double().eval()
    theirs.load_state_dict(their_weights(ours))
    for name, module in list(theirs.named_modules()):
        if type(module).__name__ == "DeepseekV3RMSNorm":  # which rounds to float32
            exact = nn.RMSNorm(len(module.get_parameter("weight")), eps=1e-6, dtype=torch.float64)
            exact.weight.copy_(module.get_parameter("weight"))
            theirs.set_submodule(name, exact)
    theirs.set_submodule("model.rotary_emb", Table())
    assert_close(ours(tokens()), theirs(tokens()).logits, tolerance=1e-12)


@pytest.mark.parametrize("q_rank", [None, 14])
@torch.no_grad()
def test_a_whole_model_equals_deepseek_v2(q_rank: int | None) -> None:
    ours = model(q_rank)
    theirs = DeepseekV2ForCausalLM(DeepseekV2Config(**arguments(q_rank))).double().eval()
    theirs.load_state_dict(their_weights(ours))
    assert_close(ours(tokens()), theirs(tokens()).logits)  # they round norms and angles to float32


@torch.no_grad()
def test_a_measurement_equals_that_of_the_same_model_in_transformers() -> None:
    ours = model().float()
    theirs = DeepseekV3ForCausalLM(DeepseekV3Config(**arguments(None))).eval()
    theirs.load_state_dict(their_weights(ours))
    own, other = measure(ours, tokens()), measure(theirs, tokens())
    assert_close(own.importance, other.importance)
    assert other.hidden_norm is not None
    assert other.value_norm is not None
    assert other.key_norm is not None
    assert_close(own.hidden_norm, other.hidden_norm)
    assert_close(own.value_norm, other.value_norm)
    assert_close(own.key_norm, other.key_norm)


@pytest.mark.parametrize("name", sorted(name for name in examples_of("operation") if "differential" not in name))
def test_every_operation_with_one_query_per_head_trains_with_the_widths_of_latent_queries_and_values(name: str) -> None:
    projection = {"kind": "latent", "nope_width": 5, "rope_width": 4, "value_width": 6}
    changes = {**SIZES, "projection": projection, "attention": {"operation": examples_of("operation")[name].values}}
    made = Transformer(build_recipe({"model": changes, "metric": {"length": 32}}).model)
    made.loss(tokens()).backward()
    assert all(x.grad is not None for key, x in made.named_parameters() if "learned" in key)


def test_default_widths_have_the_papers_ratio_to_the_head_width() -> None:
    heads = Transformer(build_recipe({"model": {**SIZES, "projection": "latent"}, "metric": {"length": 32}}).model)
    latent = heads.get_submodule("blocks.0.attention.latent")
    assert isinstance(latent, LatentHeads)
    d = E // H
    assert latent.kv_down.weight.shape == (4 * d + d // 2, E)
    assert latent.kv_up.weight.shape == (H * 2 * d, 4 * d)
    assert latent.q_up.weight.shape == (H * (d + d // 2), E)


def test_latent_matrices_start_by_the_declared_laws_and_norms_as_one() -> None:
    wide = {**SIZES, "width": 512, "projection": {"kind": "latent", "q_rank": 96}}
    made = Transformer(build_recipe({"model": wide, "metric": {"length": 32}}).model, seed=1)
    for name, d_in in (("q_down", 512), ("q_up", 96), ("kv_down", 512), ("kv_up", 512)):
        weight = made.get_parameter(f"blocks.0.attention.latent.{name}.weight")
        assert weight.shape[1] == d_in
        assert weight.std().item() == pytest.approx(math.sqrt(2 / (5 * d_in)), rel=0.02)
    for name in ("q_norm", "kv_norm"):
        assert (made.get_parameter(f"blocks.0.attention.latent.{name}.weight") == 1).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_heads": 2}, "projection latent has separate keys and values for every head"),
        ({"norm": {"qk_norm": True}}, "normalises its latents instead of each head's key"),
        ({"attention": {"operation": "differential"}}, "one query and key per head, but operation differential needs"),
        (
            {"attention": {"operation": "differential_v2"}},
            "per head, but operation differential_v2 needs two",
        ),
        ({"projection": {"kind": "latent", "rope_width": 3}}, "an even projection.rope_width, not 3"),
    ],
)
def test_combinations_that_latent_attention_does_not_support_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        build_recipe({"model": {**SIZES, "projection": "latent"}, "metric": {"length": 32}}, {"model": changes})


def test_latent_attention_is_listed_as_a_difference_from_llama() -> None:
    assert "model.projection is latent" in differences(model().config)["projection"]
