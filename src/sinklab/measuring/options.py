"""The settings of a measurement of one model, from the command line down to the metric."""

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from numbers import Integral, Real
from operator import index
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, field_validator

from sinklab.errors import InputError
from sinklab.settings import ADVANCED, INPUT, MEASURED, CommandSettings, Flag, Several

Inputs = Literal["natural", "random", "repeat"]
EPS = (0.3,)


def thresholds(eps: float | Sequence[float]) -> tuple[float, ...]:
    """One threshold or several, as floats.

    Raises:
        InputError: no threshold is given, or a threshold is not a number in (0, 1).
    """
    given: Any = eps
    several = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    if not several:
        raise InputError("eps is empty; expected one share of attention or several, such as 0.3")
    for one in several:
        if not isinstance(one, Real):
            raise InputError(f"eps is {one!r}, which is not a number; expected a share of attention, such as 0.3")
        if not 0 < float(one) < 1:
            raise InputError(f"eps is {one}; expected a share of attention between 0 and 1, such as 0.3")
    return tuple(map(float, several))


def parse_eps(given: Any) -> tuple[float, ...]:
    """Thresholds, of which --eps gives each or a list as text: ["0.3", "0.2,0.4"] is 0.3, 0.2, 0.4.

    Raises:
        InputError: not a number, or outside (0, 1).
    """
    if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
        return thresholds(given)
    found: dict[float, None] = {}
    for part in ",".join(given).split(","):
        try:
            found[float(part)] = None
        except ValueError:
            raise InputError(
                f"--eps {part}: expected a share of attention such as 0.3, or a list such as 0.2,0.3"
            ) from None
    return thresholds(tuple(found))


