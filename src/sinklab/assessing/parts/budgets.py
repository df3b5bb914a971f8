"""Budgets: KV heads that need the full cache, and the loss when the other heads keep only the sink and recent keys.

After DuoAttention (2410.10819, section 2.2), where retrieval heads are those that "significantly alter model outputs
when restricted to recent tokens and attention sinks". A restricted KV head keeps C keys, the first n and the latest
C - n, for all its query heads; T is the length of the sequences:

    seen(t) = { s <= t : s < n or s > t - (C - n) },      keys keep their positions in the text
    cost of a KV head = KL divergence from the unchanged model when this head alone is restricted

DuoAttention trains a weight alpha for every head with an L1 penalty (eq. 1 to 3; mit-han-lab/duo-attention fe93c31);
heads with alpha above a quantile keep all keys (eq. 4). Here the cost of each head is measured alone, without training,
on sequences other than those of the losses.

A fraction f of the KV heads keeps all keys and the other heads keep C keys. The policy selects the heads:

    by cost           the heads with the highest cost keep all keys
    by sink share     the heads with the lowest importance of the first position keep all keys
    random            random heads keep all keys, mean of several draws
    one for all       every head keeps f T + (1 - f) C keys, rounded, including the first n. At the end of the text the
                      total over heads is then the same, apart from the rounding
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sinklab.assessing.cache_policies import FIRST_AND_RECENT, CachePolicy, KeyBudget, policies_of
from sinklab.assessing.part import AssessPart, PartFigure, PartNumber, PartRow, TextSize
from sinklab.assessing.reading import (
    DRAWS,
    DrawnEffect,
    Effect,
    HeadCost,
    HeadSet,
    PartInput,
    chosen_heads,
    first_importance,
)
from sinklab.assessing.settings import AssessSettings
from sinklab.attention.layer_call import LayerCall
from sinklab.attention.masks import Dense
from sinklab.models.hooks import intercept
from sinklab.tables import PlotAxis

FRACTIONS = (0.125, 0.25, 0.5)
SHOWN_FULL = 0.25  # fraction f of the answers and scalar results, and fraction of heads in `retrieval`
BY_COST, BY_SINK, RANDOM, FOR_ALL = "by cost", "by sink share", "random", "one for all"


class HeadBudget(DrawnEffect):
    """Loss when some KV heads keep all keys and the others few, or when all keep the same number; mean over draws.

    Attributes:
        policy: rule that selects the heads with all keys, or `one for all`.
        full: nominal fraction f of the KV heads with all keys; for `one for all`, it only determines `keys`.
        keys: number of keys per KV head at the end of the text, mean over heads, learned leading tokens included.
    """

    policy: str
    full: float
    keys: float


class Budgets(AssessPart):
    """Loss with a separate key budget for every KV head, compared with the same total budget shared equally.

    Attributes:
        size, first: number C of keys of a restricted head, and number n of first keys among them, learned leading
            tokens included.
        heads: loss and KL divergence when each KV head alone is restricted, on other sequences than `policies`.
        sink_shares: importance of the first position, or summed over the learned leading tokens of a model that has
            any, by KV head (mean over its query heads), in the order of `heads` and on the same sequences.
        retrieval: the quarter of the KV heads with the highest KL divergence, highest first, as (layer, head): 1-based,
            layers numbered among the attention layers. The other heads are streaming heads.
        restricted: loss with C keys for every head.
        policies: loss by fraction of heads with all keys and by policy.
    """

    name = "budgets"
    question = "Do all heads need all keys?"
    on_request = True
    numbers = (
        PartNumber(
            "budget_by_head_added",
            "All keys for a quarter of the heads, few for the others, added loss",
            ("By head", "nats added"),
        ),
        PartNumber("budget_for_all_added", "The same budget for all heads, added loss", ("For all", "nats added")),
    )
    layout = PartFigure(
        "Budgets by head",
        "Loss added to {0.unchanged.loss:.3f} when some KV heads keep all {0.length:,} keys and the others {0.size}, "
        "including the first {0.first} (DuoAttention, 2410.10819), or when all heads keep the same number of keys.",
        PlotAxis("Keys per head at the end of the text, mean", "x", "keys"),
    )

    size: int
    first: int
    heads: list[HeadCost]
    sink_shares: list[float]
    retrieval: list[tuple[int, int]]
    restricted: Effect
    policies: list[HeadBudget]

    @classmethod
    def text_size(cls, settings: AssessSettings) -> TextSize:
        return TextSize(settings.sequences, settings.length, others=settings.head_sequences)

    @classmethod
    def run(cls, given: PartInput) -> "Budgets":
        """Measure the cost of restricting each KV head, on the other sequences, and the loss for every policy."""
        settings, S = given.settings, given.tokens_NT.shape[1] + given.adapter.leading
        size = KeyBudget(min(settings.budgets), min(settings.most_kept, min(settings.budgets) - 1), settings.seed)
        alone = given.reader_of_others()
        heads = alone.by_key_head(lambda chosen: RestrictedHeads(size, chosen))
        shares: dict[tuple[int, int], list[Tensor]] = {(one.layer, one.head): [] for one in heads}

        def observe(layer: LayerCall) -> None:
            for head, share_BR in enumerate(first_importance(layer).chunk(layer.call.k_BGTD.shape[1], 1), 1):
                shares[layer.index, head].append(share_BR.flatten().cpu())

        with intercept(given.adapter, observe=observe):
            alone.observed()
        names, sink_shares = list(shares), {head: float(torch.cat(found).mean()) for head, found in shares.items()}
        costliest = [(one.layer, one.head) for one in sorted(heads, key=lambda one: -one.kl)]
        least = sorted(names, key=lambda head: sink_shares[head])
        reader, draw = given.reader(), random.Random(settings.seed)
        conditions = []
        for full in FRACTIONS:
            count = round(full * len(names))
            keys = (count * S + (len(names) - count) * size.keys) / len(names)
            drawn = [draw.sample(names, count) for _ in range(DRAWS)]
            for policy, sets in ((BY_COST, [costliest[:count]]), (BY_SINK, [least[:count]]), (RANDOM, drawn)):
                edits = [RestrictedHeads(size, frozenset(names) - set(some)) for some in sets]
                conditions.append(({"policy": policy, "full": full, "keys": keys}, edits))
            for one in policies_of(cls.name):
                policy = FOR_ALL if one is FIRST_AND_RECENT else f"{FOR_ALL}, {one.name}"
                equal = partial(one.evict, size=KeyBudget(round(keys), size.first, size.seed))
                conditions.append(({"policy": policy, "full": full, "keys": keys}, [equal]))
        return cls(
            **reader.result_fields(),
            size=size.keys,
            first=size.first,
            heads=heads,
            sink_shares=list(sink_shares.values()),
            retrieval=costliest[: round(SHOWN_FULL * len(names))],
            policies=reader.effects(HeadBudget, conditions),
            restricted=reader.under(RestrictedHeads(size, frozenset(names))).effect(),
        )

    def rows(self) -> Iterator[PartRow]:
        """The answers are the losses of all policies at f = 1/4."""
        yield self.unchanged_row()
        points = [(policy, self.size) for policy in dict.fromkeys(one.policy for one in self.policies)]
        yield self.row(f"{self.size} keys, first {self.first} kept", self.restricted, points=points)
        names = {BY_COST: ["budget_by_head_added"], FOR_ALL: ["budget_for_all_added"]}
        for one in self.policies:
            keys, S, is_shown = round(one.keys), self.length, one.full == SHOWN_FULL
            share = round(one.full * len(self.heads)) / len(self.heads)
            apart = share * (S + 1) / 2 + (1 - share) * _mean_keys(self.size, S)
            mean = _mean_keys(keys, S) if one.policy.startswith(FOR_ALL) else apart
            yield self.row(
                f"{one.policy}, {100 * one.full:g} % full",
                one,
                f"{keys:,} keys per head at the end, {mean:,.0f} on average",
                answer=f"{one.keys:,.0f} of {S:,} keys, {one.policy}" if is_shown else "",
                numbers=names.get(one.policy, []) if is_shown else [],
                points=[(one.policy, one.keys)],
            )

    def remark(self) -> str:
        costliest = ", ".join(f"{layer}.{head}" for layer, head in self.retrieval[:8])
        costs = {(one.layer, one.head): one.kl for one in self.heads}
        share = sum(costs[head] for head in self.retrieval) / (sum(costs.values()) or 1)
        return (
            f"budgets: with each KV head restricted alone, the {len(self.retrieval)} costliest of {len(costs)} heads "
            f"account for {100 * share:.0f} % of the summed KL divergence; the largest (layer.head): {costliest}"
        )


def _mean_keys(size: int, length: int) -> float:
    """Return the mean of min(t, size) over the queries t = 1 .. length."""
    return size * (length - (size - 1) / 2) / length


@dataclass(frozen=True)
class RestrictedHeads:
    """Attention edit that restricts KV heads to the keys that a policy keeps."""

    size: KeyBudget
    heads: HeadSet
    policy: CachePolicy = FIRST_AND_RECENT

    def __call__(self, layer: LayerCall) -> LayerCall:
        """Return the call with a mask that restricts the selected KV heads; unchanged if none is in this layer."""
        chosen_G = chosen_heads(layer, self.heads, layer.call.k_BGTD.shape[1])
        if not chosen_G.any():
            return layer
        H, L, device = layer.call.q_BHTD.shape[1], layer.length, layer.call.q_BHTD.device
        others_H = ~chosen_G.repeat_interleave(H // len(chosen_G))
        mask = self.policy.mask(layer, self.size)
        kept = mask.block(0, L, 0, L, device).expand(*mask.sizes, L, L)
        return layer.masked(Dense(kept | others_H[:, None, None], later=True))
