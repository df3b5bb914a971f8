"""Attention functions of users: those that compute softmax attention are measured, all others are refused by name, and
a probe changes no forward pass."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from families import family_tokens
from measure_reference import importance_by_loops
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.models.llama import modeling_llama

import sinklab
from sinklab.errors import SinklabError
from sinklab.models.adapter import adapt
from sinklab.models.hooks import intercept
from sinklab.models.huggingface.interface import foreign_attention

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}
TOKENS = family_tokens()
NAME = "mine"
Weights = Callable[[Any, Tensor], Tensor]  # (attention module, masked scores) -> weights


def llama(implementation: str = "sdpa", **options: Any) -> Any:
    torch.manual_seed(0)
    config = hf.LlamaConfig(**SIZES | options)
    return hf.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()


def written_out(weights: Weights) -> Any:
    """Attention as users write it, with explicit weights and an additive mask."""

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, **_: Any) -> Any:
        k, v = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (k, v))
        scores = q @ k.mT * scaling
        scores = scores if mask is None else scores + mask
        weights_BHTS = weights(module, scores)
        return (weights_BHTS @ v).transpose(1, 2).contiguous(), weights_BHTS

    return attention


def softmax(_: Any, z: Tensor) -> Tensor:
    return z.softmax(-1)


def shifted(_: Any, z: Tensor) -> Tensor:
    return torch.cat((z[..., :1] + 10, z[..., 1:]), -1).softmax(-1)


def scaled(_: Any, z: Tensor) -> Tensor:
    return (1.05 * z).softmax(-1)


def sigmoid(_: Any, z: Tensor) -> Tensor:
    return z.sigmoid()


def relu(_: Any, z: Tensor) -> Tensor:
    return z.relu() / (z.relu().sum(-1, keepdim=True) + 1e-6)


def with_sink_logits(_: Any, z: Tensor) -> Tensor:
    return torch.cat((z, torch.zeros_like(z[..., :1])), -1).softmax(-1)[..., :-1]


def softcapped(_: Any, z: Tensor) -> Tensor:
    return (2 * torch.tanh(z / 2)).where(z > -1e4, z).softmax(-1)


def windowed(_: Any, z: Tensor) -> Tensor:
    return z.masked_fill(torch.ones_like(z, dtype=torch.bool).tril(z.shape[-1] - z.shape[-2] - 5), -1e9).softmax(-1)


def one_head_dropped(_: Any, z: Tensor) -> Tensor:
    return z.softmax(-1) * torch.tensor([1.0, 1, 1, 0]).view(-1, 1, 1)


def of_the_last_layer_dropped(module: Any, z: Tensor) -> Tensor:
    return z.softmax(-1) * float(module.layer_idx < 2)


def with_temperature(module: Any, z: Tensor) -> Tensor:
    return (z * module.temperature).softmax(-1)


def value_gated(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
    return sdpa_attention_forward(module, q, k, v * v.sigmoid(), mask, **options)


def ignoring_the_mask(module: Any, q: Tensor, k: Tensor, v: Tensor, _: Any, **options: Any) -> Any:
    return sdpa_attention_forward(module, q, k, v, None, **options)


def wrapped(*args: Any, **options: Any) -> Any:
    return sdpa_attention_forward(*args, **options)


@functools.wraps(sdpa_attention_forward)
def named_as_that_of_transformers(module: Any, q: Tensor, *args: Any, **options: Any) -> Any:
    return sdpa_attention_forward(module, 3 * q, *args, **options)


ACCEPTED = {
    "a wrapper of sdpa": (wrapped, sdpa_mask),
    "a wrapper of sdpa without a mask function": (wrapped, None),
    "softmax": (written_out(softmax), eager_mask),
    "a partial": (functools.partial(wrapped), sdpa_mask),
}
REFUSED = {
    "shifted": written_out(shifted),
    "scaled": written_out(scaled),
    "sigmoid": written_out(sigmoid),
    "relu": written_out(relu),
    "with sink logits": written_out(with_sink_logits),
    "softcapped": written_out(softcapped),
    "windowed": written_out(windowed),
    "one head dropped": written_out(one_head_dropped),
    "last layer dropped": written_out(of_the_last_layer_dropped),
    "value gated": value_gated,
    "wraps": named_as_that_of_transformers,
}


@pytest.fixture(autouse=True)
def _registries(monkeypatch: pytest.MonkeyPatch) -> None:
    for interface in (AttentionInterface, AttentionMaskInterface):
        monkeypatch.setattr(interface, "_global_mapping", dict(interface._global_mapping))


def registered(function: Any, mask: Any, name: str = NAME) -> list[int]:
    """Register a function that counts its calls by layer."""
    calls: list[int] = []

    def counted(module: Any, *args: Any, **options: Any) -> Any:
        calls.append(module.layer_idx)
        return function(module, *args, **options)

    AttentionInterface.register(name, counted)
    if mask is not None:
        AttentionMaskInterface.register(name, mask)
    return calls


def with_function(function: Any, mask: Any = eager_mask, **options: Any) -> tuple[Any, list[int]]:
    model, calls = llama(**options), registered(function, mask)
    model.set_attn_implementation(NAME)
    return model, calls


@torch.no_grad()
def matrices_importance(model: Any) -> Tensor:
    """alpha (sequences, layers, heads, positions) from the matrices of transformers' eager attention."""
    model.set_attn_implementation("eager")
    rows = [model(tokens[None], output_attentions=True, use_cache=False).attentions for tokens in TOKENS]
    return torch.stack([importance_by_loops(torch.cat(attention)) for attention in rows])


