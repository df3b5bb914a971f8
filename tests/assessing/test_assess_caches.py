"""Rolling caches and eviction in one pass give what a cache gives token by token."""

import itertools
from dataclasses import replace

import pytest
import torch
from assessed import ASSESSED, part_settings, run_part, small, some_tokens
from closeness import assert_close
from sampling import one_in
from streaming_reference import Policy, distinct_keys, first_and_recent, heavy_hitters, latest_attention, streamed

from sinklab.assessing import cache_policies
from sinklab.assessing.cache_policies import EVICTION, CachePolicy, KeyBudget, policies_of
from sinklab.assessing.parts.caches import Budgets, Eviction, PromptCache
from sinklab.assessing.parts.streaming import RollingCache
from sinklab.assessing.reading import PairedReader, changed_attention
from sinklab.attention.layer_call import LayerCall
from sinklab.errors import InputError
from sinklab.models.adapter import NativeAdapter
from sinklab.models.hooks import Edit, evaluating

EVICTED = ("softmax", "grouped keys", "sigmoid", "k biases", "sink token", "differential v2")


def evicting(policy: str, keys: int, first: int = 0, seed: int = 0) -> Edit:
    (found,) = (one for one in policies_of(EVICTION) if one.name == policy)
    return lambda layer: found.evict(layer, KeyBudget(keys, first, seed))


def under(one: NativeAdapter, edit: Edit, tokens: torch.Tensor) -> torch.Tensor:
    with evaluating(one.module), changed_attention(one, edit):
        return one.hidden(tokens)


def compare(one: NativeAdapter, edit: Edit, policy: Policy, in_cache: bool) -> None:
    tokens = some_tokens()
    expected = torch.stack([streamed(one.module, row, policy, in_cache) for row in tokens])
    assert_close(under(one, edit, tokens), expected, 1e-9)


@pytest.mark.parametrize(("variant", "first"), one_in(7, itertools.product(ASSESSED, (0, 1, 4))))
def test_a_rolling_cache_in_one_pass_equals_reading_token_by_token(variant: str, first: int) -> None:
    compare(small(variant), RollingCache(7, first), first_and_recent(7, first), in_cache=True)


@pytest.mark.parametrize("variant", ["softmax", "k biases", "alibi"])
def test_a_rolling_cache_with_positions_in_the_text_equals_reading_token_by_token(variant: str) -> None:
    compare(small(variant), RollingCache(7, 2, in_cache=False), first_and_recent(7, 2), in_cache=False)


def test_positions_in_the_cache_and_in_the_text_give_different_outputs() -> None:
    one, tokens = small(), some_tokens()
    cache, text = (under(one, RollingCache(7, 2, in_cache), tokens) for in_cache in (True, False))
    assert (cache - text).abs().max() > 1e-3 * text.abs().max()


@pytest.mark.parametrize(
    ("variant", "budget", "barred"),
    one_in(5, ((name, *sizes) for name in EVICTED for sizes in ((6, 0), (6, 2), (2, 0), (3, 1)))),
)
def test_heavy_hitters_are_those_of_a_cache_that_is_kept_token_by_token(variant: str, budget: int, barred: int) -> None:
    compare(
        small(variant),
        evicting("heavy without sink", budget, barred),
        heavy_hitters(budget, barred),
        in_cache=False,
    )


@pytest.mark.parametrize(("variant", "budget"), one_in(3, itertools.product(EVICTED, (6, 2))))
def test_keys_by_latest_attention_are_those_of_a_cache_that_is_kept_token_by_token(variant: str, budget: int) -> None:
    compare(small(variant), evicting("TOVA", budget), latest_attention(budget), in_cache=False)


@pytest.mark.parametrize(  # two unit keys have the same cosine to their mean
    ("variant", "budget"), one_in(3, itertools.product(EVICTED[:-1], (6, 3)))
)
def test_distinct_keys_are_those_of_a_cache_that_is_kept_token_by_token(variant: str, budget: int) -> None:
    one = small(variant)
    config = one.module.config
    turned = config.rotary_width if config.position.kind == "rotary" else 0
    compare(one, evicting("KeyDiff", budget), distinct_keys(budget, turned), in_cache=False)


