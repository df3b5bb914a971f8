"""Settings of a measurement, as command-line options and as Python objects."""

import re
from collections.abc import Sequence
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
    """Convert one threshold or several to a tuple of floats.

    Raises:
        InputError: if there is no threshold, or one is not a number in (0, 1).
    """
    given: Any = eps
    try:
        several = (given,) if isinstance(given, str) else tuple(given)
    except TypeError:  # a number, or an array without axes
        several = (given,)
    if not several:
        raise InputError("eps is empty; expected one or more shares of attention, such as 0.3")
    for one in several:
        if not isinstance(one, Real):
            raise InputError(f"eps is {one!r}, which is not a number; expected a share of attention, such as 0.3")
        if not 0 < float(one) < 1:
            raise InputError(f"eps is {one}; expected a share of attention between 0 and 1, such as 0.3")
    return tuple(map(float, several))


def parse_eps(given: Any) -> tuple[float, ...]:
    """Parse the values of --eps, each a number or a comma-separated list: ["0.3", "0.2,0.4"] -> (0.3, 0.2, 0.4).

    Repeated values are dropped. Anything but a list of strings is converted by `thresholds`.

    Raises:
        InputError: if a value is not a number in (0, 1).
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


def parse_maps(given: Any) -> tuple[tuple[int, ...], ...]:
    """Parse the values of --map to (layer, head): "3.1" is layer 3, head 1. Pairs of numbers are kept.

    Raises:
        InputError: if a text is not LAYER.HEAD with 1-based numbers, or another value is not a list of whole numbers.
    """
    maps = []
    try:
        for one in given:
            if isinstance(one, str):
                if not (found := re.fullmatch(r"([1-9]\d*)\.([1-9]\d*)", one)):
                    raise InputError(f"--map {one}: expected LAYER.HEAD, both counted from 1, such as 3.1")
                one = (int(found[1]), int(found[2]))
            maps.append(tuple(map(index, one)))
    except TypeError:
        raise InputError(f"maps is {given!r}; expected pairs of whole numbers, such as [(3, 1)]") from None
    return tuple(maps)


class Options(CommandSettings, frozen=True):
    """Settings of a measurement, and metadata stored with its result.

    Attributes:
        eps: attention thresholds of the sink rate, in (0, 1); the first is the main one.
        lengths: increasing lengths below the sequence length; the sink rate is also computed on the sequences
            truncated to each, in the same forward pass. Padding is not supported.
        details: also measure the statistics of statistics/details.py.
        batch_size: sequences per forward pass; affects memory and speed, not the result. None: as many as fit in
            memory, at most 16 and at most 8,192 tokens (models/memory_budget.py). Halved on out-of-memory, with a note
            in the result.
        first_target: 1-based position of the first target included in the loss; under a prefix mask, targets inside the
            prefix are excluded too, as in training.
        loss: if False, skip the loss and the logits, a third of the compute of a small model with a large vocabulary.
        maps: (layer, head) pairs, 1-based, whose attention, cosine and norm product matrices are saved; implies
            `details`.
        gradients: also measure gradient norms, with another forward and a backward pass per batch (gradients.py).
            Padding is not supported.
        explore: save the attention map of every head on the first sequence (explored.py).
        model_name, bos: metadata stored with the result.
        inputs: kind of the sequences, stored with the result; with "repeat", `measure_with_study` also checks the
            paper's propositions.
    """

    panel = MEASURED

    inputs: Annotated[Inputs, Flag(metavar="KIND", panel=INPUT)] = Field(
        default="natural", description="natural (text), random (uniform tokens) or repeat (one token)."
    )
    eps: Annotated[tuple[float, ...], BeforeValidator(parse_eps), Flag(text=list[str], metavar="EPS")] = Field(
        default=EPS,
        description="Importance above which a position is a sink; repeatable, main one first; default: 0.3.",
    )
    lengths: Several[Annotated[int, Field(ge=1)]] = Field(
        default=(), description="Also report the sink rate at this shorter length; repeatable."
    )
    details: bool = Field(
        default=False, description="Also measure angles, entropy, distances, secondary sinks and kurtosis; slower."
    )
    maps: Annotated[
        tuple[tuple[int, int], ...],
        BeforeValidator(parse_maps),
        Flag("--map", metavar="LAYER.HEAD", text=list[str]),
    ] = Field(default=(), description="Save a head's attention, cosine and norm maps; implies --details; repeatable.")
    explore: bool = Field(
        default=False,
        description="Also save every head's attention map of the first sequence for the report: 128 tokens, one byte "
        "per entry, at most 1,000 heads (select heads with --map).",
    )
    gradients: bool = Field(
        default=False,
        description="Also measure the loss gradient at the attention input, by layer and position; 3x slower.",
    )
    loss: bool = Field(default=True, description="Skip the loss and the logits; up to a third faster on small models.")
    batch_size: Annotated[int | None, Flag(panel=ADVANCED)] = Field(
        default=None, ge=1, description="Sequences per batch; default: what fits in memory, at most 16 (8,192 tokens)."
    )
    first_target: int = 2
    model_name: str = ""
    bos: bool = False

    @field_validator("lengths", mode="before")
    @classmethod
    def _are_whole_numbers(cls, lengths: Any) -> tuple[int, ...]:
        try:
            return tuple(map(index, lengths))
        except TypeError:
            raise InputError(f"lengths is {lengths!r}; expected whole numbers, such as [16, 32]") from None

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
        """True if details are measured, requested directly or implied by `maps`."""
        return self.details or bool(self.maps)

    def check_lengths(self, longest: int) -> None:
        """Check that sequences of `longest` tokens can be truncated to `lengths`.

        Raises:
            InputError: if `lengths` are not increasing, or not within 1 to `longest` - 1.
        """
        if any(low >= high for low, high in pairwise((0, *self.lengths, longest))):
            raise InputError(
                f"lengths {list(self.lengths)}: use increasing lengths from 1 to {longest - 1}, or longer sequences"
            )

    def check_maps(self, layers: int, heads: int) -> None:
        """Check that the layers and heads of `maps` exist.

        Raises:
            InputError: if a layer or head does not exist.
        """
        for layer, head in self.maps:
            if not 1 <= layer <= layers:
                raise InputError(f"--map {layer}.{head}: the model has attention layers 1 to {layers}")
            if not 1 <= head <= heads:
                raise InputError(f"--map {layer}.{head}: layer {layer} has heads 1 to {heads}")


class Study(CommandSettings, frozen=True):
    """Interventions on the model or the tokens.

    `ablate` and `perturb` add measurements to that of the unchanged model; all of them are under `swap_position` and
    `replace_position`.

    Attributes:
        ablate: names of ablations (surgery/ablations.py).
        perturb: 1-based position of a token that is replaced, to measure how far the effect spreads
            (surgery/mixing.py).
        swap_position: two 1-based positions whose learned embeddings are swapped.
        replace_position: positions (i, j), 1-based; the learned embedding of i is replaced by that of j.
    """

    panel = MEASURED

    ablate: Annotated[Several[str], Flag(metavar="NAME")] = Field(
        default=(),
        description="Also measure an ablation: mask_first:N, no_bos, zero_massive or zero_massive:LAYER; repeatable.",
    )
    swap_position: Annotated[tuple[int, int] | None, Flag(metavar="I J", panel=ADVANCED)] = Field(
        default=None, description="Swap the learned embeddings of positions I and J."
    )
    replace_position: Annotated[tuple[int, int] | None, Flag(metavar="I J", panel=ADVANCED)] = Field(
        default=None, description="Replace the learned embedding of position I by that of J."
    )
    perturb: Annotated[int | None, Flag(metavar="N")] = Field(
        default=None,
        description="Also replace token N and measure how far the change spreads, with and without key 1.",
    )

    @field_validator("ablate", mode="before")
    @classmethod
    def _is_a_list(cls, ablate: object) -> object:
        if isinstance(ablate, str):  # else each character would be an item
            raise InputError(f"ablate is a string: pass a list, ablate=[{ablate[:80]!r}]")
        return ablate
