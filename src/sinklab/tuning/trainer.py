"""Subclass of trl's SFTTrainer; imported only if trl is installed.

Conversations are already tokenized, with labels for the assistant's tokens and IGNORED elsewhere, so trl's data
preparation is skipped. Differences from SFTTrainer:

- A sinklab model computes its own loss; trl would call the model's body and apply the LM head to the hidden states.
- The validation loss is the mean over all labelled tokens, not over batches, so it is independent of the batch size.
- Checkpoints are saved without a model card.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # comes with trl, an extra that `dev` leaves out
from transformers import Trainer
from transformers.trainer_callback import PrinterCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer

from sinklab.errors import SinklabError
from sinklab.jobs import StepProgress
from sinklab.model.loss import IGNORED
from sinklab.models.families import family_of
from sinklab.survey.api import EVAL_PREFIX, SinkCallback
from sinklab.tuning.sft_dataset import SftDataset, TokenizedChat
from sinklab.tuning.tuned_directory import METRICS, SINK, UPDATES, rows_of, write_rows


@dataclass(eq=False)
class TuneRecord(TrainerCallback):
    """Callback that adds the sink to the Trainer's log history, and writes its rows with every checkpoint.

    Attributes:
        folder: folder of metrics.jsonl and updates.jsonl.
        sink: sink callback of the same trainer, called before this callback.
        should_stop: callback, called after every update; if it returns True, a checkpoint is saved and training stops.
        progress: progress reporter; a unit is one update, and every evaluation is reported as a note.
    """

    folder: Path
    sink: SinkCallback
    should_stop: Callable[[], bool]
    progress: StepProgress

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Report an update or an evaluation, and add the sink metrics of an evaluation to the log history.

        Raises:
            SinklabError: if a loss or gradient is not finite.
        """
        step, remedy = state.global_step, "lower --lr, or inspect the model with `sinklab measure`"
        if logs and "loss" in logs and "grad_norm" in logs:
            loss, gradient = logs["loss"], logs["grad_norm"]
            if not (math.isfinite(loss) and math.isfinite(gradient)):
                raise SinklabError(
                    f"update {step} has loss {loss} and gradient norm {gradient}, which must be finite: {remedy}. "
                    "Earlier checkpoints are unchanged"
                )
            self.progress.advance(text=f"loss {loss:.3f}, gradient {gradient:.3g}")
        elif logs and f"{EVAL_PREFIX}loss" in logs:
            if not math.isfinite(loss := logs[f"{EVAL_PREFIX}loss"]):
                raise SinklabError(
                    f"the loss on held-out conversations is {loss} after update {step}, but must be finite: {remedy}. "
                    "Earlier checkpoints are unchanged"
                )
            found = self.sink.measurement
            assert found is not None, "the sink callback is called first"
            fields = {"sink_rate": [*found.sink_rate], "sink_rate_bias": found.sink_rate_bias}
            state.log_history[-1][SINK] = {**fields, "hidden_norm_ratio": found.hidden_norm_ratio}
            made = rows_of(state.log_history)[1][-1]
            trained = "" if made.train_loss is None else f"train {made.train_loss:.4f}, "
            gradient = "" if made.grad_norm is None else f", gradient {made.grad_norm:.3g}"
            sink = f"Sink_1 {made.sink_rate[0]:.2f} %"
            self.progress.note(f"step {step}: {trained}held out {loss:.4f}, {sink}{gradient}")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save a checkpoint and stop training if `should_stop` returns True."""
        if self.should_stop():
            control.should_save = control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write metrics.jsonl and updates.jsonl."""
        updates, evaluations = rows_of(state.log_history)
        write_rows(self.folder / UPDATES, updates)
        write_rows(self.folder / METRICS, evaluations)


class Tuner(SFTTrainer):
    """SFTTrainer with the differences listed in the module docstring."""

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        compute = Trainer.compute_loss if family_of(self.model).exported else SFTTrainer.compute_loss
        found: Any = compute(self, model, inputs, return_outputs, num_items_in_batch)
        if not model.training:
            targets = int((inputs["labels"][:, 1:] != IGNORED).sum())
            self._nats += float(found[0] if return_outputs else found) * targets
            self._targets += targets
        return found

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._nats, self._targets = 0.0, 0
        output = super().evaluation_loop(*args, **kwargs)
        output.metrics[f"{EVAL_PREFIX}loss"] = self._nats / self._targets
        return output

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, because `write_model` writes the model card of the final model."""


def tuner(dataset: SftDataset, folder: Path, callbacks: list[TrainerCallback], begins: bool) -> Tuner:
    """Build the trainer of a model and its conversations.

    Args:
        folder: folder of the checkpoints.
        callbacks: callbacks, called in this order after the default callbacks of the Trainer.
        begins: True if training starts at step 0; the model is then evaluated before the first update.
    """
    model: Any = dataset.model.module
    settings = dataset.tuning.asked
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # warning of transformers about an option set by trl
        config = SFTConfig(
            output_dir=str(folder),
            learning_rate=settings.lr,
            lr_scheduler_type="cosine",
            warmup_steps=settings.warmup,  # a fraction of all steps if below 1
            weight_decay=0.0,
            max_grad_norm=1.0,
            max_steps=settings.steps,
            per_device_train_batch_size=settings.micro_batch,
            per_device_eval_batch_size=settings.micro_batch,
            gradient_accumulation_steps=settings.batch_size // settings.micro_batch,
            max_length=settings.length,
            gradient_checkpointing=False,  # trl's default is True
            bf16=model.device.type == "cuda" and torch.cuda.is_bf16_supported(),
            use_cpu=model.device.type == "cpu",
            seed=settings.seed,
            logging_steps=1,
            logging_nan_inf_filter=False,
            eval_strategy="steps",
            eval_steps=settings.eval_every,
            eval_on_start=begins,
            save_strategy="steps",
            save_steps=settings.save_every,
            save_total_limit=2,
            report_to=[],
            disable_tqdm=True,
            dataset_kwargs={"skip_prepare_dataset": True},
        )
    made = Tuner(
        model,
        config,
        train_dataset=_rows(dataset.trained),
        eval_dataset=_rows(dataset.held_out),
        processing_class=dataset.model.tokenizer,
        callbacks=callbacks,
    )
    made.remove_callback(PrinterCallback)
    return made


def _rows(chats: Sequence[TokenizedChat]) -> Dataset:
    rows = []
    for chat in chats:
        labels = [token if trained else IGNORED for token, trained in zip(chat.ids, chat.is_trained, strict=True)]
        rows.append({"input_ids": chat.ids, "labels": labels})
    return Dataset.from_list(rows)
