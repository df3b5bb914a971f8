"""Angles, entropy, distances, secondary sinks, kurtosis and maps, against whole matrices and by hand."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from closeness import assert_close
from details_reference import Captured, Read, captured, read_eagerly, reference, stream_of
from families import FAMILIES, TEN_FAMILIES, pair_of
from own_models import VARIANTS, attention_matrices, core_inputs, own_model, own_tokens
from transformers import AutoModelForCausalLM

from sinklab.attention import query_blocks
from sinklab.attention.importance import score_rows
from sinklab.attention.masks import CAUSAL, Mask, Window, real_tokens
from sinklab.attention.query_blocks import ScoreMatrix
from sinklab.errors import InputError
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.options import parse_maps
from sinklab.measuring.statistics.collecting import layer_details
from sinklab.measuring.statistics.details import Details
from sinklab.measuring.statistics.statistic_base import Angles
from sinklab.model.config import ModelConfig
from sinklab.model.transformer import Transformer
from sinklab.models.hooks import hooked
from sinklab.survey.api import measure

EPS = 0.2
LENGTH = 14
MAPS = [(2, 3), (1, 1)]


def _tokens() -> torch.Tensor:
    return torch.randint(3, 64, (3, LENGTH), generator=torch.Generator().manual_seed(1))


@cache
def _models(family: str) -> tuple[Any, Any]:
    assert family in FAMILIES
    return pair_of(family)


def _details(measured: Measurement) -> Details:
    assert measured.details is not None
    return measured.details


@cache
def _matrices(family: str) -> Read:
    """Reference from the family's own eager attention."""
    return read_eagerly(*_models(family), _tokens())


@pytest.mark.parametrize("family", TEN_FAMILIES)
def test_every_statistic_is_that_of_the_familys_own_matrices(family: str) -> None:
    attention, seen, values, hidden = _matrices(family)
    expected = reference(attention, seen, values, hidden, EPS)
    details = _details(measure(_models(family)[0], _tokens(), eps=EPS, batch_size=2, details=True))
    for name, array in expected.items():
        found = getattr(details, name)
        assert found is not None, name
        assert_close(found, array, what=name)
    assert (details.cosine is None) == (seen is None)


@pytest.mark.parametrize("family", TEN_FAMILIES)
def test_maps_are_the_matrices_of_the_heads_asked_for(family: str) -> None:
    attention, seen, _, _ = _matrices(family)
    details = _details(measure(_models(family)[0], _tokens(), batch_size=2, maps=MAPS))
    assert details.maps == MAPS
    assert details.map_attention is not None
    for place, (layer, head) in enumerate(MAPS):
        rows = attention[:, layer - 1, head - 1]
        assert_close(details.map_attention[place], rows.mean(0))
        if seen is None:
            assert details.map_cosine is None
            continue
        q, k = seen.queries[layer - 1][:, head - 1], seen.keys[layer - 1][:, head - 1]
        product = q.norm(dim=-1)[:, :, None] * k.norm(dim=-1)[:, None] * (rows > 0)
        cosine = torch.cosine_similarity(q[:, :, None], k[:, None], dim=-1) * (rows > 0)
        assert details.map_cosine is not None
        assert details.map_norm_product is not None
        assert_close(details.map_cosine[place], cosine.mean(0))
        assert_close(details.map_norm_product[place], product.mean(0))


@pytest.mark.parametrize("family", TEN_FAMILIES)
@pytest.mark.parametrize(("left", "right"), [(6, 0), (0, 6)])
def test_padding_changes_no_statistic(family: str, left: int, right: int) -> None:
    model, tokens = _models(family)[0], _tokens()
    plain = _details(measure(model, tokens, eps=EPS, maps=MAPS))
    pad = torch.nn.functional.pad
    mask = pad(torch.ones_like(tokens), (left, right))
    padded_tokens = pad(tokens, (left, right), value=9)
    padded = _details(measure(model, padded_tokens, attention_mask=mask, eps=EPS, maps=MAPS))
    _assert_same(padded, plain)


