"""Chunks cached apart, against a cache of transformers that was joined by hand and against a block mask."""

from typing import Any

import pytest
import torch
import transformers as hf
from assessed import ASSESSED, part_settings, run_part, small, some_tokens
from closeness import assert_close
from families import GROUPED
from torch import Tensor

from sinklab.assessing.parts.chunks import CHUNKS, Chunks, JoinedCache, _cached
from sinklab.assessing.reading import Passes, changed_attention
from sinklab.attention.masks import Dense
from sinklab.models.adapter import Adapter
from sinklab.models.huggingface.pretrained_adapter import HuggingFaceAdapter

SIZE, LENGTH = 4, 28
PROMPT = CHUNKS * SIZE


def under(one: Adapter, edit: Any, row: Tensor) -> Tensor:
    with torch.no_grad(), changed_attention(one, edit):
        return one.hidden(row[None])[0]


def by_hand(model: Any, row: Tensor, recomputed: int, front: int) -> Tensor:
    """Hidden states after the prompt; every cache is read at the positions of the text, and joined chunk by chunk."""

    def read(tokens: Tensor, start: int, cache: Any) -> Tensor:
        places = torch.arange(start, start + len(tokens))[None]
        return model.model(tokens[None], position_ids=places, past_key_values=cache).last_hidden_state[0]

    joined: Any = hf.DynamicCache(config=model.config)
    read(row[:SIZE], 0, joined)
    for start in range(SIZE, PROMPT, SIZE):
        alone: Any = hf.DynamicCache(config=model.config)
        read(row[:front], start - front, alone) if front else None  # next to the chunk, as where it was cached
        read(row[start : start + SIZE], start, alone)
        read(row[start : start + recomputed], start, joined) if recomputed else None
        for layer, other in zip(joined.layers, alone.layers, strict=True):
            layer.keys = torch.cat((layer.keys, other.keys[:, :, front + recomputed :]), 2)
            layer.values = torch.cat((layer.values, other.values[:, :, front + recomputed :]), 2)
    return read(row[PROMPT:], PROMPT, joined)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("config", [hf.LlamaConfig, hf.Qwen3Config])
@pytest.mark.parametrize(("recomputed", "front"), [(0, 0), (1, 0), (3, 0), (0, 2)])
def test_the_continuation_equals_that_with_a_cache_joined_by_hand(recomputed: int, front: int, config: Any) -> None:
    torch.manual_seed(3)
    model: Any = hf.AutoModelForCausalLM.from_config(config(**GROUPED)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.ndim > 1 else 1)
    adapter = HuggingFaceAdapter(model)
    for row in some_tokens(2, LENGTH, vocabulary=60) + 3:
        edit = JoinedCache(_cached(adapter, row, SIZE, front), SIZE, recomputed)
        with torch.no_grad():
            expected = by_hand(model, row, recomputed, front)
        assert_close(under(adapter, edit, row)[PROMPT:], expected, 1e-5)


@pytest.mark.parametrize("variant", [*ASSESSED])
def test_chunks_cached_apart_equal_a_block_mask_over_the_prompt(variant: str) -> None:
    one, row = small(variant), some_tokens(1, LENGTH)[0]

    def blocks(layer: Any) -> Any:
        places = torch.arange(LENGTH + layer.leading) - layer.leading
        chunk = (places // SIZE).clamp(max=CHUNKS)
        seen = (chunk[:, None] == chunk) | (places < 0) | (places >= PROMPT)[:, None]
        return layer.masked(Dense(seen.tril()[None, None]))

    cached = _cached(one, row, SIZE, 0)
    found, expected = (under(one, edit, row)[PROMPT:] for edit in (JoinedCache(cached, SIZE), blocks))
    if variant not in ("k biases", "sink token"):  # where a chunk is nearer to the bias or sink token than in the text
        assert_close(found, expected, 1e-9)
    whole = under(one, JoinedCache(cached, SIZE, recomputed=SIZE), row)
    assert_close(whole, under(one, None, row), 1e-12)
    assert float((found - whole[PROMPT:]).abs().max()) > 1e-3


def test_the_first_keys_of_later_chunks_are_hidden_only_after_the_prompt() -> None:
    one, row = small(), some_tokens(1, LENGTH)[0]
    masks: list[Tensor] = []

    def watch(layer: Any) -> Any:
        edited = JoinedCache(_cached_once, SIZE, hidden=2)(layer)
        masks.append(edited.call.mask.block(0, LENGTH, 0, LENGTH, row.device)[0, 0])
        return edited

    _cached_once = _cached(one, row, SIZE, 0)
    under(one, watch, row)
    hidden = [place for start in (4, 8, 12) for place in (start, start + 1)]
    expected = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    expected[PROMPT:, hidden] = False
    assert all(torch.equal(mask, expected) for mask in masks)


def test_the_part_has_every_method_and_the_loss_of_the_second_half() -> None:
    steps, tokens = Passes(), some_tokens(2, 128)
    one = small(context=128)
    found = run_part(Chunks, one, tokens, part_settings(kept=(0, 2)), passes=steps)
    assert [row.method for row in found.methods] == [
        "cached apart",
        *(f"first {k} recomputed" for k in (1, 4)),
        "own sinks hidden",
        "cached after the first 2",
    ]
    assert (found.prompt, steps.done) == (64, 2 * (1 + 5))
    assert found.unchanged.targets == found.methods[0].targets == 2 * (128 - 64 - 1)
    assert [row.answer for row in found.rows()][1] == "cached apart, 4 chunks of 16 tokens"
    assert all(one.kl > 1e-6 for one in found.methods)
    assert found.sinks.due_to_sink == pytest.approx(found.methods[0].loss - found.methods[-1].loss)
    assert dict(found.values()) == {
        "chunks_apart_added": pytest.approx(found.methods[0].loss - found.unchanged.loss),
        "chunks_due_to_sink": found.sinks.due_to_sink,
    }


@pytest.mark.parametrize(
    ("changes", "length", "why"),
    [
        ({}, 15, "4 chunks of at least 2 tokens need a --length of 16 or more"),
        ({"position": {"kind": "learnable"}}, 64, "its learnable positional embeddings are added"),
        ({"attention": {"operation": {"kind": "forgetting"}}}, 64, "its layers depend on earlier tokens other than by"),
    ],
)
def test_models_whose_chunks_cannot_be_moved_are_refused(changes: Any, length: int, why: str) -> None:
    assert str(Chunks.refusal(small(context=64, **changes), part_settings(length=length))).startswith(why)
