"""The rounded KV cache, against an independent implementation of KIVI and against a rounding cache of transformers."""

import random
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from assessed import part_settings, run_part, small, some_tokens
from closeness import assert_close
from families import GROUPED, family_tokens, pair_of
from torch import nn

from sinklab.assessing.parts import PARTS, USUAL, kv_cache
from sinklab.assessing.parts.kv_cache import (
    KVCache,
    RoundedCache,
    last_linear_layers,
    outliers_and_sinks,
    rounded_in_groups,
)
from sinklab.assessing.reading import PairedReader, Passes, changed_attention, key_heads
from sinklab.assessing.settings import AssessOptions, settings_for
from sinklab.errors import InputError
from sinklab.models.adapter import adapt
from sinklab.models.hooks import evaluating, hooked


def by_hand(numbers: list[float], bits: int) -> list[float]:
    """One group: codes 0 .. 2^bits - 1 between the least and the largest."""
    low, high = min(numbers), max(numbers)
    step = (high - low) / (2**bits - 1) or 1.0
    return [low + step * round((x - low) / step) for x in numbers]


def rounded_by_hand(x_BGSD: torch.Tensor, axis: int, bits: int, left: set[int], size: int) -> torch.Tensor:
    found = x_BGSD.clone()
    B, G, S, D = x_BGSD.shape
    lines = [(b, g, slice(None), d) for b in range(B) for g in range(G) for d in range(D)]
    if axis == 3:
        lines = [(b, g, s, slice(None)) for b in range(B) for g in range(G) for s in range(S) if s not in left]
    for line in lines:
        whole = x_BGSD[line].tolist()
        for start in range(0, len(whole), size):
            places = [i for i in range(start, min(start + size, len(whole))) if axis == 3 or i not in left]
            if places:
                found[line][places] = torch.tensor(by_hand([whole[i] for i in places], bits), dtype=x_BGSD.dtype)
    return found