def _assert_same(one: Details, other: Details) -> None:
    assert one.arrays().keys() == other.arrays().keys()
    for name, array in other.arrays().items():
        assert_close(one.arrays()[name], array, what=name)
    assert [(s.sequence, s.position, s.token, s.block) for s in one.secondary_sinks] == [
        (s.sequence, s.position, s.token, s.block) for s in other.secondary_sinks
    ]


@pytest.mark.parametrize("family", ["llama", "gpt-oss, sinks and window 5"])
def test_statistics_are_averaged_over_the_sequences_that_are_long_enough(family: str) -> None:
    model, tokens = _models(family)[0], _tokens()
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    mask[1, 11:] = 0
    alone = [_details(measure(model, one[None], maps=MAPS)) for one in (tokens[0, 5:], tokens[1, :11], tokens[2])]
    for size in (1, 3):
        together = _details(measure(model, tokens, attention_mask=mask, maps=MAPS, batch_size=size))
        for name in ("entropy", "by_distance", "secondary", "matrix_entropy"):
            parts = [_padded(getattr(one, name), getattr(together, name).shape) for one in alone]
            assert_close(getattr(together, name), np.mean(parts, 0), what=name)
        for name in ("cosine", "norm_product", "kurtosis", "alignment", "map_attention"):
            whole = getattr(together, name)
            parts = [_padded(getattr(one, name), whole.shape) for one in alone]
            reach = np.array([(np.arange(LENGTH) < n) for n in (9, 11, LENGTH)]).sum(0)
            reach = reach[:, None] if name == "map_attention" else reach
            assert_close(whole, np.sum(parts, 0) / reach, what=name)
        assert_close(together.first_by_query[..., 3], np.mean([one.first_by_query[..., 3] for one in alone], 0))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_statistic_of_our_own_transformer_is_that_of_its_matrices(variant: str) -> None:
    model, tokens = own_model(variant), own_tokens(3)
    details = _details(measure(model, tokens, eps=EPS, batch_size=2, maps=[(2, 4)]))
    matrices = attention_matrices(model, variant, tokens)[0].detach()
    queries, keys, values = ([x[:, :, model.leading :].double() for x in one] for one in core_inputs(model, tokens))
    values = [v.repeat_interleave(4 // v.shape[1], 1) for v in values]
    stream = stream_of(model, tokens, model.blocks)[:, :, model.leading :]
    expected = reference(matrices.double(), Captured(queries, keys, values), values, stream, EPS)
    for name, array in expected.items():
        assert_close(getattr(details, name), array, what=name)
    assert details.map_attention is not None
    seen_rows = matrices[:, 1, 3].mean(0)
    assert_close(details.map_attention[0], seen_rows)


@pytest.mark.parametrize("kind", ["identity", "elu_kernel", "differential", "differential_v2"])
def test_proxy_scores_of_any_operation_add_up_to_one(kind: str) -> None:
    config = {"layers": 2, "width": 32, "heads": 4, "ffn_width": 48, "vocab_size": 32, "context": 16}
    attention = {"operation": {"kind": kind}}
    model = Transformer(ModelConfig.model_validate({**config, "attention": attention}))
    details = _details(measure(model, own_tokens(2), details=True))
    full = details.first_by_query[..., 0]
    assert_close(full, 1)  # the first query has itself alone
    assert_close(details.by_distance.sum(-1), 1)


def _padded(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.pad(array, [(0, want - have) for have, want in zip(array.shape, shape, strict=True)])


def test_every_statistic_of_a_trained_model_is_that_of_its_matrices(data_dir: Path) -> None:
    folder = data_dir / "models" / "TinyStories-656K"
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    eager: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    tokens = torch.randint(3, 2000, (2, 12), generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = model.config.bos_token_id
    with torch.no_grad():
        output = eager(tokens, output_attentions=True)
    seen = captured(model, tokens)
    expected = reference(
        torch.stack(output.attentions, 1).double(),
        seen,
        seen.values,
        stream_of(model, tokens, model.model.layers),
        EPS,
    )
    details = _details(measure(model, tokens, eps=EPS, details=True))
    for name, array in expected.items():
        assert_close(getattr(details, name), array, what=name)


@pytest.mark.parametrize("mask", [CAUSAL, Window(6)])
def test_results_do_not_depend_on_the_size_of_blocks(mask: Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 20, 8, generator=generator) for heads in (4, 2))
    real, angles = real_tokens(torch.ones(2, 20)), Angles(q, k, mask)
    whole = layer_details(score_rows(ScoreMatrix(q, k, mask)), real, angles, [1])
    monkeypatch.setattr(query_blocks, "BLOCK_ELEMENTS", 1)
    monkeypatch.setattr(query_blocks, "SMALLEST_BLOCK", 3)
    pieces = layer_details(score_rows(ScoreMatrix(q, k, mask)), real, angles, [1])
    for name, tensor in whole[0].items():
        torch.testing.assert_close(pieces[0][name], tensor, msg=lambda m, n=name: f"{n}: {m}")
    torch.testing.assert_close(pieces[1], whole[1])


def test_details_are_not_in_the_files_unless_requested(tmp_path: Path) -> None:
    model, tokens = _models("llama")[0], _tokens()
    plain, detailed = (measure(model, tokens, details=wanted) for wanted in (False, True))
    assert plain.details is None
    assert "details" not in plain.document()
    plain.save(tmp_path / "plain")
    with np.load(tmp_path / "plain" / "measurement.npz") as arrays:
        assert not [name for name in arrays if name.startswith("details_")]
    document = detailed.document()
    del document["details"]
    assert document.keys() == plain.document().keys()
    assert document["sink_rate"] == plain.sink_rate
    np.testing.assert_array_equal(detailed.importance, plain.importance)


def test_details_that_were_saved_are_loaded(tmp_path: Path) -> None:
    measured = measure(_models("llama")[0], _tokens(), eps=EPS, maps=MAPS)
    measured.save(tmp_path)
    loaded = Measurement.load(tmp_path)
    assert loaded.document() == measured.document()
    saved = _details(measured).arrays()
    assert "details_map_cosine" in saved
    assert saved.keys() == _details(loaded).arrays().keys()
    for name, array in _details(loaded).arrays().items():
        np.testing.assert_array_equal(array, saved[name])


def test_damaged_details_say_to_measure_again(tmp_path: Path) -> None:
    measured = measure(_models("llama")[0], _tokens(), details=True)
    measured.save(tmp_path)
    with np.load(tmp_path / "measurement.npz") as file:
        arrays = dict(file)
    for change in ({}, {"details_entropy": arrays["details_entropy"][:1]}):
        kept = {name: array for name, array in arrays.items() if change or name != "details_entropy"}
        np.savez(tmp_path / "measurement.npz", **(kept | change))
        with pytest.raises(InputError, match=r"delete measurement\.json and measurement\.npz there"):
            Measurement.load(tmp_path)


@pytest.mark.parametrize(
    ("maps", "message"), [([(3, 1)], "attention layers 1 to 2"), ([(1, 5)], "layer 1 has heads 1 to 4")]
)
def test_a_map_of_a_head_that_is_not_there_is_refused_before_anything_is_read(
    maps: list[tuple[int, int]], message: str
) -> None:
    model, passes = _models("llama")[0], []
    counting = model.register_forward_pre_hook(lambda *_: passes.append(1))
    with hooked([counting]), pytest.raises(InputError, match=message):
        measure(model, _tokens(), maps=maps)
    assert not passes


def test_a_map_of_very_long_sequences_is_refused_before_anything_is_read() -> None:
    model = _models("llama")[0]
    model.config.max_position_embeddings = 8192
    with pytest.raises(InputError, match="use `length=4096` or less"):
        measure(model, torch.zeros(1, 5000, dtype=torch.long), maps=[(1, 1)])


@pytest.mark.parametrize("given", ["3", "0.1", "1.0", "a.b", "1.2.3", "-1.2"])
def test_a_map_is_named_by_layer_and_head(given: str) -> None:
    assert parse_maps(["3.1", "12.10"]) == ((3, 1), (12, 10))
    with pytest.raises(InputError, match=r"expected LAYER\.HEAD"):
        parse_maps([given])


def test_half_precision_is_accumulated_in_float32() -> None:
    model = pair_of("llama")[0].to(torch.bfloat16)
    details = _details(measure(model, _tokens(), details=True))
    assert_close(details.by_distance.sum(-1), 1)
