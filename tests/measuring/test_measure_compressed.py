"""Keys that compress several tokens, and hidden states that are not one vector per token, as in DeepSeek-V4."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from closeness import assert_close
from families import LATENT, family_tokens
from measure_reference import eager_reference

import sinklab
from sinklab.errors import SinklabError
from sinklab.measuring.surgery import plan_ablation
from sinklab.models.adapter import adapt

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
TOKENS = torch.arange(72).view(3, 24)


def deepseek_v4(*layers: str) -> Any:
    """A random model with these layers, which compress 4 tokens (sparse) or 128 (heavy) into a key."""
    config = hf.DeepseekV4Config(
        vocab_size=128,
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=len(layers),
        num_attention_heads=4,
        head_dim=16,
        q_lora_rank=16,
        num_experts_per_tok=2,
        n_routed_experts=4,
        layer_types=list(layers),
        mlp_layer_types=["moe"] * len(layers),
        o_groups=2,
        o_lora_rank=8,
        index_n_heads=2,
        index_head_dim=16,
        index_topk=4,
        sliding_window=16,
        max_position_embeddings=512,
        hc_mult=2,
        partial_rotary_factor=0.5,
    )
    torch.manual_seed(0)
    return hf.AutoModelForCausalLM.from_config(config).eval()


@torch.no_grad()
def test_models_with_several_residual_streams_have_importance_and_no_norms() -> None:
    """Hyper-connections of DeepSeek-V4, AltUp of Gemma 3n."""
    for model in (deepseek_v4(SLIDING, SLIDING), gemma_3n()):
        found = sinklab.measure(model, TOKENS, details=True)
        model.set_attn_implementation("eager")
        reference = eager_reference(model, TOKENS)
        assert_close(found.importance, reference.importance.mean(0))
        assert found.loss == pytest.approx(reference.loss, rel=1e-5)
        assert found.hidden_norm is None
        assert any("several residual streams" in note for note in found.notes)


def test_changes_of_the_residual_stream_are_refused_if_there_are_several() -> None:
    with pytest.raises(SinklabError, match="several residual streams"):
        plan_ablation("zero_massive", adapt(gemma_3n()), TOKENS, 0)


def gemma_3n() -> Any:
    """A random model with four residual streams and shared keys."""
    config = hf.Gemma3nTextConfig(
        vocab_size=128,
        vocab_size_per_layer_input=128,
        hidden_size=32,
        hidden_size_per_layer_input=8,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_kv_shared_layers=2,
        laurel_rank=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=8,
        activation_sparsity_pattern=[0.0] * 4,
    )
    torch.manual_seed(0)
    return hf.AutoModelForCausalLM.from_config(config).eval()


def test_xlnet_whose_tokens_attend_to_all_others_is_refused() -> None:
    model = hf.XLNetLMHeadModel(hf.XLNetConfig(vocab_size=64, d_model=32, n_layer=2, n_head=4, d_inner=48)).eval()
    with pytest.raises(SinklabError, match="'xlnet' model is not causal"):
        sinklab.measure(model, family_tokens(), details=True)


@torch.no_grad()
def test_massive_activations_of_prophetnet_are_in_its_main_stream() -> None:
    config = hf.ProphetNetConfig(
        vocab_size=64,
        hidden_size=32,
        num_encoder_layers=4,
        num_decoder_layers=4,
        num_decoder_attention_heads=4,
        decoder_ffn_dim=48,
        max_position_embeddings=64,
        init_std=0.3,
    )
    torch.manual_seed(0)
    model, tokens = hf.ProphetNetForCausalLM(config).eval(), family_tokens()
    streams = model(tokens[:1], output_hidden_states=True).hidden_states
    measured = sinklab.measure(model, tokens, ablate=["zero_massive"])
    assert measured.massive_activations
    assert measured.ablations
    for one in [*measured.massive_activations, measured.ablations[0].largest_before]:
        assert one is not None
        assert one.value == pytest.approx(float(streams[one.layer][0, one.position - 1, one.dimension]), rel=1e-5)
        assert abs(one.value) == pytest.approx(float(streams[one.layer].abs().max()), rel=1e-5)


@torch.no_grad()
def test_blocks_with_two_attention_layers_are_found() -> None:
    config = hf.LongcatFlashConfig(**dict[str, Any](LATENT, num_hidden_layers=4, num_experts_per_tok=2, head_dim=4))
    torch.manual_seed(0)
    model, tokens = hf.AutoModelForCausalLM.from_config(config).eval(), family_tokens()
    measured = sinklab.measure(model, tokens)
    before, after, _ = model(tokens, output_hidden_states=True).hidden_states  # the last one is normalised
    assert measured.hidden_norm is not None
    assert (len(measured.importance), len(measured.hidden_norm)) == (4, 3)
    assert_close(measured.hidden_norm[:2], torch.stack([before, after]).norm(dim=-1).mean(1))
    assert not measured.notes


@pytest.mark.parametrize("use_cache", [True, False])
def test_keys_that_compress_several_tokens_are_refused_with_their_layer(use_cache: bool) -> None:
    model = deepseek_v4(SLIDING, SPARSE)
    with (
        pytest.raises(
            SinklabError, match=r"layer 2 of this 'deepseek_v4' model has 30 keys for 24 tokens: .*compressed"
        ),
        sinklab.probe(model),
    ):
        model(TOKENS, use_cache=use_cache)


def test_a_cache_filled_before_the_probe_is_not_reported_as_compressed_keys() -> None:
    config = hf.LlamaConfig(
        vocab_size=128, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    cache = model(TOKENS[:, :8], use_cache=True).past_key_values
    with pytest.raises(SinklabError, match="start the probe before the first call"), sinklab.probe(model):
        model(TOKENS[:, 8:], past_key_values=cache)


@pytest.mark.parametrize("family", ["blt", "musicgen_decoder"])
def test_models_with_several_stacks_or_several_tokens_per_position_are_refused(family: str) -> None:
    part = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 32}
    inner = {"vocab_size": 64, "hidden_size_global": 32, **part}
    made: dict[str, Callable[[], Any]] = {
        "blt": lambda: hf.BltForCausalLM(
            hf.BltConfig(
                vocab_size=64,
                encoder_hash_byte_group_vocab=8,
                encoder_hash_byte_group_size=[3],
                patcher_config={"vocab_size": 64, **part},
                encoder_config=inner,
                decoder_config=inner,
                global_config=part,
            )
        ),
        "musicgen_decoder": lambda: hf.MusicgenForCausalLM(
            hf.MusicgenDecoderConfig(
                vocab_size=64, hidden_size=32, ffn_dim=32, num_hidden_layers=1, num_attention_heads=4
            )
        ),
    }
    with pytest.raises(SinklabError, match=f"several stacks of layers .* several tokens per position .*'{family}'"):
        sinklab.measure(made[family](), torch.ones(1, 8, dtype=torch.long))
