"""A run as a Hugging Face directory, which is whole or not there: written aside, then renamed.

model.safetensors, config.json, generation_config.json, tokenizer.json, tokenizer_config.json, README.md, and
modeling_sinklab.py where transformers does not know the architecture.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sinklab.data.tokenizers import load_tokenizer
from sinklab.errors import InputError, SinklabError
from sinklab.export.bundle import bundled
from sinklab.export.card import model_card
from sinklab.export.forms import CODE, SpecialTokens, form_of
from sinklab.export.tokenizer import write_tokenizer
from sinklab.files import is_full, write_text
from sinklab.train.directory.history import Evaluation, read_history
from sinklab.train.directory.run import TrainedRun, load_run

MODELING = "sinklab.model.huggingface.modeling"


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        directory: where.
        architecture: the class that transformers loads.
        code: the file of code beside it; None where transformers has the class.
        step: of the run.
        parameters: how many.
    """

    directory: Path
    architecture: str
    code: str | None
    step: int
    parameters: int

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**asdict(self), "directory": str(self.directory)}


def export_run(run: Path, directory: Path) -> Exported:
    """Write the model of a run, at its newest checkpoint.

    Args:
        run: a run directory; it may be in progress.
        directory: new, or empty.

    Raises:
        InputError: no run, no checkpoint yet, or a directory that holds something.
        SinklabError: no valid checkpoint, or the disk is full or not writable; nothing is left behind.
    """
    _check_free(directory)
    return write_directory(load_run(run), read_history(run / "metrics.jsonl"), directory)


def write_directory(found: TrainedRun, history: Sequence[Evaluation], directory: Path) -> Exported:
    """The same of a run that is loaded.

    Args:
        history: its evaluations, for the model card.

    Raises:
        SinklabError: the disk is full or not writable; nothing is left behind.
    """
    tokenizer = load_tokenizer(str(found.tokenizer_path))
    tokens = SpecialTokens(tokenizer.bos_id, tokenizer.eos_id)
    form, recipe = form_of(found.model, tokens), found.recipe
    with whole_directory(directory) as aside:
        from safetensors.torch import save_file
        from transformers import GenerationConfig

        form.config.update({"architectures": [form.architecture], "dtype": "float32"})
        form.config.save_pretrained(aside)
        GenerationConfig(bos_token_id=tokens.bos, eos_token_id=tokens.eos).save_pretrained(aside)
        save_file(form.weights, aside / "model.safetensors", metadata={"format": "pt"})
        write_tokenizer(tokenizer, aside, recipe.data.bos, recipe.model.context)
        if not form.is_foreign:
            write_text(aside / f"{CODE}.py", bundled(MODELING))
        write_text(aside / "README.md", model_card(recipe, found.step, history, form))
    parameters = sum(parameter.numel() for parameter in found.model.parameters())
    code = None if form.is_foreign else f"{CODE}.py"
    return Exported(directory, form.architecture, code, found.step, parameters)


def _check_free(directory: Path) -> None:
    try:
        there = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
        if not there.is_dir():
            raise InputError(f"{there} is a file, so {directory} cannot be a directory: give a new one")
        if directory.is_dir() and any(directory.iterdir()):
            raise InputError(f"{directory} is not empty: give a new directory, or move away what is there")
    except OSError as error:
        raise InputError(f"{directory} cannot be a directory of ours: {error.strerror}. Give another") from error


@contextmanager
def whole_directory(directory: Path) -> Iterator[Path]:
    """A folder beside the directory, new or empty, whose place it takes in the end; on failure it vanishes.

    Raises:
        SinklabError: the disk is full or not writable.
    """
    aside: Path | None = None
    try:
        target = directory.resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{target.name[:60]}.", dir=target.parent))
        yield aside
        aside.chmod(0o755)
        for path in aside.iterdir():
            path.chmod(0o644)
        os.replace(aside, target)
    except OSError as error:
        remedy = "free some space, or give" if is_full(error) else "give"
        raise SinklabError(
            f"cannot write {directory}: {error.strerror or error}; {remedy} another directory"
        ) from error
    finally:
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)
