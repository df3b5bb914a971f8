"""Models in which not every layer has attention: the notes count the others and say that they see hidden keys."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from closeness import assert_close
from families import FAMILIES, GROUPED, family_tokens, pair_of
from hidden_keys_reference import scores_without_first_keys
from measure_reference import eager_reference
from own_models import own_tokens

from sinklab.errors import SinklabError
from sinklab.model.config import ModelConfig
from sinklab.model.transformer import Transformer
from sinklab.survey.api import measure

THREE: dict[str, Any] = GROUPED | {"num_hidden_layers": 3}
FOUR: dict[str, Any] = GROUPED | {"num_hidden_layers": 4}
LATENT: dict[str, Any] = FOUR | {"num_key_value_heads": 4}
MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_state": 4, "mamba_n_groups": 1, "mamba_chunk_size": 8}
SINKS = hf.MiMoV2FlashConfig(
    **THREE | {"head_dim": 16, "v_head_dim": 8, "num_key_value_heads": 2},
    sliding_window=4,
    layer_types=["full_attention", "sliding_attention", "full_attention"],
    mlp_layer_types=["dense"] * 3,
)
HYBRIDS: dict[str, Any] = {
    "jamba": FAMILIES["jamba, one attention layer of two"],
    "qwen3-next": lambda: hf.Qwen3NextConfig(
        **FOUR,
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
    "lfm2": lambda: hf.Lfm2Config(**FOUR, layer_types=["conv", "full_attention"] * 2),
    "nemotron-h": lambda: hf.NemotronHConfig(
        **THREE,
        layers_block_type=["linear_attention", "mlp", "full_attention"],
        mamba_num_heads=4,
        mamba_head_dim=8,
        ssm_state_size=4,
        n_groups=1,
        chunk_size=8,
    ),
    "kimi-linear": lambda: hf.KimiLinearConfig(
        **LATENT,
        layer_types=[*["linear_attention"] * 3, "full_attention"],
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        linear_head_dim=8,
        linear_num_heads=4,
        num_local_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
    ),
    "falcon-h1": lambda: hf.FalconH1Config(**GROUPED, **MAMBA, mamba_d_ssm=32, mamba_d_head=8),
}
COUNTED = {
    "jamba": ("1 of 2 layers has attention (2), here layer 1", "linear or recurrent"),
    "qwen3-next": ("1 of 4 layers has attention (4), here layer 1", "linear or recurrent"),
    "kimi-linear": ("1 of 4 layers has attention (4), here layer 1", "linear or recurrent"),
    "lfm2": ("2 of 4 layers have attention (2, 4), here layers 1 to 2", "linear or recurrent"),
    "nemotron-h": ("1 of 3 layers has attention (3), here layer 1", "linear, recurrent or feed-forward"),
}
CARRYING = {
    "jamba": "layer 1",
    "qwen3-next": "layers 1..3",
    "kimi-linear": "layers 1..3",
    "lfm2": "layers 1, 3",
    "nemotron-h": "layer 1",
    "falcon-h1": "all layers",
}


HIDING: list[dict[str, Any]] = [{"ablate": ["mask_first:1"]}, {"perturb": 4}]


def hybrid(name: str) -> Any:
    torch.manual_seed(0)
    return hf.AutoModelForCausalLM.from_config(HYBRIDS[name](), attn_implementation="eager").eval()


def own_hybrid(every: int) -> Transformer:
    config = {"layers": 4, "width": 32, "heads": 4, "ffn_width": 48, "vocab_size": 32, "context": 16}
    mixer = {"kind": "gated_delta", "every": every}
    return Transformer(ModelConfig.model_validate({**config, "mixer": mixer}), seed=3)


@pytest.mark.parametrize("name", HYBRIDS)
def test_layers_without_attention_are_counted_and_those_with_it_numbered(name: str) -> None:
    measured = measure(hybrid(name), family_tokens())
    expected = (
        []
        if name not in COUNTED
        else ["{}; the others are {} and not included in the sink rate".format(*COUNTED[name])]
    )
    assert measured.notes == expected
    assert measured.layers == len(eager_reference(hybrid(name), family_tokens()).importance[0])


@pytest.mark.parametrize(("every", "said"), [(2, "2 of 4 layers have attention (2, 4)"), (4, "1 of 4 layers has")])
def test_layers_without_attention_of_our_own_hybrids_are_counted(every: int, said: str) -> None:
    [note] = measure(own_hybrid(every), own_tokens()).notes
    assert note.startswith(said)
    assert note.endswith("the others are linear or recurrent and not included in the sink rate")


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("asked", HIDING)
def test_a_note_says_which_layers_still_see_keys_that_are_hidden_from_attention(
    name: str, asked: dict[str, Any]
) -> None:
    notes = measure(hybrid(name), family_tokens(), **asked).notes
    assert any(f"the linear or recurrent part of {CARRYING[name]} still sees them" in note for note in notes)


def test_only_hybrids_have_the_note_on_layers_that_still_see_hidden_keys() -> None:
    for asked in HIDING:
        found = measure(own_hybrid(2), own_tokens(), **asked)
        assert any("layers 1, 3 still sees" in note for note in found.notes)
        assert measure(pair_of("llama")[0], family_tokens(), **asked).notes == []
    assert "still sees" not in str(measure(own_hybrid(2), own_tokens(), bos=True, ablate=["no_bos"]).notes)


@pytest.mark.parametrize("name", HYBRIDS)
def test_the_first_keys_are_hidden_in_the_attention_of_hybrids(name: str) -> None:
    model, tokens = hybrid(name), family_tokens()
    with scores_without_first_keys(2, tokens.shape[1]):
        logits = eager_reference(model, tokens).logits
    nats = -logits.log_softmax(-1)[:, 2:-1].gather(2, tokens[:, 3:, None])
    [ablation] = measure(model, tokens, ablate=["mask_first:2"]).ablations or []
    assert_close(ablation.loss_after, nats.mean())


def test_nan_is_located_by_the_number_of_the_attention_layer_or_of_the_block() -> None:
    for place, said in (
        ("qkv", r"importance values .* in attention layer 2,"),
        ("out", "hidden states .* in layer 4,"),
    ):
        model: Any = own_hybrid(2)
        with torch.no_grad():
            getattr(model.blocks[3].attention, place).weight.fill_(torch.nan)
        with pytest.raises(SinklabError, match=said):
            measure(model, own_tokens())


def test_the_attention_to_a_bias_is_nan_in_layers_without_one() -> None:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(SINKS, attn_implementation="eager").eval()
    tokens = family_tokens()
    found = measure(model, tokens).importance_bias
    assert found is not None
    assert np.isnan(found).all(1).tolist() == [True, False, True]
    with torch.no_grad():
        weights_BHTT = model(tokens, output_attentions=True).attentions[1]
    np.testing.assert_allclose(found[1], (1 - weights_BHTT.sum(-1)).mean((0, 2)), rtol=1e-4)
