"""Interventions on a model within a `with` block.

    with masked_first_keys(model, 4):            # no query after the fourth sees the first four keys
    with zeroed(model, layer=2, position=1, dimension=447):
    with swapped_positions(model, 1, 5):         # learned embeddings; also replaced_position(model, 1, 5)

These functions support Hugging Face causal language models, sinklab transformers and exported models (not if loaded
with their own code, `trust_remote_code`). They can be used around or inside a probe, and restore the model afterwards,
also after an exception. Positions and layers are 1-based; with padding, position 1 is the first real token of each
sequence. `masked_first_keys` and `zeroed` do not support a KV cache.

Over-mixing (2504.02732): how far the effect of replacing one token spreads, with and without the first key.

The token at one position is replaced by the next sequence's token at that position. After every block

    spread = mean over sequences and later positions t of |h'_t - h_t| / |h_t|

is computed for the original model, and with the first key hidden from all later queries, so that no head can use it as
a sink. Before the first block the spread is 0. 2504.02732 does not hide the first key. It removes BOS from the text,
which is equivalent in a model with relative positions only, and reports the norm of the difference. Here this norm is
divided by that of the hidden state, because norms grow from block to block.

Ablations: the same sequences without the first keys, without BOS, or without the massive activation.

    mask_first:N   no query after the N-th sees the first N keys                      (`masked_first_keys`)
    no_bos         the sequences without their leading special tokens
    zero_massive   the hidden-state entry (position, channel) with the largest ratio to the median is set to zero after
                   the first block after which it is the largest entry, and after every later block (`zeroed`)
    zero_massive:LAYER   the same entry is set to zero after this block only
    mean_massive, mean_massive:LAYER   the entry is set to its mean over the sequences instead (2402.17762, table 3)

The losses without and with the ablation are over the same targets: those predicted by a query from which keys are
hidden (mask_first), those present in both versions of the sequence (no_bos), or all targets. If an entry is zeroed
after one block only, as in Sun et al. (2402.17762, section 3), a later block may write it again: layer 12 of
SmolLM2-135M-Instruct does so for the channel zeroed after layer 2. The result therefore contains the largest remaining
activation.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sinklab.attention.masks import real_tokens
from sinklab.errors import InputError, SinklabError
from sinklab.measuring.findings import Ablation, MassiveActivation, Mixing, largest_activations, strongest
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.options import check_pair
from sinklab.models.adapter import Adapter, LanguageModel, adapt, residual_blocks
from sinklab.models.families import family_of
from sinklab.models.hooks import (
    changed_entries,
    evaluating,
    hidden_states,
    hooked,
    probed_alone,
    residual_stream,
    token_norms,
)
from sinklab.tables import highest_rate


@contextmanager
def zeroed(
    model: LanguageModel,
    layer: int,
    position: int,
    dimension: int,
    last_layer: int | None = None,
    values: Sequence[float] = (),
) -> Iterator[None]:
    """Set one channel of the residual stream to a value at one position of every sequence, after one block or several.

    Sequences that end before the position are unchanged. Other forward hooks of a block receive the changed output,
    also if they were registered earlier.

    Args:
        layer: number of the block, 1-based.
        position: position, 1-based, without padding; 0 is the last learned token (sink token or register), -1 the one
            before it.
        dimension: channel, 0-based, as in `massive_activations`.
        last_layer: the channel is zeroed after each block from `layer` to this one; by default only after `layer`.
        values: the value after each of these blocks; default: zero.

    Raises:
        InputError: if a layer or the position does not exist, `last_layer` is below `layer`, or an exported model was
            loaded with its own code; in a forward pass, if the dimension does not exist, or the attention mask is not a
            padding mask.
        SinklabError: if the blocks cannot be found, or another thread changes, probes or intercepts the model; in a
            forward pass, if a KV cache with tokens, or a static one, is passed.
    """
    adapter = _adapt_in_place(model)
    blocks = residual_blocks(adapter)
    last_layer = layer if last_layer is None else last_layer
    for number in (layer, last_layer):
        if not 1 <= number <= len(blocks):
            raise InputError(f"layer {number} does not exist: use 1 to {len(blocks)}")
    if last_layer < layer:
        raise InputError(f"layers {layer} to {last_layer} are an empty range: use a last layer of at least {layer}")
    first = 1 - adapter.leading
    if position < first:
        raise InputError(f"position {position} does not exist: positions start at {first}")

    def leaving(value: float, _: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        hidden_BTC = hidden_states(output).clone()
        T, C = hidden_BTC.shape[1:]
        if not 0 <= dimension < C:
            raise InputError(f"dimension {dimension} does not exist: use 0 to {C - 1}")
        here_BT = torch.arange(T, device=hidden_BTC.device) == columns(hidden_BTC)[:, None] + position - 1
        hidden_BTC[..., dimension].masked_fill_(here_BT, value)
        if isinstance(output, torch.Tensor):
            return hidden_BTC
        changed = (hidden_BTC, *output[1:])
        return list(changed) if isinstance(output, list) else changed

    chosen = blocks[layer - 1 : last_layer]
    with (
        probed_alone(adapter.module),
        adapter.first_columns() as columns,
        hooked(
            block.register_forward_hook(partial(leaving, value), prepend=True)
            for block, value in zip(chosen, values or [0.0] * len(chosen), strict=True)
        ),
    ):
        yield


def swapped_positions(model: LanguageModel, i: int, j: int) -> AbstractContextManager[None]:
    """Swap the learned embeddings of positions i and j in the `with` block (2410.10781, table 7).

    Raises:
        InputError: when entered, if the model has no learned positional embeddings, they are offloaded, a position does
            not exist, i equals j, or an exported model was loaded with its own code.
        SinklabError: when entered, if another thread changes, probes or intercepts the model.
    """
    return _rewritten_positions(model, {i: j, j: i})


def replaced_position(model: LanguageModel, i: int, j: int) -> AbstractContextManager[None]:
    """Replace the learned embedding of position i by that of position j in the `with` block (2410.10781, table 7)."""
    return _rewritten_positions(model, {i: j})


@contextmanager
def _rewritten_positions(model: LanguageModel, source: dict[int, int]) -> Iterator[None]:
    """Give each position that is a key of `source` the learned embedding of the position that is its value."""
    adapter = _adapt_in_place(model)
    table_PC = adapter.position_table
    if table_PC is None:
        raise InputError(
            "the model has no learned positional embeddings to change, unlike GPT-2, OPT, GPT-Neo, "
            "or sinklab models with model.position.kind learnable"
        )
    if table_PC.is_meta:
        raise InputError(
            "the model's learned positional embeddings are offloaded and cannot be changed: load the whole model onto "
            "one device"
        )
    check_pair(*next(iter(source.items())))
    for position in {*source, *source.values()}:
        if position > len(table_PC):
            raise InputError(f"position {position} does not exist: the model has positions 1 to {len(table_PC)}")
    table_PC = table_PC.detach()
    rows, others = (torch.tensor(list(pick), device=table_PC.device) - 1 for pick in (source, source.values()))
    with probed_alone(adapter.module), changed_entries((table_PC, rows, table_PC[others])):
        yield


@contextmanager
def masked_first_keys(model: LanguageModel, n: int) -> Iterator[None]:
    """Hide keys 1..n from every query after the n-th, in every attention layer, in the `with` block.

    Queries 1..n are unchanged, so that no row of the attention matrix is empty; keys outside the sequence (sink
    logits, key biases, a learned sink token) remain visible. Sequences of at most n tokens are unchanged.

    Raises:
        InputError: if n is below 1, or an exported model was loaded with its own code; in a forward pass, if the
            attention mask is not a padding mask.
        SinklabError: if the blocks cannot be found, or another thread changes, probes or intercepts the model; in a
            forward pass of a Hugging Face model, if its attention accepts no explicit mask and is not intercepted, the
            keys cannot be hidden in every attention layer, or a static KV cache, or one with tokens, is passed.
    """
    if n < 1:
        raise InputError(f"{n} keys to hide: use at least 1")
    adapter = _adapt_in_place(model)
    residual_blocks(adapter)
    with probed_alone(adapter.module), adapter.without_first_keys(n):
        yield


def _adapt_in_place(model: LanguageModel) -> Adapter:
    adapter = adapt(model)
    if family_of(model).exported and adapter.module is not getattr(model, "transformer", None):
        raise InputError(
            "the exported model was loaded with its own code (trust_remote_code), of which sinklab measures an "
            "unchanged copy: call sinklab.register() and load the model without trust_remote_code"
        )
    return adapter


BATCH_SIZE = 4  # default number of sequences per forward pass, which runs each with and without the replacement
MIXING_PASSES = 4  # forward passes per sequence: original and replaced token, with the first key and without it


def measure_mixing(
    adapter: Adapter,
    tokens_NT: Tensor,
    position: int,
    batch_size: int | None = None,
    reached: Callable[[int], None] = lambda done: None,
) -> Mixing:
    """Measure how far replacing the token at one position spreads, by block; the model is restored afterwards.

    Args:
        tokens_NT: token ids, without padding.
        position: position of the replaced token, 1-based, within 2 .. T - 1 (`Study.check`).
        batch_size: sequences per forward pass, each with both tokens; by default `BATCH_SIZE`.
        reached: called after every forward pass with the work done so far. A sequence counts MIXING_PASSES times;
            sequences whose token cannot be replaced count as done.

    Raises:
        InputError: if all sequences have the same token at the position.
        SinklabError: if the blocks of the model cannot be found, or the first key cannot be hidden (see
            `masked_first_keys`).
    """
    changed_NT = tokens_NT.clone()
    changed_NT[:, position - 1] = tokens_NT[:, position - 1].roll(-1)
    differs_N = changed_NT[:, position - 1] != tokens_NT[:, position - 1]
    if not bool(differs_N.any()):
        raise InputError(
            f"--perturb {position}: all sequences have the same token there, so it cannot be replaced by that of "
            "another sequence; use another position, or more sequences"
        )
    pairs_N2T = torch.stack([tokens_NT[differs_N], changed_NT[differs_N]], 1)
    done = MIXING_PASSES * (len(tokens_NT) - len(pairs_N2T))  # sequences that are left out count as done
    spreads = []

    def change(hidden_BTC: Tensor) -> Tensor:
        """Return |h' - h| / |h|, mean over later positions, summed over sequences.

        h are the hidden states in the first half of the batch, h' those in the second half, with the replaced token.
        """
        before, after = hidden_BTC[:, adapter.leading + position :].double().chunk(2)
        return (token_norms(after - before) / token_norms(before).clamp(min=1e-30)).mean(1).sum().cpu()

    for surgery in (nullcontext(), masked_first_keys(adapter.module, 1)):
        total_M = torch.zeros(())
        with surgery, evaluating(adapter.module), residual_stream(residual_blocks(adapter), change) as found:
            for part_B2T in pairs_N2T.split(batch_size or BATCH_SIZE):
                adapter.run(part_B2T.transpose(0, 1).flatten(0, 1).to(adapter.device))
                total_M = total_M + torch.stack(found)
                done += 2 * len(part_B2T)
                reached(done)
        spreads.append((total_M / len(pairs_N2T)).tolist())
    with_first, without_first = spreads
    return Mixing(position=position, sequences=len(pairs_N2T), spread=with_first, spread_without_first=without_first)


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
        largest: for zero_massive and mean_massive, the activation with the largest ratio to the median; else None.
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
    """Build the plan of the named ablation; zero_massive and mean_massive run the model.

    Args:
        name: name of the ablation, which `Study.check` has checked.
        bos_tokens: number of special tokens at the start of each sequence.

    Raises:
        InputError: if the layer does not exist, there is no BOS to remove, or the sequences without it are too short.
        SinklabError: if the name is zero_massive or mean_massive and the blocks of the model cannot be found.
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
    if kind in ("zero_massive", "mean_massive"):
        return _massive(name, adapter, tokens_NT, number, to_mean=kind == "mean_massive")
    if not bos_tokens:
        raise InputError("no_bos: the sequences have no BOS to remove; pass bos=True if position 1 is BOS")
    length, after = tokens_NT.shape[1], first_target + bos_tokens
    if length - bos_tokens < first_target:
        raise InputError(f"no_bos on sequences of {length} tokens leaves no token to predict: use longer sequences")
    return Plan("no_bos", "the sequences without BOS", nullcontext(), first_target=after, dropped=bos_tokens)


