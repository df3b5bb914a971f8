"""Our attention and our model against modules of transformers, on shared random weights and inputs."""

from typing import Any

import pytest
import torch
from closeness import assert_close
from torch import Tensor, nn
from transformers import DiffLlamaConfig, Gemma2Config, GptOssConfig, LlamaConfig, MistralConfig, Qwen3Config
from transformers.models.diffllama.modeling_diffllama import DiffLlamaForCausalLM
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.mistral.modeling_mistral import MistralForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

from sinklab.attention.layer_call import AttentionCore
from sinklab.model.llama import llama_sizes, llama_weights
from sinklab.model.position import rotary_tables, rotate
from sinklab.model.transformer import Transformer
from sinklab.train.recipe import Recipe, build_recipe

H, G, T, D, E = 4, 2, 24, 8, 32
SIZES: dict[str, Any] = {"hidden_size": E, "num_attention_heads": H, "num_key_value_heads": G, "head_dim": D}
SMALL = {
    "model": {"layers": 2, "width": E, "heads": H, "kv_heads": G, "ffn_width": 48, "vocab_size": 97, "context": 32},
    "metric": {"length": 32},
}


def recipe(**model: object) -> Recipe:
    return build_recipe(SMALL, {"model": model})


def core(**attention: object) -> AttentionCore:
    config = recipe(attention=attention, position="none").model
    return AttentionCore(config.attention, G, D, heads=H)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def tokens() -> Tensor:
    return torch.randint(97, (2, T), generator=torch.Generator().manual_seed(0))


def causal() -> Tensor:
    return torch.full((T, T), float("-inf")).triu(1)[None, None]


def drawn(module: nn.Module, scale: float) -> nn.Module:
    """The module with all weights drawn at random, large enough for its non-linearities to matter."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, scale, generator=generator)
    return module.eval()


def through(module: nn.Module, ours: AttentionCore, x_BTE: Tensor) -> Tensor:
    """Our attention between the projections of a transformers module."""
    heads = (module.get_submodule(f"{name}_proj")(x_BTE).view(2, T, -1, D).transpose(1, 2) for name in ("q", "k", "v"))
    return module.get_submodule("o_proj")(ours(*heads).transpose(1, 2).reshape(2, T, H * D))


def test_rotary_agrees_with_llama() -> None:
    config = LlamaConfig(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    q, k = random(2, H, T, D), random(2, G, T, D)
    cos, sin = LlamaRotaryEmbedding(config)(q, torch.arange(T)[None])
    tables = rotary_tables(T, D, 500.0, torch.device("cpu"))
    for ours, theirs in zip(
        (rotate(q, *tables), rotate(k, *tables)), apply_rotary_pos_emb(q, k, cos, sin), strict=True
    ):
        assert_close(ours, theirs)


@pytest.mark.parametrize("width", [1, 5, 30])
def test_a_window_equals_mistrals_sliding_window(width: int) -> None:
    ours = Transformer(recipe(attention={"mask": {"kind": "window", "width": width}}).model, seed=3).eval()
    plain = Transformer(recipe().model, seed=3)
    arguments = llama_sizes(plain.config)
    arguments = {key: value for key, value in arguments.items() if key not in ("attention_bias", "mlp_bias")}
    config = MistralConfig(**arguments, sliding_window=width)
    config._attn_implementation = "eager"
    theirs = MistralForCausalLM(config).eval()
    theirs.load_state_dict(llama_weights(plain))
    with torch.no_grad():
        assert_close(ours(tokens()), theirs(tokens()).logits)


def test_qk_norm_equals_qwen3s() -> None:
    ours = Transformer(recipe(norm={"qk_norm": True}).model, seed=3).eval()
    plain = Transformer(recipe().model, seed=3)
    arguments = {
        key: value for key, value in llama_sizes(plain.config).items() if key not in ("attention_bias", "mlp_bias")
    }
    theirs = Qwen3ForCausalLM(Qwen3Config(**arguments, head_dim=D, attention_bias=False)).eval()
    weights = llama_weights(plain)
    with torch.no_grad():
        for i in range(2):
            for name in ("q_norm", "k_norm"):
                weight = ours.get_parameter(f"blocks.{i}.attention.{name}.weight")
                weight.copy_(1 + 0.3 * random(D))
                weights[f"model.layers.{i}.self_attn.{name}.weight"] = weight
        theirs.load_state_dict(weights)
        assert_close(ours(tokens()), theirs(tokens()).logits)


def test_softcap_equals_gemma_2s() -> None:
    config = Gemma2Config(**SIZES, query_pre_attn_scalar=D, attn_logit_softcapping=2.0, attention_dropout=0.0)
    config._attn_implementation = "eager"
    theirs, x = drawn(Gemma2Attention(config, layer_idx=1), 0.5), random(2, T, E)
    unrotated = (torch.ones(1, T, D), torch.zeros(1, T, D))
    with torch.no_grad():
        expected = theirs(x, position_embeddings=unrotated, attention_mask=causal())[0]
        assert_close(through(theirs, core(softcap=2.0), x), expected)
        assert not torch.allclose(through(theirs, core(), x), expected, rtol=1e-2, atol=1e-2)


def test_sink_logits_equal_those_of_gpt_oss() -> None:
    config = GptOssConfig(**SIZES, attention_dropout=0.0)
    config._attn_implementation = "eager"
    theirs, x, ours = drawn(GptOssAttention(config, layer_idx=1), 0.5), random(2, T, E), core(bias="sink_logit")
    unrotated = (torch.ones(1, T, D // 2), torch.zeros(1, T, D // 2))
    with torch.no_grad():
        ours.get_parameter("bias.logit").copy_(theirs.get_parameter("sinks"))
        expected = theirs(x, position_embeddings=unrotated, attention_mask=causal())[0]
        assert_close(through(theirs, ours, x), expected)
        assert not torch.allclose(through(theirs, core(), x), expected, rtol=1e-2, atol=1e-2)


def test_differential_attention_equals_diffllamas() -> None:
    """Compares whole models: heads are pairs of half-heads with separate rotations, and lambda depends on the depth."""
    ours = Transformer(recipe(layers=3, attention={"operation": {"kind": "differential"}}).model, seed=3).eval()
    plain = Transformer(recipe(layers=3).model)
    halves: dict[str, Any] = {"num_attention_heads": 2 * H, "num_key_value_heads": 2 * G, "head_dim": D // 2}
    theirs = DiffLlamaForCausalLM(DiffLlamaConfig(**(llama_sizes(plain.config) | halves))).eval()
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.mul_(4 if ".learned." in name or ".qkv." in name else 1)
        plain.load_state_dict({name: ours.get_parameter(name) for name in plain.state_dict()})
        weights = llama_weights(plain)
        for i in range(3):
            for name in ("q", "k", "v"):  # theirs have the first halves of all heads first
                heads = weights[f"model.layers.{i}.self_attn.{name}_proj.weight"].view(-1, 2, D // 2, E)
                weights[f"model.layers.{i}.self_attn.{name}_proj.weight"] = heads.transpose(0, 1).reshape(-1, E)
            for name in ("q1", "k1", "q2", "k2"):
                vector = ours.get_parameter(f"blocks.{i}.attention.core.learned.{name}")
                weights[f"model.layers.{i}.self_attn.lambda_{name}"] = vector
            ours.get_parameter(f"blocks.{i}.attention.core.learned.norm.weight").fill_(1)  # their norm has no weight
        theirs.load_state_dict(weights)
        expected = theirs(tokens()).logits
        torch.testing.assert_close(ours(tokens()), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
