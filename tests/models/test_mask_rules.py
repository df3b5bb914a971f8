"""Masks of Hugging Face models are read as rules without computing their entries, and measurements are the same."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import sinklab
from sinklab.attention import primitive
from sinklab.attention.layer_call import LayerCall
from sinklab.attention.masks import Both, Causal, Dense, Document, Mask, MaskTensor, Window
from sinklab.models.adapter import adapt
from sinklab.models.hooks import evaluating
from sinklab.models.huggingface import interface

T, WIDTH = 320, 24  # several blocks of queries
COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "sliding_window": WIDTH,
}
MIXED: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"]}
WINDOWS: dict[str, Callable[[], Any]] = {
    "mistral": lambda: hf.MistralConfig(**COMMON),
    "gemma2": lambda: hf.Gemma2Config(**COMMON, **MIXED, query_pre_attn_scalar=16),
    "gemma3": lambda: hf.Gemma3TextConfig(**COMMON, **MIXED, query_pre_attn_scalar=16),
    "gpt-oss": lambda: hf.GptOssConfig(**COMMON, **MIXED, num_local_experts=2, num_experts_per_tok=1),
    "qwen2": lambda: hf.Qwen2Config(**COMMON, **MIXED, use_sliding_window=True),
    "qwen3": lambda: hf.Qwen3Config(**COMMON, **MIXED, use_sliding_window=True),
}
TOKENS = torch.randint(3, 64, (2, T), generator=torch.Generator().manual_seed(1))
PADDING = {"none": (0, 0), "left": (40, 0), "right": (0, 40)}


def model_of(config: Any) -> Any:
    torch.manual_seed(0)
    return hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def padded(side: str) -> Tensor:
    """A padding mask whose second row is shorter."""
    real = torch.ones_like(TOKENS)
    left, right = PADDING[side]
    real[1, :left] = 0
    real[1, T - right :] = 0
    return real


def read_masks(model: Any, **inputs: Any) -> list[Mask]:
    """The mask of every attention layer in a forward pass."""
    found: list[Mask] = []

    def compute(layer: LayerCall) -> Tensor:
        found.append(layer.call.mask)
        return layer.own_output()

    with evaluating(model), adapt(model).intercepted(compute):
        model(**inputs)
    return found


@contextmanager
def as_entries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Build masks with their entries, as transformers does."""
    with monkeypatch.context() as patch:
        patch.setattr(interface, "ruled_mask", interface.sdpa_mask)
        yield


def refuse(**_: Any) -> Tensor:
    pytest.fail("the entries of a mask were computed")


class NoSquares(TorchDispatchMode):
    """Refuse boolean tensors with an entry for every query and key."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not isinstance(result, MaskTensor) and result.dtype == torch.bool:
            assert result.shape[-2:] != (T, T), func
        return result


@pytest.mark.parametrize("name", WINDOWS)
def test_an_unpadded_measurement_computes_no_mask_of_queries_by_keys(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(WINDOWS[name]())
    with monkeypatch.context() as patch, NoSquares():
        patch.setattr(interface, "sdpa_mask", refuse)
        found = sinklab.measure(model, TOKENS, details=True)
    assert found.sink_rate_visible is not None


@pytest.mark.parametrize("side", PADDING)
@pytest.mark.parametrize("name", WINDOWS)
def test_measurements_with_mask_rules_equal_those_with_mask_entries(
    name: str, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, real = model_of(WINDOWS[name]()), padded(side)
    given: dict[str, Any] = {"attention_mask": real} if side != "none" else {}
    rules = read_masks(model, input_ids=TOKENS, use_cache=False, **given)
    window, full = (Both, Document) if given else (Window, Causal)
    assert [type(rule) for rule in rules] == [window, window if name == "mistral" else full]
    found = sinklab.measure(model, TOKENS, details=True, **given)
    with as_entries(monkeypatch):
        entries = read_masks(model, input_ids=TOKENS, use_cache=False, **given)
        assert isinstance(entries[0], Dense)
        expected = sinklab.measure(model, TOKENS, details=True, **given)
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    for array in ("importance", "importance_visible", "hidden_norm", "importance_bias"):
        one, other = getattr(found, array), getattr(expected, array)
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_allclose(one, other, rtol=2e-6, atol=1e-6)
    assert found.details is not None
    assert expected.details is not None
    np.testing.assert_allclose(found.details.entropy, expected.details.entropy, rtol=1e-5)


@pytest.mark.parametrize("name", ["mistral", "gpt-oss"])
def test_flex_attention_computes_sliding_windows_where_it_is_available(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(WINDOWS[name]())
    with evaluating(model):
        expected = model(TOKENS, use_cache=False).logits
    for module in (interface, primitive):  # the kernel that is chosen on a card, here uncompiled
        monkeypatch.setattr(module, "flex_serves", lambda query, value: True)
    names = set()

    def compute(layer: LayerCall) -> Tensor:
        assert layer.library is not None
        names.add((type(layer.call.mask), layer.library.name))
        return layer.library.output()

    with evaluating(model), adapt(model).intercepted(compute):
        found = model(TOKENS, use_cache=False).logits
    assert (Window, "flex") in names
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def llama4() -> Any:
    return hf.Llama4TextConfig(
        **COMMON | {"sliding_window": None},
        attention_chunk_size=16,
        layer_types=["chunked_attention", "full_attention"],
        num_local_experts=2,
        intermediate_size_mlp=48,
        moe_layers=[],
    )


def test_chunked_masks_packed_sequences_and_caches_have_dense_masks() -> None:
    model = model_of(WINDOWS["mistral"]())
    assert isinstance(read_masks(model_of(llama4()), input_ids=TOKENS, use_cache=False)[0], Dense)
    packed = torch.cat((torch.arange(100), torch.arange(T - 100))).expand(2, -1)
    assert isinstance(read_masks(model, input_ids=TOKENS, position_ids=packed, use_cache=False)[0], Dense)
    square = torch.ones(2, 1, T, T, dtype=torch.bool).tril()
    assert isinstance(read_masks(model, input_ids=TOKENS, attention_mask=square, use_cache=False)[0], Dense)
    cache = model(TOKENS[:, :100]).past_key_values
    assert isinstance(read_masks(model, input_ids=TOKENS[:, 100:], past_key_values=cache)[0], Dense)


def test_a_sequence_no_longer_than_its_window_has_a_plain_causal_mask() -> None:
    masks = read_masks(model_of(WINDOWS["gemma3"]()), input_ids=TOKENS[:, :WIDTH], use_cache=False)
    assert all(mask.plain for mask in masks)


def test_a_mask_rule_acts_like_its_entries_and_changes_device_without_computing_them() -> None:
    made = 0

    def entries() -> Tensor:
        nonlocal made
        made += 1
        return torch.ones(T, T, dtype=torch.bool).tril()[None, None]

    mask = MaskTensor(Window(3), entries, (1, 1, T, T), torch.device("cpu"))
    moved = mask.to("meta")
    assert isinstance(moved, MaskTensor)
    assert (moved.rule, moved.device.type, mask.shape, made) == (mask.rule, "meta", (1, 1, T, T), 0)
    assert torch.equal(mask & mask.logical_not(), torch.zeros(1, 1, T, T, dtype=torch.bool))
    assert made == 1
    with pytest.raises(AssertionError):
        mask.logical_not_()
