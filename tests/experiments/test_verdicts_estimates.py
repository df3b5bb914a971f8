"""The statistics of verdicts against textbooks, explicit formulas, and another library."""

import math
from itertools import pairwise, permutations

import numpy as np
import pytest
from scipy import stats

from sinklab.experiments.quantities import Measure
from sinklab.experiments.verdicts.estimates import (
    MeanOverSeeds,
    SeedSpread,
    equivalent,
    holm,
    over_seeds,
    paired_spread,
    seeds_that_decide,
    single_spread,
    within,
)
from sinklab.experiments.verdicts.transforms import slope, transformed, turned_back


def known(spread: SeedSpread | None) -> SeedSpread:
    assert spread
    return spread


def test_a_rate_of_k_out_of_n_counts_as_k_and_a_half_out_of_n_and_one() -> None:
    assert transformed(0.0, "rate", 1600) == pytest.approx(math.log(0.5 / 1600.5))
    assert transformed(100.0, "rate", 1600) == pytest.approx(math.log(1600.5 / 0.5))
    assert transformed(25.0, "rate", 1600) == pytest.approx(math.log((400.5 / 1601) / (1 - 400.5 / 1601)))
    assert transformed(3.7, "positive", 1600) == math.log(3.7)


@pytest.mark.parametrize("value", [0.0, 0.0625, 1.0, 36.0, 50.0, 99.9375, 100.0])
def test_numbers_come_back_from_the_scale_on_which_they_are_compared(value: float) -> None:
    assert turned_back(transformed(value, "rate", 1600), "rate", 1600) == pytest.approx(value, abs=1e-9)
    assert turned_back(transformed(value + 1, "positive", 1600), "positive", 1600) == pytest.approx(value + 1)


def test_what_lies_beyond_all_rates_comes_back_as_the_last_of_them() -> None:
    assert turned_back(-800.0, "rate", 1600) == 0.0
    assert turned_back(800.0, "rate", 1600) == 100.0


@pytest.mark.parametrize(("value", "measure"), [(0.5, "rate"), (20.0, "rate"), (95.0, "rate"), (3.0, "positive")])
def test_the_slope_of_a_transform_is_its_derivative(value: float, measure: Measure) -> None:
    step = 1e-5
    rise = transformed(value + step, measure, 1600) - transformed(value - step, measure, 1600)
    assert slope(value, measure, 1600) == pytest.approx(rise / (2 * step), rel=1e-6)


def test_the_single_spread_is_that_within_cells_whatever_lies_between_them() -> None:
    spread = known(single_spread([[1.0, 2.0, 3.0], [11.0, 15.0], [100.0]]))
    assert (spread.sd**2, spread.df) == (pytest.approx((2.0 + 8.0) / 3), 3)
    assert single_spread([[1.0], [2.0]]) is None
    assert single_spread([[1.0, 1.0]]) is None


def test_the_paired_spread_of_balanced_data_is_the_explicit_formula_of_two_way_residuals() -> None:
    y = np.random.default_rng(0).normal(size=(4, 3)) + np.arange(4)[:, None] * 5 + np.array([0.0, 3.0, -2.0])
    residual = y - y.mean(1, keepdims=True) - y.mean(0, keepdims=True) + y.mean()
    spread = known(paired_spread([dict(enumerate(row)) for row in y.tolist()]))
    assert spread.df == (4 - 1) * (3 - 1)
    assert spread.sd == pytest.approx(math.sqrt((residual**2).sum() / 6))


def test_seeds_may_be_missing_from_the_paired_spread() -> None:
    # Cells a and b share seeds 0, 1; c has seed 2 alone, which says nothing. One difference of differences is left.
    spread = known(paired_spread([{0: 1.0, 1: 4.0}, {1: 9.0, 0: 2.0}, {2: 77.0}]))
    assert spread.df == 1
    assert spread.sd == pytest.approx(abs((9.0 - 4.0) - (2.0 - 1.0)) / 2)
    assert paired_spread([{0: 1.0, 1: 2.0}, {2: 3.0, 3: 5.0}]) is None  # two seed effects each explain all
    assert paired_spread([{0: 1.0, 1: 2.0}]) is None
    assert paired_spread([]) is None


def test_what_all_cells_of_a_seed_share_is_no_spread_between_pairs() -> None:
    noise = np.random.default_rng(1).normal(size=(5, 3)) * 0.1
    together = noise + np.array([0.0, 50.0, -70.0])
    alone, shared = (known(paired_spread([dict(enumerate(row)) for row in y.tolist()])) for y in (noise, together))
    assert shared.sd == pytest.approx(alone.sd)


def test_of_two_cells_alone_the_comparison_is_the_paired_t_test_of_scipy() -> None:
    draw = np.random.default_rng(2)
    for n in (2, 3, 5, 9):
        a, b = draw.normal(size=n) + 1.0, draw.normal(size=n)
        sigma = known(paired_spread([dict(enumerate(a.tolist())), dict(enumerate(b.tolist()))]))
        mean = over_seeds((a - b).tolist(), SeedSpread(sigma.sd * math.sqrt(2), sigma.df))
        theirs = stats.ttest_rel(a, b)
        assert mean.p == pytest.approx(float(theirs.pvalue))
        assert mean.interval() == pytest.approx(tuple(theirs.confidence_interval()))