@pytest.mark.parametrize("name", ACCEPTED)
@torch.no_grad()
def test_softmax_attention_of_a_user_is_measured_as_that_of_transformers(name: str) -> None:
    model, calls = with_function(*ACCEPTED[name])
    assert foreign_attention(model) == NAME
    expected = model(TOKENS, use_cache=False)
    calls.clear()
    with sinklab.probe(model) as watch:
        found = model(TOKENS, use_cache=False)
    assert calls == [0, 1, 2]
    assert torch.equal(found.logits, expected.logits)
    measured = sinklab.measure(model, TOKENS)
    assert measured.backend == NAME
    alpha_NLHT = matrices_importance(model)
    torch.testing.assert_close(torch.stack([x.importance_BHT for x in watch.layers], 1), alpha_NLHT)
    np.testing.assert_allclose(measured.importance, alpha_NLHT.mean(0), rtol=1e-5, atol=1e-6)
    assert measured.loss == pytest.approx(sinklab.measure(model, TOKENS).loss, rel=1e-5)


@pytest.mark.parametrize("name", REFUSED)
@torch.no_grad()
def test_other_attention_is_refused_by_name_and_layer(name: str) -> None:
    model, _ = with_function(REFUSED[name], sdpa_mask if name in ("value gated", "wraps") else eager_mask)
    layer = 3 if name == "last layer dropped" else 1
    says = rf"'mine' does not compute softmax attention in layer {layer} \(its output differs by .*watch_attention"
    with sinklab.probe(model) as watch, pytest.raises(SinklabError, match=says):
        model(TOKENS)
    assert watch.layers == []
    with pytest.raises(SinklabError, match=says):
        sinklab.measure(model, TOKENS)
    assert says.split("'")[1] in (adapt(model).inseparable() or "")
    with intercept(adapt(model), edit=lambda layer: layer), pytest.raises(SinklabError, match=says):
        model(TOKENS, use_cache=False)


@torch.no_grad()
def test_a_user_function_registered_under_a_name_of_transformers_is_detected() -> None:
    model = llama()
    assert foreign_attention(model) is None
    registered(written_out(shifted), None, "sdpa")
    AttentionMaskInterface.register("sdpa", eager_mask)
    assert foreign_attention(model) == "sdpa"
    with pytest.raises(SinklabError, match="'sdpa' does not compute softmax attention in layer 1"):
        sinklab.measure(model, TOKENS)


@torch.no_grad()
def test_a_function_set_in_the_registry_of_one_file_is_found() -> None:
    model, interface = llama(), vars(modeling_llama)["ALL_ATTENTION_FUNCTIONS"]
    interface["sdpa"] = written_out(sigmoid)
    try:
        assert foreign_attention(model) == "sdpa"
    finally:
        del interface["sdpa"]


@torch.no_grad()
def test_a_replaced_eager_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama("eager")
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", written_out(sigmoid))
    with pytest.raises(SinklabError, match="'eager' does not compute softmax attention in layer 1"):
        sinklab.measure(model, TOKENS)


