"""Settings of an assessment, and the sequence lengths, cache sizes and budgets derived from them for one model."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from sinklab.errors import InputError
from sinklab.settings import (
    ADVANCED,
    INPUT,
    MEASURED,
    MOST,
    ColumnName,
    CommandSettings,
    Flag,
    Seed,
    Several,
    split_names,
)

if TYPE_CHECKING:
    from sinklab.opening import Model

Placed = Literal["cache", "text"]
CacheSize = Annotated[int, Field(ge=2)]
"""Number of keys in a cache, including the query's own."""
LONGEST = 2**13  # the length part reads 2 contexts, at most LONGEST tokens, but at least 5/4 of the context
KEPT = (0, 1, 2, 4)
TOLERANCE = 0.01
"""Default of the loss in nats per token that a setting may add: 0.01 multiplies the perplexity by 1.01."""
CACHE_GROUP = 32  # size of a quantisation group of the KV cache, in tokens or channels
FEWEST_SCORED = 8  # tokens of the text that `parity` compares
PART_NAMES = (
    "streaming",
    "quantisation",
    "eviction",
    "prompt_cache",
    "length",
    "key_ablations",
    "heads",
    "kv_cache",
    "kv_formats",
    "pruning",
    "writer",
    "budgets",
    "chunks",
    "bos",
)
"""Parts of an assessment in the order of execution and display; each is a class in `parts/`."""


@dataclass(frozen=True)
class DefaultSizes:
    """Default amounts of text and numbers of draws, which determine the run time of an assessment.

    Attributes:
        within: maximum number of tokens per sequence, except in the streaming and length parts.
        tokens: total number of tokens, except in the streaming and length parts; at least one sequence.
        streamed: total number of tokens of the streaming part, and of the length part; at least one sequence each.
        kept: numbers of first tokens kept in the rolling cache; each is evaluated.
        draws: number of draws of rounded activations, keys and values (`quantisation`, `kv_cache`, `kv_formats`).
        caches, budgets: ratios of the sequence length to the sizes of the rolling caches and to the key budgets.
        head_sequences: number of sequences on which `kv_cache` tests each KV head; 0 omits these tests.
    """

    within: int
    tokens: int
    streamed: int
    kept: tuple[int, ...]
    draws: int
    caches: tuple[int, ...]
    budgets: tuple[int, ...]
    head_sequences: int


FULL_SIZES = DefaultSizes(2**10, 2**11, 2**12, KEPT, draws=3, caches=(16, 4), budgets=(8, 4), head_sequences=1)
QUICK_SIZES = DefaultSizes(2**8, 2**9, 2**10, (0, 4), draws=1, caches=(16,), budgets=(4,), head_sequences=0)


def _names(given: object) -> object:
    """Split a comma-separated list of part names into a tuple; `all` gives an empty tuple."""
    return () if given == "all" else split_names(given)


class AssessOptions(CommandSettings, frozen=True):
    """Settings of an assessment; if one is None or empty, its default depends on the model or on other settings."""

    panel = MEASURED

    parts: Annotated[Several[str], BeforeValidator(_names), Flag(text=str, default="all", metavar="NAMES")] = Field(
        default=(),
        exclude=True,
        description=f"Comma-separated list of {', '.join(PART_NAMES)}; all: the parts that are not slow "
        "(docs/assess.md).",
    )
    quick: bool = Field(
        default=False,
        exclude_if=lambda quick: not quick,
        description="Fewer settings, on 512 tokens (streaming: 1,024), and no layer or head alone; in `assess` only "
        "streaming, quantisation, eviction, prompt_cache and kv_cache: under 3 minutes for 135 M parameters on 2 CPU "
        "cores. Explicit options take precedence.",
    )
    sequences: Annotated[int | None, Flag(panel=INPUT)] = Field(
        default=None,
        ge=1,
        le=MOST,
        description="Number of sequences, except in `length`; default: as many as have 2,048 tokens in total, or "
        "4,096 in streaming.",
    )
    length: Annotated[int | None, Flag(panel=INPUT)] = Field(
        default=None, ge=8, le=MOST, description="Tokens per sequence; default: the context, at most 1,024."
    )
    stream_length: Annotated[int | None, Flag(panel=INPUT)] = Field(
        default=None,
        ge=8,
        le=MOST,
        description="Tokens per sequence in streaming; default: 4 times --length, or less if the model has a limit.",
    )
    column: ColumnName = Field(default=None, exclude=True)  # the hash of the text decides
    caches: Annotated[Several[CacheSize], Flag("--cache")] = Field(
        default=(), description="Keys in the rolling cache; repeatable; default: 1/16 and 1/4 of --stream-length."
    )
    kept: Annotated[Several[Annotated[int, Field(ge=0)]], Flag("--keep")] = Field(
        default=(),
        description="First tokens kept in the rolling cache; repeatable; default: 0, 1, 2, 4, in `advise` also 8, 16.",
    )
    positions: Annotated[Placed | None, Flag(metavar="PLACE")] = Field(
        default=None, description="Key positions in streaming: cache or text; default: cache if the model supports it."
    )
    budgets: Annotated[Several[CacheSize], Flag("--budget")] = Field(
        default=(),
        description="Keys kept by eviction, prompt_cache and (only the smallest) budgets; repeatable; default: 1/8 and "
        "1/4 of --length.",
    )
    sink_tokens: int = Field(default=1, ge=1, description="Number of first tokens that form the sink.")
    residual: Annotated[int, Flag(panel=ADVANCED)] = Field(
        default=0,
        ge=0,
        le=MOST,
        multiple_of=CACHE_GROUP,
        exclude_if=lambda tokens: tokens == 0,
        description="Recent tokens that kv_cache keeps in full precision, a multiple of 32 (KIVI: 32 or 128).",
    )
    head_sequences: Annotated[int | None, Flag(panel=ADVANCED)] = Field(
        default=None,
        ge=0,
        le=MOST,
        exclude_if=lambda sequences: sequences in (None, 1),
        description="Number of sequences on which kv_cache and budgets test each KV head separately; default: 1; with "
        "--quick, 0 (kv_cache tests no head).",
    )
    seed: Annotated[Seed, Flag(panel=ADVANCED)] = Field(default=0, description="Random seed for random keys and heads.")

    @property
    def sizes(self) -> DefaultSizes:
        """Default amounts of text and draws: `QUICK_SIZES` with --quick, else `FULL_SIZES`."""
        return QUICK_SIZES if self.quick else FULL_SIZES

    @property
    def most_kept(self) -> int:
        """Largest number of first tokens kept in a cache, for parts with a single number; if it is 0, that of KEPT."""
        return max(self.kept, default=0) or max(KEPT)


