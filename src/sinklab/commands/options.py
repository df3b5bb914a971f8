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
        default="auto", description="Of the weights; auto: as in the files, but float32 where a CPU emulates that."
    )
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:N, or map: spread over all of them.")
    revision: Annotated[str | None, Flag(metavar="NAME")] = Field(
        default=None, description="Branch, tag or commit of a model of the hub; main unless given."
    )
    trust_remote_code: bool = Field(default=False, description="Run code that comes with the model.")

    def on(self, console: "Console") -> "Loading":
        """The same for the loader, which says on the console what takes a while."""
        from sinklab.models.huggingface.loading import Loading

        return Loading(**dict(self), say=partial(say_on, console))


class SubfolderLoadingOptions(LoadingOptions, frozen=True):
    """How a model is loaded that may lie in a folder of its repository."""

    subfolder: Annotated[str | None, Flag(metavar="FOLDER")] = Field(
        default=None, description="The model lies in this folder of the directory or repository."
    )


ModelName = Annotated[str, typer.Argument(help="Run directory, Hugging Face id, model directory or .gguf file.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result document to standard output, nothing else there.")]
