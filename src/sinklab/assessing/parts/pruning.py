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

from torch import Tensor

from sinklab.assessing.part import AssessPart, PartFigure, PartNumber, PartRow, several
from sinklab.assessing.parts.heads import HeadRole, Heads
from sinklab.assessing.reading import DRAWS, DrawnEffect, HeadSet, PartInput, chosen_heads
from sinklab.assessing.settings import AssessSettings
from sinklab.attention.layer_call import LayerCall
from sinklab.models.adapter import Adapter
from sinklab.tables import PlotAxis

SHARES = (0.05, 0.1, 0.2, 0.3, 0.5)
SHOWN_SHARE = 0.1  # fraction of heads removed in the scalar results
KINDS = ("nop", "broadcast")
SINK_FIRST, SINK_LAST, RANDOM, SAME_LAYERS = "sink first", "sink last", "random", "same layers"


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
        ),
        PartNumber(
            "random_heads_pruned_added",
            "A tenth of the heads removed at random, added loss",
            ("Random heads", "a tenth removed, nats added"),
        ),
    )
    layout = PartFigure(
        "Removing heads",
        "Loss added to {0.unchanged.loss:.3f} when some of {0.total} heads are removed: those with the largest or "
        f"smallest share of attention on the sink (2601.06787), or random heads (mean of {DRAWS} draws), from all "
        "layers or with the same number per layer.",
        PlotAxis("Heads removed (percent)", "x", "percent"),
    )

    total: int
    orders: list[RemovedHeads]
    kinds: list[RemovedHeads]

    @classmethod
    def refusal(cls, adapter: Adapter, settings: AssessSettings) -> str | None:
        return Heads.refusal(adapter, settings)

    @classmethod
    def run(cls, given: PartInput) -> "Pruning":
        """Measure the loss by order and fraction of heads removed, and with all nop or all broadcast heads removed."""
        roles = Heads.run(given).heads
        reader, draw = given.reader(), random.Random(given.settings.seed)

        def of_the_same_layers(chosen: Sequence[HeadRole]) -> list[HeadRole]:
            layers = [role.layer for role in chosen]
            return [
                role
                for layer in sorted(set(layers))
                for role in draw.sample([one for one in roles if one.layer == layer], layers.count(layer))
            ]

        falling = sorted(roles, key=lambda role: -role.share)
        orders: list[tuple[str, float, Sequence[Sequence[HeadRole]]]] = []
        for share in SHARES:
            count = max(1, round(share * len(roles)))
            most, least = falling[:count], falling[-count:]
            orders += [
                (SINK_FIRST, share, [most]),
                (SINK_LAST, share, [least]),
                (RANDOM, share, [draw.sample(roles, count) for _ in range(DRAWS)]),
                (SAME_LAYERS, share, [of_the_same_layers(most) for _ in range(DRAWS)]),
            ]
        kinds: list[tuple[str, float, Sequence[Sequence[HeadRole]]]] = []
        for kind in KINDS:
            if chosen := [role for role in roles if role.kind == kind]:
                share, drawn = len(chosen) / len(roles), [draw.sample(roles, len(chosen)) for _ in range(DRAWS)]
                kinds += [(f"all {kind}", share, [chosen]), (f"as many random as {kind}", share, drawn)]
        conditions = [
            (
                {"order": order, "share": share, "heads": len(choices[0])},
                [WithoutHeads(frozenset((role.layer, role.head) for role in some)) for some in choices],
            )
            for order, share, choices in (*orders, *kinds)
        ]
        found = reader.effects(RemovedHeads, conditions)
        by_order, by_kind = found[: len(orders)], found[len(orders) :]
        return cls(**reader.result_fields(), total=len(roles), orders=by_order, kinds=by_kind)

    def rows(self) -> Iterator[PartRow]:
        """The answers are all orders with a tenth of the heads removed."""
        yield self.unchanged_row()
        names = {SINK_FIRST: ["sink_heads_pruned_added"], RANDOM: ["random_heads_pruned_added"]}
        for number, one in enumerate((*self.orders, *self.kinds)):
            heads, ordered = several(one.heads, "head"), number < len(self.orders)
            tenth = ordered and one.share == SHOWN_SHARE
            yield self.row(
                f"{one.order}, {f'{100 * one.share:.0f} %' if ordered else heads} removed",
                one,
                one.range_of_draws,
                answer=f"{heads} removed, {one.order}" if tenth else "",
                numbers=names.get(one.order, []) if tenth else [],
                points=[(one.order, 100 * one.share)] if ordered else [],
            )


@dataclass(frozen=True)
class WithoutHeads:
    """Change of the attention that sets the outputs of the query heads `heads` to zero."""

    heads: HeadSet

    def __call__(self, layer: LayerCall) -> Tensor:
        """Return the layer's output (B, H, T, V) with the removed heads set to zero."""
        out_BHTV = layer.output()
        return out_BHTV * ~chosen_heads(layer, self.heads, out_BHTV.shape[1])[:, None, None]