def some_cache(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("left", [set(), {0}, {0, 1, 37}])
def test_groups_are_rounded_as_by_hand_without_spared_positions_in_their_scales(bits: int, left: set[int]) -> None:
    x = some_cache(2, 2, 70, 40)
    x[:, :, 0] *= 100
    spared = torch.tensor([s in left for s in range(70)])[:, None]
    for axis in (2, 3):
        assert_close(rounded_in_groups(x, axis, bits, spared), rounded_by_hand(x, axis, bits, left, 32), 1e-12)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_whole_groups_agree_with_the_codes_that_kivi_packs(bits: int) -> None:
    x = some_cache(2, 3, 64, 32)
    for axis, shape in ((2, (2, 3, 2, 32, 32)), (3, (2, 3, 64, 1, 32))):
        grouped = x.view(shape)
        over = -2 if axis == 2 else -1  # of tokens, or of channels
        least, most = grouped.min(over, keepdim=True)[0], grouped.max(over, keepdim=True)[0]
        codes = ((grouped - least) / ((most - least) / (2**bits - 1))).clamp(0, 2**bits - 1).round().to(torch.int32)
        expected = codes * ((most - least) / (2**bits - 1)) + least
        assert_close(rounded_in_groups(x, axis, bits, torch.tensor(False)), expected.view_as(x), 1e-12)


def test_rounding_does_not_change_a_group_of_equal_numbers() -> None:
    x = torch.full((1, 1, 40, 8), 0.3, dtype=torch.float64)
    assert torch.equal(rounded_in_groups(x, 2, 2, torch.tensor(False)), x)


class RoundingCache(hf.DynamicCache):
    """A cache of transformers that returns rounded keys and values."""

    def __init__(self, bits: int, left: set[int], only: tuple[int, int] | None) -> None:
        super().__init__()
        self.bits, self.left, self.only = bits, left, only

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        both = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        made = [rounded_by_hand(x, axis, self.bits, self.left, 32) for x, axis in zip(both, (2, 3), strict=True)]
        if self.only is None:
            return tuple(made)
        for x, full in zip(made, both, strict=True):
            for g in range(x.shape[1]):
                if (layer_idx + 1, g + 1) != self.only:
                    x[:, g] = full[:, g]
        return tuple(made)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize(("left", "only"), [(set(), None), ({0}, None), (set(), (2, 1))])
def test_a_rounded_cache_equals_a_rounding_cache_in_transformers(
    family: str, left: set[int], only: tuple[int, int] | None
) -> None:
    model, tokens = pair_of(family)[0].double(), family_tokens()
    adapter, spared = adapt(model), torch.tensor([t in left for t in range(tokens.shape[1])])
    edit = RoundedCache(2, spared, None if only is None else frozenset({only}))
    with evaluating(model):
        expected = model.base_model(
            tokens, past_key_values=RoundingCache(2, left, only), use_cache=True
        ).last_hidden_state
        with changed_attention(adapter, edit):
            found = adapter.hidden(tokens)
    assert_close(found, expected, 1e-6)


class KiviCache(hf.DynamicCache):
    """KIVI's cache, a token at a time, as in llama_kivi.py of jy-yuan/KIVI: read first, then rounded."""

    def __init__(self, bits: int, residual: int, group: int) -> None:
        super().__init__()
        self.bits, self.residual, self.group = bits, residual, group
        self.held: dict[int, list[list[torch.Tensor]]] = {}

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        super().update(key_states, value_states, layer_idx, *args, **kwargs)  # counts positions
        coarse_k, full_k, coarse_v, full_v = self.held.setdefault(layer_idx, [[], [], [], []])
        full_k.append(key_states)
        full_v.append(value_states)
        read = torch.cat(coarse_k + full_k, 2), torch.cat(coarse_v + full_v, 2)
        if len(full_k) == self.residual:
            coarse_k.append(rounded_by_hand(torch.cat(full_k, 2), 2, self.bits, set(), self.group))
            full_k.clear()
        if len(full_v) > self.residual:
            coarse_v.append(rounded_by_hand(full_v.pop(0), 3, self.bits, set(), self.group))
        return read


@pytest.mark.parametrize("residual", [4, 8])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_a_residual_equals_that_of_kivis_cache_read_token_by_token(
    family: str, residual: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "CACHE_GROUP", 4)
    model, tokens = pair_of(family)[0].double(), family_tokens()
    assert tokens.shape[1] > residual + 4
    adapter, cache = adapt(model), KiviCache(2, residual, 4)
    with evaluating(model):
        parts = [model.base_model(x, past_key_values=cache, use_cache=True) for x in tokens.split(1, dim=1)]
        with changed_attention(adapter, RoundedCache(2, residual=residual).output):
            found = adapter.hidden(tokens)
        with changed_attention(adapter, RoundedCache(2)):
            without = adapter.hidden(tokens)
    assert_close(found, torch.cat([part.last_hidden_state for part in parts], 1), 1e-6)
    assert (found - without).abs().max() > 1e-3


@pytest.mark.parametrize("variant", ["k biases", "sink logit", "sink token", "sigmoid", "alibi", "grouped keys"])
def test_a_residual_as_long_as_the_text_rounds_nothing(variant: str) -> None:
    one, tokens = small(variant), some_tokens(2, 20)
    for edit in (RoundedCache(2, residual=32), RoundedCache(40, residual=8)):  # 40 bits lose nothing either
        read = PairedReader(one, tokens).under(edit.output).effect()
        assert read.kl == pytest.approx(0, abs=1e-9)


def test_a_residual_lowers_the_cost_and_is_in_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "BITS", (2,))
    one, tokens = small(), some_tokens(3, 32)
    settings = [part_settings().model_copy(update={"residual": R}) for R in (0, 8)]  # the command has multiples of 32
    plain, recent = (run_part(KVCache, one, tokens[:2], tokens[2:], given) for given in settings)
    assert recent.settings[0].everything.kl < plain.settings[0].everything.kl
    assert "residual" not in plain.model_dump()
    assert recent.model_dump()["residual"] == 8
    assert "up to 8 recent tokens" in recent.remark()


