"""`sinklab.probe` around `generate` records the returned sequences; other ways of generating are refused."""

import copy
from typing import Any

import pytest
import torch
import transformers as hf
from closeness import assert_close
from measure_reference import importance_by_loops
from torch import Tensor

import sinklab
from sinklab.errors import SinklabError

END = 5
SMALL: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
PROMPTS = torch.randint(6, 24, (2, 5), generator=torch.Generator().manual_seed(1))
HOW: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": END, "pad_token_id": 3}


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, initializer_range=0.2)).eval()


@pytest.fixture
def other() -> Any:
    torch.manual_seed(1)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, initializer_range=0.2)).eval()


@torch.no_grad()
def check(model: Any, watch: Any, sequences: list[Tensor]) -> None:
    """Every row is that of its sequence in a full forward pass of the model's own eager attention."""
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    assert len(watch.layers[0].importance_BHT) == len(sequences)
    for number, row in enumerate(sequences):
        attentions = eager(row[None], output_attentions=True, use_cache=False).attentions
        alpha_LHT = importance_by_loops(torch.cat(attentions))
        for layer, alpha_HT in zip(watch.layers, alpha_LHT, strict=True):
            assert_close(layer.importance_BHT[number, :, : len(row)], alpha_HT, what=f"sequence {number}")
            assert not layer.importance_BHT[number, :, len(row) :].any()


def read_of(text_BT: Tensor, prompt: int) -> list[Tensor]:
    """Tokens of each sequence that `generate` has read: up to END, or all but the last token without END."""
    rows = []
    for row in text_BT:
        ends = (row[prompt:-1] == END).nonzero()
        rows.append(row[: prompt + int(ends[0]) + 1] if len(ends) else row[:-1])
    return rows


@torch.no_grad()
def test_the_measurement_of_a_probe_is_that_of_its_sequences(model: Any) -> None:
    with sinklab.probe(model) as watch:
        with pytest.raises(SinklabError, match="no forward pass was recorded"):
            watch.measurement()
        text_BT = model.generate(PROMPTS, attention_mask=torch.ones_like(PROMPTS), do_sample=False, **HOW)
        model(PROMPTS[:1, :3])
    rows = [*read_of(text_BT, PROMPTS.shape[1]), PROMPTS[0, :3]]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    found = watch.measurement(eps=0.1, model_name="mine")
    expected = sinklab.measure(model, tokens, attention_mask=mask, eps=0.1)
    assert (found.sink_rate, found.sequence_lengths) == (expected.sink_rate, expected.sequence_lengths)
    assert (found.sequences, found.length, found.model, found.loss) == (3, expected.length, "mine", None)
    for name in ("importance", "importance_first", "key_norm", "value_norm"):
        torch.testing.assert_close(*(torch.from_numpy(getattr(one, name)) for one in (found, expected)))
    assert len(found.columns("heads")["sink_rate"]) == 8


@pytest.mark.parametrize(
    "how", [{"do_sample": True, "num_return_sequences": 8, "top_k": 0}, {"do_sample": False}, {"use_cache": False}]
)
@torch.no_grad()
def test_each_returned_sequence_has_its_own_record_up_to_its_end(model: Any, how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    with sinklab.probe(model) as watch:
        text_BT = model.generate(PROMPTS, attention_mask=torch.ones_like(PROMPTS), **HOW, **how)
    rows = read_of(text_BT, PROMPTS.shape[1])
    if how.get("do_sample"):
        assert len({len(row) for row in rows}) > 1  # some have ended before the others
    check(model, watch, rows)


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ({"num_beams": 3}, "beam search"),
        ({"num_beams": 3, "use_cache": False}, "beam search"),
        ({"num_beams": 2, "do_sample": True}, "beam sample"),
        ({"generation_config": hf.GenerationConfig(num_beams=2)}, "beam search"),
        ({"prompt_lookup_num_tokens": 2}, "assisted generation"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive search"),
    ],
    ids=str,
)
def test_ways_of_generating_that_read_other_sequences_are_refused_before_anything_is_read(
    model: Any, how: dict[str, Any], named: str
) -> None:
    with sinklab.probe(model) as watch:
        with pytest.raises(SinklabError, match=rf"^{named} .* Generate outside the probe, then call model"):
            model.generate(PROMPTS, max_new_tokens=3, **how)
        assert watch.layers == []
        model.generate(PROMPTS, max_new_tokens=3, do_sample=False)
    assert "generate" not in vars(model)
    model.generate(PROMPTS, max_new_tokens=3, num_beams=2)


