"""Loss and KL divergence at every position, of the unchanged model and under interventions on the same text.

    loss_t = -log p(x_t+1 | x_1 .. x_t)                             nats
    kl_t   = sum_v p_t(v) (log p_t(v) - log q_t(v))                 nats

p_t is the next-token distribution of the unchanged model, q_t that of the model under an intervention.

On sequences longer than its context, the unchanged model is evaluated in windows of its context, which overlap by at
least half. Of each window after the first, only the predictions at tokens that are not in the previous window are
scored, so that every target beyond the first context is predicted from at least half a context.

Logits are computed in slices of rows. log p of the unchanged model is computed once and cached for all interventions,
up to `LOG_PROBABILITIES_KEPT` bytes per text; for further rows it is recomputed under every intervention. On a CPU,
loss and KL divergence are computed in slices that fit in its cache, so that an intervention costs little more than one
forward pass with the LM head. Two alternatives were rejected because they are inaccurate where the divergence is small:
half precision, and kl = sum p log p - sum p z + logsumexp(z), with z the logits of q and a cached sum p log p, which
does not require log q.

Rounding of activations, keys or values amplifies differences: a change in the last digits of the embeddings moves some
values to the next step of the grid in the first layers, and many in the last. The loss then varies although the model
and the text are the same. It is therefore the mean of several draws, in which the input of the first block is
multiplied by 1 + d x (`perturbed`; d: 1e-6, or a quarter of the resolution of the dtype if that is larger; x: normal).
The first draw is unchanged.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from sinklab.assessing.settings import AssessSettings
from sinklab.attention.layer_call import LayerCall
from sinklab.errors import InputError, SinklabError
from sinklab.models.adapter import Adapter
from sinklab.models.hooks import evaluating, intercept, replaced_inputs
from sinklab.models.memory_budget import LOGITS_AT_ONCE, free_bytes
from sinklab.schema import Omitted, ReadDocument

TOKENS_AT_ONCE = 2**11
TARGETS_OF_A_BLOCK = 64
DRAWS = 3  # number of random sets of heads, whose losses are averaged
NOISE = 1e-6  # least relative size of the perturbation in draws
LOG_PROBABILITIES_KEPT = 2**30  # bytes per text: 5,461 positions in float32 with a vocabulary of 49,152
SLICE = 2**19  # logits per slice on a CPU: 2 MiB in float32
Change = Callable[[LayerCall], LayerCall | Tensor]
"""Change of the attention: a function of an attention call that returns another call, or the output (B, H, T, V)."""

HeadSet = frozenset[tuple[int, int]]
"""Heads as pairs (layer, head), both 1-based; only attention layers are counted."""


class Effect(ReadDocument):
    """Loss of the model, unchanged or under an intervention, and its KL divergence from the unchanged model.

    Attributes:
        loss: mean loss over the target tokens (not the added loss).
        kl: mean over the targets of KL(unchanged model || model under the intervention).
        targets: number of target tokens.
        error: standard error of the added loss (`standard_error`); None for the unchanged model, for means over several
            draws (`mean_effect`), and for a single block of targets.
    """

    loss: float
    kl: float
    targets: int
    error: Omitted[float] = None


class DrawnEffect(Effect):
    """Mean loss over draws of an intervention with a random choice, such as of heads; without one there is one draw.

    Attributes:
        losses: loss of each draw.
    """

    losses: list[float]

    @property
    def range_of_draws(self) -> str:
        """Remark for a row of the table, such as `draws 2.7012 to 2.8151`; empty for a single draw."""
        return f"draws {min(self.losses):.4f} to {max(self.losses):.4f}" if len(self.losses) > 1 else ""


class SinkCost(ReadDocument):
    """Loss that rounding adds because of the sink.

    Attributes:
        due_to_sink: loss with all tokens rounded minus loss with the sink positions in full precision, mean over draws.
        due_error: standard error of `due_to_sink` over the text (`standard_error`); None for a single block of targets.
        draws: `due_to_sink` of each draw; None for a single draw.
    """

    due_to_sink: float
    due_error: Omitted[float] = None
    draws: Omitted[list[float]] = None

    @property
    def due_said(self) -> str:
        """Remark for a row of the table, such as `due to the sink +0.2607 ± 0.0709, draws +0.2308 to +0.2849`."""
        text = f"due to the sink {self.due_to_sink:+.4f}"
        text += "" if self.due_error is None else f" ± {self.due_error:.4f}"
        return text + (f", draws {min(self.draws):+.4f} to {max(self.draws):+.4f}" if self.draws else "")


class HeadCost(Effect):
    """Effect of quantising or restricting one KV head; `layer` (among attention layers) and `head` are 1-based."""

    layer: int
    head: int


@dataclass(frozen=True)
class ByPosition:
    """Loss and KL divergence at each of the P targets of N sequences.

    Attributes:
        first: 1-based position of the first target.
        loss_NP, kl_NP: loss and KL divergence of the targets at positions first .. T, in nats, float64.
        unchanged_NP: loss of the unchanged model at the same targets; None if this is the unchanged model.
    """

    first: int
    loss_NP: Tensor
    kl_NP: Tensor
    unchanged_NP: Tensor | None = None

    def effect(self, start: int = 1, stop: int | None = None) -> Effect:
        """Return mean loss and KL divergence over the targets at positions start .. stop - 1 (1-based); default: all.

        The standard error is clustered by blocks of 64 successive targets, as neighbouring targets are correlated.

        Raises:
            SinklabError: if a loss or KL divergence is not finite.
        """
        here = slice(max(start - self.first, 0), None if stop is None else max(stop - self.first, 0))
        loss_NP, kl_NP = self.loss_NP[:, here], self.kl_NP[:, here]
        loss, kl = float(loss_NP.mean()), float(kl_NP.mean())
        if not (loss_NP.isfinite().all() and kl_NP.isfinite().all()):
            raise SinklabError(
                "the loss or KL divergence is not finite: the model, unchanged or under an intervention, computes NaN "
                "or infinity. For a model in half precision, try --dtype float32"
            )
        error = None if self.unchanged_NP is None else standard_error(loss_NP - self.unchanged_NP[:, here])
        return Effect(loss=loss, kl=max(kl, 0.0), targets=loss_NP.numel(), error=error)


def mean_of(draws: Sequence[ByPosition]) -> ByPosition:
    """Return the mean loss and KL divergence of several draws at every target."""
    loss_NP, kl_NP = (torch.stack(x).mean(0) for x in ([d.loss_NP for d in draws], [d.kl_NP for d in draws]))
    return replace(draws[0], loss_NP=loss_NP, kl_NP=kl_NP)


def sink_cost(everything: Sequence[ByPosition], spared: Sequence[ByPosition]) -> dict[str, Any]:
    """Return the fields of a `SinkCost` from draws with all tokens rounded, and with the sink positions spared."""
    due_DNP = torch.stack([one.loss_NP - other.loss_NP for one, other in zip(everything, spared, strict=True)])
    due_NP, by_draw = due_DNP.mean(0), due_DNP.mean((1, 2)).tolist()
    return {
        "due_to_sink": float(due_NP.mean()),
        "due_error": standard_error(due_NP),
        "draws": by_draw if len(by_draw) > 1 else None,
    }


@contextmanager
def perturbed(adapter: Adapter, draw: int, seed: int = 0) -> Iterator[None]:
    """Change the last digits of the first block's input in the `with` block; draw 0 changes nothing."""

    def noisy(_: int, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed + draw)).to(x)
        return x * (1 + max(NOISE, torch.finfo(x.dtype).eps / 4) * noise)

    with replaced_inputs(adapter.blocks[:1] if draw else [], noisy):
        yield


