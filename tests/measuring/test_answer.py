"""The two sentences that begin the output of a measurement."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from made_measurement import made_measurement
from own_models import SIZES, VOCABULARY, own_model, own_tokens

from sinklab.measuring.answer import answer
from sinklab.measuring.measurement import Measurement
from sinklab.model.config import ModelConfig
from sinklab.model.transformer import Transformer
from sinklab.survey.api import measure

LARGE_MODEL = Path(__file__).parents[2] / "results" / "models" / "SmolLM2-135M-Instruct"
LONG = 40


def measured(**changes: Any) -> Measurement:
    """A measurement without sinks, with these fields changed."""
    made = made_measurement(bias="sink_rate_bias" in changes, length=LONG)
    nothing: dict[str, Any] = {"sink_rate": [0.0] * LONG, "importance": np.zeros_like(made.importance)}
    return made.model_copy(update=nothing | changes)


def rates(**by_position: float) -> list[float]:
    return [by_position.get(f"at_{position}", 0.0) for position in range(1, LONG + 1)]


def test_the_answer_of_a_real_model_names_its_layers_and_its_massive_activation() -> None:
    sink, beside = answer(Measurement.load(LARGE_MODEL))
    assert sink == (
        "Strong sink on the first token: 74 % of heads at eps 0.3; most heads of layers 4 to 10 and 13 to 30; "
        "1.1 % on position 6."
    )
    assert beside.startswith("Massive activation in channel 507 at position 1, strongest after layer 12 (14,166 times")
    assert beside.endswith("; secondary sinks in 11 % of heads.")


def test_the_answer_for_a_repeated_token_is_no_sink_and_that_proposition_4_holds() -> None:
    sink, beside = answer(Measurement.load(LARGE_MODEL / "repeat"))
    assert sink == "No sink (one token repeated): 0 % of heads at eps 0.3 on the first token, 0 % on position 2."
    assert beside.endswith("; proposition 4 of the paper holds.")


def test_the_adjectives_have_the_thresholds_of_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reading.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?:below|from|(\d+) to) (\d+) % \| (\w+) sink \|", page, re.MULTILINE)
    assert [strength for *_, strength in rows] == ["no", "weak", "moderate", "strong"]
    for (low, high, strength), edge in zip(rows, (0, 1, 30, 70), strict=True):
        assert edge == int(low or (0 if strength == "no" else high))
        for rate in (edge, (edge or 1) - 0.1):
            said = answer(measured(sink_rate=rates(at_1=rate)))[0]
            assert said.lower().startswith(f"{strength} sink") == (rate >= edge or strength == "no")


def test_a_sink_on_the_learned_bias_is_named_beside_the_first_token() -> None:
    found = measured(sink_rate=rates(at_1=0.4), sink_rate_bias=62.0, importance_bias=np.ones((3, 4)))
    assert answer(found)[0] == (
        "Moderate sink on the bias, sink logit or stick-breaking's rest: 62 % of heads at eps 0.3; most heads of every "
        "layer; 0.4 % on BOS."
    )


def test_a_sink_on_biases_that_only_some_layers_have_is_reported() -> None:
    bias = {"bias": {"kind": "sink_logit"}}
    config = {**SIZES, "layers": 3, "attention": bias, "pattern": {"every": 3, "bias": {"kind": "none"}}}
    model = Transformer(ModelConfig.model_validate(config))
    with torch.no_grad():
        for name, logits in model.named_parameters():
            if ".bias." in name:
                logits.fill_(9.0)
    assert answer(measure(model, own_tokens()))[0].startswith(
        "Strong sink on the bias, sink logit or stick-breaking's rest: 100 % of heads at eps 0.3; most heads of "
        "layers 1 to 2; "
    )


def test_the_answer_for_stick_breaking_names_its_rest() -> None:
    attention = {"operation": {"kind": "stick_breaking"}}
    model = Transformer(ModelConfig.model_validate({**SIZES, "layers": 1, "attention": attention}))
    assert "on the bias, sink logit or stick-breaking's rest" in answer(measure(model, own_tokens()))[0]


def test_the_layer_with_most_sink_heads_is_named_if_no_layer_has_a_majority_of_them() -> None:
    importance = np.zeros((3, 4, LONG))
    importance[1, 2, 0] = 0.4
    assert answer(measured(sink_rate=rates(at_1=6.0), importance=importance))[0] == (
        "Weak sink on BOS: 6.0 % of heads at eps 0.3; most in layer 2 (1 of 4 heads)."
    )


def test_a_sink_on_a_later_position_is_reported_with_its_position() -> None:
    first = answer(measured(sink_rate=rates(at_3=45.0)))[0]
    assert first == "Moderate sink on position 3: 45 % of heads at eps 0.3; 0 % on BOS."


def test_under_windows_the_rate_is_that_of_the_queries_that_see_the_position() -> None:
    found = measured(
        sink_rate=rates(at_1=2.0), sink_rate_visible=rates(at_1=80.0), importance_visible=np.zeros((3, 4, LONG))
    )
    assert answer(found)[0].startswith(
        "Strong sink on BOS: 80 % of heads at eps 0.3, over the queries that see it (2.0"
    )


def test_the_answer_says_which_quantities_were_not_measured() -> None:
    assert answer(measured())[1] == (
        "Massive activations were not measured; secondary sinks were not measured (--details)."
    )


@pytest.mark.parametrize("variant", ["sink token", "key bias", "sigmoid", "window"])
def test_native_variants_have_an_answer(variant: str) -> None:
    tokens = torch.randint(VOCABULARY, (3, 16), generator=torch.Generator().manual_seed(1))
    found = measure(own_model(variant), tokens, eps=(0.3, 0.1), details=True)
    sink, beside = answer(found)
    named = {"sink token": "the sink token or registers", "key bias": "the bias, sink logit or stick-breaking's rest"}
    assert (" of heads (proxy scores) at eps 0.3" if found.proxy else " of heads at eps 0.3") in sink
    assert any(name in sink for name in named.values()) == (variant in named)
    assert named.get(variant, "") in sink
    assert ("proxy scores" in sink) == found.proxy
    assert beside.startswith("No massive activation (at most ")


def test_sequences_so_short_that_uniform_attention_passes_the_threshold_are_called_too_short() -> None:
    short = made_measurement(length=8)
    assert answer(short)[0] == (
        "Sequences of 8 tokens are too short to detect a sink: uniform attention to the first token is already 0.34, "
        "and the threshold is 0.3."
    )


def test_a_batch_of_mixed_lengths_has_no_sink_where_its_short_sequences_end() -> None:
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4
    )
    model, tokens, mask = hf.LlamaForCausalLM(config).eval(), torch.randint(3, 64, (4, 40)), torch.ones(4, 40).long()
    mask[3:, 3:] = 0
    found = measure(model, tokens, attention_mask=mask)
    assert found.sequence_lengths == [40, 40, 40, 3]
    assert max(found.sink_rate[1:]) > 10  # the last of three tokens gets a third of the attention of its only query
    assert "position" not in answer(found)[0]
    assert "on the first token" in answer(found)[0]
    assert measure(model, tokens).sequence_lengths is None
    shorter = measure(model, tokens[:, :9], attention_mask=mask[:, :9])
    assert answer(shorter)[0].startswith("Sequences of 3 to 9 tokens are too short to detect a sink")
    sink = found.model_copy(update={"sink_rate": rates(at_1=2.0, at_2=90.0)})
    assert answer(sink)[0].startswith("Strong sink on position 2")
