"""Measuring a Hugging Face causal language model: batches of tokens through a probed model."""

import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sinklab.errors import InputError
from sinklab.measuring.accumulate import Accumulator, Batch
from sinklab.measuring.activations import largest_activations, strongest
from sinklab.measuring.batches import in_batches, reporting
from sinklab.measuring.cost import costing
from sinklab.measuring.hooks import Progress, check_lengths, check_request, evaluating, residual_norms, stacked
from sinklab.measuring.huggingface.context import check_length, rotary_parameters
from sinklab.measuring.huggingface.gguf import is_unpacked
from sinklab.measuring.huggingface.interface import decoder_blocks
from sinklab.measuring.huggingface.loading import input_device, quantisation, vocabulary_size
from sinklab.measuring.huggingface.loss import forward_loss, forward_only, makes_logits_in_pieces
from sinklab.measuring.huggingface.probe import AnyProbe, probe
from sinklab.measuring.measurement import Inputs, Measurement, measurement_from
from sinklab.measuring.memory import fitting_batch, sizes_of_pretrained
from sinklab.measuring.padding import RealTokens, real_tokens
from sinklab.measuring.statistics.watch import BatchDetails, DetailsWatch
from sinklab.measuring.visible import visible_layers


def measure_pretrained(
    model: PreTrainedModel,
    tokens_NT: Tensor,
    *,
    attention_mask_NT: Tensor | None = None,
    eps: float | Sequence[float] = 0.3,
    lengths: Sequence[int] = (),
    batch_size: int | None = None,
    first_target: int = 2,
    loss: bool = True,
    details: bool = False,
    maps: Sequence[tuple[int, int]] = (),
    model_name: str = "",
    inputs: Inputs = "natural",
    bos: bool = False,
    progress: Progress | None = None,
) -> Measurement:
    """Sinks, norms and loss of a Hugging Face causal LM; the model is left as it was found.

    Args:
        tokens_NT: token ids.
        attention_mask_NT: 1 at real tokens, 0 at padding (left or right); None where nothing is padded. Position 1
            is the first real token of each sequence; padding counts nowhere.
        eps: threshold of the sink rate, a share of attention in (0, 1); of several, the first is the headline.
        lengths: shorter than the sequences, increasing: the sink rate is also that of the sequences cut at each, from
            the same pass. Without padding only.
        batch_size: sequences per forward pass; changes memory and speed, not the result. None: as many as fit the
            memory, at most 16 (memory.py). Halved where they do not fit, which the result's notes say.
        first_target: the loss is over the targets from this position on, 1-based.
        loss: False leaves it out, and with it the logits: a third of the work of a small model with many words.
        details: also angles, entropy and what else details.py defines.
        maps: (layer, head), 1-based, whose matrices are kept; implies details.
        model_name, inputs, bos: recorded with the result.
        progress: called with (sequences done, sequences in all) after every batch.

    Raises:
        InputError: nothing to measure, token ids outside the vocabulary, more tokens than the model has positions, a
            mask that is not a padding mask.
        SinklabError: attention that could not be recorded, or NaN in the activations (the layer is named).
    """
    check_request(tokens_NT, eps, batch_size)
    _check_tokens(model, tokens_NT, attention_mask_NT)
    _check_lengths(model, lengths, tokens_NT, attention_mask_NT)
    mask_NT = torch.ones_like(tokens_NT) if attention_mask_NT is None else attention_mask_NT
    device = input_device(model)
    blocks = decoder_blocks(model)
    totals = Accumulator(eps, int(real_tokens(mask_NT).count_B.max()), lengths)
    check_length(model.config, totals.length)
    seen = DetailsWatch(maps, totals.length) if details or maps else None
    with ExitStack() as stack:
        cost = stack.enter_context(costing(device))
        stack.enter_context(evaluating(model))
        hidden = stack.enter_context(residual_norms(blocks))
        watch = stack.enter_context(probe(model, lengths, seen))  # may try the model on two tokens first
        largest = stack.enter_context(largest_activations(blocks, real_tokens(mask_NT[:1])))
        if seen is not None:
            stack.enter_context(seen.watching(blocks))
        steps = stack.enter_context(reporting(blocks, progress, len(tokens_NT)))

        def step(start: int, stop: int) -> None:
            tokens_BT, mask_BT = (x[start:stop].to(device) for x in (tokens_NT, mask_NT))
            real = real_tokens(mask_BT)
            if seen is not None:
                seen.begin(real)
            steps.begin(start, stop)
            watch.clear()
            summed = (0.0, 0)
            if loss:
                summed = forward_loss(
                    model,
                    tokens_BT,
                    real.from_position(first_target - 1),
                    arguments=_arguments(model, real),
                    vocabulary=vocabulary_size(model),
                    paused=watch.paused(),
                )
            else:
                forward_only(model, tokens_BT, _arguments(model, real))
            totals.add(_batch(watch, hidden, real, summed, None if seen is None else seen.batch(tokens_BT)))
            steps.end()

        if batch_size is None:
            sizes = sizes_of_pretrained(
                model.config,
                matrices="eager" in watch.backends,
                padded=not bool(mask_NT.all()),
                logits=not makes_logits_in_pieces(model),
            )
            batch_size = fitting_batch(sizes, tokens_NT.shape[1], device)
        notes = _quantised(model) + in_batches(len(tokens_NT), batch_size, step)
    return measurement_from(
        totals,
        cost,
        model=model_name,
        inputs=inputs,
        bos=bos,
        proxy=False,
        backend="+".join(sorted(watch.backends)),
        dtype=str(model.dtype).removeprefix("torch."),
        massive_activations=strongest(largest) if blocks else None,
        notes=notes,
    )


