"""A real trained model against the independent eager reference, and against itself under padding and batching."""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import assert_close, assert_same_rates
from measure_reference import Reference, eager_reference
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from sinklab.measuring.inputs import natural_text, token_rows
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.options import Options, Request
from sinklab.measuring.probe import probe
from sinklab.opening import open_model
from sinklab.survey.api import measure
from sinklab.survey.measure import measure_model

EPS = 0.2  # at which some of this small model's heads are above and some below
SEQUENCES, LENGTH = 12, 32
PAPER = (100, 64, 0.3)  # sequences, length and eps: the defaults of the command


@pytest.fixture(scope="module")
def folder(data_dir: Path) -> Path:
    return data_dir / "models" / "TinyStories-656K"


@pytest.fixture(scope="module")
def text(data_dir: Path) -> Path:
    return data_dir / "domains" / "tinystories.jsonl"


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def tokens(folder: Path, text: Path) -> torch.Tensor:
    encode = open_model(str(folder)).encoder()
    return token_rows(natural_text(text, encode, sequences=SEQUENCES, length=LENGTH))


@cache
def _reference(folder: Path, text: Path, bos: bool, sequences: int, length: int, eps: float) -> Reference:
    """A reference without sinklab: tokenizer.json called by transformers, and eager attention matrices."""
    import json

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    rows = []
    for line in text.read_text(encoding="utf-8").splitlines():
        ids = tokenizer(json.loads(line)["text"], add_special_tokens=bos)["input_ids"]
        if len(ids) >= length and len(rows) < sequences:
            rows.append(ids[:length])
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    return eager_reference(model, torch.tensor(rows), eps)


def _assert_same(one: Measurement, other: Measurement) -> None:
    assert_same_rates(one, other.sink_rate)
    assert one.loss == pytest.approx(other.loss, rel=1e-5)
    for name in ("importance", "importance_first", "hidden_norm", "key_norm", "value_norm"):
        assert_close(getattr(one, name), getattr(other, name), what=name)


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize(
    ("sequences", "length", "eps"), [(SEQUENCES, LENGTH, EPS), pytest.param(*PAPER, marks=pytest.mark.slow)]
)
def test_measuring_agrees_with_the_eager_reference(
    folder: Path, text: Path, bos: bool, sequences: int, length: int, eps: float
) -> None:
    expected = _reference(folder, text, bos, sequences, length, eps)
    measured = measure_model(
        str(folder), text, Request(options=Options(eps=(eps,)), sequences=sequences, length=length, no_bos=not bos)
    )
    assert measured.bos is bos
    assert_same_rates(measured, expected.sink_rate)
    assert any(0 < rate < 100 for rate in measured.sink_rate)
    assert_close(measured.importance, expected.importance.mean(0))
    assert_close(measured.importance_first, expected.importance[..., 0])
    assert measured.loss == pytest.approx(expected.loss, rel=1e-5)


def test_bos_makes_the_sink_of_this_model(folder: Path, text: Path) -> None:
    with_bos = measure_model(str(folder), text, Request(sequences=20))
    without = measure_model(str(folder), text, Request(sequences=20, no_bos=True))
    assert with_bos.sink_rate[0] > 5
    assert without.sink_rate[0] < 1


def test_a_repeated_token_shows_no_sink(folder: Path) -> None:
    repeated = measure_model(str(folder), None, Request(options=Options(inputs="repeat"), sequences=20))
    assert repeated.sink_rate[0] == 0
    assert not repeated.bos


@pytest.mark.parametrize(("left", "right"), [(7, 0), (0, 7), (3, 4)])
def test_padding_changes_nothing(model: Any, tokens: torch.Tensor, left: int, right: int) -> None:
    plain = measure(model, tokens, eps=EPS)
    pad = torch.nn.functional.pad
    padded = measure(
        model,
        pad(tokens, (left, right), value=5),
        attention_mask=pad(torch.ones_like(tokens), (left, right)),
        eps=EPS,
    )
    assert padded.length == LENGTH
    _assert_same(padded, plain)


