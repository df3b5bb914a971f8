"""Ablations: the same sequences without the first keys, without BOS, or without the massive activation.

    mask_first:N   no query after the N-th sees the first N keys                      (surgery.masked_first_keys)
    no_bos         the sequences without their leading special tokens
    zero_massive   the hidden-state entry (position, channel) with the largest ratio to the median is set to zero after
                   the first block after which it is the largest entry, and after every later block (surgery.zeroed)
    zero_massive:LAYER   the same entry is set to zero after this block only

The losses without and with the ablation are over the same targets: those predicted by a query from which keys are
hidden (mask_first), those present in both versions of the sequence (no_bos), or all targets. If an entry is zeroed
after one block only, as in Sun et al. (2402.17762, section 3), a later block may write it again: layer 12 of
SmolLM2-135M-Instruct does so for the channel zeroed after layer 2. The result therefore contains the largest remaining
activation.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from sinklab.attention.masks import real_tokens
from sinklab.errors import InputError, SinklabError
from sinklab.measuring.activations import MassiveActivation, largest_activations, strongest
from sinklab.measuring.findings import Ablation
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.statistics.highest import highest_rate
from sinklab.measuring.surgery.changes import masked_first_keys, zeroed
from sinklab.models.adapter import Adapter, residual_blocks
from sinklab.models.hooks import evaluating


@dataclass(frozen=True)
class Plan:
    """One ablation of one model, which can be run once.

    Attributes:
        name: requested name.
        what: description of the ablation.
        surgery: context manager that applies the ablation to the model; it can be entered once.
        first_target: 1-based position, in the unablated sequences, of the first target included in both losses.
        dropped: number of tokens removed from the start of each sequence.
        hidden: number of keys hidden from later queries; 0 for ablations that hide none.
        largest: for zero_massive, the activation with the largest ratio to the median; else None.
    """

    name: str
    what: str
    surgery: AbstractContextManager[None]
    first_target: int
    dropped: int = 0
    hidden: int = 0
    largest: MassiveActivation | None = None


def measure_ablations(
    adapter: Adapter,
    tokens_NT: Tensor,
    plans: Sequence[Plan],
    baseline: Measurement,
    remeasure: Callable[[Tensor, int], Measurement],
) -> list[Ablation]:
    """Measure the loss and the sinks under each ablation; the model is restored afterwards.

    Args:
        tokens_NT: token ids, without padding.
        plans: ablations, from `plan_ablation`.
        baseline: measurement of the same sequences in the unchanged model, with loss.
        remeasure: function (tokens, first target) -> measurement of the model in its current state.

    Returns:
        One result per plan, in order.

    Raises:
        SinklabError: if the model ignores its attention mask, so that keys are not hidden; see also `zeroed` and
            `masked_first_keys`, which may raise InputError too.
    """
    losses = {adapter.first_target: baseline.loss}  # baseline losses by first target
    found: list[Ablation] = []
    position_before, highest_before = highest_rate(baseline.sink_rate) or (None, None)
    for plan in plans:
        if plan.first_target not in losses:
            losses[plan.first_target] = remeasure(tokens_NT, plan.first_target).loss
        with plan.surgery:
            ablated = remeasure(tokens_NT[:, plan.dropped :], plan.first_target - plan.dropped)
            largest = strongest(_largest_by_block(adapter, tokens_NT[0]))[0] if plan.largest else None
        if plan.hidden:  # only the first `hidden` queries may attend to the hidden keys, each with at most 1 in total
            taken = (ablated.importance[..., : plan.hidden] * (ablated.length - np.arange(plan.hidden))).sum(-1)
            if taken.max() > plan.hidden * (1 + 1e-3):
                raise SinklabError(
                    f"the first keys are still visible to later queries in layer {int(taken.max(-1).argmax()) + 1}: "
                    "this model's attention ignores its attention mask, so mask_first cannot be measured"
                )
        before = losses[plan.first_target]
        assert before is not None
        assert ablated.loss is not None
        position, highest = highest_rate(ablated.sink_rate) or (None, None)
        found.append(
            Ablation(
                name=plan.name,
                what=plan.what,
                first_target=plan.first_target,
                loss_before=before,
                loss_after=ablated.loss,
                loss_change=ablated.loss - before,
                sink_rate_before=baseline.sink_rate[0],
                sink_rate_after=ablated.sink_rate[0],
                sink_rate=ablated.sink_rate,
                sink_max_before=highest_before,
                sink_max_position_before=position_before,
                sink_max_after=highest,
                sink_max_position_after=position,
                largest_before=plan.largest,
                largest_after=largest,
                still_massive=largest.is_massive if largest else None,
            )
        )
    return found


def _largest_by_block(adapter: Adapter, tokens_T: Tensor) -> list[MassiveActivation]:
    every = real_tokens(tokens_T.new_ones(1, adapter.leading + len(tokens_T)))
    with evaluating(adapter.module), largest_activations(residual_blocks(adapter), every) as found:
        adapter.run(tokens_T[None].to(adapter.device))
    return [one.model_copy(update={"position": one.position - adapter.leading}) for one in found]


def plan_ablation(name: str, adapter: Adapter, tokens_NT: Tensor, bos_tokens: int) -> Plan:
    """Build the plan of the named ablation; zero_massive runs the model on the first sequence.

    Args:
        name: name of the ablation, which `Study.check` has checked.
        bos_tokens: number of special tokens at the start of each sequence.

    Raises:
        InputError: if the layer does not exist, there is no BOS to remove, or the sequences without it are too short.
        SinklabError: if the name is zero_massive and the blocks of the model cannot be found.
    """
    kind, _, number = name.partition(":")
    first_target = adapter.first_target
    if kind == "mask_first":
        hidden = int(number)
        keys = "the first key is" if hidden == 1 else f"the first {hidden} keys are"
        return Plan(
            f"mask_first:{hidden}",
            f"{keys} hidden from later queries",
            masked_first_keys(adapter.module, hidden),
            first_target=max(hidden + 2, first_target),
            hidden=hidden,
        )
    if kind == "zero_massive":
        return _zero_massive(name, adapter, tokens_NT[0], number)
    if not bos_tokens:
        raise InputError("no_bos: the sequences have no BOS to remove; pass bos=True if position 1 is BOS")
    length, after = tokens_NT.shape[1], first_target + bos_tokens
    if length - bos_tokens < first_target:
        raise InputError(f"no_bos on sequences of {length} tokens leaves no token to predict: use longer sequences")
    return Plan("no_bos", "the sequences without BOS", nullcontext(), first_target=after, dropped=bos_tokens)


def _zero_massive(name: str, adapter: Adapter, tokens_T: Tensor, alone: str) -> Plan:
    found = _largest_by_block(adapter, tokens_T)
    top, layers = strongest(found)[0], len(found)
    one = next(one for one in found if (one.position, one.dimension) == (top.position, top.dimension))
    first, last = (int(alone), int(alone)) if alone else (one.layer, layers)
    if not 1 <= first <= layers:
        raise InputError(f"{name}: the model has layers 1 to {layers}")
    leading = adapter.leading
    learned = "the learned sink token" if leading == 1 else f"register {one.position + leading} of {leading}"
    where = f"position {one.position}" if one.position > 0 else learned
    after = f"layer {first} alone" if alone else f"layers {first} to {last}" if first < last else f"layer {first}"
    return Plan(
        name,
        f"dimension {one.dimension} at {where} is zeroed after {after} "
        f"(it was {top.value:,.1f} after layer {top.layer}, {top.ratio_to_median:,.0f} times the median)",
        zeroed(adapter.module, first, one.position, one.dimension, last),
        first_target=adapter.first_target,
        largest=top,
    )
