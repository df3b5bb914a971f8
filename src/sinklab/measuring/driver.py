"""The measuring loop: run batches of tokens through a model and accumulate the statistics of each batch.

The attention layers are recorded by `NativeRecords` (sinklab transformers) or a `Recorder` (Hugging Face models).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from sinklab.attention.masks import RealTokens, real_tokens
from sinklab.errors import InputError
from sinklab.measuring.accumulate import Accumulator, measurement_from
from sinklab.measuring.activations import largest_activations, strongest
from sinklab.measuring.batches import Batches, costing
from sinklab.measuring.explored import explore, explored_heads
from sinklab.measuring.gradients import check_gradients, gradient_norms, gradient_sink
from sinklab.measuring.huggingface.recorder import Recorder
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.options import Options
from sinklab.measuring.records import NativeRecords, batch_of, native_records
from sinklab.measuring.statistics.collecting import DetailsCollector
from sinklab.models.adapter import Adapter
from sinklab.models.hooks import (
    NO_BLOCKS,
    Progress,
    entering_norms,
    evaluating,
    hooked,
    residual_stream,
    token_norms,
    uncompiled,
)
from sinklab.models.memory_budget import fitting_batch
from sinklab.models.native import NativeAdapter


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
            that does not support them (gradients.py).
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
    adapter.check(tokens_NT, longest, options.lengths)
    if trial:
        adapter.check_causal(tokens_NT[0, mask_NT[0].bool()])
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
        stack.enter_context(uncompiled(adapter.module))
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
        sizes = adapter.sizes(padded, matrices=records.backend == "eager")
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
    if options.gradients:
        first, size = options.first_target, options.batch_size
        norm_LT, halved = gradient_norms(adapter, tokens_NT, first_target=first, batch_size=size)
        added = {"gradient_norm_ratio": gradient_sink(norm_LT), "gradient_norm": norm_LT.float().numpy()}
        measurement = measurement.model_copy(update=added | {"notes": [*measurement.notes, *halved]})
    if options.explore:
        explored = explore(adapter, tokens_NT[0, mask_NT[0].bool()], heads, partial(_recording, adapter, ()))
        measurement = measurement.model_copy(update={"explored": explored})
    return measurement


def _recording(
    adapter: Adapter, lengths: Sequence[int], details: DetailsCollector | None, dormant: bool = False
) -> AbstractContextManager[NativeRecords | Recorder]:
    if isinstance(adapter, NativeAdapter):
        return native_records(adapter, lengths, details, dormant)
    from sinklab.measuring.huggingface.probe import adapter_records

    return adapter_records(adapter.module, adapter, lengths, details)


def _after_leading(leading: int, mask_BT: Tensor) -> RealTokens:
    """Return the real tokens of a batch in which `leading` learned tokens precede the columns of `mask_BT`."""
    return real_tokens(F.pad(mask_BT, (leading, 0)))
