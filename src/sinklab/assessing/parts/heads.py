"""Heads: classification of heads as no-op ("nop") or broadcast heads, by the sink's value and the head's output.

The terms are from 2606.08105, of which only the abstract was available: "nop sinks exhibit negligible value norms;
broadcast sinks induce low-rank outputs". The definitions and thresholds below are therefore ours:

    share            mean over queries t of A_t,sink / sum_s A_ts          a sink if above SINK_EPS
    value_norm       |v_sink| / mean over other s of |v_s|                 nop if at most NEGLIGIBLE
    output_share     mean_t |A_t,sink v_sink| / mean_t |o_t|               broadcast if at least LARGE, and
    effective_rank   exp(-sum_i p_i log p_i), p_i = s_i^2 / sum_j s_j^2    at most LOW * V
    output_norm      mean_t |o_t| / its mean over the heads of the layer   (2504.03889; not used for the roles)

with A the attention weights, v the values, o the head's outputs, of dimension V, and s_i the singular values of the
matrix of all o_t. The sink is the bias key or sink logit if the layer has one, otherwise the first position; with
several registers it is the first register, and the others count as tokens. The queries t are those after the sink (all,
for a bias key or sink logit), in all sequences. The sum over s includes a bias. A gate can replace the sink of a nop
head, and a register or sink token that of a broadcast head.

Pruning: the loss when attention heads are removed in order of their sink share or output, or in control orders.

    share of a head = mean over queries t after the sink of A_t,sink / sum_s A_ts         (as in the part `heads`)

After 2601.06787, which first removes the heads with the highest mean attention of all queries to position 0, by zeroing
their slices of the output projection (no public code was found). That mean is (1 + (T - 1) share) / T if rows sum to
one, so the order is the same. In layers with a bias key or sink logit, the share on the bias is used.

A removed head's output is zeroed before norms, gates and the output projection. Heads of all layers are removed in
one of these orders:

    sink first         descending share
    sink last          ascending share
    smallest output    ascending output_norm (the score AHON LN of 2504.03889)
    random             random heads, mean of several draws
    same layers        random heads, with the same number per layer as `sink first`, mean of several draws

In addition, all nop heads or all broadcast heads (see `heads`) are removed, with as many random heads as a control.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from sinklab.assessing.part import AssessPart, PartFigure, PartNumber, PartRow, several
from sinklab.assessing.reading import DRAWS, DrawnEffect, HeadSet, PartInput, chosen_heads, refused
from sinklab.assessing.settings import AssessSettings
from sinklab.attention.layer_call import LayerCall
from sinklab.measuring.options import SINK_EPS
from sinklab.models.adapter import Adapter
from sinklab.schema import ReadDocument
from sinklab.tables import PlotAxis

HeadKind = Literal["no sink", "nop", "between", "broadcast"]

NEGLIGIBLE = 0.25
LARGE = 0.5
LOW = 0.25


class HeadRole(ReadDocument):
    """Role of the sink in one query head; `layer` and `head` are 1-based.

    Attributes:
        share: share of attention on the sink, 0 to 1, mean over the queries after it (for a bias, over all queries).
        value_norm: norm of the sink's value vector divided by the mean norm of the other keys' value vectors.
        output_share: mean norm of the sink's contribution to the head's output, divided by the mean norm of the output.
        effective_rank: effective rank of the head's outputs, at most their dimension.
        output_norm: mean norm of the head's output divided by its mean over the heads of the layer; None in results
            from before 2026-11-30.
        kind: "no sink", "nop", "broadcast", or "between" (neither nop nor broadcast).
    """

    layer: int
    head: int
    share: float
    value_norm: float
    output_share: float
    effective_rank: float
    output_norm: float | None = None
    kind: HeadKind


class Heads(AssessPart):
    """Roles of all query heads.

    Attributes:
        sink: "bias" if all layers have a bias key or sink logit, "first position" if none has, otherwise
            "bias or first position": in each layer the bias if it has one, else the first position.
        width: dimension V of the head outputs in the first attention layer; it may differ in other layers.
        heads: role of every query head.
        counts: number of heads of each kind; kinds without heads are omitted.
    """

    name = "heads"
    question = "What do heads with a sink do?"

    layout = PartFigure(
        "Roles of the heads",
        "One point per head; the sink is the {0.sink}. In a nop head the value of the sink is negligible; in a "
        "broadcast head it is large, and the head's output has a low rank (2606.08105). {0.counted}.",
        PlotAxis("Share of attention on the sink (percent)", "percent", "share, percent", domain=(0, 100)),
        PlotAxis("|v| of the sink over that of the other keys", "value_norm", "value norm relative to the other keys"),
        kind="scatter",
        reference=1.0,
        colour="kind",
        tooltip=(
            ("layer", "layer", "d"),
            ("head", "head", "d"),
            ("output_share", "share of the head's output", ".3f"),
            ("effective_rank", "effective rank", ".1f"),
        ),
    )

    sink: Literal["bias", "first position", "bias or first position"]
    width: int
    heads: list[HeadRole]
    counts: dict[HeadKind, int]

    @classmethod
    def refusal(cls, adapter: Adapter, settings: AssessSettings) -> str | None:
        return refused(adapter, lambda layer: layer.weighted(*layer.scores()))

    @classmethod
    def run(cls, given: PartInput) -> "Heads":
        """Classify every query head by the role of its sink."""
        reader, with_bias = given.reader(), set[bool]()
        sums: dict[int, list[Tensor]] = {}

        def add_sums(layer: LayerCall) -> Tensor:
            scores_BHLL, bias_BHL = layer.scores()
            out_BHLV = layer.weighted(scores_BHLL, bias_BHL)
            with_bias.add(bias_BHL is not None)
            here = _sums(layer, scores_BHLL, bias_BHL, out_BHLV)
            before = sums.get(layer.index)
            sums[layer.index] = here if before is None else [a + b for a, b in zip(before, here, strict=True)]
            return out_BHLV

        reader.observed(add_sums)
        roles = []
        for layer, (share_H, value_H, other_H, added_H, output_H, gram_HVV) in sorted(sums.items()):
            value_norm_H, output_share_H = value_H / other_H.clamp(min=1e-30), added_H / output_H.clamp(min=1e-30)
            output_norm_H = output_H / output_H.mean().clamp(min=1e-30)
            numbers_H4 = torch.stack((share_H / len(given.tokens_NT), value_norm_H, output_share_H, output_norm_H), 1)
            for head, (share, value_norm, output_share, output_norm) in enumerate(numbers_H4.tolist(), 1):
                rank = effective_rank(gram_HVV[head - 1])
                roles.append(
                    HeadRole(
                        layer=layer,
                        head=head,
                        share=share,
                        value_norm=value_norm,
                        output_share=output_share,
                        effective_rank=rank,
                        output_norm=output_norm,
                        kind=kind_of(share, value_norm, output_share, rank / gram_HVV.shape[-1]),
                    )
                )
        return cls(
            **reader.result_fields(),
            sink="bias or first position" if len(with_bias) > 1 else "bias" if True in with_bias else "first position",
            width=sums[1][-1].shape[-1],
            heads=roles,
            counts=dict(Counter(role.kind for role in roles)),
        )

    def rows(self) -> Iterator[PartRow]:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(self.counts.items()))
        yield PartRow("", None, None, answer=counts)

    def remark(self) -> str:
        return f"heads ({self.sink}): {next(self.rows()).answer}"

    @property
    def counted(self) -> str:
        """Number of heads of each kind that occurs, in the order of `HeadKind`."""
        return ", ".join(f"{self.counts[kind]} {kind}" for kind in get_args(HeadKind) if self.counts.get(kind))

    def figure(self) -> PartFigure:
        rows = [{**head.model_dump(), "percent": 100 * head.share} for head in self.heads]
        scale = "log" if all(head.value_norm > 0 for head in self.heads) else "linear"
        kinds = [kind for kind in get_args(HeadKind) if self.counts.get(kind)]
        return self.drawn(rows, y=replace(self.layout.y, scale=scale, format="~g"), series=kinds)


def _sums(layer: LayerCall, scores_BHLL: Tensor, bias_BHL: Tensor | None, out_BHLV: Tensor) -> list[Tensor]:
    """Compute statistics of each head, summed over the sequences of a batch.

    Returns:
        Means over positions, (H,) each: share of attention on the sink, norm of the sink's value, of the other values,
        of the sink's contribution to the output, and of the output; last, the Gram matrices (H, V, V) of the outputs.
    """
    v_BHLV = layer.value_BGSV.repeat_interleave(scores_BHLL.shape[1] // layer.value_BGSV.shape[1], 1).float()
    if bias_BHL is None:
        given_BHL, sink_BHV = scores_BHLL[:, :, 1:, 0], v_BHLV[:, :, 0]
        v_BHLV, out_BHLV = v_BHLV[:, :, 1:], out_BHLV[:, :, 1:]
        whole_BHL = scores_BHLL[:, :, 1:].sum(-1)
    else:
        given_BHL, value_HV, first_BHV = bias_BHL, layer.call.value_HV, v_BHLV[:, :, 0]
        sink_BHV = torch.zeros_like(first_BHV) if value_HV is None else value_HV.float().expand_as(first_BHV)
        whole_BHL = scores_BHLL.sum(-1) + bias_BHL
    norm_BH, out_BHLV = sink_BHV.norm(dim=-1), out_BHLV.float()
    means_5BH = (
        (given_BHL / whole_BHL.masked_fill(whole_BHL == 0, 1)).mean(-1),
        norm_BH,
        v_BHLV.norm(dim=-1).mean(-1),
        given_BHL.mean(-1) * norm_BH,
        out_BHLV.norm(dim=-1).mean(-1),
    )
    gram_HVV = torch.einsum("bhlv,bhlw->hvw", out_BHLV.double(), out_BHLV.double())
    return [*(x_BH.double().sum(0) for x_BH in means_5BH), gram_HVV]


def effective_rank(gram_VV: Tensor) -> float:
    """Compute exp(-sum_i p_i log p_i), with p the normalised eigenvalues of a Gram matrix; 0 for a zero matrix."""
    values = torch.linalg.eigvalsh(gram_VV).clamp(min=0)
    total = values.sum()
    if total <= 0:
        return 0.0
    p = values / total
    return float(torch.exp(-torch.special.xlogy(p, p).sum()))


def kind_of(share: float, value_norm: float, output_share: float, rank_share: float) -> HeadKind:
    """Classify a head by the thresholds in this module; `rank_share` is its effective rank divided by V."""
    if share <= SINK_EPS:
        return "no sink"
    if value_norm <= NEGLIGIBLE:
        return "nop"
    return "broadcast" if output_share >= LARGE and rank_share <= LOW else "between"


SHARES = (0.05, 0.1, 0.2, 0.3, 0.5)
SHOWN_SHARE = 0.1  # fraction of heads removed in the scalar results
KINDS = ("nop", "broadcast")
SINK_FIRST, RANDOM = "sink first", "random"


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
        "smallest share of attention on the sink (2601.06787), the smallest output relative to their layer "
        f"(2504.03889), or random heads (mean of {DRAWS} draws), from all layers or with the same number per layer.",
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
        quiet = sorted(roles, key=lambda role: role.output_norm or 0)
        orders: list[tuple[str, float, Sequence[Sequence[HeadRole]]]] = []
        for share in SHARES:
            count = max(1, round(share * len(roles)))
            most = falling[:count]
            orders += [
                (SINK_FIRST, share, [most]),
                ("sink last", share, [falling[-count:]]),
                ("smallest output", share, [quiet[:count]]),
                (RANDOM, share, [draw.sample(roles, count) for _ in range(DRAWS)]),
                ("same layers", share, [of_the_same_layers(most) for _ in range(DRAWS)]),
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
