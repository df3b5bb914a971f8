"""Importance over the queries that may see a key, against explicit matrices in float64."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from closeness import assert_close
from rich.console import Console

import sinklab
from sinklab.commands.results import print_measurement
from sinklab.measuring.measurement import Measurement
from sinklab.model.config import ModelConfig
from sinklab.model.transformer import Transformer
from sinklab.models.huggingface.interface import read_call
from sinklab.survey.api import measure

T, EOS, EPS = 14, 5, 0.3
COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
FAMILIES: dict[str, tuple[Any, list[int | None]]] = {  # and the window of each layer
    "mistral": (lambda: hf.MistralConfig(**COMMON, sliding_window=4), [4, 4, 4]),
    "gemma2": (lambda: hf.Gemma2Config(**COMMON, **MIXED, sliding_window=4, query_pre_attn_scalar=8), [4, None, 4]),
    "gemma3": (lambda: hf.Gemma3TextConfig(**COMMON, **MIXED, sliding_window=6, query_pre_attn_scalar=8), [6, None, 6]),
    "qwen2": (lambda: hf.Qwen2Config(**COMMON, **MIXED, sliding_window=4, use_sliding_window=True), [4, None, 4]),
    "phi3": (lambda: hf.Phi3Config(**COMMON, sliding_window=3), [3, 3, 3]),
    "gpt-oss": (
        lambda: hf.GptOssConfig(**COMMON, **MIXED, sliding_window=4, num_local_experts=2, num_experts_per_tok=1),
        [4, None, 4],
    ),
    "gpt-neo": (
        lambda: hf.GPTNeoConfig(
            vocab_size=64,
            hidden_size=32,
            num_layers=3,
            num_heads=4,
            max_position_embeddings=64,
            attention_types=[[["local", "global", "local"], 1]],
            window_size=4,
            initializer_range=0.3,
        ),
        [4, None, 4],
    ),
}


def tokens_of(sequences: int = 5, length: int = T) -> torch.Tensor:
    return torch.randint(3, 64, (sequences, length), generator=torch.Generator().manual_seed(1))


def dtype_of(name: str) -> torch.dtype:
    return torch.float32 if name == "gpt-oss" else torch.float64  # its experts take no float64


def family(name: str) -> tuple[Any, Any, list[int | None]]:
    """The same random weights in float64, behind the default attention and behind eager attention."""
    config, windows = FAMILIES[name]
    torch.manual_seed(0)
    model, eager = (
        hf.AutoModelForCausalLM.from_config(config(), attn_implementation=kind).to(dtype_of(name)).eval()
        for kind in ("eager" if name == "gemma2" else None, "eager")  # fused attention may leave out its soft cap
    )
    eager.load_state_dict(model.state_dict())
    return model, eager, windows


def by_loops(attention_TT: torch.Tensor, seen_TT: torch.Tensor) -> torch.Tensor:
    """For every key the mean over the queries that may see it."""
    return torch.stack([attention_TT[seen_TT[:, k], k].mean() for k in range(len(attention_TT))])


@torch.no_grad()
def expected_of(eager: Any, row_T: torch.Tensor, windows: list[int | None]) -> torch.Tensor:
    """(layers, heads, T) of one sequence without padding."""
    attention = eager(row_T[None], output_attentions=True, use_cache=False).attentions
    t, k = torch.arange(len(row_T))[:, None], torch.arange(len(row_T))
    seen = [(k <= t) & (k > t - (window or T)) for window in windows]
    return torch.stack(
        [torch.stack([by_loops(head, see) for head in layer[0]]) for layer, see in zip(attention, seen, strict=True)]
    )


def rates(alpha_NLHT: torch.Tensor, eps: float = EPS) -> list[float]:
    return (100 * (alpha_NLHT > eps).double().mean((0, 1, 2))).tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_mean_over_visible_queries_is_that_of_the_familys_own_matrices(name: str) -> None:
    model, eager, windows = family(name)
    expected = torch.stack([expected_of(eager, row, windows) for row in tokens_of()])
    found = measure(model, tokens_of(), eps=[EPS, 0.2], batch_size=2)
    assert_close(found.importance_visible, expected.mean(0))
    assert found.sink_rate_visible == pytest.approx(rates(expected))
    assert found.sink_rates_visible is not None
    assert found.sink_rates_visible["0.2"] == pytest.approx(rates(expected, 0.2))
    assert found.sink_rate_visible != found.sink_rate
    full = [layer for layer, window in enumerate(windows) if window is None]
    np.testing.assert_array_equal(np.asarray(found.importance_visible)[full], found.importance[full])


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt-oss", "gpt-neo"])
def test_padding_does_not_change_the_importance_over_visible_queries(name: str) -> None:
    model, eager, windows = family(name)
    lengths, pads = (T, 3, 9), ((0, 0), (11, 0), (2, 3))  # the second is shorter than every window
    rows = [row[:length] for row, length in zip(tokens_of(3), lengths, strict=True)]
    pad = torch.nn.functional.pad
    tokens = torch.stack([pad(row, sides, value=9) for row, sides in zip(rows, pads, strict=True)])
    mask = torch.stack([pad(torch.ones_like(row), sides) for row, sides in zip(rows, pads, strict=True)])
    alone = [expected_of(eager, row, windows) for row in rows]
    for batch_size in (1, 3):
        found = measure(model, tokens, attention_mask=mask, batch_size=batch_size)
        for k in range(T):
            seen = torch.stack([one[..., k] for one in alone if k < one.shape[-1]])
            assert_close(np.asarray(found.importance_visible)[..., k], seen.mean(0))
            assert found.sink_rate_visible is not None
            assert found.sink_rate_visible[k] == pytest.approx(100 * (seen > EPS).double().mean())


MASKS: dict[str, dict[str, Any]] = {
    "window": {"mask": {"kind": "window", "width": 4}},
    "window behind a sink token": {"mask": {"kind": "window", "width": 4}, "bias": {"kind": "sink_token"}},
    "window beside a key bias": {"mask": {"kind": "window", "width": 4}, "bias": {"kind": "k"}},
    "window, sigmoid": {"mask": {"kind": "window", "width": 4}, "operation": {"kind": "sigmoid"}},
    "window, kernel": {"mask": {"kind": "window", "width": 4}, "operation": {"kind": "elu_kernel", "normalised": True}},
    "prefix": {"mask": {"kind": "prefix", "length": 3}},
    "documents": {"mask": {"kind": "document", "eos_id": EOS}},
}


def ours(attention: dict[str, Any], length: int = 16) -> Transformer:
    sizes = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn_width": 48, "vocab_size": 64, "context": length}
    model = Transformer(ModelConfig.model_validate({**sizes, "attention": attention}), seed=3).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.6)  # sharper than at the start
    return model


def seen_by(kind: str, tokens_T: torch.Tensor) -> torch.Tensor:
    """Boolean mask (T, T), from the definition of each kind."""
    t, k = torch.arange(len(tokens_T))[:, None], torch.arange(len(tokens_T))
    if kind.startswith("window"):
        return (k <= t) & (k > t - 4)
    if kind == "prefix":
        return (k <= t) | (k < 3)
    document_T = torch.cat((torch.zeros(1), (tokens_T == EOS)[:-1].cumsum(0)))
    return (k <= t) & (document_T[:, None] == document_T)


@torch.no_grad()
def matrices_of(model: Transformer, tokens_NT: torch.Tensor, kind: str) -> torch.Tensor:
    """Normalised scores among the tokens (N, L, H, T, T), from what the cores are given."""
    given: list[Any] = []
    cores: list[Any] = [block.attention.core for block in model.blocks]  # type: ignore[union-attr]
    handles = [core.register_forward_hook(lambda _, args, __: given.append(args)) for core in cores]
    model(tokens_NT)
    for handle in handles:
        handle.remove()
    found = []
    for core, (q, k, *_) in zip(cores, given, strict=True):
        k = k.repeat_interleave(2, 1)
        if kind == "window, kernel":
            q, k = (torch.nn.functional.elu(x) + 1 for x in (q, k))
        z = q @ k.transpose(-1, -2) / 8**0.5
        similarity = z if kind == "window, kernel" else z.sigmoid() if kind == "window, sigmoid" else z.exp()
        seen = torch.stack([seen_by(kind, row) for row in tokens_NT])[:, None]
        leading = int(core.leading)
        weights = similarity[..., leading:, leading:] * seen
        extra = similarity[..., leading:, :leading].sum(-1, keepdim=True)
        if core.bias.key is not None:
            extra = (q @ core.bias.key_per_head()[:, :, None] / 8**0.5).exp()
        found.append(weights / (weights.sum(-1, keepdim=True) + extra))
    return torch.stack(found, 1)


@pytest.mark.parametrize("kind", MASKS)
def test_our_models_agree_with_matrices_written_out(kind: str) -> None:
    model, tokens = ours(MASKS[kind]), tokens_of()
    tokens[:, 6] = EOS
    tokens[1, 3] = EOS
    expected = torch.stack(
        [
            torch.stack([torch.stack([by_loops(head, seen_by(kind, row)) for head in layer]) for layer in one])
            for one, row in zip(matrices_of(model, tokens, kind), tokens, strict=True)
        ]
    )
    found = measure(model, tokens, batch_size=2)
    assert_close(found.importance_visible, expected.mean(0))
    assert found.sink_rate_visible == pytest.approx(rates(expected))


@pytest.mark.parametrize("width", [None, T])
def test_visible_importance_is_not_reported_if_every_later_query_sees_every_key(width: int | None) -> None:
    found = measure(ours({"mask": {"kind": "window", "width": width}} if width else {}), tokens_of())
    assert found.sink_rate_visible is None
    assert found.importance_visible is None
    assert not any("visible" in note for note in found.notes)
    config = hf.MistralConfig(**COMMON, sliding_window=T)
    foreign = measure(hf.AutoModelForCausalLM.from_config(config).eval(), tokens_of())
    assert foreign.sink_rate_visible is None
    assert foreign.notes == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mistral", "a sliding window of 4 tokens in all layers"),
        ("gemma3", "a sliding window of 6 tokens in layers 1, 3"),
    ],
)
def test_a_note_says_which_layers_have_a_window_and_its_width(name: str, said: str) -> None:
    model, _, _ = family(name)
    assert any(note.startswith(said) and "sink_rate_visible" in note for note in measure(model, tokens_of()).notes)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("prefix", "the first 3 keys are visible to earlier queries in all layers"),
        ("documents", "no key is visible to more than 7 queries in all layers"),
    ],
)
def test_a_note_says_how_prefix_and_document_masks_change_the_visible_keys(kind: str, said: str) -> None:
    tokens = tokens_of(2).clamp(min=EOS + 1)
    tokens[:, 6] = EOS
    assert any(note.startswith(said) for note in measure(ours(MASKS[kind]), tokens).notes)


def test_importance_over_visible_queries_is_not_diluted_by_a_window() -> None:
    """Over the queries that see key 1, its importance is T / w times the importance over all queries."""
    model, length, width = ours({"mask": {"kind": "window", "width": 16}}, 128), 128, 16
    tokens = torch.full((1, length), 7)
    found = measure(model, tokens)  # equal tokens under rotary: nearly uniform
    uniform = sum(1 / t for t in range(1, width + 1)) / width
    assert np.asarray(found.importance_visible)[..., 0].mean() == pytest.approx(uniform, rel=0.3)
    ratio = np.asarray(found.importance_visible)[..., 0] / found.importance[..., 0]
    assert_close(ratio, length / width)


@torch.no_grad()
def test_a_model_that_decodes_past_its_window_gives_the_same_as_one_pass() -> None:
    model, _, _ = family("mistral")
    prompt = tokens_of(2, 6)
    with sinklab.probe(model) as decoding:
        whole = model.generate(prompt, max_new_tokens=T - 5, do_sample=False, eos_token_id=None)
    with sinklab.probe(model) as together:
        model(whole[:, :-1], use_cache=False)
    for one, other in zip(decoding.layers, together.layers, strict=True):
        assert one.visible_BHT is not None
        assert other.visible_BHT is not None
        assert_close(one.visible_BHT, other.visible_BHT)
        assert one.view == other.view


def test_gradients_do_not_change_the_importance_over_visible_queries() -> None:
    model, eager, windows = family("gemma3")
    with sinklab.probe(model) as watch:
        model(tokens_of(), labels=tokens_of()).loss.backward()
    expected = torch.stack([expected_of(eager, row, windows) for row in tokens_of()], 1)
    for layer, alpha in zip(watch.layers, expected, strict=True):
        shown = layer.importance_BHT if layer.visible_BHT is None else layer.visible_BHT
        assert_close(shown, alpha)


def test_masks_that_are_added_to_the_scores_hide_keys_too() -> None:
    seen = seen_by("window", torch.zeros(T))
    added = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
    q = torch.randn(2, 4, T, 8, generator=torch.Generator().manual_seed(0))
    layer = read_call(torch.nn.Module(), q, q, q, added)
    assert layer.visible_queries()[0, 0].tolist() == seen.sum(0).tolist()


def test_the_files_and_the_terminal_have_the_sink_rate_over_visible_queries(tmp_path: Path) -> None:
    measured = measure(ours(MASKS["window"]), tokens_of(), eps=[EPS, 0.2])
    measured.save(tmp_path)
    document = json.loads((tmp_path / "measurement.json").read_text())
    assert document["sink_rate_visible"] == measured.sink_rate_visible
    with np.load(tmp_path / "measurement.npz") as arrays:
        np.testing.assert_array_equal(arrays["importance_visible"], np.asarray(measured.importance_visible))
    assert Measurement.load(tmp_path).document() == measured.document()
    out = StringIO()
    print_measurement(measured, Console(file=out, width=100), full=True)
    shown = out.getvalue()
    assert measured.sink_rate_visible is not None
    assert "queries that see it" in shown
    assert f"{measured.sink_rate_visible[0]:.2f}" in shown
    assert "visible" in next(line for line in shown.splitlines() if "highest head" in line)