class AssessSettings(AssessOptions, frozen=True):
    """Settings of an assessment, with all defaults resolved for one model.

    Attributes:
        stream_sequences: number of sequences of the streaming part.
        long_length: tokens per sequence of the length part; None if the model cannot read beyond its context
            (`Adapter.ends`).
    """

    sequences: int = Field(default=...)
    length: int = Field(default=...)
    stream_sequences: int
    stream_length: int = Field(default=...)
    positions: Placed = Field(default=...)
    head_sequences: int = Field(default=1, exclude_if=lambda sequences: sequences == 1)
    long_length: int | None


def settings_for(model: "Model", options: AssessOptions) -> AssessSettings:
    """Resolve the defaults of the options, which depend on the model's context and on each other.

    Raises:
        InputError: if an option is invalid for the model or for the length of the sequences.
    """
    adapter, fixed = model.adapter, model.adapter.fixed_positions()
    context = adapter.context
    length = options.length or min(context, options.sizes.within)
    if length > context:
        raise InputError(f"--length {length} exceeds the context of {model.name}: set at most --length {context}")
    if options.positions == "cache" and fixed:
        raise InputError(f"{model.name} cannot use positions in the cache, as {fixed}: set --positions text")
    longest = min(4 * length, context) if adapter.ends else 4 * length
    stream_length = options.stream_length or longest
    if adapter.ends and stream_length > context:
        raise InputError(
            f"--stream-length {stream_length}: {model.name} is limited to {context} tokens, as {adapter.ends}: set at "
            f"most --stream-length {context}"
        )
    sizes = options.sizes
    caches = options.caches or tuple(sorted({max(2, stream_length // ratio) for ratio in sizes.caches}))
    budgets = options.budgets or tuple(sorted({max(2, length // ratio) for ratio in sizes.budgets}))
    for option, numbers, given, tokens in (
        ("--cache", caches, "--stream-length", stream_length),
        ("--budget", budgets, "--length", length),
    ):
        if max(numbers) > tokens:
            raise InputError(
                f"{option} {max(numbers)}: the sequences have only {tokens} tokens, so the cache would never be full: "
                f"set at most {option} {tokens}, or a larger {given}"
            )
    if (first := max(options.kept, default=0)) >= min(caches):
        raise InputError(
            f"--keep {first}: the smallest cache has only {min(caches)} keys: set a smaller --keep or a larger --cache"
        )
    if options.sink_tokens > length // 4:
        raise InputError(
            f"--sink-tokens {options.sink_tokens}: set 1 to {length // 4}, at most a quarter of the tokens per sequence"
        )
    if "kv_cache" in options.parts and options.residual >= length:
        raise InputError(
            f"--residual {options.residual}: the sequences have only {length} tokens, so no key would be quantised: "
            f"set --residual below {length}, or a larger --length"
        )
    decided: dict[str, Any] = {
        "sequences": options.sequences or max(1, sizes.tokens // length),
        "length": length,
        "stream_sequences": options.sequences or max(1, sizes.streamed // stream_length),
        "stream_length": stream_length,
        "caches": caches,
        "kept": options.kept or tuple(first for first in sizes.kept if first < max(caches)),
        "positions": options.positions or ("text" if fixed else "cache"),
        "budgets": budgets,
        "head_sequences": sizes.head_sequences if options.head_sequences is None else options.head_sequences,
        "long_length": None if adapter.ends else max(min(2 * context, LONGEST), context + context // 4),
    }
    return AssessSettings(**{**dict(options), **decided})
