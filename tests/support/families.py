"""Small random models of many families, in transformers' own classes, and tokens for them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers as hf
from transformers.models.falcon import modeling_falcon as falcon

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # sharp attention, so that some alphas lie above eps
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


GROUPED: dict[str, Any] = SMALL | {"num_key_value_heads": 2, "head_dim": 8}


LATENT: dict[str, Any] = SMALL | {  # multi-head latent attention, with experts after the first layer
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
}


MULTI_QUERY: dict[str, Any] = GROUPED | {"num_key_value_heads": 1}


LENGTH = 14


IGNORING: dict[str, Any] = {  # they do not call transformers' attention interface
    "falcon": lambda: hf.FalconConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.3,
    ),
    "falcon, alibi": lambda: hf.FalconConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True, initializer_range=0.3
    ),
    "bloom": lambda: hf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3),
    "mpt": lambda: hf.MptConfig(
        vocab_size=64, d_model=32, n_layers=2, n_heads=4, max_seq_len=64, initializer_range=0.3
    ),
    "gpt-neo, window 5": lambda: hf.GPTNeoConfig(
        vocab_size=64,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        max_position_embeddings=64,
        attention_types=[[["global", "local"], 1]],
        window_size=5,
        initializer_range=0.3,
    ),
}
GPTJ: dict[str, Any] = {
    "gptj": lambda: hf.GPTJConfig(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4, initializer_range=0.3
    )
}
if not hf.GPTJModel._supports_attention_backend:  # before transformers 5.24
    IGNORING |= GPTJ


FAMILIES: dict[str, Any] = {
    "llama": lambda: hf.LlamaConfig(**GROUPED),
    "llama multi-query": lambda: hf.LlamaConfig(**MULTI_QUERY),
    "gpt2": lambda: hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3),
    "gpt-neox": lambda: hf.GPTNeoXConfig(**SMALL),
    "opt": lambda: hf.OPTConfig(
        vocab_size=64,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
        init_std=0.3,
    ),
    "mistral, window 5": lambda: hf.MistralConfig(**GROUPED, sliding_window=5),
    "qwen3": lambda: hf.Qwen3Config(**GROUPED),
    "gemma2, softcap and window 5": lambda: hf.Gemma2Config(
        **GROUPED, sliding_window=5, attn_logit_softcapping=3.0, query_pre_attn_scalar=8
    ),
    "gpt-oss, sinks and window 5": lambda: hf.GptOssConfig(
        **GROUPED, num_local_experts=2, num_experts_per_tok=1, sliding_window=5
    ),
    "gemma3, window 5": lambda: hf.Gemma3TextConfig(**GROUPED, sliding_window=5, query_pre_attn_scalar=8),
    "phi3": lambda: hf.Phi3Config(**SMALL, num_key_value_heads=2),
    "deepseek-v3, other value width": lambda: hf.DeepseekV3Config(**LATENT),
    "jamba, one attention layer of two": lambda: hf.JambaConfig(
        **SMALL,
        num_key_value_heads=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=2,
        num_experts_per_tok=1,
        use_mamba_kernels=False,
        mamba_d_state=4,
        mamba_d_conv=2,
        mamba_dt_rank=4,
    ),
    "olmo2": lambda: hf.Olmo2Config(**SMALL, num_key_value_heads=2),
    "stablelm, parallel blocks": lambda: hf.StableLmConfig(**SMALL, num_key_value_heads=2, use_parallel_residual=True),
    "cohere": lambda: hf.CohereConfig(**SMALL, num_key_value_heads=2),
    **IGNORING,
    **GPTJ,
}

COUNTING: dict[str, Any] = {  # positions do not follow the mask: they begin at 3, and at the first column
    "roberta": lambda: hf.RobertaConfig(**dict[str, Any](SMALL, pad_token_id=2, is_decoder=True)),
    "bart": lambda: hf.BartConfig(
        vocab_size=64,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=48,
        max_position_embeddings=64,
        init_std=0.3,
    ),
}

TEN_FAMILIES = [
    "llama",
    "gpt2",
    "mistral, window 5",
    "gemma2, softcap and window 5",
    "gpt-oss, sinks and window 5",
    "deepseek-v3, other value width",
    "opt",
    "gpt-neox",
    "olmo2",
    "bloom",
]
"""Some of each kind, where all would take long."""


def pair_of(family: str) -> tuple[Any, Any]:
    """The same random weights behind the default attention and behind eager attention."""
    torch.manual_seed(0)
    # The fused attention that older transformers give Gemma 2 leaves out its soft cap.
    own = "eager" if family.startswith("gemma2") else None
    config = (FAMILIES | COUNTING)[family]
    model = hf.AutoModelForCausalLM.from_config(config(), attn_implementation=own).eval()
    eager = hf.AutoModelForCausalLM.from_config(config(), attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_(1.5, 2.0)
    eager.load_state_dict(model.state_dict())
    return model, eager


@contextmanager
def alibi_once(family: str) -> Iterator[None]:
    """Halve Falcon's ALiBi, which its eager attention adds twice and its default attention once."""
    with pytest.MonkeyPatch.context() as patch:
        if family == "falcon, alibi":
            whole = falcon.build_alibi_tensor
            patch.setattr(falcon, "build_alibi_tensor", lambda *given, **named: whole(*given, **named) / 2)
        yield


def family_tokens() -> torch.Tensor:
    return torch.randint(3, 64, (5, LENGTH), generator=torch.Generator().manual_seed(1))


def hooks_on(model: torch.nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
