"""Key heads restricted to the sink and recent keys, against masks of transformers and by hand, and known answers."""

import math
from typing import Any

import pytest
import torch
from assessed import part_settings, run_part, small, some_tokens
from closeness import assert_close
from families import family_tokens, pair_of

from sinklab.assessing.cache_policies import KeyBudget
from sinklab.assessing.parts import caches as budgets
from sinklab.assessing.parts.caches import FRACTIONS, Budgets, RestrictedHeads
from sinklab.assessing.parts.streaming import RollingCache
from sinklab.assessing.reading import HeadSet, PairedReader, Passes, changed_attention, key_heads
from sinklab.attention.layer_call import LayerCall
from sinklab.models.adapter import adapt
from sinklab.models.hooks import evaluating
from sinklab.survey.api import measure


def seen(L: int, size: int, first: int) -> torch.Tensor:
    """Mask (query, key) of the first keys and the latest."""
    matrix = torch.zeros(L, L, dtype=torch.bool)
    for t in range(L):
        keys = list(range(t + 1))
        if len(keys) > size:
            keys = keys[:first] + keys[len(keys) - (size - first) :]
        matrix[t, keys] = True
    return matrix


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_a_restricted_key_head_equals_an_attention_mask_in_transformers(family: str) -> None:
    model, eager = (one.double() for one in pair_of(family))
    adapter, tokens = adapt(model), family_tokens()
    L, heads = tokens.shape[1], max(head for _, head in key_heads(adapter))
    restricted = 2  # of 2 or 4 key heads, in both layers
    mask = torch.ones(L, L, dtype=torch.bool).tril().repeat(len(tokens), 4, 1, 1)
    for query_head in range(4):
        if query_head // (4 // heads) == restricted - 1:
            mask[:, query_head] = seen(L, 5, 2)
    added = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -1e9)
    with evaluating(eager), evaluating(model):
        expected = eager.base_model(tokens, attention_mask=added, use_cache=False).last_hidden_state
        with changed_attention(
            adapter, RestrictedHeads(KeyBudget(5, 2), frozenset({(1, restricted), (2, restricted)}))
        ):
            found = adapter.hidden(tokens)
    assert_close(found, expected, 1e-6)


