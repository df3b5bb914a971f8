"""A sequence continued from its cache equals the sequence read at once."""

from typing import Any

import pytest
import torch
from closeness import assert_close
from sampling import one_in
from torch import Tensor

from sinklab.errors import InputError
from sinklab.interventions import VARIANTS
from sinklab.model.block import Past
from sinklab.model.transformer import Transformer
from sinklab.train.recipe import build_recipe

SIZES = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn_width": 24, "vocab_size": 40, "context": 32}
COMBINATIONS: dict[str, dict[str, Any]] = {
    "clipped behind a sink token": {"operation": "clipped_softmax", "bias": "sink_token"},
    "elastic with a key bias in a window": {
        "operation": "elastic_softmax",
        "bias": "k",
        "mask": {"kind": "window", "width": 4},
    },
    "a kernel with a key bias behind a prefix": {
        "operation": {"kind": "elu_kernel", "normalised": True},
        "bias": "kv",
        "mask": {"kind": "prefix", "length": 4},
    },
    "a signed kernel in documents behind a sink token": {
        "operation": "identity",
        "bias": "sink_token",
        "mask": {"kind": "document", "eos_id": 3},
    },
    "forgetting in documents behind a sink token": {
        "operation": "forgetting",
        "bias": "sink_token",
        "mask": {"kind": "document", "eos_id": 3},
    },
    "1.5-entmax with a sink logit in a window": {
        "operation": "entmax15",
        "bias": "sink_logit",
        "mask": {"kind": "window", "width": 4},
    },
    "differential v2 with a key bias in a window": {
        "operation": "differential_v2",
        "bias": "kv",
        "mask": {"kind": "window", "width": 4},
    },
    "softpick with a sink logit in documents": {
        "operation": "softpick",
        "bias": "sink_logit",
        "mask": {"kind": "document", "eos_id": 3},
    },
}


def model(overlay: Any, **sizes: Any) -> Transformer:
    """A model with enlarged weights, so that a key missing from the cache changes its output."""
    recipe = build_recipe({"model": {**SIZES, **sizes}, "metric": {"length": 16}}, overlay)
    made = Transformer(recipe.model, seed=1).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.mul_(20 if ".bias." in name or name == "sink_token" else 1.6)
    return made


def tokens(sequences: int = 2, length: int = 18) -> Tensor:
    return torch.randint(SIZES["vocab_size"], (sequences, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def in_pieces(transformer: Transformer, tokens_BT: Tensor, *lengths: int) -> Tensor:
    past = transformer.new_past()
    return torch.cat([transformer.head(transformer.hidden(piece, past)) for piece in tokens_BT.split(lengths, 1)], 1)


@torch.no_grad()
def check_in_pieces(transformer: Transformer) -> None:
    whole_BTV, shared = transformer(tokens()), transformer.config.shared_tokens
    for first in (2, 7):  # the tokens of a prefix see each other only once all of them were read
        pieces_BTV = in_pieces(transformer, tokens(), first, 3, 1, 1, 13 - first)
        seen = max(first, shared) - 1
        assert_close(pieces_BTV[:, seen:], whole_BTV[:, seen:])


@pytest.mark.parametrize("name", one_in(3, VARIANTS))
def test_every_variant_continues_from_its_cache(name: str) -> None:
    heads = {"kv_heads": None} if name.startswith(("heads_1", "multi_query", "mla")) else {}
    check_in_pieces(model(VARIANTS[name].overlay, **heads))


@pytest.mark.parametrize("name", COMBINATIONS)
def test_combinations_continue_from_their_cache(name: str) -> None:
    check_in_pieces(model({"model": {"attention": COMBINATIONS[name]}}))


@pytest.mark.parametrize("name", ["softmax", "sink_token", "document", "elu_kernel", "forgetting", "linear_hybrid"])
@torch.no_grad()
def test_cached_rows_can_be_exchanged_repeated_and_cropped(name: str) -> None:
    transformer, tokens_BT = model(VARIANTS[name].overlay), tokens(3)
    past = transformer.new_past()
    transformer.hidden(tokens_BT[:, :12], past)
    past.reorder_cache(torch.tensor([2, 0, 1]))
    past.crop(10)
    assert past.get_seq_length() == 10
    past.crop(-2)
    past.reorder_cache(torch.tensor([0, 0, 1, 1]))
    rows = torch.tensor([2, 2, 0, 0])
    assert_close(transformer.hidden(tokens_BT[rows, 8:], past), transformer.hidden(tokens_BT[rows])[:, 8:])


@torch.no_grad()
def test_a_cache_cropped_to_nothing_is_empty() -> None:
    transformer = model(VARIANTS["sink_token"].overlay)
    past = transformer.new_past()
    past.crop(0)
    transformer.hidden(tokens()[:, :5], past)
    past.crop(0)
    assert past.get_seq_length() == 0
    assert_close(transformer.hidden(tokens(), past), transformer.hidden(tokens()))


def test_a_learned_table_of_positions_limits_continued_sequences() -> None:
    transformer = model(VARIANTS["position_learnable"].overlay)
    past = transformer.new_past()
    transformer.hidden(tokens(length=30), past)
    with pytest.raises(InputError, match="33 tokens, but the learned positional embeddings end at"):
        transformer.hidden(tokens(length=3), past)


def test_an_empty_past_has_no_tokens_and_no_positions() -> None:
    past = Past(2, leading=1)
    assert (past.get_seq_length(), past.positions) == (0, 0)
    past.reorder_cache(torch.tensor([0]))
    assert past.tokens_BT is None
