"""Pairs decided alike at two sizes."""

import random

import pytest

from sinklab.experiments.ranks import BySeed, ranked, stability


def seeds(*values: float) -> BySeed:
    return dict(enumerate(values))


def test_the_same_order_decides_every_pair_alike_and_the_reverse_none() -> None:
    small = {name: seeds(value, value + 0.1) for name, value in zip("abcd", (1.0, 2.0, 3.0, 4.0), strict=True)}
    large = {name: {seed: 10 * value for seed, value in of.items()} for name, of in small.items()}
    reverse = {name: {seed: -value for seed, value in of.items()} for name, of in small.items()}
    same, turned = stability(small, large), stability(small, reverse)
    assert (same.pairs, same.accuracy, same.certain, same.certain_accuracy) == (6, 1.0, 6, 1.0)
    assert (turned.accuracy, turned.certain_accuracy) == (0.0, 0.0)


def test_one_exchange_of_neighbours_costs_one_pair() -> None:
    small = {name: seeds(value) for name, value in zip("abcd", (1.0, 2.0, 3.0, 4.0), strict=True)}
    large = {name: seeds(value) for name, value in zip("abcd", (1.0, 3.0, 2.0, 4.0), strict=True)}
    found = stability(small, large)
    assert (found.pairs, found.alike) == (6, 5)
    assert found.certain == 0, "one seed makes nothing certain"
    assert found.certain_accuracy is None


def test_a_pair_is_certain_where_all_seeds_lie_on_one_side_paired() -> None:
    large = {"a": seeds(1.0, 5.0), "b": seeds(2.0, 6.0), "c": seeds(3.0, 4.0)}
    small = {"a": seeds(1.0), "b": seeds(2.0), "c": seeds(9.0)}
    found = stability(small, large)
    assert (found.pairs, found.alike) == (3, 2), "by the means b is above c at the large size"
    assert (found.certain, found.certain_alike) == (1, 1), "a and b; c crosses both"


def test_equal_pairs_and_cells_of_one_size_are_left_out() -> None:
    small = {"a": seeds(0.0), "b": seeds(0.0), "c": seeds(1.0), "only here": seeds(2.0), "empty": {}}
    large = {"a": seeds(0.0), "b": seeds(1.0), "c": seeds(2.0), "empty": seeds(1.0), "only there": seeds(5.0)}
    found = stability(small, large)
    assert (found.pairs, found.alike) == (2, 2)
    assert stability({}, large).accuracy is None


def test_chance_is_a_half() -> None:
    draw = random.Random(0)
    accuracies = []
    for _ in range(300):
        small, large = ({name: seeds(draw.random()) for name in "abcdefg"} for _ in range(2))
        found = stability(small, large)
        assert found.accuracy is not None
        accuracies.append(found.accuracy)
    assert sum(accuracies) / len(accuracies) == pytest.approx(0.5, abs=0.03)


def test_the_smallest_mean_comes_first() -> None:
    assert ranked({"a": seeds(3.0, 3.0), "b": seeds(1.0, 2.0), "c": {}, "d": seeds(2.0)}) == ["b", "d", "a"]