@torch.no_grad()
def test_a_replaced_forward_that_computes_attention_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return self.o_proj(self.q_proj(hidden_states).cumsum(1)), None

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)
    for reading in (lambda model: sinklab.measure(model, TOKENS), probed):
        with pytest.raises(SinklabError, match="0 attention calls were recorded in 3 layers"):
            reading(llama())


def probed(model: Any) -> None:
    with sinklab.probe(model):
        model(TOKENS)


@torch.no_grad()
def test_an_undeclared_window_is_refused_at_the_first_sequence_longer_than_it() -> None:
    model, _ = with_function(written_out(windowed))
    with sinklab.probe(model) as watch:
        model(TOKENS[:, 1:5])
        with pytest.raises(SinklabError, match="'mine' does not compute softmax attention"):
            model(TOKENS)
    with sinklab.probe(model), pytest.raises(SinklabError, match="'mine' does not compute softmax attention"):
        model.generate(TOKENS[:1, :3], max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert len(watch.layers[0].importance_BHT) == len(TOKENS)


@torch.no_grad()
def test_a_function_that_ignores_the_padding_mask_is_refused() -> None:
    model, _ = with_function(ignoring_the_mask, sdpa_mask)
    mask = torch.ones_like(TOKENS)
    mask[0, :3] = 0
    sinklab.measure(model, TOKENS)
    with sinklab.probe(model), pytest.raises(SinklabError, match="'mine' does not compute softmax attention"):
        model(TOKENS, attention_mask=mask)


def trained(model: Any, watched: bool) -> tuple[list[Tensor], list[float]]:
    """Weights and losses of three steps."""
    model = copy.deepcopy(model).train()
    optimiser, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    torch.manual_seed(1)

    def steps() -> None:
        for _ in range(3):
            loss = model(TOKENS, labels=TOKENS, use_cache=False).loss
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            losses.append(float(loss))

    if watched:
        with sinklab.probe(model) as watch:
            steps()
        assert len(watch.layers[0].importance_BHT) == 3 * len(TOKENS)
    else:
        steps()
    return list(model.parameters()), losses


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("implementation", ["sdpa", "eager", NAME])
def test_training_under_a_probe_gives_the_same_weights_bit_for_bit(implementation: str, checkpointing: bool) -> None:
    model = llama("eager" if implementation == "eager" else "sdpa", attention_dropout=0.2)
    if implementation == NAME:
        registered(wrapped, sdpa_mask)
        model.set_attn_implementation(NAME)
    if checkpointing:
        model.gradient_checkpointing_enable()
    expected, losses = trained(model, watched=False)
    found, watched_losses = trained(model, watched=True)
    assert watched_losses == losses
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_learned_temperature_is_refused_in_the_first_step_after_it_changes() -> None:
    model, _ = with_function(written_out(with_temperature))
    for layer in model.model.layers:
        layer.self_attn.temperature = nn.Parameter(torch.ones(()))
    expected = model(TOKENS, labels=TOKENS).loss
    with sinklab.probe(model) as watch:
        loss = model(TOKENS, labels=TOKENS).loss
        assert float(loss) == float(expected)
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=10.0).step()
        with pytest.raises(SinklabError, match="'mine' does not compute softmax attention in layer"):
            model(TOKENS.flip(1))
    assert len(watch.layers[0].importance_BHT) == len(TOKENS)
    with pytest.raises(SinklabError, match="'mine' does not compute softmax attention in layer"):
        sinklab.measure(model, TOKENS)


WINDOWS: dict[str, Any] = {"sliding_window": 6, "head_dim": 8}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
PROBED: dict[str, tuple[Any, str]] = {
    "llama eager": (hf.LlamaConfig(**SIZES), "eager"),
    "llama sdpa": (hf.LlamaConfig(**SIZES), "sdpa"),
    "mistral eager": (hf.MistralConfig(**SIZES, **WINDOWS), "eager"),
    "mistral sdpa": (hf.MistralConfig(**SIZES, **WINDOWS), "sdpa"),
    "gemma2 eager": (hf.Gemma2Config(**SIZES, **WINDOWS, layer_types=KINDS), "eager"),
    "gpt2 eager": (hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=4), "eager"),
    "gpt2 sdpa": (hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=4), "sdpa"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PROBED)
