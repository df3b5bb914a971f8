"""Pruning: the loss when attention heads are removed in order of their sink share, or in control orders.

    share of a head = mean over queries t after the sink of A_t,sink / sum_s A_ts         (as in the part `heads`)

After 2601.06787, which first removes the heads with the highest mean attention of all queries to position 0, by zeroing
their slices of the output projection (no public code was found). That mean is (1 + (T - 1) share) / T if rows sum to
one, so the order is the same. In layers with a bias key or sink logit, the share on the bias is used.

A removed head's output is zeroed before norms, gates and the output projection. Heads of all layers are removed in
one of these orders:

    sink first     descending share
    sink last      ascending share
    random         random heads, mean of several draws
    same layers    random heads, with the same number per layer as `sink first`, mean of several draws

In addition, all nop heads or all broadcast heads (see `heads`) are removed, with as many random heads as a control.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sinklab.assessing.part import AssessPart, AssessText, DrawnEffect, PartFigure, PartJob, PartNumber, PartRow
from sinklab.assessing.parts.heads import HeadRole, Heads, assess_heads
from sinklab.assessing.reading import DRAWS, PairedReader, Step, mean_effect
from sinklab.assessing.settings import AssessSettings
from sinklab.attention.layer_call import LayerCall
from sinklab.models.adapter import Adapter
from sinklab.plots import PlotAxis

SHARES = (0.05, 0.1, 0.2, 0.3, 0.5)
SHOWN_SHARE = 0.1  # fraction of heads removed in the scalar results
KINDS = ("nop", "broadcast")
SINK_FIRST, SINK_LAST, RANDOM, SAME_LAYERS = "sink first", "sink last", "random", "same layers"
QueryHeads = frozenset[tuple[int, int]]
"""Query heads as pairs (layer, head), both 1-based; only attention layers are counted."""


class RemovedHeads(DrawnEffect):
    """Loss with some heads removed, mean over draws.

    Attributes:
        order: order of removal in `Pruning.orders`; set of heads in `Pruning.kinds`, such as "all nop" or "as many
            random as nop".
        share: fraction of heads removed; in `Pruning.orders`, the nominal fraction before rounding to whole heads.
        heads: number of heads removed.
    """

    order: str
    share: float
    heads: int


class Pruning(AssessPart):
    """Loss by fraction of heads removed.

    Attributes:
        total: number of query heads of the model.
        orders: losses by order of removal and fraction of heads.
        kinds: losses with all nop or all broadcast heads removed, if any, each with a random control of equal size.
    """

    name = "pruning"
    question = "Can the heads with a sink be removed?"
    on_request = True
    numbers = (
        PartNumber(
            "sink_heads_pruned_added",
            "A tenth of the heads removed, sink heads first, added loss",
            ("Sink heads", "a tenth removed, nats added"),
            "removing the tenth of the heads with the largest share of attention on the sink",
        ),
        PartNumber(
            "random_heads_pruned_added",
            "A tenth of the heads removed at random, added loss",
            ("Random heads", "a tenth removed, nats added"),
            "removing a random tenth of the heads, mean of several draws",
        ),
    )

    total: int
    orders: list[RemovedHeads]
    kinds: list[RemovedHeads]

    @classmethod
    def refusal(cls, adapter: Adapter, settings: AssessSettings) -> str | None:
        return Heads.refusal(adapter, settings)

    @classmethod
    def job(cls, text: AssessText, settings: AssessSettings) -> PartJob:
        tokens_NT = text.sequences(settings.sequences, settings.length)
        passes = 3 + len(SHARES) * (2 + 2 * DRAWS) + len(KINDS) * (1 + DRAWS)
        run = partial(assess_pruning, text.model.adapter, tokens_NT, settings)
        return PartJob(passes * len(tokens_NT), run)

    def rows(self) -> Iterator[PartRow]:
        """The answers are all orders with a tenth of the heads removed."""
        yield self.unchanged_row()
        names = {SINK_FIRST: ["sink_heads_pruned_added"], RANDOM: ["random_heads_pruned_added"]}
        for one in (*self.orders, *self.kinds):
            heads, ordered = self.noun_of(one.heads, "head"), one in self.orders
            tenth = ordered and one.share == SHOWN_SHARE
            yield self.row(
                f"{one.order}, {f'{100 * one.share:.0f} %' if ordered else heads} removed",
                one,
                f"draws {min(one.losses):.4f} to {max(one.losses):.4f}" if len(one.losses) > 1 else "",
                answer=f"{heads} removed, {one.order}" if tenth else "",
                numbers=names.get(one.order, []) if tenth else [],
            )

    def figure(self) -> PartFigure:
        return PartFigure(
            "Removing heads",
            f"Loss added to {self.unchanged.loss:.3f} when some of {self.total} heads are removed: those with the "
            f"largest or smallest share of attention on the sink (2601.06787), or random heads (mean of {DRAWS} "
            "draws), from all layers or with the same number per layer.",
            [self.point(one, one.order, 100 * one.share) for one in self.orders],
            PlotAxis("Heads removed (percent)", "x", "percent"),
            series=(SINK_FIRST, SINK_LAST, RANDOM, SAME_LAYERS),
        )


@dataclass(frozen=True)
class WithoutHeads:
    """Compute function that sets the outputs of the query heads `heads` to zero."""

    heads: QueryHeads

    def __call__(self, layer: LayerCall) -> Tensor:
        """Return the layer's output (B, H, T, V) with the removed heads set to zero."""
        out_BHTV = layer.output()
        kept = [(layer.index, head) not in self.heads for head in range(1, out_BHTV.shape[1] + 1)]
        return out_BHTV * torch.tensor(kept, device=out_BHTV.device)[:, None, None]


