"""Cells that stand in an order, such as values of weight decay, told by their names: one word and a number each."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

NAME = re.compile(r"(.+)_(\d+(?:\.\d+)?(?:e-?\d+)?)([kMB]?)")
TIMES = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9}
FEWEST = 3


@dataclass(frozen=True)
class Ordered:
    """Cells from the smallest value to the largest.

    Attributes:
        what: is varied.
        labels: of the cells by their names, in order; a cell that varies nothing stands first under its own name.
    """

    what: str
    labels: dict[str, str]


def ordered(cells: Sequence[str]) -> Ordered | None:
    """The order that the names of cells say: None unless all but at most one are `WORD_NUMBER` with the same word."""
    found = {name: match for name in cells if (match := NAME.fullmatch(name))}
    others = [name for name in cells if name not in found]
    words = {match[1] for match in found.values()}
    if len(words) != 1 or len(found) < FEWEST or len(others) > 1:
        return None
    rising = sorted(found, key=lambda name: float(found[name][2]) * TIMES[found[name][3]])
    labels = {name: found[name][2] + found[name][3] for name in rising}
    return Ordered(words.pop().replace("_", " "), {name: name for name in others} | labels)
