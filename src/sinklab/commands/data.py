"""`sinklab data prepare`: write token shards from text, or estimate their size."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from sinklab.commands.ending import stderr
from sinklab.commands.from_model import with_options
from sinklab.commands.options import Json
from sinklab.errors import InputError
from sinklab.settings import ADVANCED, INPUT, LARGEST, OUTPUT
from sinklab.signals import keeping_what_is_finished

if TYPE_CHECKING:
    from sinklab.data.config import Mix
    from sinklab.data.shards import Settings


@with_options
def prepare(
    source: Annotated[
        str,
        typer.Argument(
            help="stdlib, site-packages, a .txt or .jsonl file, a folder of them, hf:NAME or synthetic:NAME."
        ),
    ],
    tokenizer: Annotated[str, typer.Option(rich_help_panel=INPUT, help="Hugging Face name or path, or train:SIZE.")],
    out: Annotated[Path, typer.Option(rich_help_panel=OUTPUT, help="Directory for the token shards.")],
    valid_fraction: Annotated[
        float, typer.Option(rich_help_panel=INPUT, help="Fraction of the documents held out for validation.")
    ] = 0.02,
    limit_bytes: Annotated[
        int | None,
        typer.Option(min=1, max=LARGEST, rich_help_panel=INPUT, help="Read at most this many bytes of text."),
    ] = None,
    limit_tokens: Annotated[
        int | None, typer.Option(min=2, max=LARGEST, rich_help_panel=INPUT, help="Write exactly this many tokens.")
    ] = None,
    mix: Annotated[
        Literal["weights", "files"] | None,
        typer.Option(
            metavar="KIND",
            rich_help_panel=INPUT,
            help="weights: by domain weight; files: all files at an equal rate; default: sequentially.",
        ),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=INPUT, help="With --mix weights: YAML of domain: weight; default: the paper's 17 domains."
        ),
    ] = None,
    absent: Annotated[
        Literal["refuse", "renormalise"],
        typer.Option(
            metavar="HOW",
            rich_help_panel=INPUT,
            help="With --mix weights, for domains without files: refuse, or renormalise the other weights.",
        ),
    ] = "refuse",
    seed: Annotated[
        int,
        typer.Option(
            min=0, max=LARGEST, rich_help_panel=ADVANCED, help="With --mix: random seed for the domain or file order."
        ),
    ] = 0,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", rich_help_panel=OUTPUT, help="Write nothing: report the number of bytes and tokens."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Tokenize text into shards that recipes use as data.source.

    Example: sinklab data prepare stories.txt --tokenizer train:4096 --out data/stories

    The same call resumes after an interruption and writes the same bytes. Encoding uses all cores, or
    RAYON_NUM_THREADS of them.
    """
    from sinklab.data.prepare import settings_of

    settings = settings_of(
        source,
        tokenizer,
        valid_fraction=valid_fraction,
        text_limit_bytes=limit_bytes,
        mix=_mix_of(mix, weights, absent, seed),
        token_limit=limit_tokens,
    )
    if dry_run:
        _estimate(settings, as_json)
    else:
        with keeping_what_is_finished():
            _prepare(settings, out, as_json)


def _mix_of(kind: str | None, weights: Path | None, absent: str, seed: int) -> "Mix | None":
    """Build the mix from the options.

    Raises:
        InputError: if an option belongs to another kind of mix, or the file contains no weights.
    """
    from sinklab.data.config import UniformMix, WeightedMix
    from sinklab.files import parse_yaml

    if kind != "weights" and (weights is not None or absent != "refuse"):
        raise InputError("--weights and --absent require --mix weights: add it, or remove them")
    if kind is None:
        return None
    if kind == "files":
        return UniformMix(seed=seed)
    values = {"seed": seed, "absent": absent}
    try:
        if weights is not None:
            values["weights"] = parse_yaml(weights.read_text(encoding="utf-8"))
        return WeightedMix.model_validate(values)
    except OSError as error:
        raise InputError(f"cannot read {weights}: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{weights} must have lines of domain: weight, each above 0: {error}") from error


def _estimate(settings: "Settings", as_json: bool) -> None:
    """Print the estimated bytes and tokens.

    Raises:
        InputError: if the text or tokenizer cannot be used.
    """
    from sinklab.commands.terminal.plans import print_estimate
    from sinklab.commands.terminal.progress import JobProgress
    from sinklab.data.texts import estimate

    with JobProgress(stderr(), phase="estimating"):
        found = estimate(settings)
    if as_json:
        print(json.dumps(found.document(), indent=2))
    else:
        print_estimate(found, Console())


def _prepare(settings: "Settings", out: Path, as_json: bool) -> None:
    """Prepare the data and print the result.

    Raises:
        InputError, SinklabError: as `prepare_settings`.
    """
    from sinklab.commands.terminal.progress import data_progress
    from sinklab.data.prepare import prepare_settings

    with data_progress(stderr()) as board:
        dataset = prepare_settings(settings, out, board, board.counted)
    if as_json:
        print((out / "data.json").read_text(encoding="utf-8"))
        return
    print(f"{out}: {len(dataset.train):,} training and {len(dataset.valid):,} validation tokens")
    for name, share in (dataset.manifest.shares or {}).items():
        print(f"  {name}: {share.tokens:,} tokens")
