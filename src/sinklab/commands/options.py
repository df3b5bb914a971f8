"""Settings and options shared by several commands, and functions that print results."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import AfterValidator, Field
from rich.console import Console

from sinklab.commands.terminal.progress import JobProgress
from sinklab.commands.terminal.tables import print_text, stderr
from sinklab.errors import InputError, UnsavedError
from sinklab.experiments.sweep.engines import EngineName
from sinklab.files import RUNS
from sinklab.settings import ADVANCED, INPUT, OUTPUT, CommandSettings, Flag, Several, dtype_name
from sinklab.signals import keeping_what_is_finished

if TYPE_CHECKING:
    from sinklab.models.huggingface.loading import Loading


def option(panel: str, help: str, *names: str, **settings: Any) -> Any:
    """Declare an option in a panel of the help, named after its parameter unless `names` are given."""
    return typer.Option(*names, rich_help_panel=panel, help=help, **settings)


class LoadingOptions(CommandSettings, frozen=True):
    """Options that determine how a model is loaded."""

    dtype: Annotated[str, AfterValidator(dtype_name), Flag(metavar="TYPE")] = Field(
        default="auto",
        description="Weights in float32, bfloat16, float16, or auto (as stored; float32 for .gguf files and where a "
        "CPU emulates the type).",
    )
    device: Annotated[str, Flag(metavar="NAME")] = Field(
        default="auto",
        description="auto (a GPU if there is one), cpu, cuda, cuda:N, or map (weights split over GPUs, memory, disk).",
    )
    revision: Annotated[str | None, Flag(metavar="NAME", panel=INPUT)] = Field(
        default=None, description="Branch, tag or commit on the hub; default: main."
    )
    subfolder: Annotated[str | None, Flag(metavar="FOLDER", panel=INPUT)] = Field(
        default=None, description="Folder of the model inside MODEL."
    )
    adapters: Annotated[Several[str], Flag(name="--adapter", metavar="ADAPTER", panel=INPUT)] = Field(
        default=(), description="PEFT adapter (LoRA) to apply; repeatable."
    )
    trust_remote_code: bool = Field(default=False, description="Run code from the model's repository.")
    tokenizer: Annotated[Literal["auto", "file", "transformers"], Flag(metavar="KIND", panel=INPUT)] = Field(
        default="auto",
        description="file (tokenizer.json), transformers or auto.",
    )

    def on(self, console: Console) -> "Loading":
        """Return the settings for the model loader, which prints a message to `console` before slow steps."""
        from sinklab.models.huggingface.loading import Loading

        return Loading(**dict(self), say=partial(print_text, console=console))

    def within(self, model: str) -> str:
        """Return a model name with --subfolder appended if it is a local directory; for errors, see `in_subfolder`."""
        from sinklab.models.huggingface.loading import in_subfolder

        return in_subfolder(model, self.subfolder)


MOST_SEEDS = 1000
"""Maximum number of replicates per cell, so that a mistyped number is rejected before the sweep is planned."""


DEFAULT_SCALE = "tiny"
"""Scale of experiments that have several, unless --scale is passed."""


class ReproduceSettings(CommandSettings, frozen=True):
    """Settings of `sinklab reproduce` and `lab`."""

    panel = INPUT

    scale: Annotated[str | None, Flag(metavar="NAME")] = Field(
        default=None,
        description="Models to train: tiny, mini, laptop, lab, small, 60m, 1b, backcopy or trigger_average; default: "
        "the experiment's only scale, else tiny.",
    )
    seeds: int | None = Field(
        default=None,
        ge=1,
        le=MOST_SEEDS,
        description="Replicates per cell: the first N seeds, draws or models; default: the experiment's, usually 5.",
    )
    cells: Annotated[Several[str], Flag(name="--cell", metavar="NAME")] = Field(
        default=(), description="Train only this cell; repeatable. Default: all cells of the experiments."
    )
    models: Annotated[Several[str], Flag(name="--model", metavar="MODEL")] = Field(
        default=(),
        description="Model to measure, for experiments on existing models: Hugging Face id, directory, .gguf file or "
        "run directory. Repeatable: a base and a chat model, or several models to compare. For an experiment whose "
        "replicates are fixed models, these models replace them.",
    )
    steps: int | None = Field(default=None, ge=1, description="Updates per model; default: as in the recipe.")
    text: Path | None = Field(
        default=None,
        description="Text to train on (default: as in the recipe) or to measure on: a text file, or a folder.",
    )
    data: Path | None = Field(
        default=None,
        description="File with the items of the downstream task, for experiments that evaluate existing models "
        "(figure_10, on HellaSwag); or file of conversations, for experiments that fine-tune (figure_30).",
    )
    trust_remote_code: Annotated[bool, Flag(panel=ADVANCED)] = Field(
        default=False, description="Run code from the model's repository."
    )
    jobs: Annotated[int | None, Flag(panel=ADVANCED)] = Field(
        default=None,
        ge=1,
        description="Models trained concurrently (--engine local); default: one per GPU; without a GPU, derived from "
        "the numbers of runs and CPU cores.",
    )
    engine: Annotated[EngineName, Flag(panel=ADVANCED, metavar="NAME")] = Field(
        default=EngineName.local, description="Execution engine: local, slurm or ray."
    )
    engine_options: Annotated[Several[str], Flag(name="--engine-option", metavar="KEY=VALUE", panel=ADVANCED)] = Field(
        default=(), description="Option of slurm or ray, such as partition=gpu; repeatable."
    )
    shard: Annotated[str | None, Flag(panel=ADVANCED, metavar="I/N")] = Field(
        default=None,
        pattern=r"^\d+/[1-9]\d*$",
        description="Train only the runs whose number modulo N is I (from 0): one of N commands, as of srun.",
    )
    dry_run: Annotated[bool, Flag(panel=OUTPUT)] = Field(
        default=False, description="Only print the cells, changes and estimated hours, or the planned measurements."
    )
    out: Annotated[Path | None, Flag(panel=OUTPUT)] = Field(
        default=None,
        description="Directory for results; default: runs/SCALE, or runs/models/MODEL/ID for existing models.",
    )
    packed: Annotated[Path | None, Flag(panel=ADVANCED)] = Field(
        default=None, description="Resume from this folder, written by report --pack; its runs are not retrained."
    )

    @property
    def scale_name(self) -> str:
        """--scale, or the default."""
        return self.scale or DEFAULT_SCALE

    @property
    def directory(self) -> Path:
        """Directory of a sweep of trained models: --out, or runs/SCALE."""
        return self.out or RUNS / self.scale_name

    @property
    def shard_of(self) -> tuple[int, int]:
        """I and N of --shard; 0 and 1 without it.

        Raises:
            InputError: if I is not smaller than N.
        """
        shard, _, count = (self.shard or "0/1").partition("/")
        if int(shard) >= int(count):
            raise InputError(f"--shard {self.shard}: the shards of {count} are 0/{count} to {int(count) - 1}/{count}")
        return int(shard), int(count)

    @property
    def overlay(self) -> dict[str, Any]:
        """Recipe keys that --steps and --text override in every run.

        Raises:
            InputError: if the file or folder --text does not exist.
        """
        if self.text is not None and not self.text.exists():
            raise InputError(f"--text {self.text}: there is no such file or folder")
        overlay: dict[str, Any] = {} if self.steps is None else {"train": {"steps": self.steps}}
        return overlay if self.text is None else {**overlay, "data": {"source": str(self.text)}}


def print_result(as_json: bool, document: Callable[[], object], show: Callable[[Console], None]) -> None:
    """Print a result to standard output: `document()` as JSON if `as_json`, else by calling `show`."""
    if as_json:
        print(json.dumps(document(), indent=2))
    else:
        show(Console())


def run_job(
    work: Callable[[JobProgress], Any],
    phase: str,
    as_json: bool,
    show: Callable[[Any, Console], None],
    resumes: bool = False,
    *,
    what: str = "",
    steps: int | None = None,
) -> Any:
    """Run a job with a progress display on stderr, print its result as JSON or by calling `show`, and return it.

    Args:
        work: function of the progress display that returns the result, an object with a `document()` method.
        phase, what, steps: see `JobProgress`.
        resumes: True if the same command resumes an interrupted job.

    Raises:
        UnsavedError: if the result could not be saved; it has been printed.
    """
    try:
        with keeping_what_is_finished(resumes), JobProgress(stderr(), what, steps, phase=phase) as progress:
            result = work(progress)
    except UnsavedError as error:
        print_result(as_json, error.result.document, partial(show, error.result))
        raise
    print_result(as_json, result.document, partial(show, result))
    return result


def save_report(folder: Path) -> None:
    """Write report.html of the results in a folder, and print its path to stderr; for errors, see `write_report`."""
    from sinklab.report.page import write_report

    with JobProgress(stderr(), phase="writing the report"):
        path = write_report([folder])
    print_text(f"report: {path}", stderr())


ModelName = Annotated[str, typer.Argument(help="Run directory, Hugging Face id, model directory or .gguf file.")]
Json = Annotated[bool, option(OUTPUT, "Print the result as JSON to standard output.", "--json")]
