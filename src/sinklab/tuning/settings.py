"""Settings of instruction tuning; the defaults follow the paper's 1B model (2410.10781, figure 30).

The paper states the data (UltraChat), the learning rate with a cosine schedule, 64 conversations of 2,048 tokens per
step, and one epoch. It does not state the warm-up (here 10 % of the steps, as for Zephyr on the same conversations) or
the optimiser (here AdamW with transformers' defaults: betas 0.9 and 0.999, no weight decay, gradient clipping at 1).
"""

import math
from typing import Annotated

from pydantic import Field

from sinklab.errors import InputError
from sinklab.settings import ADVANCED, MEASURED, MOST, TRAINING, CommandSettings, Flag
from sinklab.tables import plural

LONGEST = 2048
HELD_OUT = 100
SINK_LENGTH = 64
EVALUATIONS = 10
TOKENS_AT_A_TIME = 4096  # maximum tokens of the default micro-batch, unless it is a single conversation


class TuneOptions(CommandSettings, frozen=True):
    """Options of instruction tuning; None values are derived from the model, conversations and other options."""

    panel = TRAINING

    lr: float = Field(default=2e-5, ge=1e-12, le=1e3, description="Peak learning rate; cosine decay to 0.")
    warmup: float = Field(default=0.1, ge=0.0, le=0.9, description="Fraction of the steps with linear warm-up.")
    batch_size: int = Field(default=64, ge=1, le=10**6, description="Conversations per update.")
    micro_batch: Annotated[int | None, Flag(panel=ADVANCED)] = Field(
        default=None,
        ge=1,
        description="Conversations per micro-batch, a divisor of --batch-size; default: at most 4,096 tokens, or one.",
    )
    length: int | None = Field(
        default=None,
        ge=4,
        le=MOST,
        description="Tokens to which conversations are truncated; default: 2,048, at most the context.",
    )
    epochs: float = Field(default=1.0, ge=1e-6, le=1e6, description="Passes over the training conversations.")
    steps: int | None = Field(default=None, ge=1, le=MOST, description="Number of updates; overrides --epochs.")
    held_out: Annotated[int | None, Flag(panel=ADVANCED)] = Field(
        default=None, ge=1, description="Number of held-out conversations; default: a tenth, at most 100."
    )
    eval_every: Annotated[int | None, Flag(panel=ADVANCED)] = Field(
        default=None, ge=1, description="Updates between evaluations; default: a tenth of all updates."
    )
    save_every: Annotated[int | None, Flag(panel=ADVANCED)] = Field(
        default=None, ge=1, description="Updates between checkpoints; default: a tenth of all updates."
    )
    sequences: Annotated[int, Flag(panel=MEASURED)] = Field(
        default=100, ge=1, le=MOST, description="Maximum number of sequences for the sink metric."
    )
    sink_length: Annotated[int | None, Flag(panel=MEASURED)] = Field(
        default=None,
        ge=2,
        le=MOST,
        description="Tokens per sequence for the sink metric; default: 64, or --length if less.",
    )
    eps: Annotated[float, Flag(panel=MEASURED)] = Field(
        default=0.3, ge=1e-9, le=1 - 1e-9, description="Threshold: a position is a sink if its importance exceeds it."
    )
    seed: Annotated[int, Flag(panel=ADVANCED)] = Field(
        default=0, ge=0, le=2**32 - 1, description="Random seed for held-out conversations and training order."
    )


class TuneSettings(TuneOptions, frozen=True):
    """Settings of instruction tuning without unset values; `steps`, the number of updates, replaces `epochs`."""

    micro_batch: int = Field(default=...)
    length: int = Field(default=...)
    epochs: float = Field(default=1.0, exclude=True)
    steps: int = Field(default=...)
    held_out: int = Field(default=...)
    eval_every: int = Field(default=...)
    save_every: int = Field(default=...)
    sink_length: int = Field(default=...)


class TuneManifest(TuneSettings, frozen=True):
    """Settings of a tuning run and hashes of its inputs. When a run is resumed, they and the model name must be equal.

    Attributes:
        files: hash of the model's files (`opening.model_files`); None for a model on the hub.
        data: SHA-256 of the conversations file.
        sink_tokens: SHA-256 of the tokens of the sink metric.
        chat_template: template that replaces the model's; None for the model's own.
    """

    files: str | None
    data: str
    sink_tokens: str
    chat_template: str | None


def held_out_for(options: TuneOptions, conversations: int) -> int:
    """Return the number of held-out conversations: `options.held_out`, else a tenth, at least 1 and at most 100.

    Args:
        conversations: number of usable conversations.

    Raises:
        InputError: if there are fewer than two conversations, or none would be left for training.
    """
    if conversations < 2:
        raise InputError(
            f"{plural(conversations, 'usable conversation')}: at least 2 are needed, one for "
            "training and one held out; add conversations or raise --length"
        )
    count = min(HELD_OUT, max(1, conversations // 10)) if options.held_out is None else options.held_out
    if count >= conversations:
        raise InputError(
            f"--held-out {count} leaves none of {conversations} usable conversations for training: set a smaller value"
        )
    return count


def settings_for(options: TuneOptions, length: int, held_out: int, trained: int) -> TuneSettings:
    """Return the settings for these options, with a derived value in place of every None.

    Args:
        length: maximum number of tokens per conversation.
        held_out, trained: numbers of held-out and of training conversations.

    Raises:
        InputError: if the batch size is not a multiple of the micro-batch, or the sequences of the sink metric are
            longer than `length`.
    """
    most = min(options.batch_size, max(1, TOKENS_AT_A_TIME // length))
    micro = options.micro_batch or next(size for size in range(most, 0, -1) if options.batch_size % size == 0)
    if options.batch_size % micro:
        raise InputError(f"--batch-size {options.batch_size} is not a multiple of --micro-batch {micro}: set a divisor")
    sink_length = min(SINK_LENGTH, length) if options.sink_length is None else options.sink_length
    if sink_length > length:
        raise InputError(
            f"--sink-length {sink_length} exceeds the {length} tokens per conversation: set at most {length}"
        )
    steps = options.steps or math.ceil(options.epochs * math.ceil(trained / options.batch_size))
    every = max(1, steps // EVALUATIONS)
    decided = {"micro_batch": micro, "length": length, "steps": steps, "held_out": held_out, "sink_length": sink_length}
    intervals = {"eval_every": options.eval_every or every, "save_every": options.save_every or every}
    return TuneSettings(**{**dict(options), **decided, **intervals})
