"""Options that more than one command has."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

LARGEST = 2**63 - 1  # of whole numbers, as files and generators hold them
MOST = 10**9  # sequences, and tokens in each: their product is still the size of a tensor


class Inputs(StrEnum):
    """What a measured model reads."""

    natural = "natural"
    random = "random"
    repeat = "repeat"


class MixKind(StrEnum):
    """How several files become one text."""

    weights = "weights"
    files = "files"


class Absent(StrEnum):
    """What to do about a domain that a mix names and the text does not have."""

    refuse = "refuse"
    renormalise = "renormalise"


class TableFormat(StrEnum):
    """What a measurement's tables are written as."""

    csv = "csv"
    parquet = "parquet"


class Precision(StrEnum):
    """The dtype a measured model is loaded in; auto is the one its files have, or float32 where that is emulated."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


Json = Annotated[bool, typer.Option("--json", help="Print the result document to standard output, nothing else there.")]
Text = Annotated[Path | None, typer.Option(help=".txt or .jsonl (text or messages); for natural inputs.")]
InputKind = Annotated[Inputs, typer.Option(help="Text, uniform random tokens, or one token repeated.")]
Sequences = Annotated[int, typer.Option(min=1, max=MOST, help="How many sequences.")]
Length = Annotated[int, typer.Option(min=2, max=MOST, help="Tokens per sequence, BOS included.")]
Eps = Annotated[
    list[str] | None,
    typer.Option(help="A position is a sink above this importance; may be repeated, the first is the headline."),
]
NoBos = Annotated[bool, typer.Option("--no-bos", help="Without the tokens the tokenizer puts first.")]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Sequences at a time; default: what fits, at most 16.")]
Dtype = Annotated[
    Precision, typer.Option(help="Of the weights; auto: as in the files, but float32 where a CPU emulates that.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N, or map: spread over all of them.")]
Seed = Annotated[int, typer.Option(min=0, max=LARGEST, help="Of random and repeated tokens.")]
Revision = Annotated[
    str | None, typer.Option(metavar="NAME", help="Branch, tag or commit of a model of the hub; main unless given.")
]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]


class TrackerName(StrEnum):
    """Where a run can be followed."""

    wandb = "wandb"
    tensorboard = "tensorboard"


Track = Annotated[
    list[TrackerName] | None,
    typer.Option(help="Also log to W&B (also offline) or TensorBoard; may be repeated."),
]