def standard_error(x_NP: Tensor) -> float | None:
    """Compute the standard error of the mean of x, clustered by B blocks; None for a single block.

    A block has up to 64 successive positions of one sequence. The standard error is

        (B / (B - 1) sum_b (sum of x in block b - size of b * mean of x)^2)^(1/2) / (N P)
    """
    deviations_B = torch.stack([block_NK.sum(1) for block_NK in (x_NP - x_NP.mean()).split(TARGETS_OF_A_BLOCK, 1)])
    B = deviations_B.numel()
    return None if B < 2 else float((B / (B - 1) * deviations_B.square().sum()).sqrt()) / x_NP.numel()


OneEffect = TypeVar("OneEffect", bound=Effect)


@dataclass
class Passes:
    """Counts sequences read by the forward passes of a part, and reports how many were read and how many are expected.

    Attributes:
        report: callback (sequences read, sequences expected), called after every forward pass.
        done, total: the two numbers.
    """

    report: Callable[[int, int], None] = lambda done, total: None
    done: int = 0
    total: int = 0

    def expect(self, sequences: int) -> None:
        """Announce forward passes over this many sequences; those that were not announced count when they are done."""
        self.total = max(self.total, self.done + sequences)

    def read(self, sequences: int) -> None:
        """Count a forward pass."""
        self.done += sequences
        self.total = max(self.total, self.done)
        self.report(self.done, self.total)


