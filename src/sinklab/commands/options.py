"""Options that more than one command has."""

import re
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from sinklab.errors import InputError
from sinklab.measuring.options import Inputs

LARGEST = 2**63 - 1  # of whole numbers, as files and generators hold them
MOST = 10**9  # sequences, and tokens in each: their product is still the size of a tensor


MixKind = Literal["weights", "files"]
"""How several files become one text."""

Absent = Literal["refuse", "renormalise"]
"""What to do about a domain that a mix names and the text does not have."""

Precision = Literal["auto", "float32", "bfloat16", "float16"]
"""The dtype a measured model is loaded in; auto is the one its files have, or float32 where that is emulated."""


class TableFormat(StrEnum):  # typer takes no lists of literals
    """What a measurement's tables are written as."""

    csv = "csv"
    parquet = "parquet"


class TrackerChoice(StrEnum):
    """Where a run can be followed."""

    wandb = "wandb"
    tensorboard = "tensorboard"


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
Revisions = Annotated[
    list[str] | None,
    typer.Option(
        "--revision",
        metavar="NAME",
        help="Branch, tag or commit of a model of the hub; several, such as step1000, give the curve of its training.",
    ),
]
Subfolder = Annotated[
    str | None, typer.Option(metavar="FOLDER", help="The model lies in this folder of the directory or repository.")
]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]
Track = Annotated[
    list[TrackerChoice] | None,
    typer.Option(help="Also log to W&B (also offline) or TensorBoard; may be repeated."),
]


def parse_eps(given: Sequence[str]) -> tuple[float, ...]:
    """The thresholds of --eps, which may be repeated and hold lists: ["0.3", "0.2,0.4"] is 0.3, 0.2, 0.4.

    Raises:
        InputError: not a number.
    """
    thresholds: dict[float, None] = {}
    for part in ",".join(given).split(","):
        try:
            thresholds[float(part)] = None
        except ValueError:
            raise InputError(
                f"--eps {part}: expected a share of attention such as 0.3, or a list such as 0.2,0.3"
            ) from None
    return tuple(thresholds)


def parse_maps(given: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """The (layer, head) of --map, which may be repeated: ["3.1"] is layer 3, head 1.

    Raises:
        InputError: not two numbers from 1 on.
    """
    wanted = []
    for one in given:
        found = re.fullmatch(r"([1-9]\d*)\.([1-9]\d*)", one)
        if not found:
            raise InputError(f"--map {one}: expected LAYER.HEAD, both counted from 1, such as 3.1")
        wanted.append((int(found[1]), int(found[2])))
    return tuple(wanted)
