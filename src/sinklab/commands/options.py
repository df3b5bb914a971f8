"""Options that more than one command has."""

from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from pydantic import Field

from sinklab.commands.ending import say_on
from sinklab.settings import CommandSettings, Flag

if TYPE_CHECKING:
    from rich.console import Console

    from sinklab.models.huggingface.loading import Loading

Precision = Literal["auto", "float32", "bfloat16", "float16"]


class LoadingOptions(CommandSettings, frozen=True):
    """How a model is loaded."""

    dtype: Precision = Field(
        default="auto", description="Of the weights; auto: that of the files, or float32 if the CPU only emulates it."
    )
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:N, or map: weights spread over all devices.")
    revision: Annotated[str | None, Flag(metavar="NAME")] = Field(
        default=None, description="Branch, tag or commit on the hub; default: main."
    )
    trust_remote_code: bool = Field(default=False, description="Run code from the model's repository.")

    def on(self, console: "Console") -> "Loading":
        """The loader's settings; slow steps are announced on the console."""
        from sinklab.models.huggingface.loading import Loading

        return Loading(**dict(self), say=partial(say_on, console))


class SubfolderLoadingOptions(LoadingOptions, frozen=True):
    """How a model is loaded that may lie in a folder of its repository."""

    subfolder: Annotated[str | None, Flag(metavar="FOLDER")] = Field(
        default=None, description="Folder of the model within the directory or repository."
    )


ModelName = Annotated[str, typer.Argument(help="Run directory, Hugging Face id, model directory or .gguf file.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result document, and nothing else, to standard output.")]
