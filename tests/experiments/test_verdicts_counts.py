"""The two counts of the rule, by hand and against scipy, which computes them in another way."""

import itertools

import numpy as np
import pytest
from scipy import stats

from sinklab.experiments.verdicts.kinds import (
    middle_and_ends,
    pairs_against,
    rank_sum_p,
    seed_by_seed,
    separated,
    share_interval,
)


@pytest.mark.parametrize(
    ("kept", "seeds", "expected"),
    [(5, 5, True), (4, 5, None), (1, 5, None), (0, 5, False), (8, 8, True), (7, 8, None),
     (9, 9, True), (8, 9, True), (7, 9, None), (1, 9, False), (0, 9, False), (2, 9, None)],
)  # fmt: skip
def test_a_claim_must_hold_at_every_seed_or_at_all_but_one_of_nine(
    kept: int, seeds: int, expected: bool | None
) -> None:
    assert seed_by_seed([True] * kept + [False] * (seeds - kept)) is expected


def test_a_claim_kept_by_half_of_all_seeds_is_reproduced_at_five_in_one_case_of_32() -> None:
    found = [seed_by_seed(held) for held in itertools.product((True, False), repeat=5)]
    assert (found.count(True), found.count(False), len(found)) == (1, 1, 32)


def test_five_and_five_values_are_separated_in_one_order_of_252() -> None:
    orders = list(itertools.combinations(range(10), 5))
    apart = [separated(above, sorted({*range(10)} - {*above})) for above in orders]
    assert (sum(apart), len(orders)) == (1, 252)


def test_a_tie_counts_against_a_difference() -> None:
    assert pairs_against([3.0, 2.0], [1.0, 2.0]) == 1
    assert separated([2, 3, 4, 5, 6], [1, 0, 0, 0, 0])
    assert not separated([2, 3, 4, 5, 6], [2, 0, 0, 0, 0])
    assert not separated([0] * 5, [0] * 5)


@pytest.mark.parametrize(
    ("n", "m", "against"), [(4, 5, None), (4, 6, None), (5, 5, 0), (5, 6, 0), (5, 7, 1), (5, 9, 3)]
)
def test_the_number_of_pairs_that_may_be_against_depends_on_the_numbers_of_seeds(
    n: int, m: int, against: int | None
) -> None:
    """By hand: 1, 1, 2, 3, 5 of the C(n + m, n) orders have 0, 1, 2, 3, 4 pairs against."""
    passing = [u for u in range(n * m + 1) if rank_sum_p(n, m, u) <= 0.004]
    assert (passing[-1] if passing else None) == against


@pytest.mark.parametrize(("n", "m"), [(1, 1), (3, 3), (5, 5), (4, 7), (9, 8), (40, 60)])
def test_the_exact_p_is_that_of_scipy(n: int, m: int) -> None:
    draw = np.random.default_rng(0)
    for _ in range(20):
        a, b = draw.normal(size=n) + 0.5, draw.normal(size=m)
        theirs = stats.mannwhitneyu(a, b, alternative="greater", method="exact").pvalue
        assert rank_sum_p(n, m, pairs_against(a.tolist(), b.tolist())) == pytest.approx(float(theirs))


@pytest.mark.parametrize(
    ("kept", "seeds", "low", "high"),
    [(5, 5, 48, 100), (4, 5, 28, 99), (3, 5, 15, 95), (0, 5, 0, 52), (3, 3, 29, 100), (8, 8, 63, 100)],
)
def test_the_interval_of_a_share_is_that_of_tables_and_of_scipy(kept: int, seeds: int, low: int, high: int) -> None:
    found = share_interval(kept, seeds)
    assert [round(100 * end) for end in found] == [low, high]
    theirs = stats.binomtest(kept, seeds).proportion_ci(0.95, method="exact")
    assert found == pytest.approx((theirs.low, theirs.high), abs=1e-9)


def test_differences_have_a_median_and_ends_which_from_nine_seeds_on_omit_one_at_each_side() -> None:
    assert middle_and_ends([3.0, -1.0, 2.0, 9.0, 5.0]) == (3.0, -1.0, 9.0)
    assert middle_and_ends([9, 1, 2, 3, 4, 5, 6, 7, 8]) == (5, 2, 8)
    assert middle_and_ends([4.0]) == (4.0, 4.0, 4.0)
