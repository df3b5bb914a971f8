"""Eviction: the loss with a KV cache of C keys, by eviction policy; keys keep their positions in the text.

    recent                 the C latest keys
    first and recent       the first n and the C - n latest keys (StreamingLLM, 2309.17453)
    heavy hitters          the C // 2 latest, and of the others those with most accumulated attention (H2O, 2306.14048)
    heavy without sink     heavy hitters, but the first n keys are kept only while recent
    random                 the C // 2 latest, and random ones of the others

Evicted keys are lost. As in H2O's public code, the attention to a key is summed over the queries at which it was in the
cache, with the softmax over the cache, and half of the budget is for recent keys. Query heads that share a KV head
share a cache, so their sums are added (H2O's code predates grouped-query attention and has a cache per query head).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from sinklab.assessing.part import AssessPart, AssessText, Effect, PartAnswer, PartFigure, PartJob, PartNumber, PartRow
from sinklab.assessing.parts.streaming import RollingCache
from sinklab.assessing.plan import KEPT, AssessSettings
from sinklab.assessing.reading import PairedReader, Step, refused
from sinklab.attention.layer_call import LayerCall
from sinklab.attention.masks import Dense
from sinklab.models.adapter import Adapter
from sinklab.models.intercept import Edit
from sinklab.plots import PlotAxis

POLICIES = 5
LEAST_SHARE = 1e-20  # minimum share of attention on the keys in the cache; below it, the row is recomputed


class Evicted(Effect):
    """Loss with a cache of `budget` keys, evicted by `policy`, on text within the context."""

    policy: str
    budget: int


class Eviction(AssessPart):
    """Loss by eviction policy and budget of keys; `first` is the number n of first keys, at most C - 1 are kept."""

    name = "eviction"
    rank = 3
    question = "Which keys must a small cache keep?"
    numbers = (
        PartNumber(
            "recent_keys_added",
            "Recent keys only, added loss",
            ("Recent keys", "nats added"),
            "only the most recent keys, as many as the smallest budget",
        ),
    )

    first: int
    policies: list[Evicted]

    @classmethod
    def refusal(cls, adapter: Adapter, settings: AssessSettings) -> str | None:
        return refused(adapter, edit=HeavyHitters(2))

    @classmethod
    def job(cls, text: AssessText, settings: AssessSettings) -> PartJob:
        tokens_NT = text.sequences(settings.sequences, settings.length)
        first = max(settings.kept) or max(KEPT)
        run = partial(assess_eviction, text.model.adapter, tokens_NT, settings.budgets, first, settings.seed)
        return PartJob((1 + POLICIES * len(settings.budgets)) * len(tokens_NT), run)

    def answers(self) -> Iterator[PartAnswer]:
        """List the loss added by every eviction policy at the smallest budget."""
        smallest = min((one.budget for one in self.policies), default=0)
        for one in self.policies:
            if one.budget == smallest:
                yield PartAnswer(f"{one.policy}, {one.budget:,} keys", self.added(one))

    def rows(self) -> Iterator[PartRow]:
        yield self.unchanged_row()
        for one in self.policies:
            yield PartRow(f"{one.policy}, {one.budget} keys", one)

    def values(self) -> Iterator[tuple[str, float]]:
        """List the loss added when the smallest cache keeps only recent keys."""
        recent = [one for one in self.policies if one.policy == "recent"]
        if recent:
            yield "recent_keys_added", self.added(min(recent, key=lambda one: one.budget))

    def figure(self) -> PartFigure:
        return PartFigure(
            "Evicting keys",
            f"Loss added to {self.unchanged.loss:.3f} by evicting keys ({self.sequences} x {self.length:,} tokens), by "
            "policy and budget; random keys are the control.",
            [self.point(one, one.policy, one.budget) for one in self.policies],
            PlotAxis("Keys kept", "x", "keys", order=sorted({one.budget for one in self.policies})),
        )


@dataclass(frozen=True)
class HeavyHitters:
    """Attention edit that keeps recent keys and the keys with the most accumulated attention.

    Attributes:
        budget: number C of keys in the cache when a query reads it, the query's own key included.
        barred: number of first keys that are kept only while recent.
    """

    budget: int
    barred: int = 0

    def __call__(self, layer: LayerCall) -> LayerCall:
        """Return the call with every query restricted to the keys in its cache."""
        B, _, L, _ = layer.call.q_BHTD.shape
        groups = layer.call.k_BGTD.shape[1]
        total_BGL = layer.call.q_BHTD.new_zeros(B, groups, L, dtype=torch.float32)
        total_BGL[..., : self.barred] = -torch.inf
        row = _row_of_softmax(layer) if layer.operation.plain else partial(_row, layer)

        def observe(t: int, kept_BGS: Tensor) -> Tensor:
            total_BGL[..., : t + 1] += row(t, kept_BGS).float().sum(2)
            return total_BGL

        return _finding(layer, _kept(layer, self.budget, observe))


@dataclass(frozen=True)
class RandomKeys:
    """Attention edit that keeps recent keys and random other keys, drawn per layer, KV head and sequence: a control."""

    budget: int
    seed: int

    def __call__(self, layer: LayerCall) -> LayerCall:
        """Return the call with every query restricted to the keys in its cache."""
        B, groups, L, _ = layer.call.k_BGTD.shape
        draw = torch.Generator().manual_seed(self.seed + layer.index)
        rank_BGL = torch.rand(B, groups, L, generator=draw).to(layer.call.k_BGTD.device)
        return _finding(layer, _kept(layer, self.budget, lambda t, kept_BGS: rank_BGL))


def _kept(layer: LayerCall, budget: int, observe: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Return a boolean mask (B, G, L, L), True where a key is in the cache when a query reads it.

    Args:
        observe: (query index, keys in its cache) -> score of every key; the cache keeps the recent keys and, of the
            older keys, those with the highest scores.
    """
    B, groups, L, _ = layer.call.k_BGTD.shape
    device = layer.call.k_BGTD.device
    found_BGLL = torch.zeros(B, groups, L, L, dtype=torch.bool, device=device)
    held_BGL = torch.zeros(B, groups, L, dtype=torch.bool, device=device)
    recent = max(1, budget // 2)
    for t in range(L):
        held_BGL[..., t] = True
        found_BGLL[:, :, t] = held_BGL
        score_BGL = observe(t, held_BGL[..., : t + 1])
        if t + 1 < budget:
            continue
        older = t + 2 - recent  # in the cache of the next query, whose own key is recent
        heavy = budget - recent
        candidates = score_BGL[..., :older].masked_fill(~held_BGL[..., :older], -torch.inf)
        chosen = candidates.topk(heavy, -1).indices
        stays = torch.zeros_like(held_BGL[..., :older]).scatter_(-1, chosen, True)
        held_BGL[..., :older] &= stays & candidates.isfinite()
    return found_BGLL


def _row_of_softmax(layer: LayerCall) -> Callable[[int, Tensor], Tensor]:
    """Return a function like `_row` for softmax, which renormalises full rows over the keys in the cache."""
    groups = layer.call.k_BGTD.shape[1]
    scores_BHLL, bias_BHL = layer.scores()
    scores_BGRLL = scores_BHLL.unflatten(1, (groups, -1))
    bias_BGRL = None if bias_BHL is None else bias_BHL.unflatten(1, (groups, -1))

    def row(t: int, kept_BGS: Tensor) -> Tensor:
        held_BGRS = scores_BGRLL[..., t, : t + 1] * kept_BGS[:, :, None]
        total_BGR1 = held_BGRS.sum(-1, keepdim=True)
        if bias_BGRL is not None:
            total_BGR1 += bias_BGRL[..., t, None]
        if total_BGR1.min() < LEAST_SHARE:  # too much was on evicted keys for the digits of the rest
            return _row(layer, t, kept_BGS)
        return held_BGRS / total_BGR1

    return row


def _row(layer: LayerCall, t: int, kept_BGS: Tensor) -> Tensor:
    """Compute the attention weights of query t over the keys in its cache: (B, G, H / G, t + 1)."""
    call, groups = layer.call, kept_BGS.shape[1]
    kept_BHS = kept_BGS.repeat_interleave(call.q_BHTD.shape[1] // groups, 1)
    seen = call.mask.block(t, t + 1, 0, t + 1, kept_BHS.device) & kept_BHS[:, :, None]
    short = replace(call.cut(t + 1, first=t), mask=Dense(seen, later=False))
    return next(iter(layer.operation.rows(short))).weights_BHQS[:, :, 0].unflatten(1, (groups, -1))


def _finding(layer: LayerCall, found_BGLL: Tensor) -> LayerCall:
    repeats = layer.call.q_BHTD.shape[1] // found_BGLL.shape[1]
    return layer.masked(Dense(found_BGLL.repeat_interleave(repeats, 1)))


def assess_eviction(
    adapter: Adapter, tokens_NT: Tensor, budgets: Sequence[int], first: int, seed: int, step: Step
) -> Eviction:
    """Measure the loss for every eviction policy and budget.

    Args:
        first: number n of first keys that are kept or barred, a learned sink token included.
    """
    reader = PairedReader(adapter, tokens_NT, step)
    found = []
    for budget in budgets:
        kept = min(first, budget - 1)
        policies: dict[str, Edit] = {
            "recent": RollingCache(budget, 0, in_cache=False),
            "first and recent": RollingCache(budget, kept, in_cache=False),
            "heavy hitters": HeavyHitters(budget),
            "heavy without sink": HeavyHitters(budget, barred=kept),
            "random": RandomKeys(budget, seed),
        }
        for policy, edit in policies.items():
            effect = reader.under(edit).effect()
            found.append(Evicted(policy=policy, budget=budget, **effect.model_dump()))
    return Eviction(**reader.result_fields(), first=first, policies=found)
