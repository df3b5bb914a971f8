"""Evaluation during training, on a fixed set of sequences, and the trackers that log it.

Every process evaluates all sequences, so that results do not depend on the number of processes.

Trackers log recipe, evaluations and charts to Weights & Biases and TensorBoard. A resumed run appends to its log. W&B
finds the log by the id in tracking.json. TensorBoard discards logged evaluations after the step at which the run
resumes, because they are repeated.
"""

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sinklab.files import write_json
from sinklab.measuring.driver import measure
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.options import Options
from sinklab.models.adapter import NativeAdapter
from sinklab.models.hooks import evaluating
from sinklab.train.run import Run, read_metrics
from sinklab.train.update import Updater
from sinklab.train.world import gathered

LOSS_TOKENS = 2**15  # maximum tokens per batch of the validation loss; sequences above it are evaluated one by one
OTHER_EPS = (0.2, 0.4)  # additional thresholds of the sink rate
MAPPED_HEADS = 64  # the last measurement of a run has attention maps up to this number of heads
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

    def measure(
        self, details: bool = False, other_eps: Sequence[float] = (), dormant: bool = False, maps: bool = False
    ) -> Measurement:
        """Measure the sink metric on the validation text, under the recipe's data interventions.

        Args:
            details: also compute the statistics of `measuring/statistics/details.py`.
            other_eps: additional thresholds of the sink rate.
            dormant: also compute `Measurement.dormant`.
            maps: also save the attention maps of one sequence, if the model has at most MAPPED_HEADS heads.

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
            explore_at_most=MAPPED_HEADS if maps else 0,
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


PROJECT = "sinklab"
TrackerName = Literal["wandb", "tensorboard"]
# Lists whose first value, numbered 0, is that before the first block; other lists are numbered from 1.
FROM_0 = {"hidden_norm_ratio", "norm_ratio_sink_token"}


@contextmanager
def tracked(names: Sequence[TrackerName], run: Run, step: int) -> Iterator[list["Tracker"]]:
    """Open and yield the trackers of a run that resumes at `step`; close them at the end of the `with` block.

    A new tracker first logs the evaluations in metrics.jsonl. The packages must be installed (`require_extra`).

    Raises:
        SinklabError: if metrics.jsonl is damaged, or tracking.json cannot be written.
    """
    with ExitStack() as open_ones:
        trackers: list[Tracker] = []
        for name in dict.fromkeys(names):
            tracker = TRACKERS[name](run, step)
            open_ones.callback(tracker.close)
            for row in read_metrics(run.metrics) if tracker.is_new else ():
                tracker.row(row)
            trackers.append(tracker)
        yield trackers


def numbers_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Flatten an evaluation to numbers by name. Other values, such as null, are omitted.

    `sink_rate/1` is the sink rate of the first position, `sink_rate_heads/2/1` that of the second layer's first head.
    """
    found: dict[str, float] = {}
    for key, value in row.items():
        if isinstance(value, Sequence) and not isinstance(value, str):
            value = {str(number): one for number, one in enumerate(value, 0 if key in FROM_0 else 1)}
        if isinstance(value, Mapping):
            found |= {f"{key}/{name}": number for name, number in numbers_of(value).items()}
        elif isinstance(value, int | float):
            found[key] = value
    return found


class _Wandb:
    """Weights & Biases run, configured by the settings of W&B, such as `WANDB_MODE=offline`.

    Attributes:
        is_new: True if no earlier process has logged this run.
    """

    def __init__(self, run: Run, step: int) -> None:
        import wandb  # not in the extra `dev`

        self._wandb = wandb
        path = run.directory / "tracking.json"
        self.is_new = not path.exists()
        if self.is_new:
            write_json(path, {"wandb": {"project": PROJECT, "id": secrets.token_hex(8)}})
        self._run = wandb.init(
            project=PROJECT,
            name=run.recipe.name,
            id=json.loads(path.read_text(encoding="utf-8"))["wandb"]["id"],
            resume=None if self.is_new else "allow",
            dir=run.directory,
            config={**run.recipe.model_dump(mode="json"), "run_hash": run.hash},
            settings=wandb.Settings(console="off", silent=True),
        )
        self._step = step

    def row(self, row: Mapping[str, Any]) -> None:
        """Log the numbers of one evaluation, a line of metrics.jsonl."""
        self._step = row["step"]
        self._run.log(numbers_of(row), step=self._step)

    def charts(self, files: Sequence[Path]) -> None:
        """Log the charts (PNG files) of the complete run."""
        self._run.log({f"charts/{path.stem}": self._wandb.Image(str(path)) for path in files}, step=self._step)

    def close(self) -> None:
        self._run.finish()


class _TensorBoard:
    """TensorBoard event files in the folder `tensorboard` of the run; attributes and methods as in `_Wandb`."""

    def __init__(self, run: Run, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.directory / "tensorboard"
        self.is_new = not folder.exists()
        self._writer = SummaryWriter(str(folder), purge_step=0 if self.is_new or not step else step + 1)
        self._step = step
        if self.is_new or not step:
            self._writer.add_text("recipe", "".join(f"    {line}\n" for line in run.recipe.to_yaml().splitlines()), 0)

    def row(self, row: Mapping[str, Any]) -> None:
        self._step = row["step"]
        for name, number in numbers_of(row).items():
            self._writer.add_scalar(name, number, self._step)
        self._writer.flush()

    def charts(self, files: Sequence[Path]) -> None:
        import numpy
        from PIL import Image

        for path in files:
            with Image.open(path) as image:
                pixels = numpy.asarray(image.convert("RGB"))
            self._writer.add_image(f"charts/{path.stem}", pixels, self._step, dataformats="HWC")

    def close(self) -> None:
        self._writer.close()


Tracker = _Wandb | _TensorBoard
TRACKERS: dict[TrackerName, type[Tracker]] = {"wandb": _Wandb, "tensorboard": _TensorBoard}
