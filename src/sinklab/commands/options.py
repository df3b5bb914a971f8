"""Settings and options that more than one command has."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import Field

from sinklab.commands.ending import say_on
from sinklab.errors import InputError
from sinklab.experiments.sweep.engines import EngineName
from sinklab.settings import ADVANCED, INPUT, OUTPUT, CommandSettings, Flag, Several

if TYPE_CHECKING:
    from rich.console import Console

    from sinklab.models.huggingface.loading import Loading

RUNS = Path("runs")
Precision = Literal["auto", "float32", "bfloat16", "float16"]


class LoadingOptions(CommandSettings, frozen=True):
    """How a model is loaded."""

    dtype: Annotated[Precision, Flag(metavar="TYPE")] = Field(
        default="auto",
        description="Of the weights: float32, bfloat16, float16, or auto: that of the files, float32 where the CPU "
        "only emulates it.",
    )
    device: Annotated[str, Flag(metavar="NAME")] = Field(
        default="auto", description="auto, cpu, cuda, cuda:N, or map: weights spread over all devices."
    )
    revision: Annotated[str | None, Flag(metavar="NAME", panel=INPUT)] = Field(
        default=None, description="Branch, tag or commit on the hub; default: main."
    )
    trust_remote_code: bool = Field(default=False, description="Run code from the model's repository.")

    def on(self, console: "Console") -> "Loading":
        """The loader's settings; slow steps are announced on the console."""
        from sinklab.models.huggingface.loading import Loading

        return Loading(**dict(self), say=partial(say_on, console))


class SubfolderLoadingOptions(LoadingOptions, frozen=True):
    """How a model is loaded that may lie in a folder of its repository."""

    subfolder: Annotated[str | None, Flag(metavar="FOLDER", panel=INPUT)] = Field(
        default=None, description="Folder of the model within the directory or repository."
    )


class ReproduceSettings(CommandSettings, frozen=True):
    """The settings of `sinklab reproduce` and `lab`; experiments on existing models use five of them."""

    panel = INPUT

    scale: Annotated[str, Flag(metavar="NAME")] = Field(
        default="tiny", description="tiny, mini, small, 60m or 1b, of those that the experiment has."
    )
    seeds: int | None = Field(
        default=None,
        ge=1,
        description="Models per cell: the first N of the experiment's seeds; default: all, mostly 5.",
    )
    models: Annotated[Several[str], Flag(name="--model", metavar="MODEL")] = Field(
        default=(),
        description="Model to measure, for experiments on existing models, on --seeds draws of sequences: Hugging Face "
        "id, directory, .gguf file or run directory; repeatable, the chat model second. Of an experiment that names "
        "its models: measure these instead.",
    )
    steps: int | None = Field(default=None, ge=1, description="Updates per model; the recipe's unless given.")
    text: Path | None = Field(
        default=None,
        description="Train on this .txt or .jsonl file or folder instead; or measure a --model on it.",
    )
    data: Path | None = Field(
        default=None, description="HellaSwag's file, for experiments on existing models that ask it."
    )
    trust_remote_code: Annotated[bool, Flag(panel=ADVANCED)] = Field(
        default=False, description="Run code from the repository of a model."
    )
    jobs: Annotated[int | None, Flag(panel=ADVANCED)] = Field(
        default=None, ge=1, description="Models at a time; as many as the cores suggest."
    )
    engine: Annotated[EngineName, Flag(panel=ADVANCED, metavar="NAME")] = Field(
        default=EngineName.local, description="Where models are trained: local, slurm or ray."
    )
    engine_options: Annotated[Several[str], Flag(name="--engine-option", metavar="KEY=VALUE", panel=ADVANCED)] = Field(
        default=(), description="Of slurm or ray, such as partition=gpu; may be repeated."
    )
    dry_run: Annotated[bool, Flag(panel=OUTPUT)] = Field(
        default=False, description="Train nothing: print the cells, what each changes, and the hours."
    )
    out: Annotated[Path | None, Flag(panel=OUTPUT)] = Field(
        default=None, description="Directory of the runs, summary.json and report.html; runs/SCALE unless given."
    )
    packed: Annotated[Path | None, Flag(panel=ADVANCED)] = Field(
        default=None, description="Folder written by report --pack, whose runs count as trained: continue it."
    )

    @property
    def directory(self) -> Path:
        """Directory of a sweep."""
        return self.out or RUNS / self.scale

    @property
    def overlay(self) -> dict[str, Any]:
        """Changes to every recipe.

        Raises:
            InputError: there is no such text.
        """
        if self.text is not None and not self.text.exists():
            raise InputError(f"--text {self.text}: there is no such file or folder")
        overlay: dict[str, Any] = {} if self.steps is None else {"train": {"steps": self.steps}}
        return overlay if self.text is None else {**overlay, "data": {"source": str(self.text)}}


ModelName = Annotated[str, typer.Argument(help="Run directory, Hugging Face id, model directory or .gguf file.")]
Json = Annotated[
    bool,
    typer.Option("--json", rich_help_panel=OUTPUT, help="Print the result document alone to standard output."),
]
