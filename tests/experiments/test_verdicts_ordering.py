"""Pairs decided alike at two sizes, on made-up runs whose order is known."""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import pytest
from made_runs import cells_of, verdict

from sinklab.experiments.documents import JudgedClaim
from sinklab.experiments.verdicts.observations import Observations, observe
from sinklab.experiments.verdicts.ordering import pairs_alike

CELLS = ("a", "b", "c", "d")
LARGE = tuple(f"{cell}_large" for cell in CELLS)
LOSSES = {"a": [3.0, 3.01, 2.99], "b": [3.2, 3.21, 3.18], "c": [3.4, 3.41, 3.4], "d": [3.6, 3.62, 3.6]}


def seen(small: Mapping[str, Sequence[float]], large: Mapping[str, Sequence[float]]) -> Observations:
    return observe(
        cells_of("valid_loss", {**small, **{f"{cell}_large": of for cell, of in large.items()}}), "valid_loss"
    )


def judged(small: Mapping[str, Sequence[float]], large: Mapping[str, Sequence[float]]) -> JudgedClaim:
    check = {"is": "same_order", "value": "valid_loss", "of": CELLS, "there": LARGE}
    cells = {**small, **{f"{cell}_large": of for cell, of in large.items()}}
    return verdict(check, cells_of("valid_loss", cells))


def shifted(losses: Mapping[str, Sequence[float]], by: float = -1.0) -> dict[str, list[float]]:
    return {cell: [loss + by for loss in of] for cell, of in losses.items()}


def reversed_(losses: Mapping[str, Sequence[float]]) -> dict[str, Sequence[float]]:
    return dict(zip(losses, reversed(list(losses.values())), strict=True))


def test_the_same_order_is_established_and_the_reverse_refuted() -> None:
    same, turned = judged(LOSSES, shifted(LOSSES)), judged(LOSSES, reversed_(LOSSES))
    assert same.verdict == "reproduced"
    assert "6 of 6 pairs decided alike, 6 of the 6 that are certain there" in same.evidence
    assert "a < b < c < d; a_large < b_large < c_large < d_large" in same.evidence
    assert turned.verdict == "contradicted"
    assert "0 of 6" in turned.evidence


def test_one_exchange_of_neighbours_costs_one_pair() -> None:
    exchanged = {**shifted(LOSSES), "b": shifted(LOSSES)["c"], "c": shifted(LOSSES)["b"]}
    found = pairs_alike(seen(LOSSES, exchanged), CELLS, LARGE)
    assert (found.all, found.alike, found.certain, found.certain_alike) == (6, 5, 6, 5)
    assert found.same is True, "five of six are more than four fifths"


def test_pairs_that_may_be_chance_at_the_large_size_say_nothing() -> None:
    noisy = {"a": [2.0, 2.4, 2.2], "b": [2.3, 2.0, 2.2], "c": [2.4, 2.1, 2.0], "d": [2.1, 2.3, 2.35]}
    found = judged(LOSSES, noisy)
    assert found.verdict == "inconclusive"
    assert "0 of the 0 that are certain there; fewer than 5 are certain; " in found.evidence


def test_both_orders_are_of_the_seeds_that_two_cells_share() -> None:
    small = {**LOSSES, "a": [3.0, 3.01, 2.99, 9.0, 9.0]}
    assert pairs_alike(seen(small, shifted(LOSSES)), CELLS, LARGE).alike == 6


def test_a_tie_at_the_small_size_decides_nothing() -> None:
    found = pairs_alike(seen({**LOSSES, "b": LOSSES["a"]}, shifted(LOSSES)), CELLS, LARGE)
    assert (found.all, found.alike, found.certain, found.certain_alike) == (5, 5, 6, 5)