def assess_pruning(adapter: Adapter, tokens_NT: Tensor, settings: AssessSettings, step: Step) -> Pruning:
    """Measure the loss by order and fraction of heads removed, and with all nop or all broadcast heads removed.

    Raises:
        InputError: if the attention weights cannot be computed (`LayerCall.scores`).
    """
    roles = assess_heads(adapter, tokens_NT, step).heads
    reader, draw = PairedReader(adapter, tokens_NT, step), random.Random(settings.seed)

    def removed(order: str, choices: Sequence[Sequence[HeadRole]], share: float | None = None) -> RemovedHeads:
        chosen = [frozenset((role.layer, role.head) for role in some) for some in choices]
        effects = [reader.under(compute=WithoutHeads(heads)).effect() for heads in chosen]
        count = len(choices[0])
        return RemovedHeads(order=order, share=share or count / len(roles), heads=count, **mean_effect(effects))

    def of_the_same_layers(chosen: Sequence[HeadRole]) -> list[HeadRole]:
        layers = [role.layer for role in chosen]
        return [
            role
            for layer in sorted(set(layers))
            for role in draw.sample([one for one in roles if one.layer == layer], layers.count(layer))
        ]

    falling = sorted(roles, key=lambda role: -role.share)
    orders = []
    for share in SHARES:
        count = max(1, round(share * len(roles)))
        most, least = falling[:count], falling[-count:]
        orders += [
            removed(SINK_FIRST, [most], share),
            removed(SINK_LAST, [least], share),
            removed(RANDOM, [draw.sample(roles, count) for _ in range(DRAWS)], share),
            removed(SAME_LAYERS, [of_the_same_layers(most) for _ in range(DRAWS)], share),
        ]
    kinds = []
    for kind in KINDS:
        if chosen := [role for role in roles if role.kind == kind]:
            kinds.append(removed(f"all {kind}", [chosen]))
            kinds.append(removed(f"as many random as {kind}", [draw.sample(roles, len(chosen)) for _ in range(DRAWS)]))
    return Pruning(**reader.result_fields(), total=len(roles), orders=orders, kinds=kinds)
