"""The paper's four propositions on a repeated token, on models of random and of trained weights."""

import io
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from families import hooks_on, pair_of
from rich.console import Console
from transformers import AutoModelForCausalLM

import sinklab
from sinklab.commands.results import print_measurement
from sinklab.errors import InputError
from sinklab.measuring.inputs import repeated_tokens
from sinklab.measuring.options import Options, Request
from sinklab.measuring.propositions import check_propositions, softmax_of_distances
from sinklab.model.config import ModelConfig
from sinklab.model.transformer import Transformer
from sinklab.models.adapter import adapt
from sinklab.survey.measure import measure_model

NUMBERS = {"none": 1, "relative": 2, "t5": 2, "alibi": 3, "rotary": 4, "absolute": None, "learnable": None}
HUGGING_FACE = {
    "llama": ("rotary", 4),
    "gpt-neox": ("rotary", 4),
    "mistral, window 5": ("rotary", 4),
    "gemma2, softcap and window 5": ("rotary", 4),
    "deepseek-v3, other value width": ("rotary", 4),
    "bloom": ("alibi", 3),
    "mpt": ("alibi", 3),
    "gpt2": ("learnable", None),
    "opt": ("learnable", None),
    "gpt-neo, window 5": ("learnable", None),
}


def _ours(position: str, trained: bool = False, heads: int = 4, **attention: Any) -> Transformer:
    sizes = {"layers": 3, "width": 8 * heads, "heads": heads, "ffn_width": 48, "vocab_size": 40, "context": 64}
    config = {"position": {"kind": position}, "attention": attention, "norm": {"placement": "pre"}}
    model = Transformer(ModelConfig.model_validate(sizes | config), seed=1)
    if not trained:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.mul_(1 if name.endswith("norm.weight") else 3)  # sharp attention
        return model
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):  # each token is followed by the next one, but for some noise
        start = torch.randint(40, (8, 1), generator=generator)
        noise = torch.randint(2, (8, 32), generator=generator)
        loss = model.loss((start + torch.arange(32) + noise) % 40)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model


