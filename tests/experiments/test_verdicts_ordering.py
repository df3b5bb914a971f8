"""Pairs decided alike at two sizes, on made-up runs whose order is known."""

import random
from collections.abc import Mapping, Sequence

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
    assert "fewer than 5 are certain" in found.evidence


def test_both_orders_are_of_the_seeds_that_two_cells_share() -> None:
    small = {**LOSSES, "a": [3.0, 3.01, 2.99, 9.0, 9.0]}
    assert pairs_alike(seen(small, shifted(LOSSES)), CELLS, LARGE).alike == 6


def test_equal_pairs_are_left_out() -> None:
    small = {**LOSSES, "b": LOSSES["a"]}
    assert pairs_alike(seen(small, shifted(LOSSES)), CELLS, LARGE).all == 5


def test_runs_without_any_difference_seldom_have_enough_certain_pairs() -> None:
    draw, names = random.Random(0), tuple("abcdefg")
    there = tuple(f"{name}_large" for name in names)
    decided = 0
    for _ in range(200):
        small, large = ({name: [3 + draw.gauss(0, 0.02) for _ in range(3)] for name in names} for _ in range(2))
        decided += pairs_alike(seen(small, large), names, there).same is not None
    assert decided / 200 < 0.1


def test_cells_that_do_not_answer_to_each_other_are_refused() -> None:
    check = {"is": "same_order", "value": "valid_loss", "of": CELLS, "there": LARGE[:3]}
    with pytest.raises(ValueError, match="4 cells in `of` and 3 in `there`"):
        verdict(check, cells_of("valid_loss", LOSSES))
