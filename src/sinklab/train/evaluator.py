"""Evaluation during training: validation loss and sink metric on a fixed set of sequences.

Every process evaluates all sequences, so that results do not depend on the number of processes.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sinklab.measuring.driver import measure
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.options import Options
from sinklab.models.adapter import NativeAdapter
from sinklab.models.hooks import evaluating
from sinklab.train.directory.run import Run
from sinklab.train.parallelize import gathered
from sinklab.train.update import Updater

LOSS_TOKENS = 2**15  # maximum tokens per batch of the validation loss; sequences above it are evaluated one by one
OTHER_EPS = (0.2, 0.4)  # additional thresholds of the sink rate
METRIC_BATCH = 16  # sequences per batch; does not depend on the free memory, for bit-reproducibility


class Evaluator:
    """Compute validation loss and sink metric of the model in training.

    Args:
        run: run with the validation text and the settings of the sink metric.
        updater: updater whose model is evaluated, on its device and in its precision.
        check_stop: callback before each batch of the loss and before the metric; with one process also after each block
            and batch of the metric. An exception from `check_stop` ends the evaluation.

    Raises:
        InputError: if the validation text is too short for a chunk or the metric, or a data intervention is outside the
            chunk or vocabulary.
        SinklabError: if the text cannot be read or has changed since it was opened.
    """

    def __init__(self, run: Run, updater: Updater, check_stop: Callable[[], None] = lambda: None) -> None:
        self.recipe, self.updater, self.check_stop = run.recipe, updater, check_stop
        self.batches = updater.world.on_all_ranks(lambda: _batches(run))

    def losses(self) -> tuple[float, dict[str, float]]:
        """Return the mean validation loss (nats per token) and, by name, the mean of each weighted auxiliary loss."""
        model, device, added = self.updater.model, self.updater.device, self.recipe.losses
        losses = []
        with evaluating(model):
            for batch in self.batches:
                self.check_stop()
                with self.updater.autocast():
                    losses.append(model.losses(batch.to(device, non_blocking=True), added).double() * len(batch))
        loss, *others = (torch.stack(losses).sum(0) / sum(map(len, self.batches))).tolist()
        return loss, dict(zip(added.terms, others, strict=True))

    def measure(self, details: bool = False, other_eps: Sequence[float] = (), dormant: bool = False) -> Measurement:
        """Measure the sink metric on the validation text, under the recipe's data interventions.

        Args:
            details: also compute the statistics of `measuring/statistics/details.py`.
            other_eps: additional thresholds of the sink rate.
            dormant: also compute `Measurement.dormant`.

        Raises:
            SinklabError: if an activation or the loss is not finite, or a sequence does not fit into memory.
        """
        metric = self.recipe.metric
        tokens_NT = torch.cat(self.batches)[: metric.sequences, : metric.length]
        options = Options(
            eps=(metric.eps, *(eps for eps in other_eps if eps != metric.eps)),
            batch_size=METRIC_BATCH,
            details=details,
            dormant=dormant,
            model_name=self.recipe.name,
            bos=self.recipe.data.bos,
        )
        self.check_stop()
        # `Trainer._raise_if_stopped` is a collective: a process that halves its batch would call it more often.
        alone = self.updater.world.size == 1
        with self.updater.autocast(), gathered(self.updater.model):
            return measure(
                NativeAdapter(self.updater.model),
                tokens_NT,
                options,
                progress=(lambda done, total: self.check_stop()) if alone else None,
            )


def _batches(run: Run) -> list[Tensor]:
    """Load the validation sequences for loss and metric in a fixed order, split into the batches of the loss.

    The batch size depends only on the recipe, so that rounding does not depend on the number of processes.
    """
    metric, valid = run.recipe.metric, run.loader("valid")
    count = min(max(run.recipe.train.eval_sequences, metric.sequences), valid.chunks)
    tokens_NT = torch.cat([valid.batch(i) for i in range(-(-count // valid.batch_size))])[:count]
    run.dataset.valid.check_unchanged()
    size = min(run.recipe.train.micro_batch or valid.batch_size, max(1, LOSS_TOKENS // valid.context))
    return list(tokens_NT.split(size))
