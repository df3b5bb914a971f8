"""`sinklab data prepare`: write token shards from text, or estimate their size."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from sinklab.commands.ending import stderr
from sinklab.commands.from_model import with_options
from sinklab.commands.options import Json, option, print_result
from sinklab.errors import InputError
from sinklab.settings import ADVANCED, INPUT, LARGEST, OUTPUT
from sinklab.signals import keeping_what_is_finished

if TYPE_CHECKING:
    from sinklab.data.config import Mix


@with_options
def prepare(
    source: Annotated[
        str,
        typer.Argument(
            help="stdlib, site-packages, a .txt or .jsonl file, a folder of them, hf:NAME or synthetic:NAME."
        ),
    ],
    tokenizer: Annotated[str, option(INPUT, "Hugging Face name or path, train:SIZE, or words for synthetic:NAME.")],
    out: Annotated[Path, option(OUTPUT, "Directory for the token shards.")],
    valid_fraction: Annotated[
        float, option(INPUT, "Fraction of the documents held out for validation, at most 0.5.")
    ] = 0.02,
    limit_bytes: Annotated[
        int | None, option(INPUT, "Read at most this many bytes of text.", min=1, max=LARGEST)
    ] = None,
    limit_tokens: Annotated[
        int | None, option(INPUT, "Write at most this many training and validation tokens.", min=2, max=LARGEST)
    ] = None,
    mix: Annotated[
        Literal["weights", "files"] | None,
        option(
            INPUT,
            "Interleave domains by weight (weights), or all files at equal rates (files); default: sequential.",
            metavar="KIND",
        ),
    ] = None,
    weights: Annotated[
        Path | None, option(INPUT, "With --mix weights: YAML file of domain: weight; default: the paper's 17 domains.")
    ] = None,
    absent: Annotated[
        Literal["refuse", "renormalise"],
        option(
            INPUT,
            "With --mix weights, for domains without files: refuse, or renormalise the other weights.",
            metavar="HOW",
        ),
    ] = "refuse",
    seed: Annotated[
        int, option(ADVANCED, "With --mix: random seed for the order of domains or files.", min=0, max=LARGEST)
    ] = 0,
    dry_run: Annotated[bool, option(OUTPUT, "Only estimate the number of bytes and tokens.")] = False,
    as_json: Json = False,
) -> None:
    """Tokenize text into shards that recipes use as data.source.

    Example: sinklab data prepare stories.txt --tokenizer train:4096 --out data/stories

    The same command resumes after an interruption, and the shards are byte-identical. Encoding uses all cores, or
    RAYON_NUM_THREADS threads.
    """
    from sinklab.commands.terminal.plans import print_estimate
    from sinklab.commands.terminal.progress import DataBoard, JobProgress
    from sinklab.data.prepare import prepare_settings, settings_of
    from sinklab.data.texts import estimate

    settings = settings_of(
        source,
        tokenizer,
        valid_fraction=valid_fraction,
        text_limit_bytes=limit_bytes,
        mix=_mix_of(mix, weights, absent, seed),
        token_limit=limit_tokens,
    )
    if dry_run:
        with JobProgress(stderr(), phase="estimating"):
            found = estimate(settings)
        print_result(as_json, found.document, lambda out: print_estimate(found, out))
        return
    with keeping_what_is_finished(), DataBoard(stderr()) as board:
        dataset = prepare_settings(settings, out, board, board.counted)
    if as_json:
        print((out / "data.json").read_text(encoding="utf-8"))
        return
    print(f"{out}: {len(dataset.train):,} training and {len(dataset.valid):,} validation tokens")
    for name, share in (dataset.manifest.shares or {}).items():
        print(f"  {name}: {share.tokens:,} tokens")


def _mix_of(kind: str | None, weights: Path | None, absent: str, seed: int) -> "Mix | None":
    """Return the data mix that the options specify; None without --mix.

    Raises:
        InputError: if an option belongs to another kind of mix, or the weights file cannot be read or is invalid.
    """
    from sinklab.data.config import UniformMix, WeightedMix
    from sinklab.files import parse_yaml

    if kind != "weights" and (weights is not None or absent != "refuse"):
        raise InputError("--weights and --absent require --mix weights: add --mix weights, or remove them")
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
        raise InputError(f"{weights}: expected lines `domain: weight` with positive weights: {error}") from error
