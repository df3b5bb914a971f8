"""Few keys of a prompt, against a cache of transformers from which the other keys were removed."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
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
from sinklab.assessing.cache_policies import CachePolicy, KeyBudget, policies_of, pyramid
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
def test_the_continuation_equals_that_after_removing_evicted_keys_from_the_cache(name: str, config: Any) -> None:
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


def kept_keys(name: str, one: Adapter, tokens: Tensor, size: KeyBudget) -> list[Tensor]:
    """Which keys of the prompt each layer keeps, (B, G, P)."""
    found: list[Tensor] = []
    (policy,) = (one for one in policies_of(PROMPTS) if one.name == name)

    def watch(layer: Any) -> Any:
        prompt = layer.cut(PROMPT)
        found.append(policy.of_prompt(prompt, size, torch.ones(prompt.call.k_BGTD.shape[:3], dtype=torch.bool)))
        return layer

    under(one, watch, tokens)
    return found


def test_heads_share_the_budget_of_a_layer_under_adakv() -> None:
    one, tokens, size = small("grouped keys"), some_tokens(), KeyBudget(6)
    calls: list[Any] = []
    under(one, lambda layer: calls.append(layer.cut(PROMPT)) or layer, tokens)
    unequal = False
    for layer, kept in zip(calls, kept_keys("AdaKV", one, tokens, size), strict=True):
        for row in range(2):
            attention = layer.scores()[0][row].double()
            scores = snapkv(layer.call.k_BGTD[row], attention, window=3)
            best = sorted(((float(scores[g, s]), g, s) for g in range(2) for s in range(PROMPT)), reverse=True)[:12]
            expected = torch.zeros(2, PROMPT, dtype=torch.bool)
            for _, g, s in best:  # three recent keys are more than a fifth of six
                expected[g, s] = True
            assert torch.equal(kept[row], expected)
            unequal |= bool(kept[row].sum(-1)[0] != 6)
    assert unequal, "some head keeps more keys than another"


def test_a_head_keeps_a_fifth_of_its_budget_under_adakv() -> None:
    """Without recent keys, a head with lower scores would keep none."""
    policy = CachePolicy("", lambda layer, size: lambda t, kept: torch.tensor([[[1.0] * 10, [0.0] * 10]]), shared=True)
    prompt: Any = SimpleNamespace(call=SimpleNamespace(k_BGTD=torch.zeros(1, 2, 10, 4)))
    kept = policy.of_prompt(prompt, KeyBudget(5), torch.ones(1, 2, 10, dtype=torch.bool))
    assert kept.sum(-1).tolist() == [[9, 1]]


def test_budgets_of_layers_are_a_pyramid_with_the_budget_as_their_mean() -> None:
    def budgets(C: int, P: int, layers: int) -> list[int]:
        calls: list[Any] = [SimpleNamespace(index=n, length=P) for n in range(1, layers + 1)]
        return [pyramid(one, KeyBudget(C, layers=layers)) for one in calls]

    assert budgets(64, 512, 3) == [32 + 63, 64, 32 + 1]  # w = 32 and 32 // 20 = 1
    assert budgets(500, 512, 3) == [512, 500, 488]  # no layer keeps more than the prompt
    assert budgets(8, 100, 1) == [8]
    kept = kept_keys("PyramidKV", small(), some_tokens(), KeyBudget(4, layers=2))
    assert [one.sum(-1).unique().tolist() for one in kept] == [[6], [2]]


@pytest.mark.parametrize("config", [hf.LlamaConfig, hf.Qwen3Config])
def test_expected_attention_is_that_of_queries_rotated_to_later_positions(config: Any) -> None:
    torch.manual_seed(3)
    model: Any = hf.AutoModelForCausalLM.from_config(config(**GROUPED), attn_implementation="eager").double().eval()
    tokens, n, D = some_tokens(2, LENGTH, vocabulary=60) + 3, 2, 8
    found = kept_keys("expected attention", HuggingFaceAdapter(model), tokens, KeyBudget(5, n))
    cache: Any = hf.DynamicCache(config=model.config)
    with torch.no_grad():
        states = model.model(tokens[:, :PROMPT], past_key_values=cache, output_hidden_states=True).hidden_states
    turns = [torch.arange(PROMPT, PROMPT + 512) * 1e4 ** (-2 * i / D) for i in range(D // 2)]
    mean = [torch.exp(1j * turn.double()).mean() for turn in turns]  # of the complex rotations of each pair of channels

    def rotated(x: Tensor) -> Tensor:
        pairs = torch.complex(x[..., : D // 2], x[..., D // 2 :]) * torch.stack(mean)
        return torch.cat((pairs.real, pairs.imag), -1)

    for number, layer in enumerate(model.model.layers):
        normed = layer.input_layernorm(states[number]).detach()
        queries = layer.self_attn.q_proj(normed).detach().unflatten(-1, (-1, D)).transpose(1, 2)[:, :, n:]
        if config is hf.Qwen3Config:
            queries = layer.self_attn.q_norm(queries).detach()
        later = rotated(queries)  # linear, so that their mean and covariance are those of the rotated distribution
        keys, values = cache.layers[number].keys[:, :, n:], cache.layers[number].values[:, :, n:]
        for row in range(2):
            for group in range(2):
                shares = []
                for head in (2 * group, 2 * group + 1):
                    mu, sigma = later[row, head].mean(0), torch.cov(later[row, head].T, correction=0)
                    z = [mu @ k / D**0.5 + k @ sigma @ k / (2 * D) for k in keys[row, group]]
                    shares.append(torch.stack(z).softmax(0))
                score = torch.stack(shares).mean(0) * values[row, group].norm(dim=-1)
                expected = {0, 1} | {n + int(s) for s in score.topk(3).indices}
                assert set(found[number][row, group].nonzero()[:, 0].tolist()) == expected


@pytest.mark.parametrize("variant", one_in(2, ASSESSED))
def test_keeping_the_whole_prompt_changes_nothing_and_fewer_keys_only_the_continuation(variant: str) -> None:
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


def test_with_a_window_the_budget_is_filled_with_visible_keys_of_the_prompt() -> None:
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


def test_the_first_key_is_not_reported_if_no_layer_sees_it_after_the_prompt() -> None:
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
