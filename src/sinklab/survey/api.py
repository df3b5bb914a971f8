"""`sinklab.measure`: measure a model in memory, or one by its name, on token ids or on a text.

Trainer callback (transformers, trl) that measures sinks at every evaluation.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers.trainer_callback import TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from sinklab.attention.masks import real_tokens
from sinklab.data.textfiles import given_text
from sinklab.errors import InputError, named_arguments
from sinklab.measuring.driver import measure as measure_tokens
from sinklab.measuring.driver import measure_with_study
from sinklab.measuring.inputs import batch_tokens, token_matrix
from sinklab.measuring.measurement import FED, Fed, Measurement
from sinklab.measuring.monitor import LoggingCallback
from sinklab.measuring.options import Inputs, Options, Request, Study
from sinklab.models.adapter import LanguageModel, NativeAdapter, adapt, unwrapped
from sinklab.models.families import text_config
from sinklab.models.hooks import Progress, measured_in_turn
from sinklab.models.huggingface.loading import AS_IT_IS, Loading
from sinklab.opening import model_in_memory, open_model
from sinklab.schema import finite_or_none
from sinklab.survey.measure import measure_loaded


@named_arguments("text", "tokenizer", *Request.model_fields, *Options.model_fields, *Study.model_fields)
def measure(
    model: "LanguageModel | str | Path",
    tokens: Tensor | np.ndarray | Sequence[Sequence[int]] | Mapping[str, Any] | Iterable[Any] | None = None,
    *,
    text: str | Path | Sequence[Any] | None = None,
    column: str | None = None,
    tokenizer: Any = None,
    sequences: int = 100,
    length: int = 64,
    seed: int = 0,
    attention_mask: Tensor | np.ndarray | Sequence[Sequence[int]] | None = None,
    eps: float | Sequence[float] = 0.3,
    lengths: Sequence[int] = (),
    batch_size: int | None = None,
    loss: bool = True,
    details: bool = False,
    maps: Sequence[tuple[int, int]] = (),
    explore: bool = False,
    gradients: bool = False,
    ablate: Sequence[str] = (),
    perturb: int | None = None,
    model_name: str = "",
    inputs: Inputs = "natural",
    bos: bool | None = None,
    progress: Progress | None = None,
) -> Measurement:
    """Measure the sinks, norms and loss of a causal language model; return a `Measurement`.

    On token ids if `tokens` are given, else on a text, with the result of `sinklab measure MODEL --text TEXT`. A model
    in memory is restored afterwards, also after an exception.

    Args:
        model: a Hugging Face causal language model, a sinklab transformer, or an exported sinklab transformer; or the
            name of a model: a run directory, a model directory, a .gguf file, or a name on the Hugging Face hub.
        tokens: token ids (sequences, length): a tensor on any device, an array, a list of lists of integers, or the
            batch that a tokenizer returns (`input_ids`, with its `attention_mask`), or all batches of a DataLoader,
            list or other iterable, padded to one length. None for sequences of a text, or of
            random or repeated tokens (`inputs`).
        text: a list of documents (strings, conversations as lists of messages, or rows of a .jsonl file), the messages
            of one conversation, a text file, a folder of them, or a source such as "stdlib"; default: the text that
            comes with sinklab. Only without `tokens`.
        column: column of the text or messages, if `text` has rows; default: text, messages and others (measuring.md).
        tokenizer: tokenizer of a Hugging Face model, for a text, or the path or hub name of one; default: that of the
            directory or hub name from which the model was loaded.
        sequences: number of sequences; fewer, with a note, if a list of documents is short. Only without `tokens`.
        length: tokens per sequence. Only without `tokens`.
        seed: random seed of random and repeated tokens. Only without `tokens`.
        attention_mask: 1 at real tokens, 0 at padding on the left or right; None if there is no padding. Padding is not
            supported for sinklab transformers, exported or not.
        eps: threshold of the sink rate on the importance alpha, in (0, 1); `Measurement.eps` is the first of several.
        lengths: increasing lengths below the length of the sequences. The sink rate is also measured on the sequences
            truncated to each of these lengths. Padding is not supported.
        batch_size: sequences per forward pass; affects memory and speed, not the result. By default as many as fit in
            memory, but at most 16 sequences and 8,192 tokens. It is halved when memory runs out.
        loss: if False, skip the loss and the logits, which saves up to a third of the compute of a small model.
        details: also measure the statistics of `Details` (details.py), such as entropy, query-key angles, attention by
            distance, secondary sinks and kurtosis; the measurement takes about twice as long.
        maps: (layer, head) pairs, 1-based. The matrices of attention, cosine and norm product of these heads are added
            to `Measurement.details`; implies `details`.
        explore: also save the attention map of every head on the first 128 tokens of the first sequence, in 8 bits
            (findings.py). This takes one more forward pass, and one byte per head, query and key. In a model with more
            than 1,000 heads, `maps` is required, and only the heads in `maps` are saved.
        gradients: also measure the gradient norm of the loss at the attention input, by layer and position, and the
            ratio R_GS of gradient sinks (driver.py). This takes another forward and a backward pass per batch.
            Padding is not supported.
        ablate: ablations to measure: "mask_first:N", "no_bos", "zero_massive", "mean_massive", and the last two with
            ":LAYER" (surgery.py). Padding is not supported.
        perturb: 1-based position whose token is replaced, to measure how far the effect spreads (surgery.py). Padding
            is not supported.
        model_name: model name, stored with the result; default: the name of a model that was given by its name.
        inputs: kind of input tokens: "natural", "random" or "repeat"; of `tokens` it is only stored with the result.
            For "repeat" without padding, the propositions of 2410.10781 are checked too (propositions.py).
        bos: of `tokens`, whether position 1 is a special token; by default True if every sequence begins with the
            `bos_token_id` of the model's config, False for a sinklab transformer that is not exported. Without
            `tokens`, whether every sequence begins with BOS (True) or without special tokens (False); by default as the
            tokenizer begins a text.
        progress: called with (finished sequences, total sequences) after every block and batch. The first number may be
            fractional. A sequence counts again for each additional pass of `ablate` and `perturb`.

    Raises:
        InputError: if the model cannot be loaded, the text cannot be read, is too short or there is no tokenizer for
            it; if the model, the tokens, the mask or another argument is invalid, or an argument is not supported for
            this model or with padding.
        SinklabError: if the model is not causal, its attention function does not compute softmax attention, attention
            or hidden states cannot be recorded, another thread probes or intercepts the model, an ablation or `perturb`
            is impossible in this model, activations or gradients contain NaN or infinity (the message names the layer),
            the loss is NaN or infinite, or a single sequence does not fit into memory.
    """
    options: dict[str, Any] = {
        "eps": eps,
        "lengths": lengths,
        "batch_size": batch_size,
        "loss": loss,
        "details": details,
        "maps": maps,
        "explore": explore,
        "gradients": gradients,
        "inputs": inputs,
    }
    study = Study(ablate=cast(tuple[str, ...], ablate), perturb=perturb)
    if tokens is None:
        if attention_mask is not None:
            raise InputError("`attention_mask` belongs to `tokens`: pass both, or leave out `attention_mask`")
        request = Request(
            options=Options(**options),
            study=study,
            sequences=sequences,
            length=length,
            column=column,
            seed=seed,
            bos=bos is True,
            no_bos=bos is False,
            fewer=text is not None and not isinstance(text, str | Path),
        )
        found = _measure_text(model, text, tokenizer, request, progress)
        return found.model_copy(update={"model": model_name}) if model_name else found
    if text is not None or tokenizer is not None:
        raise InputError("pass `tokens`, or `text` with its `tokenizer`, not both")
    if isinstance(model, str | Path):
        model_name = model_name or str(model)
        model = cast(LanguageModel, open_model(str(model), for_text=False).module)
    model = unwrapped(model)
    adapter = adapt(model)
    tokens, own_mask = batch_tokens(tokens)
    attention_mask = own_mask if attention_mask is None else attention_mask
    tokens_NT = token_matrix(tokens)
    if tokens_NT.ndim != 2 or not tokens_NT.numel():
        raise InputError(f"tokens have shape {tuple(tokens_NT.shape)}; expected (sequences, length), neither empty")
    mask_NT = None if attention_mask is None else token_matrix(attention_mask, "the entries of attention_mask")
    if mask_NT is not None and mask_NT.shape == tokens_NT.shape and bool(mask_NT.all()):
        mask_NT = None  # no padding
    special = _begins_with_bos(model, tokens_NT, mask_NT) if bos is None else bos
    settings = Options(**options, model_name=model_name, bos=special)
    if mask_NT is not None:
        if isinstance(adapter, NativeAdapter):
            raise InputError(
                "a sinklab transformer is measured without padding: leave out attention_mask and the padded sequences"
            )
        if study.ablate or study.perturb is not None:
            raise InputError(
                "`ablate` and `perturb` do not support padding: pass sequences without padding, or leave out `ablate` "
                "and `perturb`"
            )
    study.check(tokens_NT.shape[1])
    with measured_in_turn(model):
        if mask_NT is not None:
            found = measure_tokens(adapter, tokens_NT, settings, attention_mask_NT=mask_NT, progress=progress)
        else:
            bos_tokens = int(settings.bos)
            found = measure_with_study(adapter, tokens_NT, settings, study, bos_tokens=bos_tokens, progress=progress)
    first = tokens_NT[0] if mask_NT is None else tokens_NT[0][mask_NT[0].to(tokens_NT.device).bool()]
    notes = [*found.notes, *(_note_on_padding(model, tokens_NT) if attention_mask is None else ())]
    return found.model_copy(update={"fed": Fed(ids=first[:FED].tolist()), "notes": notes})


def _measure_text(
    model: "LanguageModel | str | Path",
    text: str | Path | Sequence[Any] | None,
    tokenizer: Any,
    request: Request,
    progress: Progress | None,
) -> Measurement:
    """Measure a model by its name, or one in memory with its tokenizer, on a text."""
    with given_text(text) as source:
        for_text = request.options.inputs == "natural"
        source = request.check(source)
        if isinstance(model, str | Path):
            loading = AS_IT_IS if tokenizer is None else Loading(tokenizer=tokenizer)
            opened = open_model(str(model), loading, length=request.length, for_text=for_text)
            return measure_loaded(opened, source, request, progress)
        model = unwrapped(model)
        with measured_in_turn(model):
            return measure_loaded(model_in_memory(model, tokenizer, for_text), source, request, progress)


def _begins_with_bos(model: LanguageModel, tokens_NT: Tensor, attention_mask_NT: Tensor | None) -> bool:
    if (bos_id := getattr(text_config(model.config), "bos_token_id", None)) is None:
        return False
    first_N1 = tokens_NT[:, :1]
    if attention_mask_NT is not None and attention_mask_NT.shape == tokens_NT.shape:
        first_N1 = tokens_NT.gather(1, real_tokens(attention_mask_NT).index_BR[:, :1].to(tokens_NT.device))
    return bool((first_N1 == bos_id).all())


def _note_on_padding(model: LanguageModel, tokens_NT: Tensor) -> list[str]:
    """Return a note if sequences begin or end with two padding or end-of-text tokens, or with runs as of padding.

    These are runs of one token, the longest of at least three, that are not as long in every sequence.
    """
    config = text_config(model.config)
    named = [getattr(config, name, None) for name in ("pad_token_id", "eos_token_id")]
    ids = [token for one in named if one is not None for token in (one if isinstance(one, list) else [one])]
    pad_NT = torch.isin(tokens_NT, torch.tensor(ids, dtype=tokens_NT.dtype, device=tokens_NT.device))
    padded_N = pad_NT[:, :2].all(1) | pad_NT[:, -2:].all(1)
    for ids_NT in (tokens_NT, tokens_NT.flip(1)):
        run_N = (ids_NT == ids_NT[:, :1]).cumprod(1).sum(1)
        if run_N.max() >= 3 and run_N.min() < run_N.max():
            padded_N |= (run_N > 1) & (ids_NT[:, 0] == ids_NT[run_N.argmax(), 0])
    rows = int(padded_N.sum()) if tokens_NT.shape[1] > 1 else 0
    if not rows:
        return []
    return [
        f"{rows} of {len(tokens_NT)} sequences begin or end with several padding, end-of-text or equal tokens, which "
        "were measured as text: if this is padding, pass attention_mask"
    ]


EVAL_PREFIX = "eval_"
"""Prefix of the Trainer's evaluation metrics."""


