"""Sinks at any position, their layers and whether they are like the first token, against a family's own matrices."""

from collections import Counter
from dataclasses import asdict
from typing import Any

import pytest
import torch
from details_reference import Sink, read_eagerly, sinks
from families import TEN_FAMILIES, family_tokens, pair_of

from sinklab.survey.api import measure

EPS = 0.1


def models_without_learned_positions(family: str) -> tuple[Any, Any]:
    """Tables of positions are made small, so that later tokens can be like the first one."""
    both = pair_of(family)
    with torch.no_grad():
        for model in both:
            for name, parameter in model.named_parameters():
                if "wpe" in name or "embed_positions" in name:
                    parameter.mul_(1e-3)
    return both


def tokens_like_the_first() -> torch.Tensor:
    """One sequence repeats its first token six times, so that the states are equal; one has it again as sixth."""
    tokens = family_tokens()[:3]
    tokens[0, :6] = tokens[0, 0]
    tokens[1, 5] = tokens[1, 0]
    return tokens


def kept(expected: list[Sink]) -> list[Sink]:
    """The eight strongest of positions 2 to 4, and of those past them."""
    near, past = ([one for one in expected if (one.position <= 4) == wanted] for wanted in (True, False))
    return [one for one in expected if one in near[:8] or one in past[:8]]


@pytest.mark.parametrize("family", [*TEN_FAMILIES, "qwen3"])
def test_sinks_at_any_position_are_those_of_the_familys_own_matrices_and_states(family: str) -> None:
    model, eager = models_without_learned_positions(family)
    tokens = tokens_like_the_first()
    by_hand = read_eagerly(model, eager, tokens)
    expected = sinks(by_hand.attention, by_hand.hidden, tokens, EPS)
    details = measure(model, tokens, eps=EPS, batch_size=2, details=True).details
    assert details is not None
    assert len(details.secondary_sinks) == len(kept(expected))
    for found, one in zip(details.secondary_sinks, kept(expected), strict=True):
        measured, wanted = found.model_dump(), asdict(one)
        for name in ("importance", "alignment"):
            assert measured.pop(name) == pytest.approx(wanted.pop(name), rel=1e-4, abs=1e-5)
        assert measured == wanted
    alike = [one.alike for one in details.secondary_sinks if one.position > 4]
    assert [] in alike
    # A sink logit takes more from the first token, which has no other key, than from its copies.
    assert ([0] if family.startswith("gpt-oss") else [0, 1, 2]) in alike


@pytest.mark.parametrize("family", [*TEN_FAMILIES, "qwen3"])
def test_tokens_that_are_sinks_past_position_4_are_counted(family: str) -> None:
    model, eager = models_without_learned_positions(family)
    tokens = tokens_like_the_first()
    by_hand = read_eagerly(model, eager, tokens)
    taken = Counter(
        one.token for one in sinks(by_hand.attention, by_hand.hidden, tokens, EPS) if one.position > 4 and one.heads
    )
    ids = tokens[:, 4 : tokens.shape[1] // 2].flatten().tolist()
    details = measure(model, tokens, eps=EPS, batch_size=2, details=True).details
    assert details is not None
    assert [(one.token, one.sinks, one.occurrences) for one in details.secondary_tokens] == [
        (token, taken[token], ids.count(token)) for token in sorted(taken, key=lambda token: (-taken[token], token))
    ][:8]
    assert max(taken.values()) > 1