def test_guidance_which_reads_other_sequences_too_is_refused(model: Any) -> None:
    with sinklab.probe(model), pytest.raises(SinklabError, match=r"^guidance_scale=1\.5 .* Leave guidance_scale out"):
        model.generate(PROMPTS, max_new_tokens=3, guidance_scale=1.5)
    with sinklab.probe(model) as watch:
        model.generate(PROMPTS, max_new_tokens=3, do_sample=False, guidance_scale=1)
        assert len(watch.layers) == SMALL["num_hidden_layers"]


def test_an_assistant_model_and_beams_of_the_generation_config_are_refused(model: Any, other: Any) -> None:
    with sinklab.probe(model), pytest.raises(SinklabError, match=r"^assisted generation"):
        model.generate(PROMPTS[:1], max_new_tokens=3, assistant_model=other)
    model.generation_config.num_beams = 4
    with sinklab.probe(model), pytest.raises(SinklabError, match=r"^beam search"):
        model.generate(PROMPTS, max_new_tokens=3)


@torch.no_grad()
def test_a_model_measured_from_its_own_matrices_generates_without_a_cache() -> None:
    torch.manual_seed(0)
    config = hf.BloomConfig(vocab_size=24, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.4)
    bloom: Any = hf.BloomForCausalLM(config).eval()
    how = {**HOW, "attention_mask": torch.ones_like(PROMPTS), "do_sample": True, "num_return_sequences": 8, "top_k": 0}
    with sinklab.probe(bloom) as watch:
        with pytest.raises(SinklabError, match=r"requires whole sequences.*generate with use_cache=False"):
            bloom.generate(PROMPTS, **how)
        text_BT = bloom.generate(PROMPTS, **how, use_cache=False)
        assert bloom(PROMPTS, use_cache=False).past_key_values is None
        assert bloom(PROMPTS).past_key_values is not None
    rows = read_of(text_BT, PROMPTS.shape[1])
    assert len({len(row) for row in rows}) > 1
    with sinklab.probe(bloom) as again:
        for row in [*rows, *PROMPTS, *PROMPTS]:
            bloom(row[None])
    for one, other in zip(watch.layers, again.layers, strict=True):
        assert_close(one.importance_BHT, other.importance_BHT)


@torch.no_grad()
def test_a_forward_pass_over_the_output_of_beam_search_is_recorded(model: Any) -> None:
    text_BT = model.generate(PROMPTS, max_new_tokens=6, num_beams=3, do_sample=False, eos_token_id=None)
    with sinklab.probe(model) as watch:
        model(text_BT)
    check(model, watch, list(text_BT))


@pytest.mark.parametrize("family", ["llama", "mistral"])
@torch.no_grad()
def test_a_cache_that_was_changed_between_passes_is_refused(family: str, model: Any) -> None:
    if family == "mistral":  # which keeps the last few tokens only
        model = hf.MistralForCausalLM(hf.MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=4)).eval()
    for change, says in (
        (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), "replaced or reordered"),
        (lambda cache: cache.reorder_cache(torch.tensor([1, 1])), "replaced or reordered"),
        (lambda cache: cache.batch_repeat_interleave(2), "replaced or reordered"),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), "replaced or reordered"),
    ):
        cache: Any = hf.DynamicCache(config=model.config)
        with sinklab.probe(model):
            model(PROMPTS, past_key_values=cache)
            change(cache)
            rows = len(cache.layers[0].keys)
            with pytest.raises(SinklabError, match=f"{says}.* as in beam search"):
                model(PROMPTS[:1, :1].expand(rows, 1), past_key_values=cache)


def test_a_static_cache_is_refused_with_what_to_use(model: Any) -> None:
    with sinklab.probe(model), pytest.raises(SinklabError, match=r"static KV cache.* use a dynamic cache"):
        model.generate(PROMPTS, cache_implementation="static", **HOW)


@torch.no_grad()
def test_an_earlier_copy_of_a_cache_is_refused_as_cropped(model: Any) -> None:
    cache: Any = hf.DynamicCache(config=model.config)
    with sinklab.probe(model):
        model(PROMPTS, past_key_values=cache)
        earlier = copy.deepcopy(cache)
        model(PROMPTS[:, :2], past_key_values=cache)
        with pytest.raises(SinklabError, match="cropped to 5 of the 7 tokens"):
            model(PROMPTS[:, :1], past_key_values=earlier)


@torch.no_grad()
def test_equal_rows_of_a_cache_may_be_exchanged(model: Any) -> None:
    """The cache has copies of one prompt, for several continuations."""
    cache: Any = hf.DynamicCache(config=model.config)
    same_BT = PROMPTS[:1].expand(2, -1)
    with sinklab.probe(model) as watch:
        model(same_BT, past_key_values=cache)
        cache.reorder_cache(torch.tensor([1, 0]))
        model(PROMPTS[:, :2], past_key_values=cache)
    check(model, watch, list(torch.cat((same_BT, PROMPTS[:, :2]), 1)))