def test_an_order_that_is_chance_at_the_small_size_says_nothing() -> None:
    noisy = {"a": [3.0, 3.3, 3.1], "b": [3.2, 3.0, 3.1], "c": [3.2, 3.1, 3.05], "d": [3.1, 3.2, 3.14]}
    found = pairs_alike(seen(noisy, LOSSES), CELLS, LARGE)
    assert found.certain == 6
    assert found.share[0] < 0.4 < 0.9 < found.share[1]
    assert found.same is None
    needed = judged(noisy, LOSSES).seeds_needed
    assert needed is not None
    assert pairs_alike(seen(noisy, LOSSES), CELLS, LARGE, needed).same is False


def test_one_cell_that_stands_apart_is_no_order() -> None:
    names = tuple("abcdefg")
    there = tuple(f"{name}_large" for name in names)
    small = {name: [3 + 0.02 * i + noise for noise in (0.0, 0.002, -0.002)] for i, name in enumerate(names)}
    apart = {name: [3.0, 3.05, 2.95] for name in names[:-1]} | {"g": [4.0, 4.05, 3.95]}
    noise = random.Random(0)
    large = {name: [loss + noise.gauss(0, 0.02) for loss in of] for name, of in apart.items()}
    found = pairs_alike(seen(small, large), names, there)
    assert found.certain >= 5
    assert found.same is None
    assert "one and the same cell" in found.open_because


def test_other_sizes_and_other_cells_do_not_count_to_the_spread() -> None:
    wild = {"other": [1.0, 9.0, 3.0], "another": [5.0, 1.0, 8.0]}
    cells = {**LOSSES, **{f"{cell}_large": of for cell, of in shifted(LOSSES).items()}, **wild}
    assert pairs_alike(observe(cells_of("valid_loss", cells), "valid_loss"), CELLS, LARGE).same is True


MADE = 200
"""Pairs of sizes that are made up."""


def how_often(small: Callable[[random.Random], list[float]], large: Callable[[random.Random], list[float]]) -> Counter:
    """The findings of seven cells, three seeds, whose means at the two sizes are drawn and scatter by 0.02."""
    draw, names = random.Random(0), tuple("abcdefg")
    there = tuple(f"{name}_large" for name in names)

    def runs(means: list[float]) -> dict[str, list[float]]:
        return {
            name: [3 + 0.02 * (mean + draw.gauss(0, 1)) for _ in range(3)]
            for name, mean in zip(names, means, strict=True)
        }

    return Counter(pairs_alike(seen(runs(small(draw)), runs(large(draw))), names, there).same for _ in range(MADE))


def nothing(draw: random.Random) -> list[float]:
    return [0.0] * 7


def one_apart(draw: random.Random) -> list[float]:
    return draw.sample([8.0] + [0.0] * 6, 7)


def some_order(draw: random.Random) -> list[float]:
    return draw.sample([8.0 * i for i in range(7)], 7)


def in_order(gap: float) -> Callable[[random.Random], list[float]]:
    return lambda draw: [gap * i for i in range(7)]


def test_no_order_is_seldom_found_where_a_size_has_none() -> None:
    assert how_often(nothing, nothing)[None] > 0.98 * MADE
    assert how_often(nothing, one_apart)[None] > 0.94 * MADE
    assert how_often(some_order, one_apart)[None] > 0.92 * MADE
    assert how_often(nothing, some_order)[True] < 0.02 * MADE


def test_orders_that_have_nothing_to_do_with_each_other_are_told_apart() -> None:
    found = how_often(some_order, some_order)
    assert found[False] > 0.92 * MADE
    assert found[True] < 0.07 * MADE, "by chance four fifths of the pairs agree now and then"


def test_the_same_order_is_found() -> None:
    assert how_often(in_order(1), in_order(1))[True] > 0.7 * MADE
    assert how_often(in_order(2), in_order(2))[True] > 0.98 * MADE


def test_cells_that_do_not_answer_to_each_other_are_refused() -> None:
    check = {"is": "same_order", "value": "valid_loss", "of": CELLS, "there": LARGE[:3]}
    with pytest.raises(ValueError, match="4 cells in `of` and 3 in `there`"):
        verdict(check, cells_of("valid_loss", LOSSES))
