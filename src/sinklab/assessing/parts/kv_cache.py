"""KV cache quantisation: the loss when keys and values are rounded to few bits, with and without the sink positions.

Values x that share a scale are rounded as in KIVI (2402.02750; jy-yuan/KIVI 876b4d2, quant/new_pack.py):

    m = min x,  s = (max x - min x) / (2^bits - 1),  q(x) = m + s round((x - m) / s)

    keys     per channel: 32 successive tokens of one channel of a KV head, after RoPE
    values   per token: 32 successive channels of one token of a KV head

The last group may be shorter. Without `residual`, every key and value is rounded, including the query's own. 3 bits,
which the public code does not support, are rounded by the same formula.

`residual` R, a multiple of 32, keeps recent positions in full precision, as KIVI's cache does during decoding
(models/llama_kivi.py). For query t and key s, both counted from 0; the cache includes the query's own key and value:

    keys     full precision for s >= R floor(t / R): each block of R keys is rounded after the query of its last key
    values   full precision for t - s <= R: each value is rounded after query s + R

Spared positions stay in full precision and are excluded from the scales. They are none, the first n, or outlier tokens
detected by PrefixQuant's rule (2410.05265; ChenMnZ/PrefixQuant 97cc15b, utils/stat_utils.py) on block outputs:

    M_t = max over channels of |output of the block at t|,   t is an outlier where M_t > 64 median_s M_s in some block

    due_to_sink = loss(no position spared) - loss(the first n spared)               nats per token, as in `quantisation`

In addition, each KV head is rounded alone to 2 bits, on separate sequences. Then all KV heads are rounded except the
tenth with the highest cost (KL divergence), or except as many random heads.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from sinklab.assessing.part import AssessPart, AssessText, Effect, PartFigure, PartJob, PartNumber, PartRow
from sinklab.assessing.reading import (
    LOG_PROBABILITIES_KEPT,
    ByPosition,
    HeadCost,
    KeyHeads,
    PairedReader,
    Step,
    chosen_heads,
    key_heads,
    refused,
)
from sinklab.assessing.settings import CACHE_GROUP, AssessSettings
from sinklab.attention.layer_call import LayerCall
from sinklab.attention.masks import Dense
from sinklab.errors import InputError
from sinklab.models.adapter import Adapter
from sinklab.models.families import LATENT_WIDTH, text_config
from sinklab.models.hooks import evaluating, residual_stream
from sinklab.plots import PlotAxis
from sinklab.schema import ReadDocument

BITS = (8, 4, 3, 2)
HEAD_BITS = 2
OUTLIER = 64  # ratio of M_t to the median of M_s above which a token is an outlier
EXEMPT = 10  # one KV head in ten is exempt from rounding


class CacheRounding(ReadDocument):
    """Losses with the KV cache rounded to `bits` bits; `KVCache.residual` recent positions are in full precision.

    Attributes:
        everything: loss with no position spared.
        first_spared, found_spared: loss with the first n positions, or the outlier tokens, in full precision.
        due_to_sink: loss of `everything` minus loss of `first_spared`.
    """

    bits: int
    everything: Effect
    first_spared: Effect
    found_spared: Effect
    due_to_sink: float


class KVCache(AssessPart):
    """Loss with a rounded KV cache, and the KV heads that are most costly to round.

    Attributes:
        sink_positions: number n of first positions in `first_spared`, including a learned sink token or registers.
        found: positions of the outlier tokens of each sequence, 1-based; learned leading tokens are at 0, -1 and so on.
        settings: losses by number of bits.
        head_bits: number of bits in `heads`, `without_exempt` and `without_random`.
        residual: number R of recent positions in full precision; 0 rounds all positions.
        heads: loss and KL divergence when each KV head alone is rounded, on separate sequences.
        exempt: the tenth (at least one) of the KV heads (layer, head) with the highest KL divergence in `heads`.
        without_exempt, without_random: loss with all KV heads rounded to `head_bits` except the exempt heads, or as
            many random heads.
    """

    name = "kv_cache"
    rank = 7
    question = "Does the sink make a rounded cache costly?"
    on_request = True
    numbers = (
        PartNumber(
            "cache_N_bits_added",
            "KV cache in N bits, added loss",
        ),
        PartNumber(
            "cache_added",
            "KV cache in the fewest bits, added loss",
            ("KV cache", "2 bits, nats added"),
            "keys and values rounded to 2 bits",
        ),
        PartNumber(
            "cache_due_to_sink",
            "Part of the loss added by the KV cache in the fewest bits that is due to the sink",
            ("sink's part", "of these"),
            "the part of the loss in column KV cache that is due to the sink",
        ),
    )

    sink_positions: int
    found: list[list[int]]
    settings: list[CacheRounding]
    residual: int = Field(default=0, exclude_if=lambda residual: residual == 0)
    head_bits: int
    heads: list[HeadCost]
    exempt: list[tuple[int, int]]
    without_exempt: Effect
    without_random: Effect

    @classmethod
    def refusal(cls, adapter: Adapter, settings: AssessSettings) -> str | None:
        text = text_config(adapter.module.config)
        if getattr(text, "latent", None) or getattr(text, LATENT_WIDTH, None):
            return "the KV cache contains latent vectors (MLA) instead of keys and values"
        return refused(adapter, compute=RoundedCache(HEAD_BITS, residual=settings.residual).output)

    @classmethod
    def job(cls, text: AssessText, settings: AssessSettings) -> PartJob:
        tokens_NT, others_MT = text.split(settings.sequences, settings.head_sequences, settings.length)
        adapter, given = text.model.adapter, (settings.sink_tokens, settings.seed, settings.residual)
        passes = (3 + 3 * len(BITS)) * len(tokens_NT) + (1 + len(key_heads(adapter))) * len(others_MT)
        return PartJob(passes, partial(assess_kv_cache, adapter, tokens_NT, others_MT, *given))

    def rows(self) -> Iterator[PartRow]:
        yield self.unchanged_row()
        spared, fewest = f"first {self.counted(self.sink_positions, 'token')}", min(one.bits for one in self.settings)
        for one in self.settings:
            bits, due = f"{one.bits} bits", f"due to the sink {one.due_to_sink:+.4f}"
            numbers = [f"cache_{one.bits}_bits_added", "cache_added"][: 2 if one.bits == fewest else 1]
            yield self.row(bits, one.everything, due, answer=f"keys and values in {bits}", numbers=numbers)
            yield self.row(f"{bits}, {spared} in full precision", one.first_spared)
            yield self.row(f"{bits}, outliers in full precision", one.found_spared)
            if one.bits == fewest:
                answer, words = f"part of the loss in {bits} due to the sink", f"with a cache in {bits}"
                yield PartRow("", None, one.due_to_sink, answer=answer, gained=words, numbers=["cache_due_to_sink"])
        count, heads = len(self.exempt), f"KV head{'s' * (len(self.exempt) > 1)}"
        yield self.row(f"{self.head_bits} bits except {count} costliest {heads}", self.without_exempt)
        yield self.row(f"{self.head_bits} bits except {count} random {heads}", self.without_random)

    def remark(self) -> str:
        found = sum(map(len, self.found))
        named = ", ".join(f"{layer}.{head}" for layer, head in self.exempt[:8])
        return (
            f"kv_cache: {found} outlier tokens in {self.counted(len(self.found), 'sequence')}; the costliest KV heads "
            f"(layer.head) in {self.head_bits} bits: {named}{self._recent}"
        )

    @property
    def _recent(self) -> str:
        return f"; up to {self.residual} recent tokens are in full precision" if self.residual else ""

    def figure(self) -> PartFigure:
        rows = [
            self.point(effect, series, one.bits)
            for one in self.settings
            for series, effect in (
                ("all positions rounded", one.everything),
                ("first in full precision", one.first_spared),
                ("outliers in full precision", one.found_spared),
            )
        ]
        return PartFigure(
            "Rounding the KV cache",
            f"Loss added to {self.unchanged.loss:.3f} by rounding keys per channel and values per token, in groups of "
            f"{CACHE_GROUP} (KIVI, 2402.02750): at all positions, at all but the first "
            f"{self.counted(self.sink_positions, 'position')}, at all but outlier tokens (2410.05265){self._recent}.",
            rows,
            PlotAxis("Bits", "x", "bits", order=sorted({one.bits for one in self.settings})),
        )


def rounded(x: Tensor, axis: int, bits: int, spared: Tensor) -> Tensor:
    """Round x to `bits` bits in groups of 32 along an axis; entries where `spared` is True are left as they are."""
    x_XI, spared_XI = x.movedim(axis, -1), spared.expand_as(x).movedim(axis, -1)
    width = x_XI.shape[-1]
    padding = (0, -width % CACHE_GROUP)
    x_XNG = F.pad(x_XI, padding).unflatten(-1, (-1, CACHE_GROUP))
    out_XNG = F.pad(spared_XI, padding, value=True).unflatten(-1, (-1, CACHE_GROUP))
    low_XN1 = x_XNG.masked_fill(out_XNG, torch.inf).amin(-1, keepdim=True)
    scale_XN1 = (x_XNG.masked_fill(out_XNG, -torch.inf).amax(-1, keepdim=True) - low_XN1) / (2**bits - 1)
    scale_XN1 = torch.where(scale_XN1 > 0, scale_XN1, 1)
    on_grid_XNG = low_XN1 + scale_XN1 * ((x_XNG - low_XN1) / scale_XN1).round()
    return torch.where(out_XNG, x_XNG, on_grid_XNG).flatten(-2)[..., :width].movedim(-1, axis)


@dataclass(frozen=True)
class RoundedCache:
    """Rounding of keys and values to `bits` bits: an attention edit, and with `output` a compute function.

    Attributes:
        spared_S: boolean mask (S,) over positions, learned leading tokens included; those that are True stay in full
            precision. None for no position.
        heads: KV heads that are rounded; None for all.
        residual: number R of recent positions in full precision, used by `output` only.
    """

    bits: int
    spared_S: Tensor | None = None
    heads: KeyHeads | None = None
    residual: int = 0

    def __call__(self, layer: LayerCall) -> LayerCall:
        """Return the call with keys and values rounded, recent positions included."""
        k_BGSD, v_BGSV = layer.call.k_BGTD, layer.value_BGSV
        chosen_G = None if self.heads is None else chosen_heads(layer, self.heads)
        if chosen_G is not None and not chosen_G.any():
            return layer
        spared_S = torch.zeros(k_BGSD.shape[2], dtype=torch.bool) if self.spared_S is None else self.spared_S
        left_GS1 = spared_S.to(k_BGSD.device)[None, :, None]
        if chosen_G is not None:
            left_GS1 = left_GS1 | ~chosen_G[:, None, None]
        layer = layer.changed(k_BGTD=rounded(k_BGSD, 2, self.bits, left_GS1))
        return replace(layer, value_BGSV=rounded(v_BGSV, 3, self.bits, left_GS1))

    def output(self, layer: LayerCall) -> Tensor:
        """Compute the attention output with the rounded cache: (B, H, T, V).

        With a residual, it is computed in blocks of R queries, which have the same rounded keys.

        Raises:
            InputError: with a residual, if queries attend to later keys or `LayerCall.scores` does not apply.
        """
        whole, R = self(layer), self.residual
        if not R or whole is layer:
            return whole.output()
        mask, T, device = layer.call.mask, layer.length, layer.call.q_BHTD.device
        if not mask.causal:
            raise InputError("queries attend to later keys, so the most recent keys are undefined: omit --residual")
        outs = []
        for start in range(0, T, R):
            stop = min(start + R, T)
            seen_BHQS = mask.block(start, stop, 0, stop, device).expand(*mask.sizes, stop - start, stop)
            k_BGSD = torch.cat((whole.call.k_BGTD[:, :, :start], layer.call.k_BGTD[:, :, start:]), 2)
            call = replace(replace(whole.call, k_BGTD=k_BGSD).cut(stop, start), mask=Dense(seen_BHQS))
            both_BGSV = torch.cat((whole.value_BGSV[:, :, :stop], layer.value_BGSV[:, :, :stop]), 2)
            part = replace(whole, call=call, value_BGSV=both_BGSV)
            scores_BHQS, bias_BHQ = part.scores()
            at_S = torch.arange(stop, device=device)
            recent_QS = at_S[start:, None] - at_S <= R
            outs.append(part.weighted(torch.cat((scores_BHQS * ~recent_QS, scores_BHQS * recent_QS), -1), bias_BHQ))
        return torch.cat(outs, 2)


def assess_kv_cache(
    adapter: Adapter,
    tokens_NT: Tensor,
    others_MT: Tensor,
    sink_tokens: int,
    seed: int,
    residual: int,
    step: Step,
) -> KVCache:
    """Measure the loss with the KV cache rounded to 8, 4, 3 and 2 bits, and with one KV head rounded at a time.

    Args:
        others_MT: sequences on which single KV heads are rounded.
        sink_tokens: number of first tokens in full precision in `first_spared`, in addition to learned leading tokens.
        seed: random seed of the heads in `without_random`.
        residual: number R of recent positions in full precision; 0 rounds all positions.

    Raises:
        InputError: see `RoundedCache.output`.
        SinklabError: if a loss or KL divergence is not finite.
    """
    kept = LOG_PROBABILITIES_KEPT // len(tokens_NT)
    readers = [PairedReader(adapter, tokens_1T, step, kept=kept) for tokens_1T in tokens_NT.split(1)]
    found_NS = outlier_tokens(adapter, tokens_NT)
    first = adapter.leading + sink_tokens
    first_NS = (torch.arange(found_NS.shape[1]) < first).expand_as(found_NS)
    none_NS = torch.zeros_like(found_NS)

    def effect(bits: int, spared_NS: Tensor, heads: KeyHeads | None = None) -> Effect:
        read = [
            one.under(compute=RoundedCache(bits, spared_S, heads, residual).output)
            for one, spared_S in zip(readers, spared_NS, strict=True)
        ]
        return joined(read).effect()

    settings = []
    for bits in BITS:
        everything, first_spared = effect(bits, none_NS), effect(bits, first_NS)
        rounding = {"everything": everything, "first_spared": first_spared, "found_spared": effect(bits, found_NS)}
        settings.append(CacheRounding(bits=bits, **rounding, due_to_sink=everything.loss - first_spared.loss))
    alone = PairedReader(adapter, others_MT, step)
    heads = alone.by_key_head(
        lambda chosen: alone.under(compute=RoundedCache(HEAD_BITS, heads=chosen, residual=residual).output)
    )
    dearest = sorted(heads, key=lambda one: -one.kl)[: max(1, len(heads) // EXEMPT)]
    exempt, names = ([(one.layer, one.head) for one in some] for some in (dearest, heads))
    drawn = random.Random(seed).sample(sorted(names), len(exempt))
    return KVCache(
        sequences=len(readers),
        length=tokens_NT.shape[1],
        unchanged=joined([one.unchanged for one in readers]).effect(),
        sink_positions=first,
        found=[(found_S.nonzero()[:, 0] + 1 - adapter.leading).tolist() for found_S in found_NS],
        settings=settings,
        residual=residual,
        head_bits=HEAD_BITS,
        heads=heads,
        exempt=exempt,
        without_exempt=effect(HEAD_BITS, none_NS, frozenset(names) - set(exempt)),
        without_random=effect(HEAD_BITS, none_NS, frozenset(names) - set(drawn)),
    )


def joined(read: Sequence[ByPosition]) -> ByPosition:
    """Concatenate the losses and KL divergences of sequences of equal length that were evaluated separately."""
    unchanged = [one.unchanged_NP for one in read if one.unchanged_NP is not None]
    return ByPosition(
        read[0].first,
        torch.cat([one.loss_NP for one in read]),
        torch.cat([one.kl_NP for one in read]),
        torch.cat(unchanged) if unchanged else None,
    )


def outlier_tokens(adapter: Adapter, tokens_NT: Tensor) -> Tensor:
    """Return a boolean mask (N, S) of the outlier tokens by PrefixQuant's rule; S includes learned leading tokens."""
    found = []
    with evaluating(adapter.module), residual_stream(adapter.blocks, lambda x_BSC: x_BSC.abs().amax(-1)) as largest:
        for tokens_1T in tokens_NT.split(1):
            adapter.hidden(tokens_1T.to(adapter.device))
            M_LS = torch.cat(largest[1:])
            ratio_LS = M_LS / M_LS.median(-1, keepdim=True).values
            found.append((ratio_LS > OUTLIER).any(0).cpu())
    return torch.stack(found)
