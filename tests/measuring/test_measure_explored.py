"""The maps of `--explore`: every head of one sequence in 8 bits, read after a measurement that they do not change."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Run
from details_reference import read_eagerly
from families import pair_of
from own_models import VARIANTS, attention_matrices, own_model, own_tokens
from tiny_models import text_file, tiny_model

from sinklab.commands import measure as measure_commands
from sinklab.errors import InputError
from sinklab.measuring import findings as explored_module
from sinklab.measuring.findings import Explored
from sinklab.measuring.measurement import Measurement
from sinklab.survey.api import measure

ROUNDING = 0.5 / 255
"""Rounding error of the square root of an attention weight."""


def explored_of(model: Any, tokens: torch.Tensor, **options: Any) -> Explored:
    found = measure(model, tokens, explore=True, **options).explored
    assert found is not None
    return found


def check(found: Explored, attention_LHTT: torch.Tensor) -> None:
    L, H, T = attention_LHTT.shape[:3]
    assert found.heads == [(layer + 1, head + 1) for layer in range(L) for head in range(H)]
    assert found.attention.shape == (L * H, T, T)
    root = torch.from_numpy(found.attention / 255)
    assert (root - attention_LHTT.double().clamp(min=0).sqrt().flatten(0, 1)).abs().max() <= ROUNDING + 1e-4


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_map_is_the_matrix_of_its_head_on_the_first_sequence(variant: str) -> None:
    model, tokens = own_model(variant), own_tokens()
    found = explored_of(model, tokens)
    assert found.tokens == tokens[0].tolist()
    check(found, attention_matrices(model, variant, tokens[:1])[0][0])


@pytest.mark.parametrize("family", ["gpt2", "llama", "bloom"])
def test_every_map_is_that_of_the_familys_own_matrices(family: str) -> None:
    model, eager = pair_of(family)
    tokens = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    check(explored_of(model, tokens), read_eagerly(model, eager, tokens[:1]).attention[0])


def test_the_maps_of_a_padded_sequence_are_those_of_its_real_tokens() -> None:
    model, eager = pair_of("llama")
    tokens = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    found = explored_of(model, tokens, attention_mask=mask)
    assert found.tokens == tokens[0, 3:].tolist()
    check(found, read_eagerly(model, eager, tokens[:1, 3:]).attention[0])


def test_exploring_a_sequence_of_one_token_is_refused() -> None:
    tokens = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[0, 1:] = 0
    with pytest.raises(InputError, match="the first sequence has one token"):
        measure(pair_of("llama")[0], tokens, explore=True, attention_mask=mask)


def test_exploring_does_not_change_the_other_results() -> None:
    model, tokens = own_model("softmax"), own_tokens()
    plain, explored = measure(model, tokens), measure(model, tokens, explore=True)
    cost = {"seconds", "peak_memory_mb"}
    document = {key: value for key, value in explored.document().items() if key not in cost}
    assert document.pop("explored")["tokens"] == tokens[0].tolist()
    assert document == {key: value for key, value in plain.document().items() if key not in cost}
    assert all(np.array_equal(array, plain.arrays()[name]) for name, array in explored.arrays().items())


def test_a_long_sequence_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explored_module, "MOST_TOKENS", 6)
    model, tokens = own_model("softmax"), own_tokens()
    found = explored_of(model, tokens)
    assert found.tokens == tokens[0, :6].tolist()
    check(found, attention_matrices(model, "softmax", tokens[:1, :6])[0][0])


def test_a_model_with_too_many_heads_is_refused_unless_maps_selects_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explored_module, "MOST_HEADS", 4)
    model, tokens = own_model("softmax"), own_tokens()
    with pytest.raises(InputError, match=r"at most 4 heads and the model has 8: select .* `maps` LAYER\.HEAD"):
        measure(model, tokens, explore=True)
    found = explored_of(model, tokens, maps=[(2, 3), (1, 1)])
    assert found.heads == [(1, 1), (2, 3)]
    expected = attention_matrices(model, "softmax", tokens[:1])[0][0]
    root = torch.from_numpy(found.attention / 255)
    wanted = torch.stack((expected[0, 0], expected[1, 2])).double().sqrt()
    assert (root - wanted).abs().max() <= ROUNDING + 1e-4


def test_maps_are_saved_and_loaded(tmp_path: Path) -> None:
    measured = measure(own_model("softmax"), own_tokens(), explore=True)
    assert measured.explored is not None
    measured.model_copy(update={"explored": measured.explored.with_texts(str)}).save(tmp_path)
    found = Measurement.load(tmp_path).explored
    assert found is not None
    assert found.attention.dtype == np.uint8
    assert np.array_equal(found.attention, measured.explored.attention)
    assert found.texts == [f"[{token}]" for token in found.tokens]


def test_maps_that_do_not_fit_their_heads_are_refused(tmp_path: Path) -> None:
    measure(own_model("softmax"), own_tokens(), explore=True).save(tmp_path)
    with np.load(tmp_path / "measurement.npz") as file:
        arrays = dict(file)
    np.savez(tmp_path / "measurement.npz", **arrays | {"explored_attention": arrays["explored_attention"][1:]})
    with pytest.raises(InputError, match="explored_attention has shape"):
        Measurement.load(tmp_path)


def test_a_saved_measurement_of_a_small_model_has_its_maps_and_a_large_one_needs_the_option(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text = tiny_model(tmp_path / "model", "neox"), text_file(tmp_path / "text.jsonl")
    call = ("measure", model, "--text", text, "--sequences", 4, "--length", 8, "--out")
    assert run(*call, tmp_path / "small")[0] == 0
    assert Measurement.load(tmp_path / "small").explored is not None
    monkeypatch.setattr(measure_commands, "EXPLORED_HEADS", 1)
    assert run(*call, tmp_path / "large")[0] == 0
    assert Measurement.load(tmp_path / "large").explored is None