@dataclass
class PartInput:
    """Model, sequences and settings of one part of an assessment.

    Attributes:
        tokens_NT: token ids.
        others_MT: token ids of separate sequences (`TextSize.others`).
        presses: presses of kvpress by name, for the part `prompt_cache` (`models/huggingface/presses.py`).
    """

    adapter: Adapter
    settings: AssessSettings
    tokens_NT: Tensor
    others_MT: Tensor | None = None
    passes: Passes = field(default_factory=Passes)
    presses: Mapping[str, Any] = field(default_factory=dict)

    def reader(self, **options: Any) -> "PairedReader":
        """Return a reader of the sequences; `options` are those of `PairedReader`."""
        return PairedReader(self.adapter, self.tokens_NT, self.passes, **options)

    def reader_of_others(self) -> "PairedReader":
        """Return a reader of the other sequences."""
        assert self.others_MT is not None, "the part asks for other sequences"
        return PairedReader(self.adapter, self.others_MT, self.passes)


class PairedReader:
    """Evaluate a model under interventions and compare it with the unchanged model on the same sequences.

    The hidden states of the unchanged model are cached, and its log-probabilities up to a maximum size.

    Args:
        tokens_NT: token ids.
        passes: counter of the sequences read.
        whole: whether to also evaluate the unchanged model on whole sequences, beyond its context.
        kept: maximum size of the cached log-probabilities in bytes; at most a quarter of the free memory is used.

    Attributes:
        unchanged: loss of the unchanged model in windows of its context.
        whole: loss of the unchanged model on whole sequences; None if not requested.
    """

    def __init__(
        self,
        adapter: Adapter,
        tokens_NT: Tensor,
        passes: Passes | None = None,
        *,
        whole: bool = False,
        kept: int = LOG_PROBABILITIES_KEPT,
    ) -> None:
        self.adapter, self.tokens_NT, self.passes = adapter, tokens_NT, passes or Passes()
        free = free_bytes(adapter.device)
        self._kept = kept if free is None else min(kept, free // 4)
        self._log_p_RV = list[Tensor]()
        self.whole: ByPosition | None = None
        with changed_attention(adapter):
            same_rope = not adapter.depends_on_length(adapter.context, tokens_NT.shape[1])
            whole_NTE = self._read(tokens_NT) if whole and same_rope else None
            self._unchanged_NTE = self._within_context(whole_NTE)
            self.unchanged = self.against(self._unchanged_NTE)
            self.passes.read(len(tokens_NT))
            if whole:  # last, as dynamic RoPE in transformers keeps the frequencies of long sequences
                self.whole = self.against(self._read(tokens_NT) if whole_NTE is None else whole_NTE)
                self.passes.read(len(tokens_NT))

    def result_fields(self) -> dict[str, Any]:
        """Return the fields that the results of all parts share: `sequences`, `length` and `unchanged`."""
        N, T = self.tokens_NT.shape
        return {"sequences": N, "length": T, "unchanged": self.unchanged.effect()}

    def effects(
        self, kind: Callable[..., OneEffect], conditions: Iterable[tuple[Mapping[str, Any], Change | Sequence[Change]]]
    ) -> list[OneEffect]:
        """Return the effect of each condition, with its labels as further fields of `kind`.

        Args:
            conditions: pairs of labels and a change; several changes are draws, whose mean effect is returned
                (`mean_effect`, for a subclass of `DrawnEffect`).
        """
        draws = [(labels, list(change) if isinstance(change, Sequence) else change) for labels, change in conditions]
        self.passes.expect(len(self.tokens_NT) * sum(len(x) if isinstance(x, list) else 1 for _, x in draws))
        found = []
        for labels, change in draws:
            if isinstance(change, list):
                found.append(kind(**labels, **mean_effect([self.under(one).effect() for one in change])))
            else:
                found.append(kind(**labels, **self.under(change).effect().model_dump()))
        return found

    def under(self, change: Change | None = None) -> ByPosition:
        """Return loss and KL divergence at every target, with changed attention calls.

        Sequences are evaluated whole, also if they are longer than the context. The caller may additionally modify the
        model in a `with` block, except for its LM head.
        """
        hidden_NTE = self.observed(change)
        with evaluating(self.adapter.module):
            return self.against(hidden_NTE)

    def observed(self, change: Change | None = None) -> Tensor:
        """Return the final hidden states (N, T, E) with changed attention calls, without computing logits."""
        with changed_attention(self.adapter, change):
            hidden_NTE = self._read(self.tokens_NT)
        self.passes.read(len(self.tokens_NT))
        return hidden_NTE

    def by_key_head(self, change: Callable[[HeadSet], Change]) -> list[HeadCost]:
        """Measure a change of each KV head alone, ordered by layer and head; `change` makes it for a set of heads."""
        heads = sorted(key_heads(self.adapter))
        return self.effects(HeadCost, [({"layer": one[0], "head": one[1]}, change(frozenset({one}))) for one in heads])

    def _within_context(self, whole_NTE: Tensor | None) -> Tensor:
        """Compute the unchanged model's hidden states (N, T, E) in windows of its context, as in the module docstring.

        Args:
            whole_NTE: hidden states of the whole sequences, reused for the first window; None to compute that window.
        """
        T, context = self.tokens_NT.shape[1], self.adapter.context
        if whole_NTE is None:
            whole_NTE = self._read(self.tokens_NT[:, :context])
        parts = [whole_NTE[:, :context]]
        for start in range(context, T, stride := max(1, context // 2)):
            stop = min(start + stride, T)
            window_NLE = self._read(self.tokens_NT[:, stop - context : stop])
            parts.append(window_NLE[:, start - stop :])
        return torch.cat(parts, 1)

    def _read(self, tokens_NT: Tensor) -> Tensor:
        batches = tokens_NT.split(max(1, TOKENS_AT_ONCE // tokens_NT.shape[1]))
        return torch.cat([self.adapter.hidden(tokens_BT.to(self.adapter.device)) for tokens_BT in batches])

    def against(self, hidden_NTE: Tensor) -> ByPosition:
        """Compute the loss of hidden states (N, T, E), and their KL divergence from the unchanged model."""
        first = self.adapter.first_target
        states_RE, before_RE = (x[:, first - 2 : -1].flatten(0, 1) for x in (hidden_NTE, self._unchanged_NTE))
        targets_R1 = self.tokens_NT[:, first - 1 :].reshape(-1, 1).to(self.adapter.device)
        vocabulary = self.adapter.logits(before_RE[:1]).shape[-1]
        rows = max(1, LOGITS_AT_ONCE // vocabulary)
        size = rows if states_RE.is_cuda else max(1, SLICE // vocabulary)
        losses, divergences = [], []
        for number, start in enumerate(range(0, len(states_RE), rows)):
            here = slice(start, start + rows)
            log_p_RV, targets_C1 = self._log_p(number, before_RE[here]), targets_R1[here]
            if torch.equal(states_RE[here], before_RE[here]):
                losses.append(-log_p_RV.gather(1, targets_C1)[:, 0].double())
                divergences.append(torch.zeros_like(losses[-1]))
                continue
            slices = (x.split(size) for x in (self.adapter.logits(states_RE[here]), log_p_RV, targets_C1))
            for z_SV, log_p_SV, targets_S1 in zip(*slices, strict=True):
                log_q_SV = F.log_softmax(z_SV, -1)
                losses.append(-log_q_SV.gather(1, targets_S1)[:, 0].double())
                divergences.append((log_p_SV.exp() * (log_p_SV - log_q_SV)).sum(-1).double())
        N = len(self.tokens_NT)
        loss_NP, kl_NP = (torch.cat(x).view(N, -1).cpu() for x in (losses, divergences))
        return ByPosition(first, loss_NP, kl_NP, None if hidden_NTE is self._unchanged_NTE else self.unchanged.loss_NP)

    def _log_p(self, number: int, states_RE: Tensor) -> Tensor:
        """Return log-probabilities of the unchanged model for `states_RE`, cached while the maximum size permits.

        Args:
            number: 0-based number of the slice of rows, which identifies it in the cache.
        """
        if number < len(self._log_p_RV):
            return self._log_p_RV[number]
        log_p_RV = F.log_softmax(self.adapter.logits(states_RE), -1)
        if number == len(self._log_p_RV) and log_p_RV.nbytes <= self._kept:
            self._kept -= log_p_RV.nbytes
            self._log_p_RV.append(log_p_RV)
        return log_p_RV


@contextmanager
def changed_attention(adapter: Adapter, change: Change | None = None) -> Iterator[None]:
    """Change a model's attention calls in the `with` block, in evaluation mode.

    Score scales other than 1 / sqrt(head dimension) are folded into the queries. The output is computed by `change` or
    by `LayerCall.output`, so that the unchanged and the changed model use the same kernel.
    """

    def unscaled(layer: LayerCall) -> LayerCall:
        scale, q_BHTD = layer.call.scale, layer.call.q_BHTD
        return layer if scale is None else layer.changed(q_BHTD=q_BHTD * (scale * q_BHTD.shape[-1] ** 0.5), scale=None)

    def output(layer: LayerCall) -> Tensor:
        changed = layer if change is None else change(layer)
        return changed if isinstance(changed, Tensor) else changed.output()

    with evaluating(adapter.module), intercept(adapter, edit=unscaled, compute=output):
        yield


def first_importance(layer: LayerCall) -> Tensor:
    """Compute the importance alpha of the first position, for each sequence of the batch and query head: (B, H).

    If the model has learned leading tokens, their total alpha is returned, which includes that of a bias key.
    """
    alpha = layer.importance()
    return alpha.bias_BH if layer.leading and alpha.bias_BH is not None else alpha.positions_BHT[..., 0]


def mean_effect(effects: Sequence[Effect]) -> dict[str, Any]:
    """Return fields of a result over draws: mean `loss` and `kl`, `targets` of one draw, and all losses as `losses`.

    `error` is that of a single draw, and None for several.
    """
    losses = [one.loss for one in effects]
    mean = {"loss": fmean(losses), "kl": fmean(one.kl for one in effects), "losses": losses}
    return {**mean, "targets": effects[0].targets, "error": effects[0].error if len(effects) == 1 else None}


def key_heads(adapter: Adapter) -> HeadSet:
    """Return all KV heads of a model."""
    return frozenset((one.index, head) for one in probe(adapter) for head in range(1, one.call.k_BGTD.shape[1] + 1))


def chosen_heads(layer: LayerCall, heads: HeadSet, count: int) -> Tensor:
    """Return a boolean mask over the layer's `count` KV or query heads, True for those in `heads`."""
    chosen = [(layer.index, head) in heads for head in range(1, count + 1)]
    return torch.tensor(chosen, device=layer.call.k_BGTD.device)


def probe(adapter: Adapter, change: Change | None = None) -> list[LayerCall]:
    """Run the model on four tokens with changed attention; return each layer's unchanged call.

    Raises:
        InputError: if the change cannot be made.
    """
    calls: list[LayerCall] = []

    def watch(layer: LayerCall) -> LayerCall | Tensor:
        calls.append(layer)
        return layer if change is None else change(layer)

    with changed_attention(adapter, watch):
        adapter.hidden(torch.tensor([[1, 0, 1, 0]], device=adapter.device))
    return calls


def refused(adapter: Adapter, change: Change | None = None) -> str | None:
    """Return the reason why a change of the attention cannot be made; None if it can."""
    try:
        probe(adapter, change)
    except InputError as error:
        return str(error)
    return None
