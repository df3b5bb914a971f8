"""Evaluation of a run: validation loss and sink metric, always on the same sequences.

Every process evaluates all sequences, so that results do not depend on the number of processes, and sharded parameters
are gathered by all of them.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from sinklab.errors import InputError
from sinklab.measuring.driver import measure
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.options import Options
from sinklab.models.native import NativeAdapter
from sinklab.train.directory.run import Run
from sinklab.train.parallelize import gathered
from sinklab.train.update import Updater

LOSS_TOKENS = 2**15  # at a time, unless one sequence is longer
OTHER_EPS = (0.2, 0.4)  # further thresholds of the rates in every evaluation
METRIC_BATCH = 16  # fixed, so that a metric does not depend on the free memory, bit for bit


class Evaluator:
    """Evaluates the model of an updater.

    Args:
        run: run that provides the validation text and the metric.
        updater: updater whose model is evaluated, on its device and in its precision.
        look: called between batches, and between the blocks of the metric; an exception from it ends the evaluation.

    Raises:
        InputError: if the validation text is too short for the metric.
        SinklabError: the text has been cut short or changed since it was opened, or cannot be read.
    """

    def __init__(self, run: Run, updater: Updater, look: Callable[[], None] = lambda: None) -> None:
        self.recipe, self.updater, self.look = run.recipe, updater, look
        self.batches = updater.world.together(lambda: _batches(run))

    @torch.no_grad()
    def losses(self) -> tuple[float, dict[str, float]]:
        """Means over the evaluation sequences: the loss in nats per token, and each added loss, weighted, by name."""
        model, device, added = self.updater.model, self.updater.device, self.recipe.losses
        losses = []
        model.eval()
        try:
            for batch in self.batches:
                self.look()
                with self.updater.autocast():
                    losses.append(model.losses(batch.to(device, non_blocking=True), added).double() * len(batch))
        finally:
            model.train()
        loss, *others = (torch.stack(losses).sum(0) / sum(map(len, self.batches))).tolist()
        return loss, dict(zip(added.terms, others, strict=True))

    def measure(self, details: bool = False, other_eps: Sequence[float] = ()) -> Measurement:
        """Measure the sink metric on the validation text, under the recipe's data interventions.

        Args:
            details: also the statistics of `measuring/statistics/details.py`.
            other_eps: further thresholds, in addition to the recipe's.
        """
        metric = self.recipe.metric
        tokens_NT = torch.cat(self.batches)[: metric.sequences, : metric.length]
        options = Options(
            eps=(metric.eps, *(eps for eps in other_eps if eps != metric.eps)),
            batch_size=METRIC_BATCH,
            details=details,
            model_name=self.recipe.name,
            bos=self.recipe.data.bos,
        )
        self.look()
        alone = self.updater.world.size == 1  # `look` is a collective, and one of several may halve its batches
        with self.updater.autocast(), gathered(self.updater.model):
            return measure(
                NativeAdapter(self.updater.model),
                tokens_NT,
                options,
                progress=(lambda done, total: self.look()) if alone else None,
            )


def _batches(run: Run) -> list[Tensor]:
    """Enough validation sequences, in a fixed order, for loss and metric; no more at a time than in training.

    Their number depends on the recipe alone, not on that of the processes, so that the rounding is the same for all.
    """
    metric, valid = run.recipe.metric, run.loader("valid")
    if valid.chunks < metric.sequences:
        raise InputError(
            f"the validation text has {valid.chunks} sequences of {valid.context} tokens and the metric "
            f"needs {metric.sequences}: use more text, a larger data.valid_fraction or fewer metric.sequences"
        )
    count = min(max(run.recipe.train.eval_sequences, metric.sequences), valid.chunks)
    tokens_NT = torch.cat([valid.batch(i) for i in range(-(-count // valid.batch_size))])[:count]
    run.dataset.valid.check_unchanged()
    together = min(run.recipe.train.micro_batch or valid.batch_size, max(1, LOSS_TOKENS // valid.context))
    return list(tokens_NT.split(together))


def first_position(rates: Mapping[str, Sequence[float]] | None) -> dict[str, float] | None:
    """The rates of position 1 by threshold, percent."""
    return None if rates is None else {eps: of_positions[0] for eps, of_positions in rates.items()}
