"""Attention backends of transformers agree with eager attention, or the difference is reported."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from backend_parity import BackendParity, backend_parity, tolerance
from families import FAMILIES, GROUPED, IGNORING, family_tokens, hooks_on, pair_of
from measure_reference import importance_by_loops
from transformers import AttentionInterface

QUICK = ("eager", "sdpa", "flash_attention_2")  # flex is compiled for minutes on a CPU
WITH_SINKS: dict[str, Callable[[], Any]] = {
    "gpt-oss": lambda: hf.GptOssConfig(**GROUPED, num_local_experts=2, num_experts_per_tok=1, sliding_window=5),
    "granite-swa": lambda: hf.GraniteSWAConfig(**GROUPED, sliding_window=5),
    "mimo-v2, sinks in one layer of two": lambda: hf.MiMoV2FlashConfig(**GROUPED, sliding_window=5),
}


def model_of(name: str) -> Any:
    """A random model whose sink logits take a large share of the attention."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(WITH_SINKS[name]()).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("sinks"):
                parameter.normal_(1.5, 2.0)
    return model


def by_name(found: list[BackendParity]) -> dict[str, BackendParity]:
    return {one.backend: one for one in found}


def verdict_of_sdpa(model: Any) -> str:
    """The verdict on SDPA, which transformers refuses for models with sink logits or a softcap."""
    return "agrees" if model._supports_sdpa else "unavailable"


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in IGNORING])
def test_backends_agree_and_the_importance_is_that_of_the_familys_own_matrices(family: str) -> None:
    model, eager = pair_of(family)
    found = by_name(backend_parity(model, family_tokens(), QUICK))
    assert [one.verdict for one in found.values()] == ["reference", verdict_of_sdpa(model), "unavailable", "agrees"]
    with torch.no_grad():
        matrices = torch.stack(eager(family_tokens(), output_attentions=True).attentions, 1)
    alpha = torch.stack([importance_by_loops(one) for one in matrices])
    left = float((1 - matrices.sum(-1)).mean()) if family.startswith("gpt-oss") else None
    for name in ("eager", "sdpa", "sinklab"):
        if found[name].verdict == "unavailable":
            continue
        assert found[name].importance_first == pytest.approx(float(alpha[..., 0].mean()), rel=1e-4)
        assert found[name].sink_share == (None if left is None else pytest.approx(left, rel=1e-4))
        assert found[name].importance_difference in (None, pytest.approx(0, abs=1e-5))
    assert found["flash_attention_2"].why


@pytest.mark.parametrize("name", WITH_SINKS)
def test_sdpa_is_unavailable_for_a_model_with_sink_logits_and_our_own_backend_agrees(name: str) -> None:
    model = model_of(name)
    found = by_name(backend_parity(model, family_tokens(), QUICK))
    assert found["sdpa"].verdict == "unavailable"
    assert "does not support" in (found["sdpa"].why or "")
    assert found["sinklab"].verdict == "agrees"
    assert found["sinklab"].sink_share == pytest.approx(found["eager"].sink_share, rel=1e-4)
    assert (found["eager"].sink_share or 0) > 0.05
    assert (found["sinklab"].without_sink_difference or 0) > 0.01


@pytest.mark.parametrize("name", ["gpt-oss", "granite-swa"])
def test_a_backend_that_drops_the_sink_logits_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(name)
    monkeypatch.setattr(type(model), "_supports_sdpa", True)  # PyTorch's attention does not know of sink logits
    dropped = by_name(backend_parity(model, family_tokens(), QUICK))["sdpa"]
    assert dropped.verdict == "drops the sink"
    assert dropped.without_sink_difference == pytest.approx(0, abs=tolerance(torch.float32))
    assert (dropped.logits_difference or 0) > 0.01
    assert dropped.sink_share == pytest.approx(0, abs=1e-5)


def test_sink_logits_with_a_share_below_rounding_are_not_reported_as_dropped() -> None:
    config = hf.GptOssConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        layer_types=["full_attention"] * 2,
        max_position_embeddings=64,
        pad_token_id=0,
    )
    for seed in range(8):
        torch.manual_seed(seed)
        model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("sinks"):
                    parameter.fill_(-20.0)
        own = by_name(backend_parity(model, torch.randint(0, 64, (2, 60)), ["eager"]))["sinklab"]
        assert own.verdict == "agrees", f"seed {seed}: {own}"


def test_the_reason_names_the_experts_of_a_model_if_only_its_logits_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    one_layer: dict[str, Any] = {**GROUPED, "num_hidden_layers": 1}
    model = hf.AutoModelForCausalLM.from_config(hf.MixtralConfig(**one_layer, num_local_experts=4)).eval()
    exact = AttentionInterface._global_mapping["sdpa"]

    def louder(module: Any, q: Any, k: Any, v: Any, *args: Any, **options: Any) -> Any:
        out, weights = exact(module, q, k, v, *args, **options)
        asked_for_its_matrix = bool(((v == 0) | (v == 1)).all())
        return out if asked_for_its_matrix else 3 * out, weights

    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", louder)
    found = by_name(backend_parity(model, family_tokens(), ["sdpa"]))["sdpa"]
    assert found.verdict == "differs"
    assert "experts" in (found.why or "")


def test_a_backend_that_computes_something_else_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = pair_of("llama")[0]
    exact = AttentionInterface._global_mapping["sdpa"]

    def hotter(*args: Any, scaling: float, **options: Any) -> Any:
        return exact(*args, scaling=1.3 * scaling, **options)

    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", hotter)
    assert by_name(backend_parity(model, family_tokens(), QUICK))["sdpa"].verdict == "differs"
    assert AttentionInterface._global_mapping["sdpa"] is hotter


def test_a_kernel_that_fails_is_unavailable_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such kernel on this device. Buy another")

    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", failing)
    found = by_name(backend_parity(pair_of("llama")[0], family_tokens(), QUICK))["sdpa"]
    assert (found.verdict, found.why) == ("unavailable", "no such kernel on this device")


def test_more_positions_than_values_have_channels_are_read_in_pieces() -> None:
    tokens = torch.randint(3, 64, (2, 21), generator=torch.Generator().manual_seed(2))  # values have 8 channels
    found = by_name(backend_parity(model_of("gpt-oss"), tokens, QUICK))
    assert found["sinklab"].verdict == "agrees"
    assert found["sinklab"].importance_difference == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_the_model_and_transformers_are_left_as_they_were(family: str) -> None:
    model = pair_of(family)[0]
    before = model.config._attn_implementation, dict(AttentionInterface._global_mapping), hooks_on(model)
    found = by_name(backend_parity(model, family_tokens(), QUICK))
    assert (model.config._attn_implementation, dict(AttentionInterface._global_mapping), hooks_on(model)) == before
    if family == "bloom":  # which ignores the interface
        assert "keeps eager attention" in (found["sdpa"].why or "")
        assert found["sinklab"].verdict == "unavailable"


@pytest.mark.slow
def test_flex_attention_agrees_where_it_is_available() -> None:
    """Compiling it takes minutes; without a compiler, and with sink logits on a CPU, it is unavailable and says so."""
    llama = by_name(backend_parity(pair_of("llama")[0], family_tokens(), ["flex_attention"]))["flex_attention"]
    assert llama.verdict == "agrees" or llama.why
    found = by_name(backend_parity(model_of("gpt-oss"), family_tokens(), ["flex_attention"]))["flex_attention"]
    assert "sinks cannot be run on CPU" in (found.why or "") or found.verdict == "agrees"
