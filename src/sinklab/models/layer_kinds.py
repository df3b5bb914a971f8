"""Kinds of a model's layers: softmax attention, linear or recurrent, and feed-forward."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True)
class LayerKinds:
    """Layers of a model by kind; layer numbers are 1-based and increasing.

    Attributes:
        total: number of layers of the model.
        attention: layers with softmax attention (in a sinklab model: any attention operation). Only these are measured.
        linear: layers with linear attention, a recurrence or a convolution, possibly in addition to softmax attention.
    """

    total: int
    attention: tuple[int, ...]
    linear: tuple[int, ...] = ()

    def notes(self) -> list[str]:
        """Return a list with a note on which layers are measured; empty if all layers are."""
        number = len(self.attention)
        if number == self.total:
            return []
        others = set(range(1, self.total + 1)) - set(self.attention)
        what = "linear or recurrent" if others <= set(self.linear) else "linear, recurrent or feed-forward"
        have, numbered = ("has", "layer 1") if number == 1 else ("have", f"layers 1 to {number}")
        return [
            f"{number} of {self.total} layers {have} attention ({ranges_text(self.attention)}), here {numbered}; the "
            f"others are {what} and not included in the sink rate"
        ]

    def notes_on_hidden_keys(self) -> list[str]:
        """Return a list with a note that linear or recurrent layers see hidden tokens; empty without such layers."""
        if not self.linear:
            return []
        return [
            "tokens are hidden only from attention: the linear or recurrent part of "
            f"{layers_text(list(self.linear), self.total)} still sees them"
        ]


def layers_text(layers: Sequence[int], total: int) -> str:
    """Format increasing layer numbers as `all layers`, `layer 2` or `layers 1, 3..5`."""
    if len(layers) == total:
        return "all layers"
    return f"layer{'s' if len(layers) > 1 else ''} {ranges_text(layers)}"


def ranges_text(numbers: Sequence[int]) -> str:
    """Format increasing integers as ranges: `4..9, 12`."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)