def test_sequences_of_different_length_count_only_their_own_tokens(model: Any, tokens: torch.Tensor) -> None:
    short, whole = measure(model, tokens[:1, :10]), measure(model, tokens[1:2])
    mask = torch.ones_like(tokens[:2])
    mask[0, 10:] = 0
    both = measure(model, tokens[:2], attention_mask=mask)
    mean = (short.importance[..., :10] + whole.importance[..., :10]) / 2
    assert_close(both.importance[..., :10], mean)
    assert_close(both.importance[..., 10:], whole.importance[..., 10:])
    assert short.loss is not None
    assert whole.loss is not None
    assert both.loss == pytest.approx((short.loss * 9 + whole.loss * 31) / 40, rel=1e-5)


def test_the_batch_size_changes_nothing(model: Any, tokens: torch.Tensor) -> None:
    plain = measure(model, tokens, eps=EPS, batch_size=SEQUENCES)
    for batch_size in (1, 5):
        _assert_same(measure(model, tokens, eps=EPS, batch_size=batch_size), plain)


def test_the_norms_are_those_of_the_residual_stream_before_the_final_norm(model: Any, tokens: torch.Tensor) -> None:
    measured = measure(model, tokens)
    with torch.no_grad():
        hidden = model(tokens, output_hidden_states=True).hidden_states
        last = []
        model.model.norm.register_forward_pre_hook(lambda _, args: last.append(args[0]))
        model(tokens)
        model.model.norm._forward_pre_hooks.clear()
    expected = torch.stack([h.norm(dim=-1).mean(0) for h in (*hidden[:-1], last[0])])
    assert measured.hidden_norm is not None
    assert_close(measured.hidden_norm, expected)
    assert measured.hidden_norm_ratio == pytest.approx((expected[:, 0] / expected[:, 1:].mean(1)).tolist(), rel=1e-5)


def test_key_and_value_norms_are_those_of_the_projections(model: Any, tokens: torch.Tensor) -> None:
    measured = measure(model, tokens)
    layer = model.model.layers[0]
    with torch.no_grad():
        x = layer.input_layernorm(model.model.embed_tokens(tokens))
        for projection, norms in (
            (layer.self_attn.k_proj, measured.key_norm),
            (layer.self_attn.v_proj, measured.value_norm),
        ):
            heads = projection(x).unflatten(-1, (-1, layer.self_attn.head_dim))
            expected = heads.norm(dim=-1).mean((0, 2))  # a rotation does not change the norm
            assert norms is not None
            assert_close(norms[0], expected)


def test_being_probed_changes_no_logit_and_leaves_the_model_as_found(model: Any, tokens: torch.Tensor) -> None:
    before = model.config._attn_implementation
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    with torch.no_grad():
        plain = model(tokens).logits
        with probe(model) as watch:
            largest = (model(tokens).logits - plain).abs().max()
            assert largest <= 1e-5 * plain.abs().max()  # a logit of 20 has no digits beyond 2e-6
            assert len(watch.layers) == model.config.num_hidden_layers
    assert model.config._attn_implementation == before
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]


def test_probed_logits_are_as_near_to_the_exact_ones_as_the_models_own(model: Any, tokens: torch.Tensor) -> None:
    exact_model = copy.deepcopy(model).double()
    with torch.no_grad():
        plain, exact = model(tokens).logits, exact_model(tokens).logits
        with probe(model):
            probed = model(tokens).logits
        with probe(exact_model):
            torch.testing.assert_close(exact_model(tokens).logits, exact, atol=1e-10, rtol=0)
    errors = [(logits.double() - exact).square().mean().sqrt() for logits in (probed, plain)]
    assert errors[0] < 1.2 * errors[1]


def test_the_model_is_left_as_found_after_an_exception(model: Any, tokens: torch.Tensor) -> None:
    before = model.config._attn_implementation
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]

    def fail(done: float, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(model, tokens, progress=fail)
    assert modes == [module.training for module in model.modules()]
    assert model.config._attn_implementation == before
    model.eval()


def test_nested_probes_see_the_same(model: Any, tokens: torch.Tensor) -> None:
    with torch.no_grad(), probe(model) as outer, probe(model) as inner:
        model(tokens)
    for seen_outside, seen_inside in zip(outer.layers, inner.layers, strict=True):
        assert_close(seen_outside.importance_BHT, seen_inside.importance_BHT)