def test_in_a_run_one_head_of_one_layer_is_restricted_and_the_others_are_not() -> None:
    one, outputs = small("grouped keys"), {}
    edit = RestrictedHeads(KeyBudget(6, 1), frozenset({(2, 1)}))

    def watch(layer: LayerCall) -> torch.Tensor:
        changed = edit(layer)
        outputs[layer.index] = layer, changed.output()
        return layer.output()

    with evaluating(one.module), changed_attention(one, watch):
        one.hidden(some_tokens())
    assert torch.equal(outputs[1][0].output(), outputs[1][1])
    layer, out = outputs[2]
    q, k, v = layer.call.q_BHTD, layer.call.k_BGTD, layer.value_BGSV
    for head in range(4):
        L = q.shape[2]
        mask = seen(L, 6, 1) if head < 2 else torch.ones(L, L).tril().bool()
        z = (q[:, head] @ k[:, head // 2].transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~mask, -torch.inf)
        assert_close(out[:, head], z.softmax(-1) @ v[:, head // 2], 1e-9)


@pytest.mark.parametrize(
    "operation",
    [
        {"kind": "scalable_softmax"},
        {"kind": "scalable_softmax", "offset": 0.5},
        {"kind": "elastic_softmax", "start": -0.5},
        {"kind": "sigmoid", "shift": "row"},
    ],
    ids=str,
)
def test_an_operation_that_counts_visible_keys_counts_them_separately_for_every_head(operation: dict[str, Any]) -> None:
    one, compared = small(attention={"operation": operation}), []

    def watch(layer: LayerCall) -> torch.Tensor:
        whole, rolling = layer.output(), RollingCache(6, 1, in_cache=False)(layer).output()
        for head in range(4):
            out = RestrictedHeads(KeyBudget(6, 1), frozenset({(layer.index, head + 1)}))(layer).output()
            others = [other for other in range(4) if other != head]
            compared.append((out[:, head], rolling[:, head], whole[:, head]))
            assert_close(out[:, others], whole[:, others], 1e-12)
        return whole

    with evaluating(one.module), changed_attention(one, watch):
        one.hidden(some_tokens())
    for out, rolling, whole in compared:
        assert_close(out, rolling, 1e-12)
        assert not torch.allclose(out, whole, rtol=1e-3)


def test_restricting_all_heads_equals_a_rolling_cache() -> None:
    one, tokens = small("sink token"), some_tokens()
    reader = PairedReader(one, tokens)
    both = (RestrictedHeads(KeyBudget(6, 2), key_heads(one)), RollingCache(6, 2, in_cache=False))
    restricted, rolling = (reader.under(edit).effect() for edit in both)
    assert restricted.kl == pytest.approx(rolling.kl)


def with_one_head(layer: int, head: int) -> Any:
    """A run in which no other head writes to the stream."""
    one = small()
    with torch.no_grad():
        for number, block in enumerate(one.blocks, 1):
            kept = block.attention.out.weight[:, 8 * (head - 1) : 8 * head].clone()  # type: ignore[union-attr, index]
            block.attention.out.weight[:] = 0  # type: ignore[union-attr, index]
            if number == layer:
                block.attention.out.weight[:, 8 * (head - 1) : 8 * head] = kept  # type: ignore[union-attr, index]
    return one


def test_the_only_active_head_has_the_whole_cost_and_none_if_it_keeps_all_keys() -> None:
    one, tokens, passes = with_one_head(2, 3), some_tokens(3, 24), Passes()
    found = run_part(Budgets, one, tokens[:2], tokens[2:], part_settings(budgets=(4,), kept=(1,)), passes=passes)
    costs = {(row.layer, row.head): row.kl for row in found.heads}
    assert max(costs, key=costs.__getitem__) == (2, 3)
    assert sorted(costs.values())[:-1] == pytest.approx([0] * 7, abs=1e-12)
    assert found.retrieval[0] == (2, 3)
    assert len(found.retrieval) == 2
    assert f"the 2 costliest of {len(found.heads)} heads account for" in found.remark()
    assert found.restricted.kl > 1e-3
    for row in found.policies:
        if row.policy == "by cost":
            assert row.kl == pytest.approx(0, abs=1e-12)
        if row.policy == "one for all":
            assert row.kl > 1e-5
            assert row.keys == row.full * 24 + (1 - row.full) * 4
    assert passes.done == 2 * (2 + len(FRACTIONS) * 6) + 1 * (2 + 8)
    more = {row.what: row.more for row in found.rows()}
    quarter = sum(min(t, 9) for t in range(1, 25)) / 24, sum(0.25 * t + 0.75 * min(t, 4) for t in range(1, 25)) / 24
    assert more["one for all, 25 % full"] == f"9 keys per head at the end, {quarter[0]:.0f} on average"
    assert more["by cost, 25 % full"] == f"9 keys per head at the end, {quarter[1]:.0f} on average"


def test_the_mean_number_of_keys_counts_whole_heads() -> None:
    found = run_part(
        Budgets,
        small("grouped keys"),  # 4 KV heads: an eighth of them is none
        some_tokens(1, 24),
        some_tokens(1, 24),
        part_settings(budgets=(4,), kept=(1,)),
    )
    more = {row.what: row.more for row in found.rows()}
    assert more["by cost, 12.5 % full"] == "4 keys per head at the end, 4 on average"
    quarter = sum(0.25 * t + 0.75 * min(t, 4) for t in range(1, 25)) / 24
    assert more["by cost, 25 % full"] == f"9 keys per head at the end, {quarter:.0f} on average"


def test_a_head_with_all_keys_has_those_of_the_leading_tokens_too() -> None:
    found = run_part(
        Budgets, small("sink token"), some_tokens(1, 15), some_tokens(1, 15), part_settings(budgets=(4,), kept=(2,))
    )
    assert [row.keys for row in found.policies if row.policy == "one for all"] == [
        full * (15 + 1) + (1 - full) * 4 for full in FRACTIONS
    ]


def test_sink_shares_equal_the_measured_importance(monkeypatch: pytest.MonkeyPatch) -> None:
    one, tokens = small("grouped keys"), some_tokens(3, 20)
    monkeypatch.setattr(budgets, "FRACTIONS", (0.5,))
    full: list[HeadSet] = []
    monkeypatch.setattr(budgets, "RestrictedHeads", lambda *args: full.append(args[1]) or RestrictedHeads(*args))
    found = run_part(Budgets, one, tokens[:2], tokens[2:], part_settings(budgets=(6,), kept=(1,)))
    alpha_NLH = measure(one.module, tokens[2:]).importance_first
    by_key_head = torch.as_tensor(alpha_NLH)[0].unflatten(1, (2, 2)).mean(-1).flatten().tolist()
    assert found.sink_shares == pytest.approx(by_key_head, rel=1e-5)
    least = sorted(range(4), key=lambda place: found.sink_shares[place])[:2]
    names = [(1, 1), (1, 2), (2, 1), (2, 2)]
    by_sink = full[4 + 1]  # after each head alone, and by cost
    assert by_sink == set(names) - {names[place] for place in least}


@pytest.mark.parametrize("operation", ["differential", "differential_v2", "stick_breaking", "elu_kernel", "forgetting"])
def test_no_operation_is_refused_and_a_head_with_all_keys_costs_nothing(operation: str) -> None:
    """Keys are hidden by a mask, so weights that cannot be edited key by key are no obstacle, as in `key_ablations`."""
    one = small(attention={"operation": {"kind": operation}})
    assert budgets.Budgets.refusal(one, None) is None  # type: ignore[arg-type]
    settings = [part_settings(budgets=(C,), kept=(1,)) for C in (4, 20)]
    few, all_keys = (run_part(Budgets, one, some_tokens(1), some_tokens(1), given) for given in settings)
    assert min(row.kl for row in few.heads) > 1e-9
    assert [row.kl for row in all_keys.heads] == pytest.approx([0] * len(all_keys.heads), abs=1e-12)