def test_the_interval_is_that_of_the_table_of_t() -> None:
    # t(2) at 97.5 % is 4.303, at 95 % 2.920; t(10) at 97.5 % is 2.228 (any table).
    mean = over_seeds([1.0, 2.0, 3.0], None)
    assert mean.interval() == pytest.approx((2 - 4.303 / math.sqrt(3), 2 + 4.303 / math.sqrt(3)), abs=1e-3)
    assert mean.interval(0.90)[1] == pytest.approx(2 + 2.920 / math.sqrt(3), abs=1e-3)
    assert mean.prediction()[1] == pytest.approx(2 + 4.303 * math.sqrt(4 / 3), abs=1e-3)
    pooled = over_seeds([1.0, 2.0, 3.0], SeedSpread(1.5, 10))
    assert pooled.interval()[1] == pytest.approx(2 + 2.228 * 1.5 / math.sqrt(3), abs=1e-3)


def test_a_cell_that_scatters_more_than_the_pool_says_has_its_own_spread() -> None:
    assert known(over_seeds([1.0, 2.0, 3.0], SeedSpread(0.5, 10)).spread) == SeedSpread(1.0, 2)
    assert known(over_seeds([1.0, 2.0, 3.0], SeedSpread(2.0, 10)).spread) == SeedSpread(2.0, 10)
    assert known(over_seeds([7.0], SeedSpread(2.0, 10)).spread) == SeedSpread(2.0, 10)


def test_without_a_spread_there_is_no_interval_and_nothing_is_decided() -> None:
    for values in ([5.0], [5.0, 5.0, 5.0]):
        mean = over_seeds(values, None)
        assert mean.spread is None
        assert mean.interval() == mean.prediction() == (-math.inf, math.inf)
        assert mean.p == 1.0
        assert within(mean, 0.0, 10.0) is None
        assert within(mean, -math.inf, math.inf) is None
        assert equivalent([mean.moved_to(-9.0)]) is None


def test_holm_on_a_textbook_example() -> None:
    # p of 0.01, 0.04, 0.03, 0.005: 4 x 0.005, 3 x 0.01, 2 x 0.03, and 0.04 that is raised to the one before it.
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}) == pytest.approx(
        {"a": 0.03, "b": 0.06, "c": 0.06, "d": 0.02}
    )
    assert holm({"a": 0.6, "b": 0.7}) == {"a": 1.0, "b": 1.0}
    assert holm({"a": 0.04}) == {"a": 0.04}
    assert holm({}) == {}


def test_holm_does_not_depend_on_the_order() -> None:
    p = {"a": 0.02, "b": 0.001, "c": 0.02, "d": 0.3}
    assert all(holm(dict(order)) == holm(p) for order in permutations(p.items()))


def test_a_mean_lies_within_bounds_outside_or_neither() -> None:
    mean = over_seeds([1.9, 2.0, 2.1], None)  # +- 0.25
    assert within(mean, 1.7, 2.3) is True
    assert within(mean, 1.9, math.inf) is None
    assert within(mean, 2.3, 2.9) is False
    assert within(mean, -math.inf, 1.7) is False


def test_equivalence_is_two_one_sided_tests_of_scipy() -> None:
    draw = np.random.default_rng(3)
    for _ in range(200):
        d = draw.normal(size=5) * 0.5
        above = stats.ttest_1samp(d, -0.5, alternative="greater")
        below = stats.ttest_1samp(d, 0.5, alternative="less")
        theirs = max(np.asarray(test)[1] for test in (above, below))
        mean = over_seeds(d.tolist(), None)
        sides = [mean.moved_to(mean.mean - 0.5), mean.negated().moved_to(-mean.mean - 0.5)]
        assert (equivalent(sides) is True) == (theirs < 0.05)


def test_more_comparisons_make_it_harder_to_refute_that_all_are_equal() -> None:
    mean = over_seeds([0.16, 0.26, 0.36], None)
    assert equivalent([mean]) is False
    assert equivalent([mean], comparisons=3) is None


def test_the_seeds_that_decide_are_the_fewest_that_do_and_none_beyond_a_thousand() -> None:
    mean = MeanOverSeeds(1.0, 3, SeedSpread(2.0, 2))
    needed = seeds_that_decide(3, lambda n: mean.with_seeds(n).p < 0.05)
    # of n seeds with mean 1 and sd 2: t = sqrt(n) / 2 against t(n - 1)
    by_hand = next(n for n in range(4, 99) if math.sqrt(n) / 2 > stats.t.isf(0.025, n - 1))
    assert needed == by_hand == 18
    assert seeds_that_decide(3, lambda n: n >= 1000) == 1000
    assert seeds_that_decide(3, lambda n: n > 1000) is None


def test_a_recorded_spread_does_not_grow_surer_with_seeds_of_this_experiment() -> None:
    assert known(MeanOverSeeds(0.0, 3, SeedSpread(1.0, 8)).with_seeds(5).spread).df == 16
    assert known(MeanOverSeeds(0.0, 3, SeedSpread(1.0, 8, recorded=True)).with_seeds(5).spread).df == 8


def test_p_falls_as_seeds_are_added() -> None:
    mean = MeanOverSeeds(0.5, 3, SeedSpread(1.0, 6))
    p = [mean.with_seeds(n).p for n in range(3, 200)]
    assert all(later < earlier for earlier, later in pairwise(p))
