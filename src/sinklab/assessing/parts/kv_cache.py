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

Spared positions stay in full precision and are excluded from the scales. They are none, the first n, outlier tokens, or
sinks. The latter two are found in each sequence by a pass with the unchanged model. Outlier tokens follow PrefixQuant's
rule (2410.05265; ChenMnZ/PrefixQuant 97cc15b, utils/stat_utils.py, the default `activation_type`):

    M_t = max over neurons of |input of the down projection at t|,   outlier: M_t > 64 median_s M_s in some block

Sinks are defined as in `secondary_sinks` (sinklab.measuring.statistics.secondary), with the first position included:

    alpha_k > 0.3 in some query head,   k <= T / 2  or  T - k + 1 >= 16;   learned tokens: their sum of alpha > 0.3

    due_to_sink = loss(no position spared) - loss(the first n spared)               nats per token, as in `quantisation`

In addition, each KV head is rounded alone to 2 bits, on separate sequences. Then all KV heads are rounded except the
tenth with the highest cost (KL divergence), or except as many random heads (mean of several draws).

Losses with all KV heads rounded, or all except the costliest, are means of several draws, as in `quantisation`
(`sinklab.assessing.reading`). The losses with a single head rounded hardly vary and are of one draw.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from sinklab.assessing.part import AssessPart, PartFigure, PartNumber, PartRow, TextSize, several
from sinklab.assessing.parts.quantisation import linear_maps
from sinklab.assessing.parts.writer import feed_forward
from sinklab.assessing.reading import (
    DRAWS,
    LOG_PROBABILITIES_KEPT,
    ByPosition,
    DrawnEffect,
    Effect,
    HeadCost,
    HeadSet,
    PairedReader,
    PartInput,
    SinkCost,
    chosen_heads,
    mean_effect,
    mean_of,
    perturbed,
    refused,
    sink_cost,
)
from sinklab.assessing.settings import CACHE_GROUP, AssessSettings
from sinklab.attention.layer_call import LayerCall
from sinklab.attention.masks import Dense
from sinklab.errors import InputError
from sinklab.measuring.options import SINK_EPS
from sinklab.measuring.statistics.secondary import ENOUGH
from sinklab.models.adapter import Adapter
from sinklab.models.families import LATENT_WIDTH, text_config
from sinklab.models.hooks import hooked, intercept
from sinklab.schema import Omitted
from sinklab.tables import PlotAxis

BITS = (8, 4, 3, 2)
QUICK_BITS = (8, 4, 2)
HEAD_BITS = 2
OUTLIER = 64  # ratio of M_t to the median of M_s above which a token is an outlier
EXEMPT = 10  # one KV head in ten is exempt from rounding
NAMED = 4  # maximum number of positions in a row of the table
DENSE = 3  # maximum number of linear layers of a feed-forward part without experts: gate, up and down projection
Spared = frozenset[int]
"""Spared positions of a sequence as 0-based indices, learned leading tokens included."""


class CacheRounding(SinkCost):
    """Losses with the KV cache rounded to `bits` bits, means over draws; `KVCache.residual` recent positions are exact.

    Attributes:
        everything: loss with no position spared.
        first_spared: loss with the first n positions in full precision.
        outliers_spared: loss with the outlier tokens in full precision; None if `KVCache.outliers` is.
        sinks_spared: loss with the sinks in full precision.
    """

    bits: int
    everything: Effect
    first_spared: Effect
    outliers_spared: Effect | None = None
    sinks_spared: Effect


