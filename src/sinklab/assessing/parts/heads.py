"""Heads: classification as no-op ("nop") or broadcast heads, by the sink's value and the head's output.

The terms are those of 2606.08105, of which only the abstract was available: "nop sinks exhibit negligible value norms;
broadcast sinks induce low-rank outputs". The definitions and thresholds below are therefore ours:

    share            mean over queries t of A_t,sink / sum_s A_ts          a sink if above SHARE
    value_norm       |v_sink| / mean over other s of |v_s|                 nop if at most NEGLIGIBLE
    output_share     mean_t |A_t,sink v_sink| / mean_t |o_t|               broadcast if at least LARGE, and
    effective_rank   exp(-sum_i p_i log p_i), p_i = s_i^2 / sum_j s_j^2    at most LOW of V

with s_i the singular values of the head's outputs o_t, of dimension V. The queries t are those after the sink, in all
sequences; the sum over s includes a bias. The sink is the bias key or sink logit, else the first position; of several
registers it is the first, and the other registers count as tokens. A gate can replace a nop head, and a register or
sink token a broadcast head.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from sinklab.assessing.part import AssessPart, AssessText, PartAnswer, PartFigure, PartJob
from sinklab.assessing.plan import AssessSettings
from sinklab.assessing.reading import PairedReader, Step, refused
from sinklab.attention.layer_call import LayerCall
from sinklab.models.adapter import Adapter
from sinklab.plots import PlotAxis
from sinklab.schema import ReadDocument

HeadKind = Literal["no sink", "nop", "between", "broadcast"]

SHARE = 0.3
NEGLIGIBLE = 0.25
LARGE = 0.5
LOW = 0.25


class HeadRole(ReadDocument):
    """Role of the sink in one query head; `layer` and `head` are 1-based.

    Attributes:
        share: share of attention on the sink, 0 to 1, mean over the queries after it.
        value_norm: norm of the sink's value vector divided by the mean norm of the other keys' value vectors.
        output_share: mean norm of the sink's contribution to the head's output, divided by the mean norm of the output.
        effective_rank: effective rank of the head's outputs, at most their dimension.
        kind: "no sink", "nop", "broadcast", or "between" the last two.
    """

    layer: int
    head: int
    share: float
    value_norm: float
    output_share: float
    effective_rank: float
    kind: HeadKind


class Heads(AssessPart):
    """Roles of all query heads.

    Attributes:
        sink: "bias" if the model has a bias key or sink logit, else the first position.
        width: dimension V of a head's values and output in the first attention layer; other layers may have another.
        heads: role of every query head.
        counts: number of heads of each kind; kinds without heads are left out.
    """

    name = "heads"
    rank = 6
    question = "What do heads with a sink do?"

    sink: Literal["bias", "first position"]
    width: int
    heads: list[HeadRole]
    counts: dict[HeadKind, int]

    @classmethod
    def refusal(cls, adapter: Adapter, settings: AssessSettings) -> str | None:
        return refused(adapter, compute=lambda layer: layer.weighted(*layer.scores()))

    @classmethod
    def job(cls, text: AssessText, settings: AssessSettings) -> PartJob:
        tokens_NT = text.sequences(settings.sequences, settings.length)
        return PartJob(2 * len(tokens_NT), partial(assess_heads, text.model.adapter, tokens_NT))

    def answers(self) -> Iterator[PartAnswer]:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(self.counts.items()))
        yield PartAnswer(counts, None)

    def remark(self) -> str:
        return f"heads ({self.sink}): {next(self.answers()).change}"

    def figure(self) -> PartFigure:
        kinds = [kind for kind in get_args(HeadKind) if self.counts.get(kind)]
        counts = ", ".join(f"{self.counts[kind]} {kind}" for kind in kinds)
        logarithmic = all(head.value_norm > 0 for head in self.heads)
        return PartFigure(
            "Roles of the heads",
            f"One point per head; the sink is the {self.sink}. In a nop head the value of the sink is negligible; in a "
            "broadcast head it is large, and the head's output has a low rank (2606.08105). "
            f"{counts}.",
            [{**head.model_dump(), "percent": 100 * head.share} for head in self.heads],
            PlotAxis("Share of attention on the sink (percent)", "percent", "share, percent", domain=(0, 100)),
            PlotAxis(
                "|v| of the sink over that of the other keys",
                "value_norm",
                "value's norm, times the others'",
                scale="log" if logarithmic else "linear",
                format="~g",
            ),
            kind="scatter",
            reference=1.0,
            colour="kind",
            series=kinds,
            tooltip=(
                ("layer", "layer", "d"),
                ("head", "head", "d"),
                ("output_share", "share of the head's output", ".3f"),
                ("effective_rank", "effective rank", ".1f"),
            ),
        )


@dataclass(frozen=True)
class _Sums:
    """Statistics of one layer summed over sequences: (H,) each, and the Gram matrices (H, V, V) of head outputs."""

    share_H: Tensor
    value_H: Tensor
    other_H: Tensor
    added_H: Tensor
    output_H: Tensor
    gram_HVV: Tensor


class _Watch:
    """Compute function that leaves the output unchanged and accumulates the statistics of each layer's heads."""

    def __init__(self) -> None:
        self.layers: dict[int, _Sums] = {}
        self.bias = False

    def __call__(self, layer: LayerCall) -> Tensor:
        scores_BHLL, bias_BHL = layer.scores()
        out_BHLV = layer.weighted(scores_BHLL, bias_BHL)
        repeats = scores_BHLL.shape[1] // layer.value_BGSV.shape[1]
        v_BHLV = layer.value_BGSV.repeat_interleave(repeats, 1).float()
        if bias_BHL is None:
            given_BHL, sink_BHV = scores_BHLL[:, :, 1:, 0], v_BHLV[:, :, 0]
            others_BHLV, after_BHLV = v_BHLV[:, :, 1:], out_BHLV[:, :, 1:].float()
            whole_BHL = scores_BHLL[:, :, 1:].sum(-1)
        else:
            self.bias = True
            value_HV, others_BHLV, after_BHLV = layer.call.value_HV, v_BHLV, out_BHLV.float()
            sink_BHV = (
                torch.zeros_like(v_BHLV[:, :, 0]) if value_HV is None else value_HV.float().expand_as(v_BHLV[:, :, 0])
            )
            given_BHL, whole_BHL = bias_BHL, scores_BHLL.sum(-1) + bias_BHL
        norm_BH = sink_BHV.norm(dim=-1)
        share_BHL = given_BHL / whole_BHL.masked_fill(whole_BHL == 0, 1)
        sums = _Sums(
            share_BHL.mean(-1).double().sum(0),
            norm_BH.double().sum(0),
            others_BHLV.norm(dim=-1).mean(-1).double().sum(0),
            (given_BHL.mean(-1) * norm_BH).double().sum(0),
            after_BHLV.norm(dim=-1).mean(-1).double().sum(0),
            torch.einsum("bhlv,bhlw->hvw", after_BHLV.double(), after_BHLV.double()),
        )
        if before := self.layers.get(layer.index):
            sums = _Sums(*(getattr(before, name) + getattr(sums, name) for name in vars(sums)))
        self.layers[layer.index] = sums
        return out_BHLV


