"""Layers used several times in a forward pass, a sink logit per query, attention to layers, and selected key blocks."""

from typing import Any

import pytest
import torch
import transformers as hf
from closeness import assert_close
from measure_reference import eager_reference

import sinklab
from sinklab.errors import InputError

TOKENS = torch.arange(72).view(3, 24)
SMALL = dict[str, Any](
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    initializer_range=0.3,
)
MIXED = ["sliding_attention", "full_attention"] * 2
EXPERTS = {"num_experts_per_tok": 2, "n_routed_experts": 4, "moe_intermediate_size": 16}
INKLING = {
    **SMALL,
    **EXPERTS,
    "initializer_range": 0.1,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
}
LOOP = {"n_layers_per_attn_res_block": 1, "loop_layer_index_start": 1, "loop_layer_index_end": 3, "loop_num_passes": 3}
BLOCKS = {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "index_block_size": 4, "index_topk_blocks": 2}
MODELS = {
    "Dory": {**SMALL, "n_input_layers": 1, "n_output_layers": 1, "layer_types": MIXED, "sliding_window": 5},
    "Inkling2Text": INKLING,
    "Inkling2LoopText": INKLING | LOOP,
    "MiniMaxM3VLText": {**SMALL, **BLOCKS, "index_n_heads": 2, "index_head_dim": 8, "num_local_experts": 4},
}
USED = {"Dory": (6, "layers 2..3 are used 2 times"), "Inkling2LoopText": (8, "layers 2..3 are used 3 times")}


def small_model(name: str) -> Any:
    if not hasattr(hf, f"{name}Config"):
        pytest.skip(f"this version of transformers has no {name}")
    torch.manual_seed(0)
    config = getattr(hf, f"{name}Config")(**MODELS[name])
    return hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_importance_is_that_of_the_models_own_matrices(name: str) -> None:
    model = small_model(name)
    measured, reference = sinklab.measure(model, TOKENS), eager_reference(model, TOKENS)
    assert_close(measured.importance, reference.importance.mean(0))
    assert measured.loss == pytest.approx(reference.loss, rel=1e-4)
    layers, note = USED.get(name, (4, ""))
    assert len(measured.importance) == layers
    assert any(note in one for one in measured.notes) or not note
    assert (measured.hidden_norm is None) == (name != "MiniMaxM3VLText")


@pytest.mark.parametrize("name", ["Dory", "Inkling2LoopText"])
@torch.no_grad()
def test_a_looped_model_may_decode_with_a_cache(name: str) -> None:
    model = small_model(name)
    with sinklab.probe(model) as whole:
        model(TOKENS)
    with sinklab.probe(model) as cached:
        cache = model(TOKENS[:, :10], use_cache=True).cache
        for t in range(10, TOKENS.shape[1]):
            model(TOKENS[:, t : t + 1], cache=cache, use_cache=True)
    for one, other in zip(cached.layers, whole.layers, strict=True):
        assert_close(one.importance_BHT, other.importance_BHT)


@pytest.mark.parametrize("name", ["Inkling2Text", "Inkling2LoopText"])
@torch.no_grad()
def test_a_sink_logit_per_query_has_the_rest_of_each_row(name: str) -> None:
    model = small_model(name)
    for module in model.modules():
        if hasattr(module, "sink_proj"):
            module.sink_proj.weight.mul_(20)  # so that the shares differ between queries
    matrices = model(TOKENS, output_attentions=True, use_cache=False).attentions
    with sinklab.probe(model) as watch:
        model(TOKENS)
    for layer, matrix_BHTT in zip(watch.layers, matrices, strict=True):
        rest_BHT = 1 - matrix_BHTT.sum(-1)
        assert rest_BHT.std(-1).max() > 0.05
        assert layer.bias_BH is not None
        assert_close(layer.bias_BH, rest_BHT.mean(-1))


def test_gradients_of_looped_models_are_refused() -> None:
    with pytest.raises(InputError, match="uses layers several times in a forward pass: leave out the gradients"):
        sinklab.measure(small_model("Dory"), TOKENS, gradients=True)
