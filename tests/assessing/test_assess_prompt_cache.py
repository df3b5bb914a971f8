"""Few keys of a prompt: what transformers computes with a cache from which the other keys were removed."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from assessed import ASSESSED, part_settings, run_part, small, some_tokens
from closeness import assert_close
from families import GROUPED
from sampling import one_in
from torch import Tensor

from sinklab.assessing.cache_policies import PROMPT as PROMPTS
from sinklab.assessing.cache_policies import KeyBudget, policies_of
from sinklab.assessing.parts.caches import PromptCache, PromptKeys
from sinklab.assessing.reading import PairedReader, Passes, changed_attention, refused
from sinklab.attention.masks import Dense
from sinklab.models.adapter import Adapter
from sinklab.models.hooks import evaluating
from sinklab.models.huggingface.pretrained_adapter import HuggingFaceAdapter

LENGTH, PROMPT = 20, 10

Rule = Callable[[Tensor, Tensor], Tensor]
"""From keys (G, P, D) and attention (H, P, P) of a prompt to scores (G, P)."""


def under(one: Adapter, edit: Any, tokens: Tensor) -> Tensor:
    with evaluating(one.module), changed_attention(one, edit):
        return one.hidden(tokens)


def snapkv(keys: Tensor, attention: Tensor, window: int, barred: int = 0) -> Tensor:
    groups, P, _ = keys.shape
    scores = []
    for head in range(groups):
        heads = attention[head * len(attention) // groups : (head + 1) * len(attention) // groups]
        votes = torch.stack([rows[P - window :, : P - window].mean(0) for rows in heads])
        padded = F.pad(votes, (2, 2))
        pooled = torch.stack([padded[:, k : k + 5].sum(1) / 5 for k in range(P - window)], 1).mean(0)
        pooled[:barred] = -1
        scores.append(torch.cat((pooled, torch.full((window,), 9.0, dtype=pooled.dtype))))
    return torch.stack(scores)


def tova(keys: Tensor, attention: Tensor) -> Tensor:
    score = attention[:, -1].mean(0)
    score[-1] = 9
    return score.expand(len(keys), -1)


def keydiff(keys: Tensor, attention: Tensor) -> Tensor:
    anchor = (keys / keys.norm(dim=-1, keepdim=True)).mean(1, keepdim=True)
    return -(keys * anchor).sum(-1) / keys.norm(dim=-1) / anchor.norm(dim=-1)


RULES: dict[str, tuple[int, Rule]] = {
    "first and recent": (2, lambda k, a: torch.tensor([99, 99, *range(8)]).expand(len(k), -1)),
    "SnapKV": (3, partial(snapkv, window=2)),
    "SnapKV without sink": (3, partial(snapkv, window=2, barred=3)),
    "TOVA": (3, tova),
    "KeyDiff": (3, keydiff),
    "key norm": (3, lambda k, a: -k.norm(dim=-1)),
}
"""Number of first keys that the policy keeps or bars, and its rule."""


def prompt_keys(policy: str, keys: int, first: int = 0, seed: int = 0) -> PromptKeys:
    (found,) = (one for one in policies_of(PROMPTS) if one.name == policy)
    return PromptKeys(found, KeyBudget(keys, first, seed))


def continued(model: Any, tokens: Tensor, rule: Rule, budget: int) -> tuple[Tensor, list[Tensor]]:
    """Final hidden states after the prompt, token by token, and the kept keys of each layer."""
    cache: Any = hf.DynamicCache(config=model.config)
    read = model.model(tokens[None, :PROMPT], past_key_values=cache, output_attentions=True)
    kept = []
    for layer, attention in zip(cache.layers, read.attentions, strict=True):
        found = rule(layer.keys[0], attention[0].double()).topk(budget, -1).indices.sort(-1).values
        picked = found[None, :, :, None].expand(-1, -1, -1, layer.keys.shape[-1])
        layer.keys, layer.values = layer.keys.gather(2, picked), layer.values.gather(2, picked)
        kept.append(found)
    states = []
    for place in range(PROMPT, LENGTH):
        here = torch.tensor([[place]])
        step = model.model(tokens[None, place : place + 1], past_key_values=cache, position_ids=here)
        states.append(step.last_hidden_state[0, 0])
    return torch.stack(states), kept


@pytest.mark.parametrize("config", [hf.LlamaConfig, hf.Qwen3Config])
@pytest.mark.parametrize("name", RULES)
def test_the_continuation_is_that_of_a_cache_without_the_other_keys(name: str, config: Any) -> None:
    torch.manual_seed(3)
    model = hf.AutoModelForCausalLM.from_config(config(**GROUPED), attn_implementation="eager").double().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # attention and norms that differ between keys
            parameter.mul_(3 if parameter.ndim > 1 else 0.5 + torch.rand_like(parameter))
    first, rule = RULES[name]
    tokens = some_tokens(2, LENGTH, vocabulary=60) + 3  # some special tokens have an embedding of zeros
    edit = prompt_keys(name, 4, first)
    with torch.no_grad():
        expected = [continued(model, row, rule, 4) for row in tokens]
    found = under(HuggingFaceAdapter(model), edit, tokens)
    assert_close(found[:, PROMPT:], torch.stack([states for states, _ in expected]), 1e-5)
    kept_first = torch.stack([torch.stack([(layer == 0).any(-1) for layer in kept], 0) for _, kept in expected], 1)
    assert torch.equal(torch.stack(edit.first_kept), kept_first)


@pytest.mark.parametrize("variant", one_in(2, ASSESSED))
def test_all_keys_of_the_prompt_change_nothing(variant: str) -> None:
    one, tokens = small(variant), some_tokens()
    reader = PairedReader(one, tokens)
    for policy in policies_of(PROMPTS):
        P = PROMPT + one.leading
        after = reader.under(PromptKeys(policy, KeyBudget(P))).effect()
        assert after.loss == pytest.approx(reader.unchanged.effect().loss, rel=1e-9)
        fewer = reader.under(PromptKeys(policy, KeyBudget(2)))
        assert fewer.effect(start=PROMPT + 2).kl > 1e-6
        assert fewer.effect(stop=PROMPT + 2).kl == pytest.approx(0, abs=1e-12)


def test_random_keys_are_as_many_as_the_budget_and_include_the_latest() -> None:
    seen: list[Tensor] = []

    def watch(layer: Any) -> Any:
        changed = prompt_keys("random", 6, seed=1)(layer)
        seen.append(changed.call.mask.block(0, LENGTH, 0, LENGTH, torch.device("cpu")))
        return layer

    under(small("grouped keys"), watch, some_tokens())
    for one in seen:
        after = one[:, :, PROMPT:]
        assert bool((after[..., :PROMPT].sum(-1) == 6).all())
        assert bool(after[..., PROMPT - 3 : PROMPT].all())
        assert torch.equal(after[..., PROMPT:], torch.ones(10, 10).tril().bool().expand_as(after[..., PROMPT:]))
        assert torch.equal(
            one[:, :, :PROMPT], torch.ones(LENGTH, LENGTH).tril().bool()[:PROMPT].expand(*one.shape[:2], -1, -1)
        )
        assert not torch.equal(after[0, 0], after[0, 2]), "KV heads draw on their own"


def test_keys_outside_a_window_are_not_kept() -> None:
    one, tokens = small(attention={"mask": {"kind": "window", "width": 4}}), some_tokens()
    edit = prompt_keys("key norm", 4)
    assert_close(under(one, edit, tokens), under(one, None, tokens), 1e-9)
    assert edit.first_kept == []


def test_a_window_is_filled_with_the_keys_of_the_prompt_that_it_shows() -> None:
    seen: list[Tensor] = []

    def watch(layer: Any) -> Any:
        edit = prompt_keys("key norm", 3)
        changed = edit(layer)
        seen.append(changed.call.mask.block(0, LENGTH, 0, LENGTH, torch.device("cpu"))[:, :, PROMPT, :PROMPT])
        assert edit.first_kept == []
        return layer

    under(small(attention={"mask": {"kind": "window", "width": 7}}), watch, some_tokens())
    for one in seen:  # the first query after the prompt sees its last six keys
        assert bool((one.sum(-1) == 3).all())
        assert not one[..., : PROMPT - 6].any()


def test_the_first_key_is_a_learned_token_if_there_is_one() -> None:
    one, tokens = small("sink token"), some_tokens()
    edit = prompt_keys("first and recent", 2, 1)
    after = under(one, edit, tokens)
    assert all(bool(kept.all()) for kept in edit.first_kept)

    def by_hand(layer: Any) -> Any:
        P, L = PROMPT + 1, LENGTH + 1
        allowed = torch.ones(1, 1, L, L, dtype=torch.bool).tril()
        allowed[..., P:, 1 : P - 1] = False
        return layer.masked(Dense(allowed))

    assert_close(after, under(one, by_hand, tokens), 1e-12)


def test_prompts_without_more_keys_than_the_budget_are_refused() -> None:
    why = PromptCache.refusal(small(), part_settings(length=16, budgets=(8,)))
    assert why is not None
    assert why.startswith("prompts of 8 tokens, half of --length, have no more keys than the smallest --budget, 8")
    assert PromptCache.refusal(small(), part_settings(length=18, budgets=(8, 16))) is None


def test_a_part_in_whose_layers_nobody_sees_the_first_key_says_nothing_about_it() -> None:
    one = small(attention={"mask": {"kind": "window", "width": 4}})
    found = run_part(PromptCache, one, some_tokens(), part_settings(budgets=(2,)))
    assert {row.first_kept for row in found.methods} == {None}
    assert {row["first_kept"] for row in found.figure().rows} == {None}
    assert all("first key" not in row.more for row in found.rows())


def test_queries_that_see_later_keys_are_refused() -> None:
    one = small(attention={"mask": {"kind": "prefix", "length": 4}})
    assert refused(one, prompt_keys("recent", 1)) == "queries attend to later keys, so the prompt cannot be read alone"


def test_the_part_has_every_method_at_every_budget() -> None:
    steps = Passes()
    found = run_part(PromptCache, small(), some_tokens(), part_settings(budgets=(3, 5, PROMPT)), passes=steps)
    assert len(found.methods) == 2 * len(policies_of(PROMPTS))
    assert steps.done == 2 * (1 + 2 * len(policies_of(PROMPTS)))
    by_name = {(one.method, one.budget): one for one in found.methods}
    assert by_name["recent", 3].first_kept == 0
    assert by_name["first and recent", 3].first_kept == 1
    assert by_name["SnapKV without sink", 5].first_kept == 0
    assert found.unchanged.targets == by_name["SnapKV", 5].targets == 2 * (LENGTH - PROMPT - 1)