def assess_heads(adapter: Adapter, tokens_NT: Tensor, step: Step) -> Heads:
    """Classify every query head by the role of the sink in it.

    Raises:
        InputError: if the attention weights cannot be edited (`LayerCall.scores`).
    """
    reader, watch = PairedReader(adapter, tokens_NT, step), _Watch()
    reader.observed(compute=watch)
    roles = []
    for number, sums in sorted(watch.layers.items()):
        for head in range(len(sums.share_H)):
            values = (sums.value_H, sums.other_H, sums.added_H, sums.output_H)
            value, other, added, output = (float(x[head]) for x in values)
            share = float(sums.share_H[head]) / len(tokens_NT)
            value_norm, output_share = value / max(other, 1e-30), added / max(output, 1e-30)
            rank, width = effective_rank(sums.gram_HVV[head]), sums.gram_HVV.shape[-1]
            roles.append(
                HeadRole(
                    layer=number,
                    head=head + 1,
                    share=share,
                    value_norm=value_norm,
                    output_share=output_share,
                    effective_rank=rank,
                    kind=kind_of(share, value_norm, output_share, rank / width),
                )
            )
    return Heads(
        **reader.result_fields(),
        sink="bias" if watch.bias else "first position",
        width=watch.layers[1].gram_HVV.shape[-1],
        heads=roles,
        counts=dict(Counter(role.kind for role in roles)),
    )


def effective_rank(gram_VV: Tensor) -> float:
    """Compute exp of the entropy of the normalised eigenvalues of a Gram matrix; 0 for a zero matrix."""
    values = torch.linalg.eigvalsh(gram_VV).clamp(min=0)
    total = values.sum()
    if total <= 0:
        return 0.0
    p = values / total
    return float(torch.exp(-torch.special.xlogy(p, p).sum()))


def kind_of(share: float, value_norm: float, output_share: float, rank_share: float) -> HeadKind:
    """Classify a head by the thresholds in this module; `rank_share` is its effective rank over its dimension."""
    if share <= SHARE:
        return "no sink"
    if value_norm <= NEGLIGIBLE:
        return "nop"
    return "broadcast" if output_share >= LARGE and rank_share <= LOW else "between"
