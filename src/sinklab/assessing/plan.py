"""What is asked of an assessment, and what becomes of it for one model: lengths, caches and budgets that suit it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from sinklab.assessing.layers import Patient
from sinklab.errors import InputError

Placed = Literal["cache", "text"]
WITHIN = 2**10  # tokens of a sequence within the context, unless told
TOKENS = 2**11  # of such sequences together
STREAMED = 2**12  # tokens of the streaming part together
LONGEST = 2**13  # tokens of a sequence of the length part, unless 5/4 of the context is more
KEPT = (0, 1, 2, 4)


@dataclass(frozen=True)
class Wanted:
    """What the user asks for; None leaves it to the model's context.

    Attributes:
        parts: by name; empty is all that the model can be given.
        sequences, length: N and T of what is read within the context.
        stream_length: T of the streaming part.
        caches: sizes of the rolling cache.
        kept: how many of the first tokens stay in it; KEPT unless told.
        positions: in the cache or in the text.
        budgets: of the eviction part.
        sink_tokens: so many first tokens are the sink.
        seed: of random keys.
        where_possible: parts that the model cannot be given are skipped although they are named.
    """

    parts: Sequence[str] = ()
    sequences: int | None = None
    length: int | None = None
    stream_length: int | None = None
    caches: Sequence[int] = ()
    kept: Sequence[int] = ()
    positions: Placed | None = None
    budgets: Sequence[int] = ()
    sink_tokens: int = 1
    seed: int = 0
    where_possible: bool = False

    def __post_init__(self) -> None:
        for option, numbers in (("--cache", self.caches), ("--budget", self.budgets)):
            for number in numbers:
                if number < 2:
                    raise InputError(f"{option} {number}: a cache holds 2 keys or more, the query's own included")
        for first in self.kept:
            if first < 0:
                raise InputError(f"--keep {first}: give 0 or more")


@dataclass(frozen=True)
class AssessSettings:
    """What is done, for one model; attributes as those of `Wanted`.

    Attributes:
        stream_sequences: N of the streaming part.
        long_length: T of the length part; None where the model cannot read beyond its context.
    """

    sequences: int
    length: int
    stream_sequences: int
    stream_length: int
    caches: tuple[int, ...]
    kept: tuple[int, ...]
    positions: Placed
    budgets: tuple[int, ...]
    long_length: int | None
    sink_tokens: int
    seed: int

    def document(self) -> dict[str, object]:
        """As plain JSON has it."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}


def settings_for(patient: Patient, wanted: Wanted) -> AssessSettings:
    """Lengths, caches and budgets: what was asked for, else what suits the context.

    Raises:
        InputError: what this model, or this text length, cannot be given.
    """
    context = patient.context
    length = wanted.length or min(context, WITHIN)
    if length > context:
        raise InputError(f"--length {length} is beyond the context of {patient.name}: give at most --length {context}")
    if wanted.positions == "cache" and patient.fixed_positions:
        raise InputError(
            f"the positions of {patient.name} cannot be those in a cache, as {patient.fixed_positions}: "
            "give --positions text"
        )
    stream_length = wanted.stream_length or _stream_length(patient, length)
    if patient.ends and stream_length > context:
        raise InputError(
            f"--stream-length {stream_length}: {patient.name} cannot read beyond {context} tokens, as {patient.ends}"
        )
    caches = tuple(wanted.caches) or tuple(sorted({max(2, stream_length // 16), max(2, stream_length // 4)}))
    budgets = tuple(wanted.budgets) or tuple(sorted({max(2, length // 8), max(2, length // 4)}))
    for option, numbers, given, tokens in (
        ("--cache", caches, "--stream-length", stream_length),
        ("--budget", budgets, "--length", length),
    ):
        for number in numbers:
            if number > tokens:
                raise InputError(
                    f"{option} {number}: the sequences have {tokens} tokens, fewer than the cache holds, so that it "
                    f"would never be full: give at most {option} {tokens}, or a longer {given}"
                )
    for first in wanted.kept:
        if first >= min(caches):
            raise InputError(
                f"--keep {first}: the smallest cache holds {min(caches)} keys; keep fewer than the cache holds"
            )
    if not 1 <= wanted.sink_tokens <= length // 4:
        raise InputError(f"--sink-tokens {wanted.sink_tokens}: give 1 to {length // 4}, a quarter of the sequences")
    return AssessSettings(
        sequences=wanted.sequences or max(1, TOKENS // length),
        length=length,
        stream_sequences=wanted.sequences or max(1, STREAMED // stream_length),
        stream_length=stream_length,
        caches=caches,
        kept=tuple(wanted.kept) or tuple(first for first in KEPT if first < max(caches)),
        positions=wanted.positions or ("text" if patient.fixed_positions else "cache"),
        budgets=budgets,
        long_length=None if patient.ends else max(min(2 * context, LONGEST), context + context // 4),
        sink_tokens=wanted.sink_tokens,
        seed=wanted.seed,
    )


def _stream_length(patient: Patient, length: int) -> int:
    return min(4 * length, patient.context) if patient.ends else 4 * length