@pytest.mark.parametrize("variant", ["grouped keys", "k biases"])
def test_heavy_hitters_are_recomputed_if_all_attention_was_on_evicted_keys(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_policies, "LEAST_SHARE", 2.0)
    compare(small(variant), evicting("heavy without sink", 6, 2), heavy_hitters(6, 2), in_cache=False)


def test_a_cache_as_long_as_the_text_gives_the_ordinary_loss() -> None:
    reader = PairedReader(small(), some_tokens())
    before = reader.unchanged.effect()
    whole = (evicting(policy.name, 20, 4) for policy in policies_of(EVICTION))
    for edit in (RollingCache(20, 0), RollingCache(20, 4), *whole):
        after = reader.under(edit).effect()
        assert after.loss == pytest.approx(before.loss, rel=1e-9)
        assert after.kl == pytest.approx(0, abs=1e-9)


def test_random_eviction_keeps_to_the_budget_and_never_restores_a_key() -> None:
    seen: list[torch.Tensor] = []

    def watch(layer: LayerCall) -> LayerCall:
        one_hot = torch.eye(layer.length, dtype=layer.value_BGSV.dtype).expand(*layer.value_BGSV.shape[:2], -1, -1)
        seen.append(replace(evicting("random", 6, seed=3)(layer), value_BGSV=one_hot).output() > 0)
        return layer

    under(small(), watch, some_tokens())
    kept = seen[0]
    assert kept.sum(-1).max() == 6
    assert bool((kept.sum(-1)[..., 6:] == 6).all())
    for s in range(kept.shape[-1]):
        column = kept[..., s:, s].int()
        assert bool((column.diff(dim=-1) <= 0).all()), "a key that was evicted is seen again"
    assert not torch.equal(kept[0, 0], kept[0, 1]), "each group of heads draws its own"


@pytest.mark.parametrize("edit", [evicting("heavy hitters", 8), evicting("random", 8, seed=1)])
def test_keys_outside_a_window_do_not_occupy_the_cache(edit: Edit) -> None:
    one, tokens = small(attention={"mask": {"kind": "window", "width": 8}}), some_tokens()
    before = under(one, lambda layer: layer, tokens)
    assert_close(under(one, edit, tokens), before, 1e-9)
    assert (under(one, evicting("heavy hitters", 7), tokens) - before).abs().max() > 1e-3 * before.abs().max()


def test_positions_in_the_cache_are_refused_for_kernels_with_rotary_embeddings() -> None:
    one = small(attention={"operation": {"kind": "mlp"}})
    with pytest.raises(InputError, match="--positions text"):
        under(one, RollingCache(4, 1), some_tokens())


def test_a_rolling_cache_of_a_hybrid_model_evicts_keys_but_not_recurrent_states() -> None:
    mixed = small(layers=4, mixer={"kind": "gated_delta", "every": 2})
    reader = PairedReader(mixed, some_tokens())
    before = reader.unchanged.effect()
    whole, short = (reader.under(RollingCache(size, 1)).effect() for size in (20, 4))
    assert whole.loss == pytest.approx(before.loss, rel=1e-9)
    assert short.kl > 1e-6


def test_a_new_policy_is_one_entry_and_shows_up_in_all_three_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = CachePolicy(
        "longest keys", lambda layer, size: lambda t, kept: layer.call.k_BGTD.norm(dim=-1)[..., : t + 1]
    )
    one, tokens, settings = small(), some_tokens(), part_settings(budgets=(4,), kept=(1,))
    before = [run_part(part, one, tokens, tokens, settings) for part in (Eviction, PromptCache, Budgets)]
    monkeypatch.setattr(cache_policies, "POLICIES", [*cache_policies.POLICIES, longest])
    after = [run_part(part, one, tokens, tokens, settings) for part in (Eviction, PromptCache, Budgets)]
    fields = ["policies", "methods", "policies"]
    for field, part, more in zip(fields, before, after, strict=True):
        new = [row for row in getattr(more, field) if row not in getattr(part, field)]
        assert {getattr(row, "policy", None) or row.method for row in new} <= {
            "longest keys",
            "one for all, longest keys",
        }
        assert new
        assert min(row.kl for row in new) > 1e-6
        assert any("longest keys" in row.answer for row in more.rows())
        assert any("longest keys" in point["series"] for point in more.figure().rows)
