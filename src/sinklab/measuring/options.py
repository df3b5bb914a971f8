"""What is asked of a measurement, whatever the model: one value from the command line down to the metric."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral, Real
from typing import Any, Literal, get_args

from sinklab.errors import InputError

Inputs = Literal["natural", "random", "repeat"]
EPS = (0.3,)


@dataclass(frozen=True)
class Options:
    """What is measured, and what is recorded with the result.

    Attributes:
        eps: thresholds of the sink rate, shares of attention in (0, 1); the first is the headline. One number will do.
        lengths: shorter than the sequences, increasing: the sink rate is also that of the sequences cut at each, from
            the same pass. Without padding only.
        batch_size: sequences per forward pass; changes memory and speed, not the result. None: as many as fit the
            memory, at most 16 (memory.py). Halved where they do not fit, which the result's notes say.
        first_target: the loss is over the targets from this position on, 1-based; under a prefix mask those that
            every query sees are left out as well, as in training.
        loss: False leaves it out, and with it the logits: a third of the work of a small model with many words.
        details: also angles, entropy and what else details.py defines.
        maps: (layer, head), 1-based, whose matrices are kept; implies details.
        model_name, inputs, bos: recorded with the result.

    Raises:
        InputError: no eps or one outside (0, 1), lengths that do not increase from 1 on, a batch size below 1, or
            inputs of no known kind.
    """

    eps: tuple[float, ...] = EPS
    lengths: tuple[int, ...] = ()
    batch_size: int | None = None
    first_target: int = 2
    loss: bool = True
    details: bool = False
    maps: tuple[tuple[int, int], ...] = ()
    model_name: str = ""
    inputs: Inputs = "natural"
    bos: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "eps", thresholds(self.eps))
        object.__setattr__(self, "lengths", tuple(self.lengths))
        object.__setattr__(self, "maps", tuple(tuple(one) for one in self.maps))
        if self.batch_size is not None and not (isinstance(self.batch_size, Integral) and self.batch_size >= 1):
            raise InputError(f"batch size is {self.batch_size!r}; expected a whole number of at least 1")
        if self.inputs not in get_args(Inputs):
            raise InputError(f"inputs are {self.inputs!r}: choose from {', '.join(get_args(Inputs))}")

    @property
    def detailed(self) -> bool:
        """Whether the details are asked for, by themselves or for a map."""
        return self.details or bool(self.maps)

    def check_lengths(self, longest: int) -> None:
        """Refuse lengths at which sequences of `longest` tokens cannot be cut.

        Raises:
            InputError: not increasing, or not from 1 to longest - 1.
        """
        if any(low >= high for low, high in pairwise((0, *self.lengths, longest))):
            raise InputError(
                f"lengths {list(self.lengths)}: give increasing lengths from 1 to {longest - 1}, or longer sequences"
            )

    def check_maps(self, layers: int, heads: int) -> None:
        """Refuse maps of what a model of so many attention layers and heads in each does not have.

        Raises:
            InputError: there is no such layer or head.
        """
        for layer, head in self.maps:
            if not 1 <= layer <= layers:
                raise InputError(f"--map {layer}.{head}: the model has attention layers 1 to {layers}")
            if not 1 <= head <= heads:
                raise InputError(f"--map {layer}.{head}: layer {layer} has heads 1 to {heads}")


def thresholds(eps: float | Sequence[float]) -> tuple[float, ...]:
    """One threshold or several, as numbers.

    Raises:
        InputError: none at all, or one that is no share of attention, a number in (0, 1).
    """
    given: Any = eps
    several = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    if not several:
        raise InputError("eps is empty; expected one share of attention or several, such as 0.3")
    for one in several:
        if not isinstance(one, Real):
            raise InputError(f"eps is {one!r}, which is no number; expected a share of attention, such as 0.3")
        if not 0 < float(one) < 1:
            raise InputError(f"eps is {one}; expected a share of attention between 0 and 1, such as 0.3")
    return tuple(map(float, several))
