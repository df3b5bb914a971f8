"""Ablations of the sink and of control keys, and roles of heads, against matrices computed by hand."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from assessed import run_part, small, some_tokens
from closeness import assert_close

from sinklab.assessing.parts import key_ablations
from sinklab.assessing.parts.heads import Heads, effective_rank, kind_of
from sinklab.assessing.parts.key_ablations import KeyAblations, Keys, SelectedKeys
from sinklab.assessing.reading import changed_attention
from sinklab.attention.layer_call import LayerCall
from sinklab.errors import InputError
from sinklab.models.adapter import NativeAdapter
from sinklab.models.hooks import Compute, Edit, evaluating

KINDS: tuple[Keys, ...] = ("sink", "recent", "random")


class Seen:
    """Queries, keys and values of the first layer, and its output under an edit."""

    def __init__(self, one: NativeAdapter, change: Edit | Compute) -> None:
        self.made: dict[str, Any] = {}

        def watch(layer: LayerCall) -> torch.Tensor:
            made = change(layer)
            out = made.output() if isinstance(made, LayerCall) else made
            if layer.index == 1:
                call = layer.call
                self.made = {"q": call.q_BHTD, "k": call.k_BGTD, "v": layer.value_BGSV, "out": out, "layer": layer}
            return out

        with evaluating(one.module), changed_attention(one, watch):
            one.hidden(some_tokens())
        self.q, self.k, self.v, self.out = (self.made[name] for name in ("q", "k", "v", "out"))

    def logits(self) -> torch.Tensor:
        z = self.q @ self.k.transpose(-1, -2) / math.sqrt(self.q.shape[-1])
        L = z.shape[-1]
        return z.masked_fill(torch.ones(L, L).triu(1).bool(), -torch.inf)


def selected(seen: Seen, selection: SelectedKeys) -> torch.Tensor:
    L = seen.q.shape[2]
    if selection.keys == "random":
        return selection.matrix(seen.made["layer"])
    matrix = torch.zeros(1, L, L, dtype=torch.bool)
    for q in range(L):
        for k in range(q):
            if selection.keys == "sink":
                matrix[0, q, k] = k < selection.count <= q
            else:
                matrix[0, q, k] = selection.count <= k and q - selection.count <= k
    return matrix


@pytest.mark.parametrize("keys", KINDS)
@pytest.mark.parametrize("count", [1, 2])
def test_softmax_rows_are_changed_as_the_formulas_say(keys: Keys, count: int) -> None:
    selection = SelectedKeys(keys, count, seed=3)
    one = small()
    for change in ("hidden", "value_zeroed", "spread"):
        seen = Seen(one, getattr(selection, change))
        chosen, scores = selected(seen, selection), seen.logits().softmax(-1)
        if change == "hidden":
            scores = seen.logits().masked_fill(chosen, -torch.inf).softmax(-1)
        elif change == "value_zeroed":
            scores = scores.masked_fill(chosen, 0)
        else:
            spread = torch.zeros_like(scores)
            for h in range(scores.shape[1]):
                for t in range(scores.shape[2]):
                    out = chosen[h % len(chosen), t]
                    others = [s for s in range(t + 1) if not out[s]]
                    taken = scores[:, h, t, out].sum(-1)
                    for s in others:
                        spread[:, h, t, s] = scores[:, h, t, s] + taken / len(others)
            scores = spread
        assert_close(seen.out, scores @ seen.v, 1e-9)
    seen = Seen(one, partial(selection.shifted, by=1.5))
    assert_close(seen.out, (seen.logits() + 1.5 * selected(seen, selection)).softmax(-1) @ seen.v, 1e-9)


def test_random_keys_lie_between_the_first_and_the_query() -> None:
    seen = Seen(small(), lambda layer: layer.output())
    matrix = SelectedKeys("random", 2, seed=1).matrix(seen.made["layer"])
    for _, q, k in matrix.nonzero().tolist():
        assert 2 <= k < q
    assert bool((matrix.sum(-1)[:, 4:] == 2).all())
    assert not torch.equal(matrix[0], matrix[1])


@pytest.mark.parametrize("variant", ["k biases", "sink logit", "off by one"])
def test_a_bias_is_hidden_shifted_and_spread(variant: str) -> None:
    one, selection = small(variant), SelectedKeys("bias")
    for by in (0.0, -2.0, 3.0):
        seen = Seen(one, partial(selection.shifted, by=by))
        bias = _bias_logits(one, seen) + by
        whole = torch.cat((bias[..., None], seen.logits()), -1).softmax(-1)
        assert_close(seen.out, whole[..., 1:] @ seen.v, 1e-9)
    hidden = Seen(one, selection.hidden)
    assert_close(hidden.out, hidden.logits().softmax(-1) @ hidden.v, 1e-9)
    zeroed = Seen(one, selection.value_zeroed)
    whole = torch.cat((_bias_logits(one, zeroed)[..., None], zeroed.logits()), -1).softmax(-1)
    assert_close(zeroed.out, whole[..., 1:] @ zeroed.v, 1e-9)
    spread = Seen(one, selection.spread)
    seen_by = torch.arange(1, spread.q.shape[2] + 1)[:, None]
    scores = whole[..., 1:] + whole[..., :1] / seen_by * torch.ones_like(whole[..., 1:]).tril()
    assert_close(spread.out, scores @ spread.v, 1e-9)


def _bias_logits(one: NativeAdapter, seen: Seen) -> torch.Tensor:
    bias: Any = one.blocks[0].attention.core.bias  # type: ignore[union-attr]
    if bias.key is not None:
        return (seen.q * bias.key[None, :, None]).sum(-1) / math.sqrt(seen.q.shape[-1])
    logits = torch.zeros(4, dtype=torch.float64) if bias.logit is None else bias.logit.detach()
    return logits[None, :, None].expand(seen.q.shape[:3])


def test_hiding_a_key_of_sigmoid_attention_redistributes_no_weight() -> None:
    selection = SelectedKeys("sink")
    one = small("sigmoid")
    hidden, zeroed = (Seen(one, change) for change in (selection.hidden, selection.value_zeroed))
    assert_close(hidden.out, zeroed.out, 1e-9)
    chosen = selected(hidden, selection)
    assert_close(hidden.out, hidden.logits().sigmoid().masked_fill(chosen, 0) @ hidden.v, 1e-9)


@pytest.mark.parametrize("variant", ["softmax", "k biases", "sink token", "sigmoid", "softpick", "gate"])
def test_the_sink_and_its_controls_are_assessed(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_ablations, "SHIFTS", (-2.0, 2.0))
    found = run_part(KeyAblations, small(variant), some_tokens())
    expected = [*(["bias"] if variant == "k biases" else []), *KINDS]
    assert [row.keys for row in found.keys] == expected
    for row in found.keys:
        assert [shift.by for shift in row.shifted] == [None, -2.0, 2.0]
        assert row.shifted[0].kl == row.hidden.kl
        assert 0 <= row.share <= 1


def test_the_share_of_the_sink_is_its_attention_over_the_queries_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_ablations, "SHIFTS", ())
    one = small(layers=1)
    seen = Seen(one, lambda layer: layer.output())
    scores = seen.logits().softmax(-1)
    found = run_part(KeyAblations, one, some_tokens())
    assert found.keys[0].share == pytest.approx(float(scores[:, :, 1:, 0].mean()), rel=1e-9)


def test_differential_attention_is_refused() -> None:
    one = small(attention={"operation": {"kind": "differential"}})
    with pytest.raises(InputError, match="cannot be edited"):
        run_part(KeyAblations, one, some_tokens())


def test_the_kind_of_a_head_depends_on_its_share_value_and_rank() -> None:
    assert kind_of(0.2, 0.0, 0.0, 0.0) == "no sink"
    assert kind_of(0.8, 0.1, 0.1, 0.9) == "nop"
    assert kind_of(0.8, 1.0, 0.9, 0.1) == "broadcast"
    assert kind_of(0.8, 1.0, 0.2, 0.1) == "between"
    assert kind_of(0.8, 1.0, 0.9, 0.9) == "between"


def test_the_rank_of_outputs_is_that_of_their_singular_values() -> None:
    direction = torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert effective_rank(torch.outer(direction, direction)) == pytest.approx(1, rel=1e-6)
    assert effective_rank(torch.eye(8, dtype=torch.float64)) == pytest.approx(8)
    assert effective_rank(torch.zeros(8, 8, dtype=torch.float64)) == 0


def test_roles_of_heads_are_computed_from_attention_matrices_and_values() -> None:
    one = small(layers=1)
    seen = Seen(one, lambda layer: layer.output())
    scores = seen.logits().softmax(-1)
    found = run_part(Heads, one, some_tokens())
    for head, role in enumerate(found.heads):
        norms = seen.v[:, head].norm(dim=-1)
        out = (scores @ seen.v)[:, head, 1:]
        added = scores[:, head, 1:, 0] * norms[:, :1]
        singular = torch.linalg.svdvals(out.flatten(0, 1))
        p = singular**2 / (singular**2).sum()
        assert role.share == pytest.approx(float(scores[:, head, 1:, 0].mean()), rel=1e-9)
        assert role.value_norm == pytest.approx(float(norms[:, 0].mean() / norms[:, 1:].mean()), rel=1e-6)
        assert role.output_share == pytest.approx(float(added.mean() / out.norm(dim=-1).mean()), rel=1e-6)
        assert role.effective_rank == pytest.approx(float(torch.exp(-(p * p.log()).sum())), rel=1e-5)
    assert sum(found.counts.values()) == 4


def test_heads_whose_sink_is_a_bias_without_a_value_are_nops_or_have_no_sink() -> None:
    found = run_part(Heads, small("k biases"), some_tokens())
    assert found.sink == "bias"
    assert {role.kind for role in found.heads} <= {"nop", "no sink"}