def parse_maps(given: Iterable[str | Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """The (layer, head) of maps, which --map gives as text: "3.1" is layer 3, head 1.

    Raises:
        InputError: text that is not two numbers from 1 on.
    """
    maps = []
    for one in given:
        if isinstance(one, str):
            if not (found := re.fullmatch(r"([1-9]\d*)\.([1-9]\d*)", one)):
                raise InputError(f"--map {one}: expected LAYER.HEAD, both counted from 1, such as 3.1")
            one = (int(found[1]), int(found[2]))
        maps.append(tuple(map(index, one)))
    return tuple(maps)


class Options(CommandSettings, frozen=True):
    """Settings of a measurement, and fields that are recorded with its result.

    Attributes:
        eps: thresholds of the sink rate, shares of attention in (0, 1), or a single one; the first is the headline.
        lengths: shorter than the sequences, increasing: the sink rate is also that of the sequences cut at each, from
            the same pass. Without padding only.
        batch_size: sequences per forward pass; changes memory and speed, not the result. None: as many as fit
            the memory, at most 16 (models/memory_budget.py). Halved on out-of-memory, with a note in the result.
        first_target: the loss is over the targets from this position on, 1-based; under a prefix mask those that
            every query sees are left out as well, as in training.
        loss: False leaves it out, and with it the logits: a third of the work of a small model with many words.
        maps: (layer, head), 1-based, of the matrices to save; implies details.
        gradients: also norms of the gradient, by a backward pass of every sequence (gradients.py); without padding.
        explore: keep the attention map of every head on the first sequence (explored.py).
        model_name, inputs, bos: recorded with the result.
    """

    panel = MEASURED

    inputs: Annotated[Inputs, Flag(metavar="KIND", panel=INPUT)] = Field(
        default="natural", description="natural (text), random (uniform tokens) or repeat (one token)."
    )
    eps: Annotated[tuple[float, ...], BeforeValidator(parse_eps), Flag(text=list[str], metavar="EPS")] = Field(
        default=EPS,
        description="Importance above which a position is a sink; several: the main one first; default: 0.3.",
    )
    lengths: Several[Annotated[int, Field(ge=1)]] = Field(
        default=(), description="Also the sink rate at this shorter length; repeatable."
    )
    details: bool = Field(
        default=False, description="Also angles, entropy, distances, secondary sinks and kurtosis; slower."
    )
    maps: Annotated[
        tuple[tuple[int, int], ...],
        BeforeValidator(parse_maps),
        Flag("--map", metavar="LAYER.HEAD", text=list[str]),
    ] = Field(default=(), description="Save this head's attention matrix, with --details; repeatable.")
    explore: bool = Field(
        default=False,
        description="Also keep every head's attention map of the first sequence for the report: 128 tokens, one byte "
        "per entry, at most 1,000 heads (more: those of --map).",
    )
    gradients: bool = Field(
        default=False,
        description="Also the gradient of the loss at the input of attention, by layer and position; thrice the time.",
    )
    loss: bool = Field(default=True, description="Skip the loss and the logits: a third faster on a small model.")
    batch_size: Annotated[int | None, Flag(panel=ADVANCED)] = Field(
        default=None, ge=1, description="Sequences per batch; default: what fits, at most 16."
    )
    first_target: int = 2
    model_name: str = ""
    bos: bool = False

    @field_validator("lengths", mode="before")
    @classmethod
    def _are_whole_numbers(cls, lengths: Iterable[Any]) -> tuple[int, ...]:
        return tuple(map(index, lengths))

    @field_validator("inputs", mode="before")
    @classmethod
    def _is_a_kind(cls, inputs: object) -> object:
        if inputs not in get_args(Inputs):
            raise InputError(f"inputs are {inputs!r}: choose from {', '.join(get_args(Inputs))}")
        return inputs

    @field_validator("batch_size", mode="before")
    @classmethod
    def _is_a_whole_number(cls, size: Any) -> int | None:
        if size is not None and not (isinstance(size, Integral) and int(size) >= 1):
            raise InputError(f"batch size is {size!r}; expected a whole number of at least 1")
        return None if size is None else int(size)

    @property
    def detailed(self) -> bool:
        """Whether details are measured, for themselves or for a map."""
        return self.details or bool(self.maps)

    def check_lengths(self, longest: int) -> None:
        """Refuse lengths to which sequences of `longest` tokens cannot be truncated.

        Raises:
            InputError: not increasing, or not from 1 to longest - 1.
        """
        if any(low >= high for low, high in pairwise((0, *self.lengths, longest))):
            raise InputError(
                f"lengths {list(self.lengths)}: give increasing lengths from 1 to {longest - 1}, or longer sequences"
            )

    def check_maps(self, layers: int, heads: int) -> None:
        """Refuse maps beyond the model's attention layers, or beyond the heads of each.

        Raises:
            InputError: there is no such layer or head.
        """
        for layer, head in self.maps:
            if not 1 <= layer <= layers:
                raise InputError(f"--map {layer}.{head}: the model has attention layers 1 to {layers}")
            if not 1 <= head <= heads:
                raise InputError(f"--map {layer}.{head}: layer {layer} has heads 1 to {heads}")


class Study(CommandSettings, frozen=True):
    """Changes of the model that are measured as well.

    Attributes:
        ablate: names of ablations (surgery/ablations.py).
        perturb: position of a token that is replaced by another, to see how far the change spreads, 1-based.
        swap_position: two learned positions to swap, 1-based.
        replace_position: a learned position, and the position whose embedding replaces its own.
    """

    panel = MEASURED

    ablate: Annotated[Several[str], Flag(metavar="NAME")] = Field(
        default=(),
        description="Also under mask_first:N, no_bos, zero_massive or zero_massive:LAYER; repeatable.",
    )
    swap_position: Annotated[tuple[int, int] | None, Flag(metavar="I J", panel=ADVANCED)] = Field(
        default=None, description="Swap two learned position embeddings."
    )
    replace_position: Annotated[tuple[int, int] | None, Flag(metavar="I J", panel=ADVANCED)] = Field(
        default=None, description="Replace the learned embedding of position I by that of J."
    )
    perturb: Annotated[int | None, Flag(metavar="N")] = Field(
        default=None,
        description="Also replace token N: how far does the change spread, with and without key 1?",
    )

    @field_validator("ablate", mode="before")
    @classmethod
    def _is_a_list(cls, ablate: object) -> object:
        if isinstance(ablate, str):  # which would be read letter by letter
            raise InputError(f"ablate is one name: give a list, ablate=[{ablate[:80]!r}]")
        return ablate
