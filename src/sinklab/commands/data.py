"""`sinklab data prepare`: write token shards from text, or estimate their size."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import Field

from sinklab.commands.from_model import with_options
from sinklab.commands.options import Json, option, print_result
from sinklab.commands.terminal.progress import DataDisplay, JobProgress
from sinklab.commands.terminal.tables import stderr
from sinklab.errors import InputError, cause
from sinklab.files import check_writable, parse_yaml
from sinklab.settings import ADVANCED, INPUT, LARGEST_INT64, OUTPUT, CommandSettings, Flag, Seed
from sinklab.signals import keeping_what_is_finished

if TYPE_CHECKING:
    from sinklab.data.loader import Mix


class PrepareSettings(CommandSettings, frozen=True):
    """Settings of `sinklab data prepare`, described by their help, by `DataConfig` and by `WeightedMix`."""

    panel = INPUT

    tokenizer: str = Field(
        description="Hugging Face name or path, train:SIZE (BPE trained on the text), or `words` (of synthetic:NAME)."
    )
    valid_fraction: float = Field(
        default=0.02, gt=0, le=0.5, description="Fraction of the documents held out for validation, at most 0.5."
    )
    text_limit_bytes: Annotated[int | None, Flag("--limit-bytes")] = Field(
        default=None, ge=1, le=LARGEST_INT64, description="Read at most this many bytes of text."
    )
    token_limit: Annotated[int | None, Flag("--limit-tokens")] = Field(
        default=None,
        ge=2,
        le=LARGEST_INT64,
        description="Write at most this many tokens, training and validation together.",
    )
    mix_kind: Annotated[Literal["weights", "files"] | None, Flag("--mix", metavar="KIND")] = Field(
        default=None,
        exclude=True,
        description="Interleave domains by weight (weights), or all files at equal rates (files); default: sequential.",
    )
    weights: Path | None = Field(
        default=None,
        exclude=True,
        description="With --mix weights: YAML file with lines `domain: weight`; default: the paper's 17 domains.",
    )
    absent: Annotated[Literal["refuse", "renormalise"], Flag(metavar="HOW")] = Field(
        default="refuse",
        exclude=True,
        description="With --mix weights, for domains without files: refuse, or renormalise the other weights.",
    )
    seed: Annotated[Seed, Flag(panel=ADVANCED)] = Field(
        default=0, exclude=True, description="With --mix: random seed of the interleaving."
    )

    @property
    def mix(self) -> "Mix | None":
        """Data mix that the options specify; None without --mix.

        Raises:
            InputError: if --weights or --absent is set without --mix weights, or the weights file cannot be
                read or is invalid.
        """
        from sinklab.data.loader import UniformMix, WeightedMix

        kind, weights = self.mix_kind, self.weights
        if kind != "weights" and (weights is not None or self.absent != "refuse"):
            raise InputError("--weights and --absent require --mix weights: add --mix weights, or remove them")
        if kind is None:
            return None
        if kind == "files":
            return UniformMix(seed=self.seed)
        values: dict[str, Any] = {"seed": self.seed, "absent": self.absent}
        try:
            if weights is not None:
                values["weights"] = parse_yaml(weights.read_text(encoding="utf-8"))
            return WeightedMix.model_validate(values)
        except OSError as error:
            raise InputError(f"cannot read {weights}: {error.strerror}") from error
        except ValueError as error:
            raise InputError(
                f"{weights}: expected lines `domain: weight` with positive weights ({cause(error)})"
            ) from error


@with_options
def prepare(
    *,
    source: Annotated[
        str,
        typer.Argument(
            help="stdlib or site-packages (files of this Python), a text file (.txt, .jsonl, .csv, .parquet, ..), "
            "a folder of them, hf:NAME "
            "(dataset on the Hugging Face hub) or synthetic:NAME."
        ),
    ],
    options: PrepareSettings,
    out: Annotated[Path, option(OUTPUT, "Directory for the token shards.")],
    dry_run: Annotated[bool, option(OUTPUT, "Only estimate the number of bytes and tokens.")] = False,
    as_json: Json = False,
) -> None:
    """Tokenize text into shards that recipes use as data.source.

    Example: sinklab data prepare stories.txt --tokenizer train:4096 --out data/stories

    The same command resumes after an interruption; the shards are byte-identical to those of an uninterrupted call.
    Encoding uses all cores, or RAYON_NUM_THREADS threads.
    """
    from sinklab.commands.terminal.plans import print_estimate
    from sinklab.data.loader import is_prepared
    from sinklab.data.prepare import prepare, settings_of
    from sinklab.data.texts import estimate

    settings = settings_of(source, mix=options.mix, **options.model_dump())
    if dry_run:
        with JobProgress(stderr(), phase="estimating"):
            found = estimate(settings)
        print_result(as_json, lambda: asdict(found), lambda out: print_estimate(found, out))
        return
    if not is_prepared(out):
        check_writable(out)
    with keeping_what_is_finished(), DataDisplay(stderr()) as display:
        dataset = prepare(settings, out, display, display.counted)
    if as_json:
        print((out / "data.json").read_text(encoding="utf-8"))
        return
    print(f"{out}: {len(dataset.train):,} training and {len(dataset.valid):,} validation tokens")
    for name, share in (dataset.manifest.shares or {}).items():
        print(f"  {name}: {share.tokens:,} tokens")
    for note in dataset.manifest.notes or ():
        print(f"  {note}")