def _deep() -> Transformer:
    """Rotary, with so many blocks that bfloat16 makes the hidden states of a repeated token differ by 16 percent."""
    sizes = {"layers": 24, "width": 32, "heads": 1, "ffn_width": 48, "vocab_size": 40, "context": 64}
    model = Transformer(ModelConfig.model_validate(sizes | {"init": {"kind": "torch"}}), seed=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(1 if name.endswith("norm.weight") else 6)
    return model


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("position", NUMBERS)
def test_each_proposition_holds_for_its_positional_embedding_and_none_for_those_that_are_added(
    position: str, trained: bool
) -> None:
    model = _ours(position, trained).double()
    found = check_propositions(adapt(model), [3, 17], length=40)
    assert (found.position, found.number) == (position, NUMBERS[position])
    assert found.holds is (found.number is not None)
    assert (found.hidden_deviation < 1e-12) is found.holds
    if position == "rotary":
        assert found.attention_deviation is None
        assert 0 < (found.bound_slack or 0) < 1
    else:
        assert found.bound_slack is None
        assert ((found.attention_deviation or 0) < 1e-12) is found.holds


@pytest.mark.parametrize("family", HUGGING_FACE)
def test_the_propositions_hold_for_models_of_other_libraries(family: str) -> None:
    model = pair_of(family)[0]
    found = check_propositions(adapt(model), [9], length=30)
    assert (found.position, found.number) == HUGGING_FACE[family]
    assert found.holds is (found.number is not None)
    assert hooks_on(model) == 0
    assert not str(model.config._attn_implementation).startswith("sinklab")


def test_a_real_trained_model_has_no_sink_on_a_repeated_token(data_dir: Path) -> None:
    model = data_dir / "models" / "TinyStories-656K"
    measured = measure_model(str(model), None, Request(options=Options(inputs="repeat"), sequences=20))
    assert max(measured.sink_rate[:32]) == 0
    found = measured.propositions
    assert found is not None
    assert (found.position, found.number, found.tokens, found.length) == ("rotary", 4, 8, 64)
    assert found.holds
    assert found.hidden_deviation < 1e-5
    assert (found.bound_slack or 0) > 0
    loaded: Any = AutoModelForCausalLM.from_pretrained(model)
    text = repeated_tokens(1000, sequences=3, length=20)
    assert sinklab.measure(loaded, text).propositions is None
    assert sinklab.measure(loaded, text, inputs="repeat").propositions is not None
    console = io.StringIO()
    print_measurement(measured, Console(file=console, width=400))
    assert "proposition 4 of the paper: " in console.getvalue()
    assert re.search(r"rotary +\d\.\de-\d\d +– +\d\.\de-\d\d +holds", console.getvalue())


@pytest.mark.parametrize("kind", ["ours", "llama", "gemma2, softcap and window 5", "bloom"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_model_is_checked_in_float32_and_left_as_it_was(kind: str, dtype: torch.dtype) -> None:
    model: Any = (_deep() if kind == "ours" else pair_of(kind)[0]).to(dtype)
    places = [("parameter", n, p.data) for n, p in model.named_parameters()]
    places += [("buffer", n, b) for n, b in model.named_buffers()]
    before = [(tensor.data_ptr(), tensor.clone()) for *_, tensor in places]
    found = check_propositions(adapt(model), [3, 17], length=40)
    assert (found.dtype, found.holds) == ("float32", True)
    assert found.hidden_deviation < 1e-4
    for (place, name, _), (pointer, values) in zip(places, before, strict=True):
        after = model.get_parameter(name).data if place == "parameter" else model.get_buffer(name)
        assert after.data_ptr() == pointer
        assert after.dtype == values.dtype
        assert torch.equal(after, values)


def test_a_deviation_in_bfloat16_leaves_the_proposition_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _deep().bfloat16()
    monkeypatch.setattr("sinklab.measuring.propositions.free_bytes", lambda device: 0)  # no room for float32
    found = check_propositions(adapt(model), [3, 17], length=40)
    assert (found.dtype, found.holds) == ("bfloat16", None)
    assert found.hidden_deviation > found.tolerance
    measured = sinklab.measure(model, repeated_tokens(40, sequences=3, length=20), inputs="repeat")
    console = io.StringIO()
    print_measurement(measured, Console(file=console, width=400))
    assert "cannot be decided in this precision" in console.getvalue()


def test_the_closed_form_of_softmax_over_distances_equals_explicit_loops() -> None:
    slope = 0.25
    terms = -slope * torch.arange(5).double()[None]
    attention = softmax_of_distances(terms)[0]
    for t in range(5):
        total = sum(math.exp(-slope * (t - i)) for i in range(t + 1))
        for j in range(5):
            expected = math.exp(-slope * (t - j)) / total if j <= t else 0
            assert float(attention[t, j]) == pytest.approx(expected, abs=1e-12)
    assert torch.allclose(softmax_of_distances(torch.zeros(1, 5))[0, 4], torch.full((5,), 0.2).double())


def test_slopes_other_than_those_of_alibi_fail_the_proposition() -> None:
    model = _ours("alibi")
    assert model.distance is not None
    model.distance.fixed *= 2
    found = check_propositions(adapt(model), [3], length=40)
    assert found.hidden_deviation < found.tolerance < (found.attention_deviation or 0)
    assert not found.holds


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_alibi_is_checked_with_slopes_in_the_models_precision(dtype: torch.dtype) -> None:
    model = _ours("alibi", heads=24).to(dtype)  # most slopes are no powers of two
    found = check_propositions(adapt(model), [3, 17], length=64)
    assert found.holds
    assert (found.attention_deviation or 0) < found.tolerance / 50


def test_the_rotary_bound_is_the_one_of_the_largest_product() -> None:
    model: Any = _ours("rotary").double()
    seen: list[tuple[torch.Tensor, ...]] = []
    cores = [block.attention.core for block in model.blocks]
    handles = [core.register_forward_hook(lambda _, args, __: seen.append(args[:3])) for core in cores]
    with torch.no_grad():
        model(torch.full((1, 20), 3))
    for handle in handles:
        handle.remove()
    least = math.inf
    for q, k, _ in seen:
        z = q @ k.mT / math.sqrt(q.shape[-1])
        for head in range(4):
            xi = float(q[0, head].norm(dim=-1).max() * k[0, head].norm(dim=-1).max()) / math.sqrt(q.shape[-1])
            for t in range(1, 20):
                scores = torch.softmax(z[0, head, t, : t + 1], -1)
                bound = math.exp(2 * xi) / (math.exp(2 * xi) + t)
                least = min(least, bound - float(scores.max()))
    assert check_propositions(adapt(model), [3], length=20).bound_slack == pytest.approx(least, abs=1e-9)


@pytest.mark.parametrize(
    "attention",
    [{"operation": {"kind": "sigmoid"}}, {"bias": {"kind": "k"}}, {"mask": {"kind": "window", "width": 4}}],
)
def test_attention_outside_the_propositions_is_measured_without_the_check(attention: dict[str, Any]) -> None:
    model = _ours("rotary", **attention)
    with pytest.raises(InputError, match="causal softmax attention without biases"):
        check_propositions(adapt(model), [3], length=64)
    measured = sinklab.measure(model, repeated_tokens(40, sequences=2, length=9), inputs="repeat")
    assert measured.propositions is None
    assert any("were not checked" in note for note in measured.notes)


@pytest.mark.parametrize("family", ["jamba, one attention layer of two", "falcon", "gpt-oss, sinks and window 5"])
def test_model_types_with_unknown_positional_embeddings_are_refused(family: str) -> None:
    with pytest.raises(InputError, match="is not known"):
        check_propositions(adapt(pair_of(family)[0]), [3], length=64)


def test_a_mask_without_padding_changes_nothing() -> None:
    tokens = repeated_tokens(40, sequences=2, length=9)
    for model in (_ours("rotary"), pair_of("llama")[0]):
        plain, masked = (
            sinklab.measure(model, tokens, inputs="repeat", ablate=["mask_first:1"], attention_mask=mask)
            for mask in (None, torch.ones_like(tokens))
        )
        assert plain.propositions is not None
        assert masked.propositions == plain.propositions
        assert (masked.ablations, masked.notes) == (plain.ablations, plain.notes)
        assert (masked.importance == plain.importance).all()


def test_a_model_whose_blocks_are_not_found_is_measured_without_the_check() -> None:
    model: Any = pair_of("llama")[0]
    model.model.layers = torch.nn.Sequential(*model.model.layers)
    measured = sinklab.measure(model, repeated_tokens(40, sequences=2, length=9), inputs="repeat")
    assert (measured.hidden_norm_ratio, measured.propositions) == (None, None)
    [without, note] = measured.notes
    assert without.startswith("no hidden-state norms or massive activations")
    assert "were not checked: it is not known which of the paper's propositions" in note