def _massive(name: str, adapter: Adapter, tokens_NT: Tensor, alone: str, to_mean: bool) -> Plan:
    found = _largest_by_block(adapter, tokens_NT[0])
    top, layers = strongest(found)[0], len(found)
    one = next(one for one in found if (one.position, one.dimension) == (top.position, top.dimension))
    first, last = (int(alone), int(alone)) if alone else (one.layer, layers)
    if not 1 <= first <= layers:
        raise InputError(f"{name}: the model has layers 1 to {layers}")
    leading = adapter.leading
    learned = "the learned sink token" if leading == 1 else f"register {one.position + leading} of {leading}"
    where = f"position {one.position}" if one.position > 0 else learned
    after = f"layer {first} alone" if alone else f"layers {first} to {last}" if first < last else f"layer {first}"
    values = _means(adapter, tokens_NT, one)[first - 1 : last] if to_mean else []
    return Plan(
        name,
        f"dimension {one.dimension} at {where} is {'set to its mean' if to_mean else 'zeroed'} after {after} "
        f"(it was {top.value:,.1f} after layer {top.layer}, {top.ratio_to_median:,.0f} times the median)",
        zeroed(adapter.module, first, one.position, one.dimension, last, values),
        first_target=adapter.first_target,
        largest=top,
    )


def _means(adapter: Adapter, tokens_NT: Tensor, one: MassiveActivation) -> list[float]:
    """Return the mean over sequences of an activation's channel at its position, after each block."""
    column, total_L = adapter.leading + one.position - 1, torch.zeros(())
    with (
        evaluating(adapter.module),
        residual_stream(residual_blocks(adapter), lambda x_BTC: x_BTC[:, column, one.dimension].double().sum()) as sums,
    ):
        for part_BT in tokens_NT.split(BATCH_SIZE):
            adapter.run(part_BT.to(adapter.device))
            total_L = total_L + torch.stack([value.cpu() for value in sums])
    return (total_L[1:] / len(tokens_NT)).tolist()