def test_impossible_residuals_are_refused_with_the_reason() -> None:
    recent = AssessOptions(residual=32)
    why = KVCache.refusal(small(attention={"operation": {"kind": "differential"}}), recent)  # type: ignore[arg-type]
    assert "cannot be edited" in str(why)
    why = KVCache.refusal(small(attention={"mask": {"kind": "prefix", "length": 3}}), recent)  # type: ignore[arg-type]
    assert "queries attend to later keys" in str(why)
    with pytest.raises(InputError, match="--residual 20: Input should be a multiple of 32"):
        AssessOptions(residual=20)
    model = SimpleNamespace(adapter=small(), name="one")
    with pytest.raises(InputError, match="--residual 32: the sequences have only 32 tokens, so no key would be"):
        settings_for(model, recent.model_copy(update={"parts": ("kv_cache",)}))  # type: ignore[arg-type]
    assert settings_for(model, recent).residual == 32  # type: ignore[arg-type]  # no part uses it


def with_a_loud_first_token(tokens: torch.Tensor) -> Any:
    """A run in which one channel of the first token's key and value is a thousand times the others'."""
    one = small("grouped keys")
    tokens[:, 0] = 23
    tokens[:, 1:] = tokens[:, 1:].clamp(max=22)
    with torch.no_grad():
        one.module.embedding.weight[23] = 0
        one.module.embedding.weight[23, 0] = 3e4
        for block in one.blocks:
            block.attention_norm.weight[0] *= 30  # type: ignore[index, union-attr, operator]
    return one


def test_an_outlier_at_the_first_token_causes_most_of_the_cost_of_rounding() -> None:
    tokens = some_tokens(3, 20)
    found = run_part(KVCache, with_a_loud_first_token(tokens), tokens[:2], tokens[2:])
    assert [row.bits for row in found.settings] == [8, 4, 3, 2]
    for row in found.settings:
        assert row.due_to_sink == pytest.approx(row.everything.loss - row.first_spared.loss)
    four = found.settings[1]
    assert four.first_spared.kl < four.everything.kl / 3


def test_losses_of_a_rounded_cache_are_means_of_draws_the_first_of_which_is_unperturbed() -> None:
    one, tokens = small(), some_tokens(3, 40)
    found, alone = (
        run_part(KVCache, one, tokens[:2], tokens[2:], part_settings(quick=quick)) for quick in (False, True)
    )
    assert found.unchanged == alone.unchanged
    assert found.heads == alone.heads
    assert found.without_random == alone.without_random
    assert found.without_exempt != alone.without_exempt
    by_bits = {one.bits: one for one in found.settings}
    for single in alone.settings:
        three = by_bits[single.bits]
        assert single.draws is None
        assert three.draws is not None
        assert three.draws[0] == single.due_to_sink
        assert three.due_to_sink == pytest.approx(sum(three.draws) / 3)
        assert three.draws[1] != three.draws[2]
        assert three.everything != single.everything
        assert three.due_error is not None


DOWN = {  # the down projection of a block
    "llama": "mlp.down_proj",
    "gpt2": "mlp.c_proj",
    "opt": "fc2",
    "gpt-neox": "mlp.dense_4h_to_h",
    "gemma3, window 5": "mlp.down_proj",
    "phi3": "mlp.down_proj",
    "ours": "ffn.down",
}


