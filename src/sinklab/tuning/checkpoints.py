"""The Trainer's checkpoints, of which only whole ones are continued from, and the model that the last one becomes."""

import shutil
from pathlib import Path

from sinklab.export.bundle import bundled
from sinklab.export.directory import MODELING, whole_directory
from sinklab.export.forms import CODE
from sinklab.files import write_text

PREFIX = "checkpoint-"
WHOLE = "complete"
"""Stands in a checkpoint once the Trainer has written all of it, and sinklab what led to it."""

NOT_THE_MODEL = (
    "optimizer.pt",
    "scheduler.pt",
    "scaler.pt",
    "rng_state*.pth",
    "trainer_state.json",
    "training_args.bin",
    "README.md",
    WHOLE,
)


def mark_complete(folder: Path, step: int) -> None:
    """Let the checkpoint of a step count, where there is one."""
    checkpoint = folder / f"{PREFIX}{step}"
    if checkpoint.is_dir():
        write_text(checkpoint / WHOLE, "")


def newest(folder: Path) -> tuple[int, Path] | None:
    """The step and the folder of the newest whole checkpoint."""
    whole = [path.parent for path in folder.glob(f"{PREFIX}*/{WHOLE}")]
    found = [(int(path.name.removeprefix(PREFIX)), path) for path in whole if path.name[len(PREFIX) :].isdigit()]
    return max(found, default=None)


def discard_torn(folder: Path) -> None:
    """Remove checkpoints that were never finished."""
    for path in folder.glob(f"{PREFIX}*"):
        if path.is_dir() and not (path / WHOLE).exists():
            shutil.rmtree(path)


def write_model(checkpoint: Path, directory: Path, card: str, is_ours: bool) -> None:
    """Write the model of a checkpoint as a Hugging Face directory, which is whole or not there.

    Args:
        directory: new or empty.
        card: README.md.
        is_ours: whether it is a SinklabForCausalLM, whose code stands beside the weights.

    Raises:
        SinklabError: the disk is full or not writable.
    """
    with whole_directory(directory) as aside:
        left_out = {path.name for pattern in NOT_THE_MODEL for path in checkpoint.glob(pattern)}
        for path in sorted(checkpoint.iterdir()):
            if path.is_file() and path.name not in left_out:
                shutil.copy2(path, aside / path.name)
        if is_ours:
            write_text(aside / f"{CODE}.py", bundled(MODELING))
        write_text(aside / "README.md", card)
