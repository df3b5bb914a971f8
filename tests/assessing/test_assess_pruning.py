"""Heads removed, against models whose output maps have zeros for them."""

import copy
from collections import Counter
from typing import Any, ClassVar

import pytest
import torch
from assessed import run_part, small, some_tokens
from closeness import assert_close
from families import family_tokens, pair_of

from sinklab.assessing.parts import heads as pruning
from sinklab.assessing.parts.heads import Heads, Pruning, WithoutHeads
from sinklab.assessing.reading import HeadSet, PairedReader, Passes, changed_attention
from sinklab.models.adapter import Adapter, adapt
from sinklab.models.hooks import evaluating

REMOVED: HeadSet = frozenset({(1, 2), (2, 1), (2, 4)})


def without(adapter: Adapter) -> torch.Tensor:
    tokens = family_tokens()
    with evaluating(adapter.module), changed_attention(adapter, WithoutHeads(REMOVED)):
        return adapter.hidden(tokens)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3, window 5"])
def test_removing_heads_of_a_hugging_face_model_equals_zeros_in_its_output_maps(family: str) -> None:
    model = pair_of(family)[0].double()
    pruned: Any = copy.deepcopy(model)
    with torch.no_grad():
        for layer, head in REMOVED:
            if family == "gpt2":
                pruned.transformer.h[layer - 1].attn.c_proj.weight[8 * (head - 1) : 8 * head] = 0
            else:
                pruned.model.layers[layer - 1].self_attn.o_proj.weight[:, 8 * (head - 1) : 8 * head] = 0
    with evaluating(pruned):
        expected = pruned.base_model(family_tokens(), use_cache=False).last_hidden_state
    assert_close(without(adapt(model)), expected, 1e-6)


@pytest.mark.parametrize("variant", ["softmax", "grouped keys", "gate", "sigmoid", "sink token"])
def test_removing_heads_of_a_run_equals_zeros_in_its_output_maps(variant: str) -> None:
    one, tokens = small(variant), some_tokens()
    found = PairedReader(one, tokens).under(WithoutHeads(REMOVED)).effect()
    with torch.no_grad():
        for layer, head in REMOVED:
            one.module.blocks[layer - 1].attention.out.weight[:, 8 * (head - 1) : 8 * head] = 0  # type: ignore[union-attr, index]
    assert found.loss == pytest.approx(PairedReader(one, tokens).unchanged.effect().loss, rel=1e-9)


def test_removing_heads_costs_nothing_only_if_their_output_is_zero() -> None:
    one, tokens = small(), some_tokens()
    with torch.no_grad():
        for block in one.blocks:
            block.attention.out.weight[:] = 0  # type: ignore[union-attr, index]
    found = run_part(Pruning, one, tokens)
    assert {row.kl for row in found.orders} == {0.0}
    assert max(row.kl for row in run_part(Pruning, small(), tokens).orders) > 0.01


class Recorded(WithoutHeads):
    """Records the sets of removed heads."""

    seen: ClassVar[list[HeadSet]] = []

    def __init__(self, heads: HeadSet) -> None:
        super().__init__(heads)
        self.seen.append(heads)


def test_orders_remove_heads_by_sink_share_or_output_norm_or_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    one, tokens, passes = small(layers=4), some_tokens(), Passes()
    monkeypatch.setattr(pruning, "WithoutHeads", Recorded)
    Recorded.seen.clear()
    found = run_part(Pruning, one, tokens, passes=passes)
    roles = run_part(Heads, one, tokens).heads
    shares = {(role.layer, role.head): role.share for role in roles}
    quiet = sorted((role.output_norm, (role.layer, role.head)) for role in roles)
    falling = sorted(shares, key=lambda head: -shares[head])
    drawn, layers = iter(Recorded.seen), Counter[int]()
    assert found.total == 16
    assert [row.share for row in found.orders] == [share for share in pruning.SHARES for _ in range(5)]
    for row in found.orders:
        sets = [next(drawn) for _ in row.losses]
        assert {len(heads) for heads in sets} == {row.heads}
        if row.order == "sink first":
            assert sets == [set(falling[: row.heads])]
            layers = Counter(layer for layer, _ in sets[0])
        elif row.order == "sink last":
            assert sets == [set(falling[-row.heads :])]
        elif row.order == "smallest output":
            assert sets == [{head for _, head in quiet[: row.heads]}]
        else:
            assert len(sets) == pruning.DRAWS
        if row.order == "same layers":
            assert all(Counter(layer for layer, _ in heads) == layers for heads in sets)
        assert row.loss == pytest.approx(sum(row.losses) / len(row.losses))
        assert (row.error is None) == (len(row.losses) > 1)
    assert passes.done == 2 * (3 + len(Recorded.seen))


def test_removing_all_heads_of_a_kind_is_compared_with_as_many_random_heads() -> None:
    one, tokens = small("sink logit"), some_tokens()  # a bias has no value: its heads are no-ops
    with torch.no_grad():
        one.cores[0].bias.logit.fill_(4)  # type: ignore[union-attr, operator]
    kinds = Counter(role.kind for role in run_part(Heads, one, tokens).heads)
    assert kinds["nop"] >= 4
    found = {row.order: row for row in run_part(Pruning, one, tokens).kinds}
    assert set(found) == {"all nop", "as many random as nop"}
    assert {row.heads for row in found.values()} == {kinds["nop"]}


def test_heads_whose_share_cannot_be_read_are_refused() -> None:
    one = small(attention={"operation": {"kind": "differential"}})
    assert "cannot be edited" in str(Pruning.refusal(one, None))  # type: ignore[arg-type]