def outliers_by_hand(inputs: list[torch.Tensor]) -> list[int]:
    """The rule of get_prefixed_tokens in ChenMnZ/PrefixQuant, by its default `activation_type`, for one sequence."""
    found = set()
    for x_TI in inputs:
        largest = [max(abs(number) for number in token) for token in x_TI.tolist()]
        median = sorted(largest)[(len(largest) - 1) // 2]  # torch.median is the lower one of an even number
        found |= {t for t, number in enumerate(largest) if number / median > 64}
    return sorted(found)


@pytest.mark.parametrize("family", DOWN)
def test_outliers_are_those_of_the_inputs_of_down_projections(family: str) -> None:
    adapter: Any = small() if family == "ours" else adapt(pair_of(family)[0].double())
    tokens, inputs = some_tokens(1, 14), list[torch.Tensor]()
    projections = [block.get_submodule(DOWN[family]) for block in adapter.blocks]

    def loud(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x = args[0].clone()
        if x.numel() == 14 * x.shape[-1]:  # the whole sequence, in some families without a batch axis
            x.view(14, -1)[[3, 8]] *= 1e4
        return (x,)

    def keep(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        inputs.append(args[0].view(14, -1))

    with hooked([projections[1].register_forward_pre_hook(loud)]):
        with hooked([one.register_forward_pre_hook(keep) for one in projections]), torch.no_grad():
            adapter.hidden(tokens)
        found, _ = outliers_and_sinks(PairedReader(adapter, tokens))
    assert len(inputs) == len(projections)
    assert found is not None
    assert sorted(found) == outliers_by_hand(inputs) == [3, 8]


def test_an_outlier_only_in_the_output_of_a_block_is_not_reported() -> None:
    tokens = some_tokens(1, 20)
    one, outputs = with_a_loud_first_token(tokens), list[torch.Tensor]()
    with hooked([one.blocks[0].register_forward_hook(lambda _, __, output: outputs.append(output))]), torch.no_grad():
        one.hidden(tokens)
    assert outliers_by_hand([outputs[0][0]]) == [0]
    assert outliers_and_sinks(PairedReader(one, tokens))[0] == frozenset()


def test_outliers_are_not_reported_for_models_with_experts() -> None:
    config = hf.MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2)
    adapter, tokens = adapt(hf.AutoModelForCausalLM.from_config(config)), family_tokens()
    found = run_part(KVCache, adapter, tokens[:2], tokens[2:3])
    assert found.outliers is None
    assert found.settings[0].outliers_spared is None
    assert not any("outliers" in row.what for row in found.rows())
    apart = nn.ModuleDict({"mlp": nn.ModuleList(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]) for _ in range(2))})
    assert last_linear_layers(SimpleNamespace(blocks=[apart])) == []  # type: ignore[arg-type]


def largest_alpha(attentions: Any, sequence: int) -> list[float]:
    """The largest importance over layers and heads at every position."""
    matrices = [A for layer in attentions for A in layer[sequence].tolist()]
    T = len(matrices[0])
    return [max(fmean(A[t][k] for t in range(k, T)) for A in matrices) for k in range(T)]


