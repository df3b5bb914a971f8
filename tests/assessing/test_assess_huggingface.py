"""The adapter of Hugging Face models: logits, kinds of positions, rolling caches, and models that it refuses."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from assessed import some_tokens
from closeness import assert_close
from exported_models import shaken_run, tokenizer_in
from exported_models import some_tokens as exported_tokens
from families import GROUPED, LATENT, SMALL
from foreign_streaming_reference import streamed_llama
from streaming_reference import first_and_recent

from sinklab.assessing.cache_policies import EVICTION, KeyBudget, policies_of
from sinklab.assessing.parts.streaming import RollingCache
from sinklab.assessing.reading import PairedReader, changed_attention
from sinklab.export.directory import write_directory
from sinklab.models.adapter import NativeAdapter
from sinklab.models.hooks import evaluating
from sinklab.models.huggingface.pretrained_adapter import HuggingFaceAdapter

CONFIGS: dict[str, Any] = {
    "llama": lambda: hf.LlamaConfig(**GROUPED),
    "gpt2": lambda: hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3),
    "pythia": lambda: hf.GPTNeoXConfig(**SMALL),
    "qwen3": lambda: hf.Qwen3Config(**GROUPED),
    "gemma2": lambda: hf.Gemma2Config(**GROUPED, attn_logit_softcapping=5.0, final_logit_softcapping=3.0),
    "gemma3": lambda: hf.Gemma3TextConfig(**GROUPED, sliding_window=5, query_pre_attn_scalar=8),
    "mistral, window 5": lambda: hf.MistralConfig(**GROUPED, sliding_window=5),
    "gpt-oss": lambda: hf.GptOssConfig(**GROUPED, num_local_experts=2, num_experts_per_tok=1),
}


def made(name: str) -> Any:
    torch.manual_seed(3)
    model = hf.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    return model if name == "gpt-oss" else model.double()  # its experts are in float32 at most


@pytest.mark.parametrize("name", CONFIGS)
def test_the_adapter_reproduces_the_logits_of_a_model_and_restores_it(name: str) -> None:
    model, tokens = made(name), some_tokens(vocabulary=64)
    one = HuggingFaceAdapter(model)
    with evaluating(model):
        expected = model(tokens).logits
        with changed_attention(one):
            hidden = one.hidden(tokens)
        assert_close(one.logits(hidden.flatten(0, 1)), expected.flatten(0, 1), 1e-5)
        assert_close(model(tokens).logits, expected, 1e-6)  # the model is restored


def test_streaming_a_llama_in_one_pass_equals_reading_token_by_token() -> None:
    model, tokens = made("llama"), some_tokens(1, vocabulary=64)
    one = HuggingFaceAdapter(model)
    assert one.fixed_positions() is None
    for first in (0, 2):
        with evaluating(model), changed_attention(one, RollingCache(6, first)):
            found = one.hidden(tokens)[0]
        assert_close(found, streamed_llama(model, tokens[0], first_and_recent(6, first)), 1e-5)


@pytest.mark.parametrize("name", ["llama", "pythia", "qwen3"])
def test_models_with_one_rotary_embedding_allow_positions_in_the_cache(name: str) -> None:
    assert HuggingFaceAdapter(made(name)).fixed_positions() is None


def test_positions_of_two_rotary_embeddings_are_fixed() -> None:
    assert HuggingFaceAdapter(made("gemma3")).fixed_positions() == "its layers have no common rotary embedding"


def test_an_export_with_layers_without_positions_streams_like_its_run(tmp_path: Path) -> None:
    tokenizer_in(tmp_path)
    run = shaken_run("pattern_nope", tmp_path / "tokenizer.json", layers=3)
    write_directory(run, [], tmp_path / "one")
    exported = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    assert type(exported).__name__ == "SmolLM3ForCausalLM"
    theirs, tokens = HuggingFaceAdapter(exported), exported_tokens(length=20)
    assert theirs.fixed_positions() is None
    found = []
    for one in (theirs, NativeAdapter(run.model)):
        with evaluating(one.module), changed_attention(one, RollingCache(6, 2)):
            found.append(one.hidden(tokens))
    assert_close(found[0], found[1], 1e-5)


def test_positions_are_fixed_if_each_layer_has_its_own_rotary_base() -> None:
    config = hf.GraniteSWAConfig(**GROUPED, layer_rope_theta=[1e4, 10.0], attention_multiplier=0.3)
    torch.manual_seed(3)
    one = HuggingFaceAdapter(hf.AutoModelForCausalLM.from_config(config).double())
    assert one.fixed_positions() == "its rotary embedding could not be reproduced in every layer"


def test_positions_of_complex_rotary_embeddings_are_fixed() -> None:
    one = HuggingFaceAdapter(hf.AutoModelForCausalLM.from_config(hf.DeepseekV2Config(**LATENT)))
    assert one.inseparable() is None
    assert one.fixed_positions() == "its rotary embedding could not be reproduced in every layer"


def test_learned_positions_are_fixed_and_limit_the_length() -> None:
    one = HuggingFaceAdapter(made("gpt2"))
    assert one.fixed_positions() is not None
    assert one.ends == "its learned positional embeddings end at 64"


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_cache_as_long_as_the_text_does_not_change_the_loss(name: str) -> None:
    reader = PairedReader(HuggingFaceAdapter(made(name)), some_tokens(vocabulary=64))
    before = reader.unchanged.effect()
    evictions = [partial(policy.evict, size=KeyBudget(20)) for policy in policies_of(EVICTION)]
    for edit in (RollingCache(20, 0), RollingCache(20, 3, in_cache=False), *evictions):
        assert reader.under(edit).effect().loss == pytest.approx(before.loss, rel=1e-5)


def test_a_model_that_ignores_the_attention_interface_is_inseparable() -> None:
    config = hf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)
    why = HuggingFaceAdapter(hf.AutoModelForCausalLM.from_config(config)).inseparable()
    assert why is not None
    assert "cannot be replaced" in why


@pytest.mark.parametrize(("dtype", "relative", "separable"), [
    (torch.bfloat16, 0.02, True), (torch.bfloat16, 0.1, False), (torch.float32, 0.02, False),
])  # fmt: skip
def test_the_logits_of_intercepted_calls_may_differ_by_the_rounding_of_the_dtype(
    dtype: torch.dtype, relative: float, separable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = HuggingFaceAdapter(made("llama").to(dtype))
    exact = adapter.logits

    def rounded(hidden_RE: torch.Tensor) -> torch.Tensor:
        logits_RV = exact(hidden_RE).float()
        logits_RV.view(-1)[logits_RV.abs().argmax()] *= 1 + relative
        return logits_RV

    monkeypatch.setattr(adapter, "logits", rounded)
    assert (adapter.inseparable() is None) == separable
