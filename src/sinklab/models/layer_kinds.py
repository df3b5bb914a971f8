"""Kinds of layers: those with attention, and linear, recurrent and feed-forward ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True)
class LayerKinds:
    """Layers of a model with attention, and layers that mix tokens in another way; 1-based, increasing.

    Attributes:
        total: number of layers of the model.
        attention: layers whose attention matrix is measured.
        linear: layers with linear attention, a recurrence or a convolution, also if they have attention too.
    """

    total: int
    attention: tuple[int, ...]
    linear: tuple[int, ...] = ()

    def notes(self) -> list[str]:
        """A note on the layers included in the metric, if some are excluded."""
        number = len(self.attention)
        if number == self.total:
            return []
        others = set(range(1, self.total + 1)) - set(self.attention)
        what = "linear or recurrent" if others <= set(self.linear) else "linear, recurrent or feed-forward"
        have, numbered = ("has", "layer 1") if number == 1 else ("have", f"layers 1 to {number}")
        return [
            f"{number} of {self.total} layers {have} attention ({_runs(self.attention)}), here {numbered}; the others "
            f"are {what} and in no sink rate"
        ]

    def notes_on_hidden_keys(self) -> list[str]:
        """A note on layers that still read tokens hidden from attention."""
        if not self.linear:
            return []
        return [
            "tokens are hidden from attention alone: the linear or recurrent part of "
            f"{layers_text(list(self.linear), self.total)} still reads them"
        ]


def layers_text(layers: Sequence[int], total: int) -> str:
    """`all layers`, `layer 2`, `layers 1, 3..5`."""
    if len(layers) == total:
        return "all layers"
    return f"layer{'s' if len(layers) > 1 else ''} {_runs(layers)}"


def _runs(numbers: Sequence[int]) -> str:
    """`1, 3..5`."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)