@pytest.mark.parametrize("length", [20, 60])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral, window 5"])
def test_sinks_are_those_of_the_attention_matrices(family: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, eager = (one.double() for one in pair_of(family))
    adapter, tokens = adapt(model), some_tokens(2, length, 64)
    with evaluating(eager):
        attentions = eager(tokens, output_attentions=True).attentions
    alphas = [largest_alpha(attentions, n) for n in range(2)]
    examined = [k for k in range(1, length + 1) if k <= length / 2 or length - k + 1 >= 16]
    third, fourth = sorted((alphas[0][k - 1] for k in examined), reverse=True)[2:4]
    monkeypatch.setattr(kv_cache, "SINK_EPS", eps := (third + fourth) / 2)
    above = [[k for k, alpha in enumerate(some, 1) if alpha > eps] for some in alphas]
    assert any(set(some) - set(examined) for some in above)  # few queries see the last positions
    found = [outliers_and_sinks(PairedReader(adapter, one))[1] for one in tokens.split(1)]
    assert [[s + 1 for s in sorted(some)] for some in found] == [[k for k in some if k in examined] for some in above]
    assert len(found[0]) == 3


def test_a_learned_token_is_a_sink_by_its_own_importance(monkeypatch: pytest.MonkeyPatch) -> None:
    one, tokens = small("sink token"), some_tokens(3, 12)
    for eps, expected in ((0.05, True), (0.95, False)):
        monkeypatch.setattr(kv_cache, "SINK_EPS", eps)
        found = run_part(KVCache, one, tokens[:2], tokens[2:])
        assert [0 in some for some in found.sinks] == [expected, expected]


def test_outliers_and_sinks_of_each_sequence_are_spared_and_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    one, tokens = small("grouped keys"), some_tokens(3, 20)
    pairs = iter([(frozenset({0, 6}), frozenset({4})), (frozenset({6}), frozenset({1, 2, 5, 7, 9}))])
    monkeypatch.setattr(kv_cache, "outliers_and_sinks", lambda reader: next(pairs))
    monkeypatch.setattr(kv_cache, "BITS", (2,))
    found = run_part(KVCache, one, tokens[:2], tokens[2:])
    outliers, sinks = [[1, 7], [7]], [[5], [2, 3, 6, 8, 10]]
    assert (found.outliers, found.sinks) == (outliers, sinks)
    for effect, sets in (
        (found.settings[0].outliers_spared, outliers),
        (found.settings[0].sinks_spared, sinks),
    ):
        losses = []
        for tokens_1T, some in zip(tokens[:2].split(1), sets, strict=True):
            spared = torch.tensor([t + 1 in some for t in range(20)])
            losses.append(PairedReader(one, tokens_1T).under(RoundedCache(2, spared)).effect().loss)
        assert effect is not None
        assert effect.loss == pytest.approx(fmean(losses))
    rows = {row.what: row.more for row in found.rows()}
    assert rows["2 bits, outliers in full precision"] == "positions 7 (in 2 sequences), 1"
    assert rows["2 bits, sinks in full precision"] == "positions 5, 2, 3, 6, 2 more"
    assert "outliers at positions 7 (in 2 sequences), 1; sinks at positions 5, 2, 3, 6, 2 more;" in found.remark()


def test_random_heads_are_the_mean_of_three_draws() -> None:
    one, tokens = small(), some_tokens(3, 20)
    found = run_part(KVCache, one, tokens[:2], tokens[2:], part_settings(seed=7))
    names, draw = sorted(key_heads(one)), random.Random(7)
    losses = [
        PairedReader(one, tokens[:2])
        .under(RoundedCache(2, heads=frozenset(names) - set(draw.sample(names, 1))))
        .effect()
        for _ in range(3)
    ]
    control = found.without_random
    assert control.losses == pytest.approx([one.loss for one in losses])
    assert len(set(control.losses)) > 1
    assert control.loss == pytest.approx(fmean(control.losses))
    assert control.kl == pytest.approx(fmean(one.kl for one in losses))
    assert control.error is None
    draws = f"draws {min(control.losses):.4f} to {max(control.losses):.4f}"
    assert [row.more for row in found.rows() if "random" in row.what] == [draws]


def test_heads_are_rounded_one_at_a_time_and_the_costliest_are_exempt(monkeypatch: pytest.MonkeyPatch) -> None:
    one, tokens = small("grouped keys"), some_tokens(3, 20)
    assert key_heads(one) == {(1, 1), (1, 2), (2, 1), (2, 2)}
    passes = Passes()
    found = run_part(KVCache, one, tokens[:2], tokens[2:], part_settings(quick=True), passes=passes)
    assert (found.outliers, found.sinks) == ([[], []], [[4], [10]])  # no outliers: as with no position spared
    draw = random.Random(0)
    drawn = {name for _ in range(3) for name in draw.sample(sorted(key_heads(one)), 1)}
    assert passes.done == 2 * (2 + 3 * 3 + len({*found.exempt, *drawn})) + 1 + 4
    reader = PairedReader(one, tokens[2:])
    for row in found.heads:
        alone = reader.under(RoundedCache(2, heads=frozenset({(row.layer, row.head)}))).effect()
        assert row.kl == pytest.approx(alone.kl)
    dearest = max(found.heads, key=lambda row: row.kl)
    assert found.exempt == [(dearest.layer, dearest.head)]
    others = key_heads(one) - {found.exempt[0]}
    assert found.without_exempt.kl == pytest.approx(
        PairedReader(one, tokens[:2]).under(RoundedCache(2, heads=others)).effect().kl
    )
    monkeypatch.setattr(kv_cache, "BITS", (40,))
    exact = run_part(KVCache, one, tokens[:2], tokens[2:])
    assert exact.settings[0].everything.kl == pytest.approx(0, abs=1e-9)


def test_a_learned_token_in_front_is_spared_with_the_first() -> None:
    one, tokens = small("sink token"), some_tokens(3, 12)
    found = run_part(KVCache, one, tokens[:2], tokens[2:])
    assert found.sink_positions == 2
    assert found.settings[-1].first_spared.kl != found.settings[-1].everything.kl


def test_a_latent_cache_is_refused() -> None:
    for adapter in (small("latent"), adapt(pair_of("deepseek-v3, other value width")[0])):
        why = KVCache.refusal(adapter, AssessOptions())  # type: ignore[arg-type]
        assert why == "the KV cache contains latent vectors (MLA) instead of keys and values"
    assert KVCache.refusal(small(), AssessOptions()) is None  # type: ignore[arg-type]


def test_the_part_runs_only_if_it_is_named() -> None:
    assert "kv_cache" in PARTS
    assert "kv_cache" not in USUAL