def _quantised(model: PreTrainedModel) -> list[str]:
    method = quantisation(model.config)
    if method == "gguf" and is_unpacked(model):
        return ["the weights come from a gguf file and are unpacked"]
    return [f"the weights are quantised ({method}); dtype is that of the rest"] if method else []


def _check_tokens(model: PreTrainedModel, tokens_NT: Tensor, attention_mask_NT: Tensor | None) -> None:
    vocabulary = vocabulary_size(model)
    low, high = int(tokens_NT.min()), int(tokens_NT.max())
    if low < 0 or high >= vocabulary:
        raise InputError(
            f"token id {low if low < 0 else high} is outside the model's vocabulary of {vocabulary} tokens: "
            "the tokenizer belongs to another model"
        )
    if attention_mask_NT is not None and attention_mask_NT.shape != tokens_NT.shape:
        raise InputError(
            f"the attention mask has shape {tuple(attention_mask_NT.shape)} and the tokens {tuple(tokens_NT.shape)}; "
            "they must be equal"
        )


def _check_lengths(
    model: PreTrainedModel, lengths: Sequence[int], tokens_NT: Tensor, attention_mask_NT: Tensor | None
) -> None:
    longest = tokens_NT.shape[1]
    check_lengths(lengths, longest)
    for length in lengths:
        if _turns_otherwise(model, length, longest):
            raise InputError(
                f"the model turns its positions otherwise in sequences of {longest} tokens than in those of {length} "
                f"(its rotary embedding depends on the length), so one pass cannot give both: measure {length} apart"
            )
    if lengths and attention_mask_NT is not None and not bool(attention_mask_NT.all()):
        raise InputError("several lengths need sequences without padding: leave out the padded ones, or `lengths`")


def _turns_otherwise(model: PreTrainedModel, length: int, longest: int) -> bool:
    """Whether rotary embeddings differ between sequences of two lengths (`dynamic_rope_update` of transformers)."""
    text = model.config.get_text_config(decoder=True)
    for rope in rotary_parameters(model.config):
        kind = rope.get("rope_type")
        if kind == "longrope" and length <= rope["original_max_position_embeddings"] < longest:
            return True
        if kind == "dynamic" and longest > text.max_position_embeddings:
            return True
    return False


def _arguments(model: PreTrainedModel, real: RealTokens) -> dict[str, Any]:
    """A mask and positions where there is padding (learned positions start at the first real token), no cache."""
    arguments: dict[str, Any] = {"use_cache": False}
    if real.padded:
        arguments["attention_mask"] = real.mask_BT.long()
        if "position_ids" in inspect.signature(model.forward).parameters:
            arguments["position_ids"] = (real.mask_BT.long().cumsum(-1) - 1).clamp(min=0)
    return arguments


def _batch(
    watch: AnyProbe, hidden: list[Tensor], real: RealTokens, loss: tuple[float, int], details: BatchDetails | None
) -> Batch:
    layers = watch.layers
    bias = [layer.bias_BH for layer in layers if layer.bias_BH is not None]
    return Batch(
        importance_ABHT=stacked([layer.importance_BHT for layer in layers]),
        bias_ABH=stacked(bias) if bias else None,
        hidden_MBT=stacked([real.align(norm_BT) for norm_BT in hidden]) if hidden else None,
        key_ABT=stacked([layer.key_norm_BT for layer in layers]),
        value_ABT=stacked([layer.value_norm_BT for layer in layers]),
        loss=loss[0],
        targets=loss[1],
        valid_BT=real.valid_BR,
        details=details,
        prefixes=[stacked(list(parts)) for parts in zip(*(layer.prefixes for layer in layers), strict=True)],
        visible_ABHT=visible_layers(
            [layer.importance_BHT for layer in layers], [layer.visible_BHT for layer in layers]
        ),
        views=[layer.view for layer in layers],
    )
