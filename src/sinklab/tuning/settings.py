"""What a tuning is made with; the defaults are the paper's, for its models of 1B parameters (2410.10781, figure 30).

The paper states UltraChat, the learning rate, its cosine shape, 64 conversations of 2,048 tokens a step and one epoch.
It says nothing of a warm-up (a tenth of the steps here, as where the same conversations made Zephyr) and of the
optimiser (AdamW with transformers' defaults: betas 0.9 and 0.999, no weight decay, gradients clipped at 1).
"""

import math
from dataclasses import asdict, dataclass

from sinklab.errors import InputError

LONGEST = 2048
HELD_OUT = 100
SINK_LENGTH = 64
EVALUATIONS = 10
TOKENS_AT_A_TIME = 4096  # of a micro-batch


@dataclass(frozen=True)
class TuneWanted:
    """What a user asks for; None where the model and the conversations decide.

    Attributes:
        lr: peak of the learning rate, which rises over the warm-up and falls to 0 along half a cosine.
        warmup: share of the steps over which it rises.
        batch_size: conversations per step.
        micro_batch: so many at a time; by default about 4,096 tokens.
        length: tokens of a conversation, which is cut there; by default 2,048, or the model's context.
        epochs: times that every conversation is read.
        steps: updates, in place of epochs.
        held_out: conversations that are not trained on; by default a tenth of them, at most 100.
        eval_every, save_every: steps; by default a tenth of all.
        sequences, sink_length, eps: N and T of the sink metric, and its threshold; T is by default 64, or the length.
        seed: of which conversations are held out, and of the order of the others.
    """

    lr: float = 2e-5
    warmup: float = 0.1
    batch_size: int = 64
    micro_batch: int | None = None
    length: int | None = None
    epochs: float = 1.0
    steps: int | None = None
    held_out: int | None = None
    eval_every: int | None = None
    save_every: int | None = None
    sequences: int = 100
    sink_length: int | None = None
    eps: float = 0.3
    seed: int = 0


@dataclass(frozen=True)
class TuneSettings:
    """The same with everything decided; `steps` are those of all epochs."""

    lr: float
    warmup: float
    batch_size: int
    micro_batch: int
    length: int
    steps: int
    held_out: int
    eval_every: int
    save_every: int
    sequences: int
    sink_length: int
    eps: float
    seed: int

    def document(self) -> dict[str, object]:
        """As JSON has it."""
        return asdict(self)


def length_for(wanted: TuneWanted, context: int | None) -> int:
    """Tokens at which a conversation is cut.

    Args:
        context: of the model; None where its positions have no end.

    Raises:
        InputError: beyond the context.
    """
    if wanted.length is None:
        return min(LONGEST, context or LONGEST)
    if context is not None and wanted.length > context:
        raise InputError(f"--length {wanted.length} is beyond the model's context: give at most --length {context}")
    return wanted.length


def held_out_for(wanted: TuneWanted, conversations: int) -> int:
    """How many conversations are held out.

    Raises:
        InputError: too few conversations, or none left for training.
    """
    if conversations < 2:
        raise InputError(
            f"{conversations} usable conversation{'' if conversations == 1 else 's'}: at least 2 are needed, one to "
            "train on and one held out; give more, or a larger --length"
        )
    count = min(HELD_OUT, max(1, conversations // 10)) if wanted.held_out is None else wanted.held_out
    if count >= conversations:
        raise InputError(f"--held-out {count} leaves none of {conversations} usable conversations to train on")
    return count


def settings_for(wanted: TuneWanted, length: int, held_out: int, trained: int) -> TuneSettings:
    """Everything that was left open, decided.

    Args:
        length: tokens at which a conversation is cut.
        trained: conversations that are trained on.

    Raises:
        InputError: batches that are no whole number of micro-batches, or a sink metric on more tokens than are read.
    """
    micro = wanted.micro_batch or _largest_divisor(wanted.batch_size, max(1, TOKENS_AT_A_TIME // length))
    if wanted.batch_size % micro:
        raise InputError(
            f"--batch-size {wanted.batch_size} is no whole number of --micro-batch {micro}: give a divisor of it"
        )
    sink_length = min(SINK_LENGTH, length) if wanted.sink_length is None else wanted.sink_length
    if sink_length > length:
        raise InputError(f"--sink-length {sink_length} is beyond the {length} tokens read: give at most {length}")
    steps = wanted.steps or math.ceil(wanted.epochs * math.ceil(trained / wanted.batch_size))
    every = max(1, steps // EVALUATIONS)
    return TuneSettings(
        lr=wanted.lr,
        warmup=wanted.warmup,
        batch_size=wanted.batch_size,
        micro_batch=micro,
        length=length,
        steps=steps,
        held_out=held_out,
        eval_every=wanted.eval_every or every,
        save_every=wanted.save_every or every,
        sequences=wanted.sequences,
        sink_length=sink_length,
        eps=wanted.eps,
        seed=wanted.seed,
    )


def _largest_divisor(number: int, most: int) -> int:
    return next(divisor for divisor in range(min(number, most), 0, -1) if number % divisor == 0)