@torch.no_grad()
def test_logits_and_matrices_under_a_probe_are_those_of_the_model(name: str, dtype: torch.dtype) -> None:
    config, implementation = PROBED[name]
    torch.manual_seed(0)
    model: Any = hf.AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=dtype).eval()
    mask = torch.ones_like(TOKENS)
    mask[0, :4] = 0
    passes = ({}, {"attention_mask": mask}, {"output_attentions": implementation == "eager"})
    expected = [model(TOKENS, use_cache=False, **options) for options in passes]
    text = model.generate(TOKENS[:1, :5], max_new_tokens=8, do_sample=False, pad_token_id=0)
    with sinklab.probe(model):
        found = [model(TOKENS, use_cache=False, **options) for options in passes]
        again = model.generate(TOKENS[:1, :5], max_new_tokens=8, do_sample=False, pad_token_id=0)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.logits, other.logits)
    if implementation == "eager":
        assert all(map(torch.equal, found[2].attentions, expected[2].attentions))
    assert torch.equal(text, again)


@torch.no_grad()
def test_two_models_are_probed_at_once_and_the_registries_are_left_as_they_were() -> None:
    one, other, third = llama(), llama(num_hidden_layers=2), llama()
    before = dict(AttentionInterface._global_mapping)
    first, second = sinklab.probe(one), sinklab.probe(other)
    watch, other_watch = first.__enter__(), second.__enter__()
    for model in (one, other, third):
        model(TOKENS)
    first.__exit__(None, None, None)
    other(TOKENS)
    second.__exit__(None, None, None)
    assert [len(watch.layers), len(other_watch.layers)] == [3, 2]
    assert [len(x.layers[0].importance_BHT) for x in (watch, other_watch)] == [len(TOKENS), 2 * len(TOKENS)]
    assert AttentionInterface._global_mapping == before


@torch.no_grad()
def test_an_edit_inside_a_probe_is_undone_when_its_context_ends() -> None:
    model = llama()
    expected = model(TOKENS).logits
    with sinklab.probe(model) as watch:
        with intercept(adapt(model), edit=lambda layer: layer.changed(scale=0.0)):
            changed = model(TOKENS).logits
        found = model(TOKENS).logits
    assert torch.equal(found, expected)
    assert not torch.allclose(changed, expected)
    uniform, own = watch.layers[0].importance_BHT.split(len(TOKENS))
    assert uniform.std(1).max() < 1e-6 < own.std(1).max()


def bidirectional() -> Any:
    torch.manual_seed(0)
    config = hf.Gemma3TextConfig(**SIZES, head_dim=8, use_bidirectional_attention=True)
    return hf.AutoModelForCausalLM.from_config(config).eval()


def not_causal(implementation: str) -> Any:
    return llama(implementation, is_causal=False)


@pytest.mark.parametrize("build", [bidirectional, lambda: not_causal("eager"), lambda: not_causal("sdpa")])
def test_a_model_with_a_non_causal_config_is_refused_exactly_if_it_attends_to_later_tokens(
    build: Callable[[], Any],
) -> None:
    model = build()
    later = TOKENS[:1].clone()
    later[0, -1] = (later[0, -1] + 1) % 64
    with torch.no_grad():
        causal = torch.allclose(model(TOKENS[:1]).logits[:, :-1], model(later).logits[:, :-1], atol=1e-5)
    if causal:
        sinklab.measure(model, TOKENS)
        return
    with pytest.raises(SinklabError, match=r"is not causal|attends to later tokens"):
        sinklab.measure(model, TOKENS)


def test_a_mask_function_that_shows_later_tokens_is_refused() -> None:
    def every_key(*_: Any, batch_size: int, q_length: int, kv_length: int, **__: Any) -> Tensor:
        return torch.ones(batch_size, 1, q_length, kv_length, dtype=torch.bool)

    model, _ = with_function(wrapped, every_key)
    with pytest.raises(SinklabError, match="'llama' model is not causal: in a trial, another token at position 8"):
        sinklab.measure(model, TOKENS)


def test_measuring_a_model_of_transformers_calls_no_function_of_the_user_and_stays_in_one_pass() -> None:
    calls = registered(wrapped, sdpa_mask)
    assert sinklab.measure(llama(), TOKENS).backend == "one pass"
    assert calls == []