class KVCache(AssessPart):
    """Loss with a rounded KV cache, and the KV heads that are most costly to round.

    Attributes:
        sink_positions: number n of first positions in `first_spared`, including a learned sink token or registers.
        outliers, sinks: positions of the outlier tokens and of the sinks of each sequence, 1-based; learned leading
            tokens are at 0, -1 and so on. `outliers` is None if no down projection was found, as in feed-forward parts
            with experts.
        settings: losses by number of bits.
        head_bits: number of bits in `heads`, `without_exempt` and `without_random`.
        residual: number R of recent positions in full precision; 0 rounds all positions.
        heads: loss and KL divergence when each KV head alone is rounded, on separate sequences; empty without such
            sequences (--quick). The following fields are then empty or None.
        exempt: the tenth (at least one) of the KV heads (layer, head) with the highest KL divergence in `heads`.
        without_exempt, without_random: loss with all KV heads rounded to `head_bits` except the exempt heads, or as
            many random heads (mean over draws).
    """

    name = "kv_cache"
    question = "Does the sink increase the loss of a quantised KV cache?"
    on_request = True
    in_quick = True
    setting = "KV cache"
    numbers = (
        PartNumber("cache_N_bits_added", "KV cache in N bits, added loss"),
        PartNumber("cache_added", "KV cache in the fewest bits, added loss", ("KV cache", "2 bits, nats added")),
        PartNumber(
            "cache_due_to_sink",
            "Part of the loss added by the KV cache in the fewest bits that is due to the sink",
            ("sink's part", "of these"),
        ),
    )
    layout = PartFigure(
        "Rounding the KV cache",
        "Loss added to {0.unchanged.loss:.3f} by rounding keys per channel and values per token, in groups of "
        f"{CACHE_GROUP} (KIVI, 2402.02750): at all positions, at all but the first {{0.spared}}, at all but outlier "
        f"tokens (2410.05265), at all but sinks (importance above {SINK_EPS}){{0.recent}}.",
        PlotAxis("Bits", "x", "bits", order=()),
    )

    sink_positions: int
    outliers: list[list[int]] | None = None
    sinks: list[list[int]]
    settings: list[CacheRounding]
    residual: int = Field(default=0, exclude_if=lambda residual: residual == 0)
    head_bits: int
    heads: list[HeadCost] = Field(default_factory=list)
    exempt: list[tuple[int, int]] = Field(default_factory=list)
    without_exempt: Omitted[Effect] = None
    without_random: Omitted[DrawnEffect] = None

    @classmethod
    def refusal(cls, adapter: Adapter, settings: AssessSettings) -> str | None:
        text = text_config(adapter.module.config)
        if getattr(text, "latent", None) or getattr(text, LATENT_WIDTH, None):
            return "the KV cache contains latent vectors (MLA) instead of keys and values"
        return refused(adapter, RoundedCache(HEAD_BITS, residual=settings.residual).output)

    @classmethod
    def text_size(cls, settings: AssessSettings) -> TextSize:
        return TextSize(settings.sequences, settings.length, others=settings.head_sequences)

    @classmethod
    def run(cls, given: PartInput) -> "KVCache":
        """Measure the loss with the KV cache rounded to few bits, and with one KV head rounded at a time."""
        adapter, settings, residual = given.adapter, given.settings, given.settings.residual
        kept = LOG_PROBABILITIES_KEPT // len(given.tokens_NT)
        one_by_one = given.tokens_NT.split(1)
        readers = [PairedReader(adapter, tokens_1T, given.passes, kept=kept) for tokens_1T in one_by_one]
        first, S = adapter.leading + settings.sink_tokens, adapter.leading + given.tokens_NT.shape[1]
        none, leading = [Spared()] * len(readers), [Spared(range(first))] * len(readers)
        pairs = [outliers_and_sinks(one) for one in readers]
        outliers, sinks = [some for some, _ in pairs if some is not None] or None, [some for _, some in pairs]

        @cache  # the sets of positions of a sequence are often equal
        def read(n: int, bits: int, spared: Spared, heads: HeadSet | None, draw: int) -> ByPosition:
            spared_S = torch.tensor([s in spared for s in range(S)])
            with perturbed(adapter, draw, settings.seed):
                return readers[n].under(RoundedCache(bits, spared_S, heads, residual).output)

        def drawn(
            bits: int, spared: Sequence[Spared], heads: HeadSet | None = None, draws: int = settings.sizes.draws
        ) -> list[ByPosition]:
            return [
                joined([read(n, bits, some, heads, draw) for n, some in enumerate(spared)]) for draw in range(draws)
            ]

        several_sets = [set(some) for some in zip(none, leading, outliers or none, sinks, strict=True)]
        all_bits = QUICK_BITS if settings.quick else BITS
        given.passes.expect(settings.sizes.draws * len(all_bits) * sum(map(len, several_sets)))
        roundings = []
        for bits in all_bits:
            everything, first_spared = drawn(bits, none), drawn(bits, leading)
            roundings.append(
                CacheRounding(
                    bits=bits,
                    everything=mean_of(everything).effect(),
                    first_spared=mean_of(first_spared).effect(),
                    outliers_spared=None if outliers is None else mean_of(drawn(bits, outliers)).effect(),
                    sinks_spared=mean_of(drawn(bits, sinks)).effect(),
                    **sink_cost(everything, first_spared),
                )
            )

        def by_sequence(found: Sequence[Spared]) -> list[list[int]]:
            return [sorted(s + 1 - adapter.leading for s in some) for some in found]

        by_bits = cls(
            sequences=len(readers),
            length=given.tokens_NT.shape[1],
            unchanged=joined([one.unchanged for one in readers]).effect(),
            sink_positions=first,
            outliers=None if outliers is None else by_sequence(outliers),
            sinks=by_sequence(sinks),
            settings=roundings,
            residual=residual,
            head_bits=HEAD_BITS,
        )
        if given.others_MT is None:
            return by_bits
        heads = given.reader_of_others().by_key_head(
            lambda chosen: RoundedCache(HEAD_BITS, heads=chosen, residual=residual).output
        )
        costliest = sorted(heads, key=lambda one: -one.kl)[: max(1, len(heads) // EXEMPT)]
        exempt, names = ([(one.layer, one.head) for one in some] for some in (costliest, heads))
        chance = random.Random(settings.seed)
        sampled = [chance.sample(sorted(names), len(exempt)) for _ in range(DRAWS)]
        others = {*map(frozenset, sampled)} - {frozenset(exempt)}
        given.passes.expect(len(readers) * (settings.sizes.draws + len(others)))

        def without(some: Sequence[tuple[int, int]], draws: int) -> Effect:
            return mean_of(drawn(HEAD_BITS, none, frozenset(names) - set(some), draws)).effect()

        by_head: dict[str, object] = {
            "heads": heads,
            "exempt": exempt,
            "without_exempt": without(exempt, settings.sizes.draws),
            "without_random": DrawnEffect(**mean_effect([without(some, 1) for some in sampled])),
        }
        return by_bits.model_copy(update=by_head)

    def rows(self) -> Iterator[PartRow]:
        yield self.unchanged_row()
        fewest = min(one.bits for one in self.settings)
        first = several(self.sink_positions, "token")
        for one in self.settings:
            bits, points = f"{one.bits} bits", [("all positions rounded", one.bits)]
            numbers = [f"cache_{one.bits}_bits_added", "cache_added"][: 2 if one.bits == fewest else 1]
            answer = f"keys and values in {bits}"
            more = {"answer": answer, "numbers": numbers, "points": points, "size": one.bits}
            yield self.row(bits, one.everything, one.due_said, **more)
            for name, series, positions, effect in (
                (f"first {first}", "first", None, one.first_spared),
                ("outliers", "outliers", self.outliers, one.outliers_spared),
                ("sinks", "sinks", self.sinks, one.sinks_spared),
            ):
                if effect is not None:
                    what, points = f"{bits}, {name} in full precision", [(f"{series} in full precision", one.bits)]
                    yield self.row(what, effect, "" if positions is None else named_positions(positions), points=points)
            if one.bits == fewest:
                recent = f"{self.residual} recent tokens not rounded" if self.residual else "recent tokens included"
                answer, words = f"part of the loss in {bits} due to the sink", f"with a cache in {bits}, {recent}"
                yield self.cost_row(one, answer, "cache_due_to_sink", gained=words)
        if self.without_exempt is None or self.without_random is None:
            return
        count, heads = len(self.exempt), f"KV head{'s' * (len(self.exempt) > 1)}"
        yield self.row(f"{self.head_bits} bits except {count} costliest {heads}", self.without_exempt)
        losses = self.without_random.losses
        draws = f"draws {min(losses):.4f} to {max(losses):.4f}"
        yield self.row(f"{self.head_bits} bits except {count} random {heads}", self.without_random, draws)

    def remark(self) -> str:
        named = ", ".join(f"{layer}.{head}" for layer, head in self.exempt[:8])
        outliers = "" if self.outliers is None else f"outliers at {named_positions(self.outliers)}; "
        found = f"kv_cache: {outliers}sinks at {named_positions(self.sinks)}"
        heads = f"; the costliest KV heads (layer.head) in {self.head_bits} bits: {named}" if named else ""
        return found + heads + self.recent

    @property
    def recent(self) -> str:
        """Remark on the recent tokens kept in full precision; empty if there are none."""
        return f"; up to {self.residual} recent tokens are in full precision" if self.residual else ""

    @property
    def spared(self) -> str:
        """The positions in `first_spared`, such as `position` or `2 positions`."""
        return several(self.sink_positions, "position")


def named_positions(found: Sequence[Sequence[int]]) -> str:
    """Name the most frequent positions of all sequences, as in `positions 1 (in 2 sequences), 5, 34`."""
    counts = Counter(position for some in found for position in some)
    named = [f"{at} (in {count} sequences)" if count > 1 else f"{at}" for at, count in counts.most_common(NAMED)]
    named += [f"{len(counts) - NAMED} more"] if len(counts) > NAMED else []
    return f"position{'s' * (len(counts) > 1)} {', '.join(named)}" if counts else "no position"


def rounded_in_groups(x: Tensor, axis: int, bits: int, spared: Tensor) -> Tensor:
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
    heads: HeadSet | None = None
    residual: int = 0

    def __call__(self, layer: LayerCall) -> LayerCall:
        """Return the call with keys and values rounded, recent positions included."""
        k_BGSD, v_BGSV = layer.call.k_BGTD, layer.value_BGSV
        chosen_G = None if self.heads is None else chosen_heads(layer, self.heads, k_BGSD.shape[1])
        if chosen_G is not None and not chosen_G.any():
            return layer
        spared_S = torch.zeros(k_BGSD.shape[2], dtype=torch.bool) if self.spared_S is None else self.spared_S
        left_GS1 = spared_S.to(k_BGSD.device)[None, :, None]
        if chosen_G is not None:
            left_GS1 = left_GS1 | ~chosen_G[:, None, None]
        layer = layer.changed(k_BGTD=rounded_in_groups(k_BGSD, 2, self.bits, left_GS1))
        return replace(layer, value_BGSV=rounded_in_groups(v_BGSV, 3, self.bits, left_GS1))

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


def joined(read: Sequence[ByPosition]) -> ByPosition:
    """Concatenate the losses and KL divergences of sequences of equal length that were evaluated separately."""
    unchanged = [one.unchanged_NP for one in read if one.unchanged_NP is not None]
    return ByPosition(
        read[0].first,
        torch.cat([one.loss_NP for one in read]),
        torch.cat([one.kl_NP for one in read]),
        torch.cat(unchanged) if unchanged else None,
    )


def outliers_and_sinks(reader: PairedReader) -> tuple[Spared | None, Spared]:
    """Find the outlier tokens and the sinks of one sequence, by a pass with the unchanged model.

    Args:
        reader: reader of the sequence.

    Returns:
        Outlier tokens, or None if no down projection was found, and sinks.
    """
    first, T = reader.adapter.leading, reader.tokens_NT.shape[1]
    k_T = torch.arange(1, T + 1)
    listed_T = (2 * k_T <= T) | (T - k_T + 1 >= ENOUGH)
    M_LS, sink_S = list[Tensor](), torch.zeros(first + T, dtype=torch.bool)

    def entering(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        M_LS.append(args[0].abs().amax(-1).flatten())

    def observe(layer: LayerCall) -> None:
        alpha = layer.importance()
        sink_S[first:] |= (alpha.positions_BHT > SINK_EPS).any(1)[0].cpu() & listed_T
        if alpha.bias_BH is not None:  # a bias alone has no position
            sink_S[:first] |= bool((alpha.bias_BH > SINK_EPS).any())

    hooks = (one.register_forward_pre_hook(entering) for one in last_linear_layers(reader.adapter))
    with hooked(hooks), intercept(reader.adapter, observe=observe):
        reader.observed()
    outliers = None
    if M_LS:
        ratio_LS = torch.stack([M_S / M_S.median() for M_S in M_LS])
        outliers = Spared((ratio_LS > OUTLIER).any(0).nonzero()[:, 0].tolist())
    return outliers, Spared(sink_S.nonzero()[:, 0].tolist())


def last_linear_layers(adapter: Adapter) -> list[nn.Module]:
    """Return the last linear layer of every feed-forward part; empty if one has experts, which share the tokens."""
    found = []
    for part in filter(None, map(feed_forward, adapter.blocks)):
        linear = [one.module for one in linear_maps([part])]
        if not 0 < len(linear) <= DENSE or any(weight.ndim > 2 for weight in part.parameters()):
            return []
        found.append(linear[-1])
    return found
