"""Formats of the KV cache against torch's cast, the package gguf, a scalar TurboQuant, and a cache of transformers."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from assessed import part_settings, run_part, small, some_tokens
from closeness import assert_close
from families import family_tokens, pair_of

from sinklab.assessing.parts import USUAL
from sinklab.assessing.parts.kv_formats import BY_LAYER, FORMATS, KVFormats, StoredCache, lloyd_max
from sinklab.assessing.parts.quantisation import rotated, unrotated
from sinklab.assessing.reading import changed_attention
from sinklab.models.adapter import adapt
from sinklab.models.hooks import evaluating


def cached(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_fp8_is_the_cast_of_torch_with_the_scale_of_the_tensor_or_of_a_head() -> None:
    x = cached(1, 2, 9, 16) * torch.tensor([1.0, 50.0])[:, None, None]
    assert torch.equal(FORMATS["fp8"].keys(x), x.to(torch.float8_e4m3fn).float())
    assert float(FORMATS["fp8"].keys(x * 1e4).abs().max()) == 448
    scale = x.abs().max() / 448
    assert torch.equal(FORMATS["fp8 per tensor"].keys(x), (x / scale).to(torch.float8_e4m3fn).float() * scale)
    by_head = FORMATS["fp8 per head"].keys(x)
    for head in range(2):
        own = x[:, head].abs().max() / 448
        assert torch.equal(by_head[:, head], (x[:, head] / own).to(torch.float8_e4m3fn).float() * own)


@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_blocks_are_those_of_ggml(name: str) -> None:
    gguf = pytest.importorskip("gguf", reason="needs gguf (extra gguf)")
    x = cached(2, 3, 20, 64) * torch.logspace(-2, 2, 20)[:, None]
    x[0, 0, 0] = 0
    kind = getattr(gguf.GGMLQuantizationType, name.upper())
    expected = gguf.dequantize(gguf.quantize(x.numpy(), kind), kind)
    assert np.allclose(FORMATS[name].keys(x).numpy(), expected, rtol=0, atol=1e-7)


def by_ggml(block: list[float], name: str) -> list[float]:
    """One block as ggml's reference code rounds it, in scalars."""
    if name == "q8_0":
        d = max(map(abs, block)) / 127
        return [math.copysign(math.floor(abs(x / d) + 0.5), x) * float(np.float16(d)) for x in block]
    most = max(block, key=abs)
    d = most / -8
    return [(min(15, int(x / d + 8.5)) - 8) * float(np.float16(d)) for x in block]


@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_blocks_are_rounded_one_by_one(name: str) -> None:
    x = cached(1, 1, 3, 64)
    for token in range(3):
        line = x[0, 0, token].tolist()
        expected = [y for start in (0, 32) for y in by_ggml(line[start : start + 32], name)]
        assert_close(FORMATS[name].keys(x)[0, 0, token], torch.tensor(expected), 1e-6)


@pytest.mark.parametrize(("bits", "error"), [(3, 0.0345), (4, 0.0095)])
def test_the_levels_have_the_error_of_lloyd_and_max(bits: int, error: float) -> None:
    levels = lloyd_max(bits)
    z = torch.linspace(-8, 8, 400_001, dtype=torch.float64)
    density = (-z.square() / 2).exp() / math.sqrt(2 * math.pi)
    nearest = (z[:, None] - levels).square().amin(1)
    assert float((nearest * density).sum() * (z[1] - z[0])) == pytest.approx(error, rel=5e-3)


def turboquant_by_hand(x: torch.Tensor, bits: int) -> torch.Tensor:
    """One vector: nearest levels of the rotated direction, scaled to the norm, which is stored in half precision."""
    levels, norm = lloyd_max(bits), float(x.norm())
    y = rotated(x / norm) * math.sqrt(len(x))
    near = torch.tensor([min(levels.tolist(), key=lambda level, z=float(z): abs(level - z)) for z in y])
    return unrotated(near / near.norm()) * float(np.float16(norm))


@pytest.mark.parametrize("bits", [3, 4])
def test_keys_of_turboquant_are_rounded_as_by_hand_and_keep_their_norm(bits: int) -> None:
    x, stored = cached(1, 1, 5, 32) * 7, FORMATS[f"turboquant_{bits}bit_nc"].keys
    for token in range(5):
        assert_close(stored(x)[0, 0, token], turboquant_by_hand(x[0, 0, token], bits), 1e-5)
    assert_close(stored(x).norm(dim=-1), x.norm(dim=-1), 1e-3)


