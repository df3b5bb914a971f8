"""Experiment trackers: log recipe, evaluations and charts to Weights & Biases and TensorBoard.

A resumed run appends to its log. W&B finds the log by the id in tracking.json. TensorBoard discards logged evaluations
after the step at which the run resumes, because they are repeated.
"""

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

from sinklab.files import write_json
from sinklab.train.directory.history import read_metrics
from sinklab.train.directory.run import Run

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
