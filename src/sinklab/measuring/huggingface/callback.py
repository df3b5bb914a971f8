"""Trainer callback (transformers, trl) that measures sinks at every evaluation."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from sinklab.errors import InputError
from sinklab.measuring.api import measure
from sinklab.measuring.inputs import token_matrix
from sinklab.measuring.measurement import Measurement
from sinklab.schema import finite_or_none

if TYPE_CHECKING:
    from transformers import Trainer

EVAL_PREFIX = "eval_"
"""Prefix of the Trainer's evaluation metrics."""


class SinkCallback(TrainerCallback):
    """Measures the model on fixed tokens at every evaluation, and adds the results to the Trainer's log.

    The added metrics, which `metric_for_best_model` can use:

        eval_sink_1       Sink_1, percentage of (sequence, layer, head) triples with alpha_1 > eps
        eval_sink_bias    sink rate in percent of the added bias, sink logit, sink token or registers, if any
        eval_norm_ratio   hidden state norm at position 1 divided by the mean norm at later positions; the maximum over
                          the embedding and all blocks; omitted if it is infinite or unknown

    Use it with any Trainer: `Trainer(.., callbacks=[SinkCallback(tokens)])`. The Trainer calls its W&B and TensorBoard
    callbacks before those of the user; call `callback.goes_first(trainer)` so that they log the sink metrics too.

    Args:
        tokens: token ids (sequences, length), as in `sinklab.measure`.
        eps: threshold on alpha of the sink rate, in (0, 1).
        batch_size: sequences per forward pass; by default as many as fit in memory, but at most 16 sequences and 8,192
            tokens.

    Attributes:
        measurement: last measurement; None before the first evaluation.

    Raises:
        InputError: if `tokens` are not rows of integers (see `token_matrix`). Other errors of `sinklab.measure` are
            raised at the first evaluation.
    """

    def __init__(
        self,
        tokens: Tensor | np.ndarray | Sequence[Sequence[int]],
        *,
        eps: float = 0.3,
        batch_size: int | None = None,
    ) -> None:
        self._tokens_NT = token_matrix(tokens)
        self._eps, self._batch_size = eps, batch_size
        self.measurement: Measurement | None = None

    def goes_first(self, trainer: "Trainer") -> None:
        """Move this callback before all other callbacks of the trainer, so that they log its metrics.

        Raises:
            InputError: if the trainer does not have this callback.
        """
        callbacks = trainer.callback_handler.callbacks
        if self not in callbacks:
            raise InputError("the trainer does not have this SinkCallback: pass it as Trainer(callbacks=[..]) first")
        callbacks.remove(self)
        callbacks.insert(0, self)

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

        Raises:
            InputError, SinklabError: see `sinklab.measure`.
        """
        if logs is None or not any(name.startswith(EVAL_PREFIX) for name in logs):
            return
        self.measurement = measure(model, self._tokens_NT, eps=self._eps, batch_size=self._batch_size, loss=False)
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