def test_values_of_turboquant_have_equal_steps_from_least_to_largest() -> None:
    x = torch.linspace(-1, 1, 16)[None, None, None]
    assert_close(FORMATS["turboquant_4bit_nc"].values(x), x, 1e-3)
    eight = FORMATS["turboquant_3bit_nc"].values(cached(1, 1, 4, 64))
    assert all(len(eight[0, 0, token].unique()) <= 8 for token in range(4))


def test_a_rotation_without_rounding_changes_no_logits() -> None:
    model, tokens = pair_of("llama")[0].double(), family_tokens()
    adapter = adapt(model)

    def turned(layer: Any) -> Any:
        return layer.changed(k_BGTD=rotated(layer.call.k_BGTD), q_BHTD=rotated(layer.call.q_BHTD))

    with torch.no_grad(), evaluating(model):
        plain = model(tokens).logits
        with changed_attention(adapter, turned):
            states = adapter.hidden(tokens)
        assert float((adapter.logits(states.flatten(0, 1)).view_as(plain) - plain).abs().max()) < 1e-5


class StoringCache(hf.DynamicCache):
    """A cache of transformers that returns keys and values as a format stores them."""

    def __init__(self, name: str, keys: bool, values: bool, only: int | None, spared: int) -> None:
        super().__init__()
        self.name, self.which, self.only, self.spared = name, (keys, values), only, spared

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        both = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if self.only not in (None, layer_idx + 1):
            return both
        stored = (FORMATS[self.name].keys, FORMATS[self.name].values)
        n = self.spared
        return tuple(
            torch.cat((x[:, :, :n], store(x[:, :, n:])), 2) if wanted else x
            for x, store, wanted in zip(both, stored, self.which, strict=True)
        )


@pytest.mark.parametrize(
    ("name", "keys", "values", "only", "spared"),
    [
        ("q4_0", True, True, None, 0),
        ("turboquant_3bit_nc", True, False, None, 1),
        ("fp8 per tensor", False, True, None, 0),
        ("nvfp4", True, True, 2, 2),
    ],
)
def test_a_stored_cache_equals_a_storing_cache_in_transformers(
    name: str, keys: bool, values: bool, only: int | None, spared: int
) -> None:
    model, tokens = pair_of("qwen3")[0], family_tokens()[:1]
    adapter = adapt(model)
    with torch.no_grad(), evaluating(model):
        cache = StoringCache(name, keys, values, only, spared)
        expected = model(tokens, past_key_values=cache).logits
        with changed_attention(adapter, StoredCache(FORMATS[name], spared, keys, values, only)):
            states = adapter.hidden(tokens)
        assert_close(adapter.logits(states.flatten(0, 1)).view_as(expected), expected, 1e-4)


def test_the_part_reports_every_format_and_every_single_layer() -> None:
    found = run_part(KVFormats, small(), some_tokens(), part_settings())
    assert [one.name for one in found.formats] == list(FORMATS)
    assert [(one.name, one.layer) for one in found.layers] == [(name, layer) for name in BY_LAYER for layer in (1, 2)]
    for one in found.formats:
        assert one.due_to_sink == pytest.approx(one.everything.loss - one.without_sink.loss, abs=1e-6)  # over draws
        assert one.everything.kl > 0
    assert found.formats[3].everything.kl < found.formats[4].everything.kl  # q8_0 and q4_0
    assert len(found.figure().rows) == 2 * len(found.layers)
    assert "kv_formats" not in USUAL


def test_rounding_layers_one_by_one_equals_rounding_all_at_once() -> None:
    model, tokens = pair_of("llama")[0], family_tokens()
    adapter = adapt(model)

    def one_by_one(layer: Any) -> Any:
        for index in (1, 2):
            layer = StoredCache(FORMATS["q4_0"], layer=index)(layer)
        return layer

    with torch.no_grad(), evaluating(model):
        with changed_attention(adapter, StoredCache(FORMATS["q4_0"])):
            together = adapter.hidden(tokens)
        with changed_attention(adapter, one_by_one):
            assert torch.equal(adapter.hidden(tokens), together)
