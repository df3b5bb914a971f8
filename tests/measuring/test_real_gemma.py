"""Gemma 3 270M, whose layers 6, 12 and 18 see all keys and the others a window of 512, against the definitions.

These tests are skipped if neither the folder of real data nor the Python environment has the model.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chat_templates import TEMPLATES
from real_models import Reference, eager_model, fed_by_transformers, first_to_rest, first_tokens, gemma_file, reference
from torch import Tensor

import sinklab
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.options import Request
from sinklab.models.huggingface.gguf import read_header
from sinklab.opening import Model, open_model
from sinklab.survey.measure import measure_loaded, measure_model, read_tokens

pytestmark = pytest.mark.real
SEQUENCES, LENGTH, LAYERS, HEADS = 10, 64, 18, 4
WINDOW, FULL = 512, (6, 12, 18)
FLIPPED = 2 / (SEQUENCES * LAYERS * HEADS) * 100
"""Percent: so many of the 720 shares may lie within rounding of eps."""


@pytest.fixture(scope="module")
def file(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gemma_file(data_dir, tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def text(data_dir: Path) -> Path:
    return data_dir / "domains" / "c4_web.jsonl"


@pytest.fixture(scope="module")
def read(file: Path) -> tuple[Any, Any]:
    """Model and tokenizer, read by transformers from a header that is parsed once: it has 262,144 tokens."""
    with read_header(file).parsed_once():
        return eager_model(file)


def with_bos(model: Any, bare: Tensor) -> Tensor:
    return torch.cat((torch.full((len(bare), 1), model.config.bos_token_id), bare), 1)


def agree(measured: Measurement, expected: Reference) -> None:
    np.testing.assert_allclose(measured.sink_rate, expected.rates().tolist(), atol=FLIPPED, rtol=0)
    first = torch.stack(expected.alpha, 1)[..., 0].numpy()
    np.testing.assert_allclose(measured.importance_first, first, atol=1e-3)
    assert measured.loss == pytest.approx(expected.loss, rel=1e-4)


def test_sink_norms_and_massive_activation_with_bos_are_those_of_the_definition(
    file: Path, read: tuple[Any, Any], text: Path
) -> None:
    model, tokenizer = read
    measured = measure_model(str(file), text, Request(sequences=SEQUENCES, length=LENGTH))
    expected = reference(model, with_bos(model, first_tokens(tokenizer, text, SEQUENCES, LENGTH - 1)))
    assert measured.bos
    agree(measured, expected)
    ratios = [first_to_rest(hidden.norm(dim=-1)) for hidden in expected.hidden]
    assert measured.hidden_norm_ratio is not None
    assert measured.hidden_norm_ratio[: len(ratios)] == pytest.approx(ratios, rel=1e-3)
    assert measured.massive_activations is not None
    top = measured.massive_activations[0]
    first_sequence = expected.hidden[top.layer][0].abs()
    assert (top.position, top.dimension) == (1, 163)
    assert top.ratio_to_median == pytest.approx(float(first_sequence.max() / first_sequence.median()), rel=1e-3)


def test_the_sink_without_bos_is_that_of_the_definition(read: tuple[Any, Any], text: Path) -> None:
    model, tokenizer = read
    tokens = first_tokens(tokenizer, text, SEQUENCES, LENGTH)
    measured = sinklab.measure(model, tokens, bos=False)
    assert not measured.bos
    agree(measured, reference(model, tokens))


def test_beyond_the_window_means_over_all_and_visible_queries_are_those_of_the_definition(
    read: tuple[Any, Any], text: Path
) -> None:
    model, tokenizer = read
    tokens = with_bos(model, first_tokens(tokenizer, text, 1, WINDOW + 127))
    found, expected = sinklab.measure(model, tokens, bos=True, loss=False), reference(model, tokens)
    rounding = 1 / (LAYERS * HEADS) * 100
    np.testing.assert_allclose(found.sink_rate, expected.rates().tolist(), atol=rounding, rtol=0)
    assert found.sink_rate_visible is not None
    np.testing.assert_allclose(found.sink_rate_visible, expected.rates(visible=True).tolist(), atol=rounding, rtol=0)
    alpha, visible = (torch.stack(x, 1).mean(0).numpy() for x in (expected.alpha, expected.visible))
    assert found.importance_visible is not None
    np.testing.assert_allclose(found.importance, alpha, atol=1e-3)
    np.testing.assert_allclose(found.importance_visible, visible, atol=1e-3)
    windowed = [layer for layer in range(1, LAYERS + 1) if (alpha[layer - 1] < visible[layer - 1] - 1e-6).any()]
    assert windowed == [layer for layer in range(1, LAYERS + 1) if layer not in FULL]


@pytest.fixture(scope="module")
def opened(file: Path) -> Model:
    return open_model(str(file))


@pytest.mark.parametrize("rows", ["domains/c4_web.jsonl", "chat/messages.jsonl"])
def test_the_token_ids_of_texts_and_conversations_are_those_of_transformers(
    opened: Model, read: tuple[Any, Any], data_dir: Path, rows: str
) -> None:
    for tokenizer in (opened.tokenizer, read[1]):
        tokenizer.chat_template = TEMPLATES["gemma-3"][1]  # the file is a base model's, without one
    expected = fed_by_transformers(read[1], data_dir / rows, 10, LENGTH)
    assert len(expected) == 10
    asked = Request(sequences=10, length=LENGTH)
    assert read_tokens(opened, data_dir / rows, asked).tokens_NT.tolist() == expected


def test_a_note_says_by_how_much_the_loss_of_gemma_is_higher_without_bos(opened: Model, text: Path) -> None:
    asked = Request(sequences=8, length=LENGTH)
    assert opened.special == opened.bos_ids
    assert not any("needs its BOS" in note for note in measure_loaded(opened, text, asked).notes)
    (note,) = [one for one in measure_loaded(replace(opened, special=()), text, asked).notes if "needs its BOS" in one]
    found = re.search(r"BOS <bos>: with no BOS the loss is ([\d.]+) nats per token higher", note)
    assert found is not None, note
    assert float(found[1]) > 1
