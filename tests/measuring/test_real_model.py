"""SmolLM2-135M-Instruct, measured by `sinklab measure FILE.gguf` and by an eager loop written from the definitions.

The reference (`support/real_models.py`) shares nothing with sinklab: it has transformers read the file, cuts the text,
and computes attention as whole matrices.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from real_models import Reference, eager_model, fed_by_transformers, first_to_rest, first_tokens, model_file, reference
from torch import Tensor

import sinklab
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.options import Options, Request, Study
from sinklab.opening import Model, open_model
from sinklab.survey.measure import measure_model, read_tokens

pytestmark = pytest.mark.real
SEQUENCES, LENGTH = 100, 64
FLIPPED = 4 / (SEQUENCES * 30 * 9) * 100
"""Percent: so many of the 27,000 shares may lie within rounding of eps."""


@pytest.fixture(scope="module")
def file(data_dir: Path) -> Path:
    return model_file(data_dir, "SmolLM2-135M-Instruct")


@pytest.fixture(scope="module")
def text(data_dir: Path) -> Path:
    return data_dir / "domains" / "c4_web.jsonl"


@pytest.fixture(scope="module")
def read(file: Path) -> tuple[Any, Any]:
    return eager_model(file)


@pytest.fixture(scope="module")
def model(read: tuple[Any, Any]) -> Any:
    return read[0]


@pytest.fixture(scope="module")
def natural(read: tuple[Any, Any], text: Path) -> Tensor:
    return first_tokens(read[1], text, SEQUENCES, LENGTH)


@pytest.fixture(scope="module")
def expected(model: Any, natural: Tensor) -> Reference:
    return reference(model, natural)


@pytest.fixture(scope="module")
def measured(file: Path, text: Path) -> Measurement:
    return measure_model(str(file), text, Request(options=Options(details=True), sequences=SEQUENCES, length=LENGTH))


def test_sink_rates_are_those_of_the_definition(measured: Measurement, expected: Reference) -> None:
    np.testing.assert_allclose(measured.sink_rate, expected.rates().tolist(), atol=FLIPPED, rtol=0)
    first = torch.stack(expected.alpha, 1)[..., 0].numpy()
    np.testing.assert_allclose(measured.importance_first, first, atol=1e-3)
    assert measured.loss == pytest.approx(expected.loss, rel=1e-5)


def test_angles_norms_and_secondary_sinks_are_those_of_the_definition(
    measured: Measurement, expected: Reference
) -> None:
    assert measured.details is not None
    cosine = measured.details.cosine
    assert cosine is not None
    np.testing.assert_allclose(cosine, torch.stack(expected.cosine).mean(1).numpy(), atol=1e-3)
    assert measured.key_norm_ratio == pytest.approx([first_to_rest(norm) for norm in expected.key_norm], rel=1e-3)
    ratios = [first_to_rest(hidden.norm(dim=-1)) for hidden in expected.hidden]
    assert measured.hidden_norm_ratio is not None
    assert measured.hidden_norm_ratio[: len(ratios)] == pytest.approx(ratios, rel=1e-3)
    assert measured.details.secondary_rate == pytest.approx(expected.secondary(), abs=FLIPPED)


def test_the_massive_activation_is_in_channel_507_of_the_first_token(
    measured: Measurement, expected: Reference
) -> None:
    assert measured.massive_activations is not None
    top = measured.massive_activations[0]
    first_sequence = expected.hidden[top.layer][0].abs()
    assert (top.position, top.dimension) == (1, 507)
    assert abs(top.value) == pytest.approx(float(first_sequence.max()), rel=1e-4)
    assert top.ratio_to_median == pytest.approx(float(first_sequence.max() / first_sequence.median()), rel=1e-3)


def test_ablations_remove_the_massive_activation_and_move_the_sink_to_the_second_token(file: Path, text: Path) -> None:
    names = ("mask_first:1", "zero_massive", "zero_massive:2")
    measured = measure_model(str(file), text, Request(sequences=10, length=LENGTH, study=Study(ablate=names)))
    hidden, removed, once = measured.ablations or []
    assert hidden.sink_rate_after == 0
    assert hidden.sink_max_position_after == 2
    assert hidden.sink_max_after == pytest.approx(hidden.sink_rate_before, rel=0.1)
    assert removed.what.startswith("dimension 507 at position 1 is zeroed after layers 2 to 30")
    assert (removed.still_massive, once.still_massive) == (False, True)
    assert once.largest_after is not None
    assert (once.largest_after.layer, once.largest_after.dimension) == (12, 507)  # which layer 12 writes anew


@pytest.mark.parametrize(("inputs", "low", "high"), [("random", 70, 83), ("repeat", 0, 0)])
def test_random_tokens_have_the_sink_and_a_repeated_one_has_not(
    model: Any, inputs: str, low: float, high: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (20, LENGTH if inputs == "random" else 1), generator=generator)
    tokens = tokens.expand(-1, LENGTH).contiguous()
    found, by_hand = sinklab.measure(model, tokens), reference(model, tokens)
    np.testing.assert_allclose(found.sink_rate, by_hand.rates().tolist(), atol=5 * FLIPPED, rtol=0)
    assert low <= found.sink_rate[0] <= high


@pytest.fixture(scope="module")
def opened(file: Path) -> Model:
    return open_model(str(file))


@pytest.mark.parametrize("rows", ["domains/c4_web.jsonl", "chat/messages.jsonl"])
def test_the_token_ids_of_texts_and_conversations_are_those_of_transformers(
    opened: Model, read: tuple[Any, Any], data_dir: Path, rows: str
) -> None:
    expected = fed_by_transformers(read[1], data_dir / rows, 10, LENGTH)
    assert len(expected) == 10
    asked = Request(sequences=10, length=LENGTH)
    assert read_tokens(opened, data_dir / rows, asked).tokens_NT.tolist() == expected
