"""`sinklab data prepare`: what was asked for, done or only estimated."""

import json
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from sinklab.commands.terminal.data import print_estimate
from sinklab.data.estimate import estimate
from sinklab.data.prepare import prepare, settings_of
from sinklab.data.selection import Mix, UniformMix, WeightedMix
from sinklab.errors import InputError
from sinklab.files import parse_yaml


@dataclass(frozen=True)
class Asked:
    """The text to prepare, as `prepare` takes it."""

    source: str
    tokenizer: str
    valid_fraction: float
    text_limit_bytes: int | None
    token_limit: int | None
    mix: Mix | None


def mix_of(kind: str | None, weights: Path | None, absent: str, seed: int) -> Mix | None:
    """The mix that options describe.

    Raises:
        InputError: options that belong to another kind, or a file that holds no weights.
    """
    if kind != "weights" and (weights is not None or absent != "refuse"):
        raise InputError("--weights and --absent belong to --mix weights: add it, or leave them out")
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
        raise InputError(f"{weights} does not hold lines of domain: weight, each above 0: {error}") from error


def dry_run_command(asked: Asked, as_json: bool) -> None:
    """Print the estimate.

    Raises:
        InputError: text or tokenizer cannot be used.
    """
    found = estimate(
        settings_of(
            asked.source,
            asked.tokenizer,
            valid_fraction=asked.valid_fraction,
            text_limit_bytes=asked.text_limit_bytes,
            mix=asked.mix,
            token_limit=asked.token_limit,
        )
    )
    if as_json:
        print(json.dumps(found.document(), indent=2))
    else:
        print_estimate(found, Console())


def prepare_command(asked: Asked, out: Path, as_json: bool, console: Console) -> None:
    """Prepare the data and print what came out.

    Raises:
        InputError, SinklabError: as `prepare`.
    """
    from sinklab.commands.console import data_progress

    with data_progress(console) as board:
        dataset = prepare(
            asked.source,
            asked.tokenizer,
            out,
            valid_fraction=asked.valid_fraction,
            text_limit_bytes=asked.text_limit_bytes,
            mix=asked.mix,
            token_limit=asked.token_limit,
            progress=board,
            counted=board.counted,
        )
    if as_json:
        print((out / "data.json").read_text(encoding="utf-8"))
        return
    print(f"{out}: {len(dataset.train):,} training and {len(dataset.valid):,} validation tokens")
    for name, share in (dataset.manifest.shares or {}).items():
        print(f"  {name}: {share.tokens:,} tokens")
