"""Eviction: the loss with a KV cache of C keys, by eviction policy. Keys keep their positions in the text.

The cache of a query includes its own key. The policies keep these keys:

    recent                 the C latest keys
    first and recent       the first n and the C - n latest keys (StreamingLLM, 2309.17453)
    heavy hitters          the C // 2 latest keys, and older keys with the most accumulated attention (H2O, 2306.14048)
    heavy without sink     as `heavy hitters`, but once the cache is full, the first n keys are kept only while recent
    TOVA                   the keys with the most attention of the latest query, mean over the heads (2401.06104)
    KeyDiff                the keys with the smallest cosine to the mean of the unit keys in the cache (2504.15364)
    random                 the C // 2 latest keys, and a uniformly random subset of the older keys

Evicted keys do not return to the cache. Keys that no later query sees, such as those outside a sliding window, are
evicted first. As in H2O's public code, half of the budget is for recent keys, and the attention to a key is summed over
the queries for which it was in the cache, with the softmax over the cache. Query heads that share a KV head share a
cache, so their sums are added; H2O's code predates grouped-query attention and has a cache per query head. Under TOVA
all heads of a layer keep the same keys, as in its public code. TOVA and KeyDiff do not reserve a place for recent keys;
KeyDiff compares keys with their positions, as they are in a cache.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import normalize

from sinklab.assessing.part import AssessPart, AssessText, Effect, PartFigure, PartJob, PartNumber, PartRow
from sinklab.assessing.parts.streaming import RollingCache
from sinklab.assessing.reading import PairedReader, Step, refused, seen_by_key_heads
from sinklab.assessing.settings import AssessSettings
from sinklab.attention.layer_call import LayerCall
from sinklab.attention.masks import Dense
from sinklab.models.adapter import Adapter
from sinklab.models.intercept import Edit
from sinklab.plots import PlotAxis

POLICIES = 7
LEAST_SHARE = 1e-20  # a row with less attention in total on the keys in the cache is recomputed


class Evicted(Effect):
    """Loss with a cache of `budget` keys and eviction by `policy`, on sequences within the context."""

    policy: str
    budget: int


class Eviction(AssessPart):
    """Loss by eviction policy and budget; `first` is the number n of first keys, limited to C - 1 for each budget C."""

    name = "eviction"
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
        return refused(adapter, edit=partial(keep_heavy_hitters, budget=2))

    @classmethod
    def job(cls, text: AssessText, settings: AssessSettings) -> PartJob:
        tokens_NT = text.sequences(settings.sequences, settings.length)
        run = partial(assess_eviction, text.model.adapter, tokens_NT, settings)
        return PartJob((1 + POLICIES * len(settings.budgets)) * len(tokens_NT), run)

    def rows(self) -> Iterator[PartRow]:
        """The answers are all policies at the smallest budget."""
        yield self.unchanged_row()
        smallest = min(one.budget for one in self.policies)
        for one in self.policies:
            answer = f"{one.policy}, {one.budget:,} keys" if one.budget == smallest else ""
            numbers = ["recent_keys_added"] if answer and one.policy == "recent" else []
            yield self.row(f"{one.policy}, {one.budget} keys", one, answer=answer, numbers=numbers)

    def figure(self) -> PartFigure:
        return PartFigure(
            "Evicting keys",
            f"Loss added to {self.unchanged.loss:.3f} by evicting keys ({self.sequences} x {self.length:,} tokens), by "
            "policy and budget; random keys are the control.",
            [self.point(one, one.policy, one.budget) for one in self.policies],
            PlotAxis("Keys kept", "x", "keys", order=sorted({one.budget for one in self.policies})),
        )


def keep_heavy_hitters(layer: LayerCall, budget: int, barred: int = 0) -> LayerCall:
    """Return the call with every query restricted to recent keys and the keys with the most accumulated attention.

    Args:
        budget: number C of keys in the cache, including the query's own.
        barred: number of first keys that are kept only while recent, once the cache is full.
    """
    B, _, L, _ = layer.call.q_BHTD.shape
    total_BGL = layer.call.q_BHTD.new_zeros(B, layer.call.k_BGTD.shape[1], L, dtype=torch.float32)
    total_BGL[..., :barred] = -torch.inf
    row = _rows_of(layer)

    def observe(t: int, kept_BGS: Tensor) -> Tensor:
        total_BGL[..., : t + 1] += row(t, kept_BGS).float().sum(2)
        return total_BGL

    return _restricted(layer, budget, max(1, budget // 2), observe)


def keep_latest_attention(layer: LayerCall, budget: int) -> LayerCall:
    """Return the call with every query restricted to the keys with the most attention of the query before (TOVA)."""
    groups = layer.call.k_BGTD.shape[1]
    row = _rows_of(layer)

    def observe(t: int, kept_BGS: Tensor) -> Tensor:
        return row(t, kept_BGS).float().mean((1, 2))[:, None].expand(-1, groups, -1)

    return _restricted(layer, budget, 1, observe)


def keep_distinct_keys(layer: LayerCall, budget: int) -> LayerCall:
    """Return the call with every query restricted to the keys that are least similar to the mean key (KeyDiff)."""
    k_BGTD = layer.call.k_BGTD
    unit_BGLD = normalize(k_BGTD if k_BGTD.dtype == torch.float64 else k_BGTD.float(), dim=-1)

    def observe(t: int, kept_BGS: Tensor) -> Tensor:
        seen_BGSD = unit_BGLD[:, :, : t + 1]
        mean_BGD1 = (seen_BGSD * kept_BGS[..., None]).sum(2)[..., None]  # its length does not change the order
        return -(seen_BGSD @ mean_BGD1)[..., 0]

    return _restricted(layer, budget, 1, observe)


def keep_random_keys(layer: LayerCall, budget: int, seed: int) -> LayerCall:
    """Return the call with every query restricted to recent and random keys.

    Keys are drawn independently for each layer, KV head and sequence of a batch; all batches have the same draws.
    """
    draw = torch.Generator().manual_seed(seed + layer.index)
    rank_BGL = torch.rand(layer.call.k_BGTD.shape[:3], generator=draw).to(layer.call.k_BGTD.device)
    return _restricted(layer, budget, max(1, budget // 2), lambda t, kept_BGS: rank_BGL)


def _restricted(layer: LayerCall, budget: int, recent: int, observe: Callable[[int, Tensor], Tensor]) -> LayerCall:
    """Return the call with every query restricted to the keys in its cache.

    Args:
        recent: number of recent keys that the cache keeps, including the query's own.
        observe: (query index, mask of its keys) -> scores of the keys; the cache keeps the recent keys and the older
            keys with the highest scores.
    """
    B, groups, L, _ = layer.call.k_BGTD.shape
    found_BGLL = torch.zeros(B, groups, L, L, dtype=torch.bool, device=layer.call.k_BGTD.device)
    held_BGL = torch.zeros_like(found_BGLL[:, :, 0])
    needed_BGLL = _needed(layer)
    for t in range(L):
        held_BGL[..., t] = True
        found_BGLL[:, :, t] = held_BGL
        score_BGL = observe(t, held_BGL[..., : t + 1])
        if not budget <= t + 1 < L:
            continue
        older_BGS = held_BGL[..., : t + 2 - recent]  # in the cache of the next query, whose own key is recent
        older_BGS &= needed_BGLL[..., t + 1, : t + 2 - recent]
        candidates = score_BGL[..., : t + 2 - recent].masked_fill(~older_BGS, -torch.inf)
        chosen = candidates.topk(budget - recent, -1).indices
        older_BGS &= torch.zeros_like(older_BGS).scatter_(-1, chosen, True) & candidates.isfinite()
    return layer.masked(Dense(found_BGLL.repeat_interleave(layer.call.q_BHTD.shape[1] // groups, 1)))


def _needed(layer: LayerCall) -> Tensor:
    """Return True where the query, or a later one, of some head of the KV head sees the key: (B or 1, G or 1, L, L)."""
    seen_BGLL = seen_by_key_heads(layer, 0, layer.length)
    return seen_BGLL.flip(-2).byte().cummax(-2).values.flip(-2).bool()


def _rows_of(layer: LayerCall) -> Callable[[int, Tensor], Tensor]:
    """Return `_row` of the layer, or a faster equivalent for softmax."""
    return _row_of_softmax(layer) if layer.operation.plain else partial(_row, layer)


def _row_of_softmax(layer: LayerCall) -> Callable[[int, Tensor], Tensor]:
    """Return a faster equivalent of `_row` for softmax: full rows, renormalised over the keys in the cache."""
    groups = layer.call.k_BGTD.shape[1]
    scores_BHLL, bias_BHL = layer.scores()
    scores_BGRLL = scores_BHLL.unflatten(1, (groups, -1))
    bias_BGRL = None if bias_BHL is None else bias_BHL.unflatten(1, (groups, -1))

    def row(t: int, kept_BGS: Tensor) -> Tensor:
        held_BGRS = scores_BGRLL[..., t, : t + 1] * kept_BGS[:, :, None]
        total_BGR1 = held_BGRS.sum(-1, keepdim=True)
        if bias_BGRL is not None:
            total_BGR1 += bias_BGRL[..., t, None]
        if total_BGR1.min() < LEAST_SHARE:  # renormalisation would be inaccurate
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


def assess_eviction(adapter: Adapter, tokens_NT: Tensor, settings: AssessSettings, step: Step) -> Eviction:
    """Measure the loss for every eviction policy and budget."""
    first = settings.most_kept
    reader = PairedReader(adapter, tokens_NT, step)
    found = []
    for budget in settings.budgets:
        kept = min(first, budget - 1)
        policies: dict[str, Edit] = {
            "recent": RollingCache(budget, 0, in_cache=False),
            "first and recent": RollingCache(budget, kept, in_cache=False),
            "heavy hitters": partial(keep_heavy_hitters, budget=budget),
            "heavy without sink": partial(keep_heavy_hitters, budget=budget, barred=kept),
            "TOVA": partial(keep_latest_attention, budget=budget),
            "KeyDiff": partial(keep_distinct_keys, budget=budget),
            "random": partial(keep_random_keys, budget=budget, seed=settings.seed),
        }
        for policy, edit in policies.items():
            effect = reader.under(edit).effect()
            found.append(Evicted(policy=policy, budget=budget, **effect.model_dump()))
    return Eviction(**reader.result_fields(), first=first, policies=found)