class SinkCallback(LoggingCallback):
    """Measures the model on fixed tokens at every evaluation, and adds the results to the Trainer's log.

    The added metrics, which `metric_for_best_model` can use:

        eval_sink_1       Sink_1, percentage of (sequence, layer, head) triples with alpha_1 > eps
        eval_sink_bias    sink rate in percent of the added bias, sink logit, sink token or registers, if any
        eval_norm_ratio   hidden state norm at position 1 divided by the mean norm at later positions; the maximum over
                          the embedding and all blocks; omitted if it is infinite or unknown

    Use it with any Trainer: `Trainer(.., callbacks=[SinkCallback(tokens)])`. The Trainer calls its W&B and TensorBoard
    callbacks before those of the user; call `callback.goes_first(trainer)` so that they log the sink metrics too.

    Args:
        tokens: token ids (sequences, length) or batches of them, as in `sinklab.measure`.
        eps: threshold on alpha of the sink rate, in (0, 1).
        batch_size: sequences per forward pass; by default as many as fit in memory, but at most 16 sequences and 8,192
            tokens.

    Attributes:
        measurement: last measurement; None before the first evaluation.

    Raises:
        InputError: if `tokens` are not rows of integers (see `batch_tokens`). Other errors of `sinklab.measure` are
            raised at the first evaluation.
    """

    def __init__(
        self,
        tokens: Tensor | np.ndarray | Sequence[Sequence[int]] | Mapping[str, Any] | Iterable[Any],
        *,
        eps: float = 0.3,
        batch_size: int | None = None,
    ) -> None:
        rows, self._attention_mask_NT = batch_tokens(tokens)
        self._tokens_NT = token_matrix(rows)
        self._eps, self._batch_size = eps, batch_size
        self.measurement: Measurement | None = None

    def on_log(  # type: ignore[override]  # transformers passes `logs` by keyword
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        """Measure the model if `logs` contain metrics of an evaluation, whose names begin with "eval_".

        The sink metrics are added to `logs` and to the last entry of the log history.
        """
        if logs is None or not any(name.startswith(EVAL_PREFIX) for name in logs):
            return
        self.measurement = measure(
            model,
            self._tokens_NT,
            attention_mask=self._attention_mask_NT,
            eps=self._eps,
            batch_size=self._batch_size,
            loss=False,
        )
        found = sink_numbers(self.measurement)
        logs.update(found)
        if state.log_history:
            state.log_history[-1].update(found)


def sink_numbers(measurement: Measurement) -> Mapping[str, float]:
    """Return the metrics to log, by name such as "eval_sink_1"; metrics without a finite value are left out."""
    numbers = {
        "sink_1": measurement.sink_rate[0],
        "sink_bias": measurement.sink_rate_bias,
        "norm_ratio": finite_or_none(max(measurement.hidden_norm_ratio or (), default=None)),
    }
    return {f"{EVAL_PREFIX}{name}": float(number) for name, number in numbers.items() if number is not None}
