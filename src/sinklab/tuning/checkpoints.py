"""The Trainer's checkpoints, and the model directory that is written from the last one."""

import shutil
from pathlib import Path

import sinklab
from sinklab.export.directory import atomic_directory, card_head, write_code
from sinklab.files import write_text
from sinklab.tuning.documents import Tuning

PREFIX = "checkpoint-"
WHOLE = "complete"
"""Written into a checkpoint once it and the files beside it are complete; others are not continued from."""

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
    """Mark the checkpoint of a step as complete, if there is one."""
    checkpoint = folder / f"{PREFIX}{step}"
    if checkpoint.is_dir():
        write_text(checkpoint / WHOLE, "")


def newest(folder: Path) -> tuple[int, Path] | None:
    """The step and the folder of the newest complete checkpoint."""
    whole = [path.parent for path in folder.glob(f"{PREFIX}*/{WHOLE}")]
    found = [(int(path.name.removeprefix(PREFIX)), path) for path in whole if path.name[len(PREFIX) :].isdigit()]
    return max(found, default=None)


def discard_torn(folder: Path) -> None:
    """Remove incomplete checkpoints."""
    for path in folder.glob(f"{PREFIX}*"):
        if path.is_dir() and not (path / WHOLE).exists():
            shutil.rmtree(path)


def write_model(checkpoint: Path, directory: Path, tuning: Tuning, is_ours: bool) -> None:
    """Write the model of a checkpoint as a Hugging Face directory, atomically.

    Args:
        directory: new or empty.
        tuning: for the model card.
        is_ours: whether it is a SinklabForCausalLM, whose code is written beside the weights.

    Raises:
        SinklabError: the disk is full or not writable.
    """
    left_out = {path.name for pattern in NOT_THE_MODEL for path in checkpoint.glob(pattern)}
    with atomic_directory(directory) as aside:
        for path in sorted(checkpoint.iterdir()):
            if path.is_file() and path.name not in left_out:
                shutil.copy2(path, aside / path.name)
        if is_ours:
            write_code(aside)
        write_text(aside / "README.md", tuned_card(tuning))


def tuned_card(tuning: Tuning) -> str:
    """README.md of the model: data, settings, and loss and sink before and after."""
    asked = tuning.asked.model_dump(exclude={"files", "data", "sink_tokens"})
    rows = [f"| {name} | {value} |" for name, value in asked.items()]
    settings = "\n".join(row for row in rows if "\n" not in row)
    numbers = "\n".join(
        f"| {name} | {side.valid_loss:.4f} | {side.sink_rate[0]:.2f} |" for name, side in tuning.sides().items()
    )
    return (
        f"{card_head('sft')}\n# {Path(tuning.model).name}, tuned on conversations\n\n"
        f"{tuning.architecture} of {tuning.parameters:,} parameters, tuned by sinklab {sinklab.__version__} on what "
        f"the assistant says in {tuning.conversations:,} conversations.\n\n"
        "| | loss held out, nats per token | Sink_1, percent |\n|---|---|---|\n"
        f"{numbers}\n\n## Settings\n\n| | |\n|---|---|\n{settings}\n"
    )
