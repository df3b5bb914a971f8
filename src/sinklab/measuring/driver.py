"""The measuring loop: run batches of tokens through a model and accumulate the statistics of each batch.

`measure` measures a model; `measure_with_study` repeats this with interventions (changed positional embeddings,
ablations, a replaced token) and checks the propositions.

The attention layers are recorded by `NativeRecords` (sinklab transformers) or a `Recorder` (Hugging Face models).

Gradient sinks (2603.17771, Definition 1): the gradient of the loss at the attention input, by layer and position.

h~_t is the attention input, the output of the norm before attention. The gradients of the loss at h~_t are summed over
all sequences, as in an optimiser step, before the norm is computed:

    R_GS = |grad h~_1| / mean over t = 2 .. 32 of |grad h~_t|

The last position of a sequence has no target and no gradient; for T <= 32 the mean is over 2 .. T - 1. Zeros are
added to h~ in every layer, and the gradient is taken with respect to these zeros. The gradient therefore contains only
the path through attention, even if another part of the block uses the same norm output. The model's own attention code
is used.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sinklab.attention.importance import first_to_rest
from sinklab.attention.masks import RealTokens, real_tokens
from sinklab.attention.query_blocks import accumulate_dtype
from sinklab.errors import InputError, SinklabError
from sinklab.measuring.accumulate import Accumulator, Batches, costing, measurement_from
from sinklab.measuring.findings import explore, explored_heads, largest_activations, strongest
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.options import Options, Study
from sinklab.measuring.pretrained_records import Recorder
from sinklab.measuring.propositions import LENGTH, check_propositions
from sinklab.measuring.records import NativeRecords, batch_of, native_records
from sinklab.measuring.statistics.collecting import DetailsCollector
from sinklab.measuring.surgery import (
    MIXING_PASSES,
    measure_ablations,
    measure_mixing,
    plan_ablation,
    replaced_position,
    swapped_positions,
)
from sinklab.models.adapter import Adapter, NativeAdapter, check_length
from sinklab.models.hooks import (
    NO_BLOCKS,
    Progress,
    entering_norms,
    evaluating,
    hooked,
    requiring_grad,
    residual_stream,
    token_norms,
)
from sinklab.models.memory_budget import fitting_batch

COMPARED = 32
"""Number of positions in the ratio, including the first (T_e = 31 in 2603.17771, which counts from 0)."""

FEWEST = 3
"""Minimum sequence length for the ratio: position 1, another position, and the last one, which has no gradient."""


def check_gradients(adapter: Adapter, length: int, padded: bool) -> None:
    """Check, before the measurement, that gradients can be computed; may run the model on a few tokens.

    Args:
        length: number of tokens of each sequence.
        padded: whether the sequences have padding.

    Raises:
        InputError: if sequences are padded, shorter than FEWEST tokens, or have no target after the prefix of a prefix
            mask; see also `Adapter.attention_inputs`.
        SinklabError: if an attention call of a Hugging Face model cannot be interpreted.
    """
    if padded:
        raise InputError("gradients are measured on sequences without padding: remove the padded sequences")
    fewest = max(FEWEST, adapter.first_target)
    if length < fewest:
        raise InputError(
            f"gradients need sequences of at least {fewest} tokens: the last token has no target, and targets inside "
            "the prefix of a prefix mask are excluded"
        )
    with adapter.attention_inputs(lambda _, x_BTE: x_BTE):
        pass


def gradient_norms(
    adapter: Adapter,
    tokens_NT: Tensor,
    *,
    first_target: int = 2,
    batch_size: int | None = None,
) -> tuple[Tensor, list[str]]:
    """Compute the norm of the gradient of the mean loss (nats per token) with respect to h~_t.

    The model is restored afterwards.

    Args:
        tokens_NT: token ids, without padding.
        first_target: 1-based position of the first target included in the loss.
        batch_size: sequences per backward pass; by default as many as fit in memory with the activations of all blocks,
            at most 16 sequences and 8,192 tokens.

    Returns:
        The norm by attention layer and position, (L, T), and a list with a note if the batch size was reduced, else an
        empty list.

    Raises:
        SinklabError: if an attention call of a Hugging Face model cannot be interpreted, a gradient is not finite (the
            message names the layer), or a single sequence does not fit into memory.
    """
    N, T = tokens_NT.shape
    zeros: dict[int, Tensor] = {}

    def add_zero(index: int, x_BTE: Tensor) -> Tensor:
        zeros[index] = torch.zeros_like(x_BTE, requires_grad=True)
        return x_BTE + zeros[index]

    held = 2 * max(1, adapter.kinds.total)  # activations of all blocks, and the same again for logits and gradients
    size = batch_size or fitting_batch(adapter.sizes(matrices=False), T, adapter.device, held)
    batches = Batches(N, size, None, len(adapter.blocks))
    sums: list[Tensor] = []
    targets = 0
    with ExitStack() as stack:
        stack.enter_context(evaluating(adapter.module))
        stack.enter_context(requiring_grad(adapter.module.parameters(), False))  # autograd stores no inputs of layers
        stack.enter_context(adapter.attention_inputs(add_zero))  # may run the model on a few tokens
        stack.enter_context(torch.enable_grad())
        for start, stop in batches:
            with batches.attempt():
                zeros.clear()
                loss, number = adapter.summed_loss(tokens_NT[start:stop].to(adapter.device), first_target)
                found = torch.autograd.grad(loss, [zeros[index] for index in sorted(zeros)])
                parts = [x.to(accumulate_dtype(x.dtype)).sum(0)[adapter.leading :] for x in found]
                del loss, found
                sums = [a + b for a, b in zip(sums, parts, strict=True)] if sums else parts
                targets += number
        zeros.clear()
    norm_LT = torch.stack([total_TE.norm(dim=-1).cpu() for total_TE in sums]) / targets
    broken = (~norm_LT.isfinite().all(1)).nonzero()
    if len(broken):
        raise SinklabError(
            f"the gradients contain NaN or infinity in attention layer {int(broken[0]) + 1}, caused by the model or "
            "its dtype: load the model in float32 (--dtype float32)"
        )
    return norm_LT, batches.notes()


def measure(
    adapter: Adapter,
    tokens_NT: Tensor,
    options: Options,
    *,
    attention_mask_NT: Tensor | None = None,
    progress: Progress | None = None,
    trial: bool = True,
) -> Measurement:
    """Measure the sinks, norms and loss of a model on the given tokens; return a `Measurement`.

    The model is restored afterwards, also after an exception.

    Args:
        tokens_NT: token ids of N sequences of T tokens, without learned tokens (sink token, registers).
        options: settings of the measurement, and metadata stored with the result.
        attention_mask_NT: 1 at real tokens, 0 at padding (left or right); None if there is no padding. Position 1 is
            the first real token of each sequence; padding is excluded from all statistics.
        progress: called with (finished sequences, possibly fractional; total sequences) after every block and batch.
        trial: whether a Hugging Face model is first run on a few tokens to check that it is causal (`check_causal`).

    Raises:
        InputError: if the tokens, mask or options are invalid for this model, or gradients are requested from a model
            that does not support them.
        SinklabError: see `check_causal`; also if attention or hidden states cannot be recorded, another thread probes
            or intercepts the model, activations or gradients contain NaN or infinity (the message names the layer), the
            loss is NaN or infinite, or a single sequence does not fit into memory.
    """
    tokens_NT = tokens_NT.cpu()  # each check on the GPU would synchronise it
    mask_NT = torch.ones_like(tokens_NT) if attention_mask_NT is None else attention_mask_NT.cpu()
    if mask_NT.shape != tokens_NT.shape:
        raise InputError(
            f"the attention mask has shape {tuple(mask_NT.shape)} and the tokens {tuple(tokens_NT.shape)}; the "
            "shapes must be equal"
        )
    aligned = real_tokens(mask_NT)
    if padded := aligned.padded:  # on the right, each token has the position that it has without padding
        tokens_NT, mask_NT = tokens_NT.gather(1, aligned.index_BR), aligned.valid_BR.long()
    longest = mask_NT.shape[1]
    options.check_lengths(tokens_NT.shape[1])
    if options.maps:
        options.check_maps(adapter.attention_layers, adapter.heads)
    heads = explored_heads(adapter, options.maps) if options.explore else None
    check_length(longest, adapter.limit)
    adapter.check(tokens_NT, longest, options.lengths)
    if trial:
        adapter.check_causal(tokens_NT[0, : int(aligned.count_B[0]) if padded else longest])
    if options.gradients:
        if not adapter.has_head:
            raise InputError("the gradients are those of the loss, and the model has no LM head: leave them out")
        check_gradients(adapter, longest, padded)
    if options.lengths and padded:
        raise InputError("`lengths` needs sequences without padding: remove padded sequences, or leave out `lengths`")
    totals = Accumulator(options.eps, longest, options.lengths)
    details = DetailsCollector(options.maps, longest) if options.details or options.maps else None
    first_target = options.first_target if options.loss and adapter.has_head else None
    with ExitStack() as stack:
        cost = stack.enter_context(costing(adapter.device))
        stack.enter_context(evaluating(adapter.module))
        hidden = stack.enter_context(residual_stream(adapter.blocks, token_norms))
        before = stack.enter_context(entering_norms(adapter.post_norms))
        if details is not None:
            stack.enter_context(adapter.gated(details.gates))  # may run the model on a few tokens
        recording = _recording(adapter, options.lengths, details, options.dormant)
        records = stack.enter_context(recording)  # may run the model on two tokens
        first_sequence = _after_leading(adapter.leading, mask_NT[:1])
        largest = stack.enter_context(largest_activations(adapter.blocks, first_sequence))
        if details is not None:
            stack.enter_context(details.watching(adapter.blocks))
        N, T = tokens_NT.shape
        sizes = adapter.sizes(matrices=records.backend == "eager")
        batch_size = options.batch_size or fitting_batch(sizes, T, adapter.device)
        batches = Batches(N, batch_size, progress, len(adapter.blocks))
        stack.enter_context(hooked(block.register_forward_hook(batches.block_ran) for block in adapter.blocks))
        for start, stop in batches:
            batch = None  # remains None if the memory runs out
            with batches.attempt():
                tokens_BT = tokens_NT[start:stop].to(adapter.device, non_blocking=True)
                real = _after_leading(adapter.leading, mask_NT[start:stop]).to(adapter.device)
                records.clear()
                if details is not None:
                    details.begin(real)
                loss = adapter.read(tokens_BT, real, first_target, records.paused())
                found = None if details is None else details.batch(F.pad(tokens_BT, (adapter.leading, 0)))
                batch = batch_of(records.layers, hidden, real, loss, found, adapter.leading, before).on_cpu()
            if batch is not None:
                totals.add(batch)  # not in the attempt, which may fail and be repeated
            batch = found = None  # the next batch needs the memory
        notes = [*adapter.kinds.notes(), *adapter.notes(), *batches.notes()]
    if first_target is not None and longest > 1 and not totals.targets:
        notes.append(f"no loss: the prefix mask leaves no targets in {longest} tokens")
    if not adapter.blocks:
        notes.append(f"no hidden-state norms or massive activations of this model: {NO_BLOCKS}")
    measurement = measurement_from(
        totals,
        cost,
        options,
        proxy=adapter.proxy,
        backend=records.backend,
        dtype=str(adapter.dtype).removeprefix("torch."),
        massive_activations=strongest(largest) if adapter.blocks else None,
        notes=notes,
    )
    if padded:
        measurement = measurement.model_copy(update={"sequence_lengths": aligned.count_B.tolist()})
    if options.gradients:
        first, size = options.first_target, options.batch_size
        norm_LT, halved = gradient_norms(adapter, tokens_NT, first_target=first, batch_size=size)
        ratio = first_to_rest(norm_LT[:, : min(COMPARED, norm_LT.shape[1] - 1)])  # R_GS (module docstring)
        added = {"gradient_norm_ratio": ratio.tolist(), "gradient_norm": norm_LT.float().numpy()}
        measurement = measurement.model_copy(update=added | {"notes": [*measurement.notes, *halved]})
    few = adapter.attention_layers * adapter.heads <= options.explore_at_most and longest > 1
    if options.explore or few:
        with suppress(*([] if options.explore else [SinklabError])):
            explored = explore(adapter, tokens_NT[0, mask_NT[0].bool()], heads, partial(_recording, adapter, ()))
            measurement = measurement.model_copy(update={"explored": explored})
    return measurement


def _recording(
    adapter: Adapter, lengths: Sequence[int], details: DetailsCollector | None, dormant: bool = False
) -> AbstractContextManager[NativeRecords | Recorder]:
    if isinstance(adapter, NativeAdapter):
        return native_records(adapter, lengths, details, dormant)
    from sinklab.measuring.probe import adapter_records

    return adapter_records(adapter.module, adapter, lengths, details)


def _after_leading(leading: int, mask_BT: Tensor) -> RealTokens:
    """Return the real tokens of a batch in which `leading` learned tokens precede the columns of `mask_BT`."""
    return real_tokens(F.pad(mask_BT, (leading, 0)))


TOKENS = 8  # maximum number of repeated tokens on which the propositions are checked


@contextmanager
def changed_positions(adapter: Adapter, study: Study) -> Iterator[list[str]]:
    """Swap or replace learned positional embeddings in the `with` block; yield the notes on these changes."""
    notes = []
    with ExitStack() as stack:
        for change, pair, note in (
            (swapped_positions, study.swap_position, "the learned positions {} and {} were swapped"),
            (replaced_position, study.replace_position, "learned position {} was replaced by {}"),
        ):
            if pair is not None:
                stack.enter_context(change(adapter.module, *pair))
                notes.append(note.format(*pair))
        yield notes


def measure_with_study(
    adapter: Adapter,
    tokens_NT: Tensor,
    options: Options,
    study: Study,
    *,
    bos_tokens: int,
    progress: Progress | None = None,
) -> Measurement:
    """Measure the model, and the effects of the interventions in `study`, on the given sequences.

    For sequences of at least two repeated tokens, the propositions of 2410.10781 are checked. If it is not known which
    proposition covers the model, a note states this.

    Args:
        tokens_NT: token ids, without padding.
        study: interventions, which are possible on sequences of this length (`Study.check`).
        options: settings of the measurement. Ablations are measured without lengths, details, maps, explored heads and
            gradients.
        bos_tokens: number of special tokens at the start of each sequence.
        progress: called with (finished sequences, possibly fractional; total sequences) after every block and batch,
            including the passes of ablations and `perturb`.

    Raises:
        InputError: see `driver.measure`; also if an ablation or a position does not exist in the model or the
            sequences, no token can be replaced at `perturb`, or ablations are requested and there is no loss.
        SinklabError: see `driver.measure`; also if an ablation, `perturb` or the propositions are impossible.
    """
    plain = {"lengths": (), "details": False, "maps": (), "explore": False, "explore_at_most": 0, "gradients": False}
    bare = options.model_copy(update=plain)
    passes, before = 1, 0

    def reached(done: float, sequences: int) -> None:
        if progress is not None:
            progress(before * sequences + done, passes * sequences)

    def remeasure(tokens_NT: Tensor, first_target: int) -> Measurement:
        nonlocal before
        before += 1
        changed = bare.model_copy(update={"first_target": first_target})
        return measure(adapter, tokens_NT, changed, progress=reached, trial=False)

    with changed_positions(adapter, study) as notes:
        plans = [plan_ablation(name, adapter, tokens_NT, bos_tokens) for name in study.ablate]
        passes += len(plans) + len({plan.first_target for plan in plans} - {adapter.first_target})  # baseline losses
        passes += 0 if study.perturb is None else MIXING_PASSES
        measurement = measure(adapter, tokens_NT, options, progress=reached)
        if plans and measurement.loss is None:
            raise InputError(
                "ablations report the change in loss, and there is no loss: measure with the loss, on a "
                "model with an LM head and sequences of 2 tokens or more that are longer than the prefix of a prefix "
                "mask, if any"
            )
        found: dict[str, Any] = {}
        if plans:
            found["ablations"] = measure_ablations(adapter, tokens_NT, plans, measurement, remeasure)
        if study.perturb is not None:
            before += 1
            found["mixing"] = measure_mixing(
                adapter, tokens_NT, study.perturb, options.batch_size, lambda done: reached(done, len(tokens_NT))
            )
        if study.perturb is not None or any(plan.hidden for plan in plans):
            notes += adapter.kinds.notes_on_hidden_keys()
        if measurement.inputs == "repeat":
            found["propositions"] = None
            if tokens_NT.shape[1] > 1:
                ids, times = tokens_NT[:TOKENS, -1].tolist(), min(tokens_NT.shape[1], LENGTH)
                try:
                    found["propositions"] = check_propositions(adapter, ids, times)
                except InputError as error:
                    notes.append(f"the propositions on repeated tokens were not checked: {error}")
    if notes:
        found["notes"] = [*measurement.notes, *notes]
    return measurement.model_copy(update=found)
