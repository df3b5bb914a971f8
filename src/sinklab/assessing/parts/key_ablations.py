"""Key ablations: the loss with the sink's value, key, attention or logit removed or changed.

With logits z, attention weights A, values v and outputs o, the selected keys s are ablated in four ways:

    value zeroed   o_t - sum over selected s of A_ts v_s
    hidden         the selected keys are masked; rows that sum to one are normalised over the other keys
    spread         A_ts of the selected keys is divided equally among the other keys of the row (cf. 2410.10781)
    shifted        z_ts + d for the selected keys, before the softmax or its replacement; d = -inf is `hidden`

One of these sets of keys is selected for each query t:

    bias     the bias key or sink logit of the model, with its own value (usually zero)
    sink     the first n keys (a learned sink token is the first), for the queries after them
    recent   the n keys immediately before the query's own
    random   n random keys before the query's own, drawn by layer, head and query

`recent` and `random` are controls, and exclude the first n keys. Early queries have fewer than n such keys, or none.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Literal

import torch
from torch import Tensor

from sinklab.assessing.part import AssessPart, PartFigure, PartNumber, PartRow, several
from sinklab.assessing.parts.heads import Heads
from sinklab.assessing.reading import Effect, PartInput, probe
from sinklab.assessing.settings import AssessSettings
from sinklab.attention.layer_call import LayerCall
from sinklab.attention.masks import Dense
from sinklab.attention.operations.base import Call
from sinklab.attention.scores import Score, compose
from sinklab.models.adapter import Adapter
from sinklab.schema import ReadDocument
from sinklab.tables import PlotAxis

LAYERS_KEPT, KEYS_KEPT = 64, 2**19  # limits of the cache of random keys: layers, and keys per layer
SHIFTS = (-8.0, -4.0, -2.0, -1.0, 1.0, 2.0, 4.0, 8.0)
Keys = Literal["bias", "sink", "recent", "random"]


class Shift(Effect):
    """Loss with `by` added to the logits of the keys; None (minus infinity) is the loss with the keys hidden."""

    by: float | None


class AblatedKeys(ReadDocument):
    """Losses with the sink, or an equal number of control keys, ablated.

    Attributes:
        keys: set of the ablated keys, as in the module docstring.
        share: share of attention on the ablated keys, 0 to 1, mean over layers, heads and queries with such keys; for a
            bias, over all queries of the layers with a bias.
        value_zeroed, hidden, spread: loss with each of the three ablations.
        shifted: loss for each shift of the logits, in ascending order from minus infinity.
    """

    keys: Keys
    share: float
    value_zeroed: Effect
    hidden: Effect
    spread: Effect
    shifted: list[Shift]


class KeyAblations(AssessPart):
    """Ablations of the sink, with recent and random keys as controls.

    Attributes:
        sink_keys: number n of keys in each set except the bias, a learned sink token included.
        keys: losses by set of keys: the bias if the model has one, sink, recent, random.
    """

    name = "key_ablations"
    question = "Does the model need its attention to the sink?"
    loss_without_sink = "key_ablations"
    numbers = (PartNumber("sink_hidden_added", "Sink hidden, added loss", ("Sink hidden", "nats added")),)
    layout = PartFigure(
        "Ablation of the sink",
        "Loss added to {0.unchanged.loss:.3f} by shifting the logits of the sink's {0.counted}, and of the same number "
        "of recent and random keys as controls; a negative shift reduces the attention to the keys.",
        PlotAxis("Shift of the logits", "x", "shift", format="+~g"),
    )

    sink_keys: int
    keys: list[AblatedKeys]

    @classmethod
    def refusal(cls, adapter: Adapter, settings: AssessSettings) -> str | None:
        return Heads.refusal(adapter, settings)

    @property
    def counted(self) -> str:
        """The number of keys in each set, such as `key` or `2 keys`."""
        return several(self.sink_keys, "key")

    @classmethod
    def run(cls, given: PartInput) -> "KeyAblations":
        """Measure the loss for every ablation of the sink, and of an equal number of control keys."""
        reader, settings = given.reader(), given.settings
        kinds: list[Keys] = [*(["bias"] if has_bias(given.adapter) else []), "sink", "recent", "random"]
        selections = [SelectedKeys(keys, settings.sink_tokens, settings.seed) for keys in kinds]
        totals, rows = [0.0] * len(kinds), [0] * len(kinds)

        def add_shares(layer: LayerCall) -> Tensor:
            scores_BHLL, bias_BHL = layer.scores()
            whole_BHL = scores_BHLL.sum(-1) + (0 if bias_BHL is None else bias_BHL)
            whole_BHL = whole_BHL.masked_fill(whole_BHL == 0, 1)
            for number, selection in enumerate(selections):
                if selection.keys == "bias" and bias_BHL is not None:
                    share_BHL, counted = bias_BHL / whole_BHL, bias_BHL.numel()
                else:
                    selected_HLL = selection.matrix(layer)
                    share_BHL = (scores_BHLL * selected_HLL).sum(-1) / whole_BHL
                    rows_HL = selected_HLL.any(-1)
                    counted = int(rows_HL.sum()) * (share_BHL.shape[0] * share_BHL.shape[1] // len(rows_HL))
                totals[number] += float(share_BHL.double().sum())
                rows[number] += counted
            return layer.weighted(scores_BHLL, bias_BHL)

        given.passes.expect(len(given.tokens_NT) * (1 + len(kinds) * (3 + len(SHIFTS))))
        reader.observed(add_shares)
        found = []
        for one, total, counted in zip(selections, totals, rows, strict=True):
            hidden, zeroed, spread = (reader.under(x).effect() for x in (one.hidden, one.value_zeroed, one.spread))
            shifted = reader.effects(Shift, [({"by": by}, partial(one.shifted, by=by)) for by in SHIFTS])
            found.append(
                AblatedKeys(
                    keys=one.keys,
                    share=total / max(counted, 1),
                    value_zeroed=zeroed,
                    hidden=hidden,
                    spread=spread,
                    shifted=[Shift(by=None, **hidden.model_dump()), *shifted],
                )
            )
        return cls(**reader.result_fields(), sink_keys=settings.sink_tokens, keys=found)

    def rows(self) -> Iterator[PartRow]:
        """The answers are all ablations of the bias and the sink except shifts, and the control keys hidden."""
        yield self.unchanged_row()
        names = {"bias": "learned bias", "sink": f"first {self.counted}"}
        for number, one in enumerate(self.keys):
            keys, is_sink, leads = one.keys, one.keys in names, number == 0  # the first is the bias, if any
            name = names.get(keys, f"as many {keys} keys")
            yield self.row(
                f"{keys}: hidden",
                one.hidden,
                f"share {100 * one.share:.1f} %",
                answer=f"{name} hidden",
                lost=f"with the {name} hidden" if leads else "",
                numbers=["sink_hidden_added"] if leads else [],
            )
            yield self.row(
                f"{keys}: spread",
                one.spread,
                answer=f"attention to the {name} spread over others" if is_sink else "",
                lost="with its attention spread over the other keys" if leads else "",
            )
            zeroed = f"value of the {name} zeroed" if is_sink else ""
            yield self.row(f"{keys}: value zeroed", one.value_zeroed, answer=zeroed)
            for shift in one.shifted:
                if shift.by is not None:
                    yield self.row(f"{keys}: logit {shift.by:+g}", shift, points=[(keys, shift.by)])


@dataclass(frozen=True)
class SelectedKeys:
    """Selection of the keys to ablate for every query, and four ablations of an attention call.

    `hidden` and `shifted` are edits of the call, `value_zeroed` and `spread` compute its output.

    Attributes:
        keys: set of keys (see the module docstring).
        count: number n of selected keys.
        seed: random seed for random keys.
    """

    keys: Keys
    count: int = 1
    seed: int = 0

    def matrix(self, layer: LayerCall) -> Tensor:
        """Return a boolean mask (1 or H, L, L) of the selected keys; all False for the bias, which has no column."""
        L, device = layer.length, layer.call.q_BHTD.device
        q_L1, k_L = torch.arange(L, device=device)[:, None], torch.arange(L, device=device)
        if self.keys == "bias":
            return torch.zeros(1, L, L, dtype=torch.bool, device=device)
        if self.keys == "sink":
            return ((k_L < self.count) & (q_L1 >= self.count))[None]
        candidates_LL = (k_L >= self.count) & (k_L < q_L1)
        if self.keys == "recent":
            return (candidates_LL & (k_L >= q_L1 - self.count))[None]
        heads = layer.call.q_BHTD.shape[1]
        draw = _drawn if heads * L * self.count <= KEYS_KEPT else _drawn.__wrapped__
        chosen_HLN = draw(heads, L, self.count, self.seed + layer.index).to(device)
        chosen_HLL = torch.zeros(len(chosen_HLN), L, L, dtype=torch.bool, device=device)
        return chosen_HLL.scatter_(-1, chosen_HLN, True).logical_and_(candidates_LL)

    def hidden(self, layer: LayerCall) -> LayerCall:
        """Return the call with the selected keys masked; for the bias, without bias key, sink logit and bias value."""
        if self.keys == "bias":
            return layer.changed(key_HD=None, logit_BHT=None, value_HV=None)
        return layer.masked(Dense(~self.matrix(layer)[None], later=True))

    def shifted(self, layer: LayerCall, by: float) -> LayerCall:
        """Return the call with `by` added to the logits of the selected keys."""
        if self.keys == "bias":
            return replace(layer, call=_WithShiftedBias(**vars(layer.call), by=by), library=None)
        matrix_HLL = self.matrix(layer)

        def added(z: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, matrix_HLL: Tensor) -> Tensor:
            return z + by * matrix_HLL[h if len(matrix_HLL) > 1 else 0, q, k].to(z.dtype)

        return layer.changed(position=compose(layer.call.position, Score(added, (matrix_HLL,))))

    def value_zeroed(self, layer: LayerCall) -> Tensor:
        """Return the layer's output with the values of the selected keys zeroed and the attention weights unchanged."""
        scores_BHLL, bias_BHL = layer.scores()
        if self.keys == "bias":
            layer = layer.changed(value_HV=None)
        return layer.weighted(scores_BHLL.masked_fill(self.matrix(layer), 0), bias_BHL)

    def spread(self, layer: LayerCall) -> Tensor:
        """Return the layer's output with the attention of the selected keys spread over the other visible keys."""
        scores_BHLL, bias_BHL = layer.scores()
        L, selected_HLL = layer.length, self.matrix(layer)
        others_BHLL = layer.call.mask.block(0, L, 0, L, scores_BHLL.device) & ~selected_HLL
        taken_BHL = (scores_BHLL * selected_HLL).sum(-1)
        if self.keys == "bias" and bias_BHL is not None:
            taken_BHL, bias_BHL = bias_BHL, torch.zeros_like(bias_BHL)
        each_BHL = taken_BHL / others_BHLL.sum(-1).clamp(min=1)
        spread_BHLL = torch.where(selected_HLL, 0, scores_BHLL + each_BHL[..., None] * others_BHLL)
        return layer.weighted(spread_BHLL, bias_BHL)


@lru_cache(maxsize=LAYERS_KEPT)
def _drawn(heads: int, L: int, count: int, seed: int) -> Tensor:
    """Draw `count` random keys for every query, after the first `count` keys and before the query: (H, L, count).

    Early queries have fewer such keys; their rows also contain other keys, which the caller removes.
    """
    q_L1, k_L = torch.arange(L)[:, None], torch.arange(L)
    rank_HLL = torch.rand(heads, L, L, generator=torch.Generator().manual_seed(seed))
    return rank_HLL.masked_fill_((k_L < count) | (k_L >= q_L1), -1).topk(min(count, L), -1).indices


@dataclass(frozen=True)
class _WithShiftedBias(Call):
    by: float = 0.0

    def bias_logits(self, similarity: Score | None = None) -> Tensor | None:
        by = self.by

        def shifted(z: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return z + by

        return super().bias_logits(compose(Score(shifted), similarity))


def has_bias(adapter: Adapter) -> bool:
    """Return whether any attention layer has a bias key or a sink logit."""
    return any(layer.call.has_bias for layer in probe(adapter))
