"""KV caches of few keys: the parts `eviction`, `prompt_cache` and `budgets`; cache_policies.py has the policies.

Budgets: KV heads that need the full cache, and the loss when the other heads keep only the sink and recent keys.

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

Eviction: the loss with a KV cache of C keys, by eviction policy (`cache_policies`).

The cache of a query includes its own key. Keys are evicted after every query; evicted keys do not return.

Prompt cache: the loss of a continuation that sees only C keys of its prompt, by policy (`cache_policies`).

The first half of a sequence is the prompt. It is read with all of its keys. Each KV head then keeps C of them, and the
second half is read with these and all of its own keys. Keys that no query of the continuation sees, such as those
outside a sliding window, are not kept.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sinklab.assessing.cache_policies import (
    FIRST_AND_RECENT,
    CachePolicy,
    KeyBudget,
    accumulated_attention,
    latest_attention,
    policies_of,
    seen_by_key_heads,
)
from sinklab.assessing.part import AssessPart, PartFigure, PartNumber, PartRow, TextSize
from sinklab.assessing.reading import (
    DRAWS,
    DrawnEffect,
    Effect,
    HeadCost,
    HeadSet,
    PairedReader,
    PartInput,
    chosen_heads,
    first_importance,
    refused,
)
from sinklab.assessing.settings import AssessSettings
from sinklab.attention.layer_call import LayerCall
from sinklab.attention.masks import Dense
from sinklab.errors import InputError
from sinklab.models.adapter import Adapter
from sinklab.models.hooks import evaluating, intercept
from sinklab.schema import Omitted
from sinklab.tables import PlotAxis

if TYPE_CHECKING:
    from sinklab.models.huggingface.presses import Press

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
    setting = "budgets by head"
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
        return TextSize(settings.sequences, settings.length, others=max(1, settings.head_sequences))

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
        conditions: list[tuple[dict[str, float | str], Sequence[Callable[[LayerCall], LayerCall]]]] = []
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


class Evicted(Effect):
    """Loss with a cache of `budget` keys and eviction by `policy`, on sequences within the context."""

    policy: str
    budget: int


class Eviction(AssessPart):
    """Loss by eviction policy and budget; `first` is the number n of first keys, limited to C - 1 for each budget C."""

    name = "eviction"
    question = "Which keys must a small cache keep?"
    in_quick = True
    setting = "eviction"
    numbers = (PartNumber("recent_keys_added", "Recent keys only, added loss", ("Recent keys", "nats added")),)
    layout = PartFigure(
        "Evicting keys",
        "Loss added to {0.unchanged.loss:.3f} by evicting keys ({0.sequences} x {0.length:,} tokens), by policy and "
        "budget; random keys are the control.",
        PlotAxis("Keys kept", "x", "keys", order=()),
    )

    first: int
    policies: list[Evicted]

    @classmethod
    def refusal(cls, adapter: Adapter, settings: AssessSettings) -> str | None:
        return refused(adapter, partial(CachePolicy("probe", accumulated_attention).evict, size=KeyBudget(2)))

    @classmethod
    def run(cls, given: PartInput) -> "Eviction":
        """Measure the loss for every eviction policy and budget."""
        reader, settings = given.reader(), given.settings
        sizes = [KeyBudget(C, min(settings.most_kept, C - 1), settings.seed) for C in settings.budgets]
        conditions = [
            ({"policy": policy.name, "budget": size.keys}, partial(policy.evict, size=size))
            for size in sizes
            for policy in policies_of(cls.name)
        ]
        found = reader.effects(Evicted, conditions)
        return cls(**reader.result_fields(), first=settings.most_kept, policies=found)

    def rows(self) -> Iterator[PartRow]:
        """The answers are all policies at the smallest budget."""
        yield self.unchanged_row()
        smallest = min(one.budget for one in self.policies)
        for one in self.policies:
            answer = f"{one.policy}, {one.budget:,} keys" if one.budget == smallest else ""
            numbers = ["recent_keys_added"] if answer and one.policy == "recent" else []
            points = [(one.policy, one.budget)]
            yield self.row(f"{one.policy}, {one.budget} keys", one, answer=answer, numbers=numbers, points=points)


class KeptKeys(Effect):
    """Loss of the continuation with `budget` keys of the prompt, chosen by the policy `method`.

    Attributes:
        budget: number of keys; of a press, the mean over KV heads and sequences, rounded.
        first_kept: fraction of the pairs (sequence, KV head) that keep the first key, or the first learned token.
            Layers in which the continuation does not see it are excluded; None if there are no others.
        first_kept_by_head: the same fraction of the sequences, for each layer and KV head of a press.
    """

    method: str
    budget: int
    first_kept: float | None
    first_kept_by_head: Omitted[list[list[float]]] = None


class PromptCache(AssessPart):
    """Loss of the continuation by policy and budget.

    Attributes:
        prompt: number of tokens P of the prompt, learned leading tokens not included.
        first: number n of first keys, limited to C - 1 for each budget C.
        methods: losses over the targets from position P + 2 on, the first that a query after the prompt predicts. The
            targets of `unchanged` are the same.
        presses: presses of kvpress by name, which were run in place of the policies.
    """

    name = "prompt_cache"
    question = "Which keys of a prompt must be kept?"
    in_quick = True
    setting = "prompt cache"
    layout = PartFigure(
        "Keeping few keys of a prompt",
        "Loss added to {0.unchanged.loss:.3f} after prompts of {0.prompt:,} tokens ({0.sequences} sequences) of which "
        "few keys are kept, by method and number of keys; random keys are the control.",
        PlotAxis("Keys of the prompt kept", "x", "keys", order=()),
        tooltip=(*PartFigure.tooltip, ("first_kept", "KV heads that keep the first key", ".0%")),
    )

    prompt: int
    first: int
    methods: list[KeptKeys]
    presses: Omitted[dict[str, str]] = None

    @classmethod
    def refusal(cls, adapter: Adapter, settings: AssessSettings) -> str | None:
        if min(settings.budgets) >= settings.length // 2:
            return (
                f"prompts of {settings.length // 2} tokens, half of --length, have no more keys than the smallest "
                f"--budget, {min(settings.budgets)}: set a smaller --budget, or a larger --length"
            )
        return refused(adapter, PromptKeys(CachePolicy("probe", latest_attention), KeyBudget(1)))

    @classmethod
    def run(cls, given: PartInput) -> "PromptCache":
        """Measure the loss of the continuation for every policy, and every budget that is smaller than the prompt."""
        reader, settings = given.reader(), given.settings
        prompt = given.tokens_NT.shape[1] // 2
        layers = given.adapter.attention_layers
        sizes = [
            KeyBudget(C, min(settings.most_kept, C - 1), settings.seed, layers=layers)
            for C in settings.budgets
            if prompt > C
        ]
        policies = [] if given.presses else policies_of(cls.name)
        edits = [PromptKeys(policy, size) for size in sizes for policy in policies]
        given.passes.expect((len(edits) + 3 * len(given.presses)) * len(given.tokens_NT))
        found = list[KeptKeys]()
        for edit in edits:
            effect = reader.under(edit).effect(start=prompt + 2)
            kept = torch.cat([one.flatten() for one in edit.first_kept]).float() if edit.first_kept else None
            share = None if kept is None else float(kept.mean())
            labels = {"method": edit.policy.name, "budget": edit.size.keys, "first_kept": share}
            found.append(KeptKeys(**labels, **effect.model_dump()))
        for name, press in given.presses.items():
            found += _pressed(given, reader, name, press)
        presses = {name: repr(press) for name, press in given.presses.items()} or None
        shared: dict[str, Any] = {**reader.result_fields(), "unchanged": reader.unchanged.effect(start=prompt + 2)}
        return cls(**shared, prompt=prompt, first=settings.most_kept, methods=found, presses=presses)

    def rows(self) -> Iterator[PartRow]:
        """The answers are all policies at the smallest budget, or all presses."""
        yield self.row("unchanged", self.unchanged, f"{self.sequences} prompts of {self.prompt:,} tokens")
        smallest = min(one.budget for one in self.methods)
        for one in self.methods:
            shown = self.presses or one.budget == smallest
            answer = f"{one.method}, {one.budget:,} of {self.prompt:,} keys" if shown else ""
            kept = "" if one.first_kept is None else f"first key kept by {100 * one.first_kept:.0f} % of KV heads"
            points = [(one.method, one.budget)]
            yield self.row(f"{one.method}, {one.budget} keys", one, kept, answer=answer, points=points)

    def remark(self) -> str | None:
        own = [one for one in self.methods if one.method in (self.presses or ())]
        kept = ", ".join(f"{100 * (one.first_kept or 0):.0f} % with {one.method}" for one in own)
        return f"prompt_cache: KV heads that keep the first key: {kept}" if own else None

    def figure(self) -> PartFigure:
        points = [{**self.point(one, one.method, one.budget), "first_kept": one.first_kept} for one in self.methods]
        return self.drawn(points)


def _pressed(given: PartInput, reader: PairedReader, name: str, press: "Press") -> Iterator[KeptKeys]:
    """Yield the loss with a press, and if it has scores, with the same press that keeps or drops the first n keys."""
    from sinklab.models.huggingface.presses import read_pressed, with_first_keys  # imports transformers

    prompt, first = given.tokens_NT.shape[1] // 2, given.settings.most_kept
    with_first = partial(with_first_keys, press, first, prompt)
    variants = {
        "": press,
        f", first {first} kept": with_first(kept=True),
        f", first {first} dropped": with_first(kept=False),
    }
    for words, variant in variants.items():
        if variant is None:
            continue
        try:
            read = read_pressed(given.adapter, given.tokens_NT, variant, prompt, given.settings.seed)
        except InputError:
            if variant is press:
                raise
            continue  # it scores parts of the prompt
        given.passes.read(len(given.tokens_NT))
        with evaluating(given.adapter.module):
            effect = reader.against(read.hidden_NTE).effect(start=prompt + 2)
        kept_LG = read.first_kept_NLG.float().mean(0)
        yield KeptKeys(
            method=name + words,
            budget=round(float(read.kept_NLG.float().mean())),
            first_kept=float(kept_LG.mean()),
            first_kept_by_head=kept_LG.tolist(),
            **effect.model_dump(),
        )


@dataclass
class PromptKeys:
    """Attention edit: queries after the prompt see the keys of the prompt that a policy keeps.

    The prompt is the first half of the sequence, and the learned leading tokens before it.

    Attributes:
        first_kept: whether the first key is kept, by sequence and KV head; a tensor (B, G) for each call of a layer in
            which some query after the prompt sees it.
    """

    policy: CachePolicy
    size: KeyBudget
    first_kept: list[Tensor] = field(default_factory=list)

    def __call__(self, layer: LayerCall) -> LayerCall:
        """Return the edited call.

        Raises:
            InputError: if queries attend to later keys.
        """
        if not layer.call.mask.causal:
            raise InputError("queries attend to later keys, so the prompt cannot be read alone")
        B, groups, L, _ = layer.call.k_BGTD.shape
        P = layer.leading + (L - layer.leading) // 2
        needed_BGP = seen_by_key_heads(layer, P, P).any(-2).expand(B, groups, P)
        kept_BGP = self.policy.of_prompt(layer.cut(P), self.size, needed_BGP)
        if needed_BGP[..., 0].any():
            self.first_kept.append(kept_BGP[..., 0].cpu())
        seen_BGLL = torch.ones(B, groups, L, L, dtype=torch.bool, device=kept_BGP.device).tril()
        seen_BGLL[:, :, P:, :P] = kept_BGP[:, :, None]
        return layer.masked(Dense(seen_BGLL.repeat_interleave(layer.call.q_BHTD.shape[1] // groups, 1)))
