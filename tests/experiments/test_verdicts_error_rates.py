"""How often the rule errs: thousands of made-up experiments of which the truth is known, with fixed seeds."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from sinklab.experiments.quantities import quantity
from sinklab.experiments.verdicts.estimates import MeanOverSeeds, equivalent, holm, within
from sinklab.experiments.verdicts.margins import beyond_margin, beyond_times
from sinklab.experiments.verdicts.observations import Observations, Observed
from sinklab.experiments.verdicts.recorded import QuantitySpread
from sinklab.experiments.verdicts.transforms import transformed, turned_back

DRAWS = 2000
MARGIN_OF_DRAWS = 2.6 * math.sqrt(0.05 * 0.95 / DRAWS)
"""What a rate of 5 % may miss by in so many draws, with a chance below 1 %."""

TRIPLES = 1600


def drawn(means: Sequence[float], sds: Sequence[float], seeds: int, name: str = "valid_loss") -> Iterator[Observations]:
    """Made-up experiments: on the scale of the comparison the cells have these means, and scatter so around them.

    What a seed adds to all cells alike scatters by 0.3 of that.
    """
    draw, known = np.random.default_rng(0), quantity(name)
    for _ in range(DRAWS):
        shared = draw.normal(size=seeds) * 0.3 * np.mean(sds)
        noise = draw.normal(size=(len(means), seeds)) * np.array(sds)[:, None]
        y_CS = (np.array(means)[:, None] + noise + shared).tolist()
        yield Observations(known, {f"c{c}": _observed(row, known.name) for c, row in enumerate(y_CS)}, QuantitySpread())


def _observed(row: Sequence[float], name: str) -> dict[int, Observed]:
    measure = quantity(name).measure
    values = [turned_back(y, measure, TRIPLES) for y in row]
    return {s: Observed(value, y, TRIPLES) for s, (value, y) in enumerate(zip(values, row, strict=True))}


def share_of(said: Iterator[bool]) -> float:
    """The share of the draws of which it is said."""
    return sum(said) / DRAWS


def differs(seen: Observations) -> bool:
    mean = seen.contrast({"c0": 1.0, "c1": -1.0})
    return mean is not None and mean.p < 0.05


@pytest.mark.parametrize("cells", [2, 5, 11])
def test_three_seeds_without_a_difference_show_one_in_six_percent_at_most(cells: int) -> None:
    assert share_of(differs(seen) for seen in drawn([1.0] * cells, [0.01] * cells, 3)) <= 0.06


@pytest.mark.parametrize("cells", [2, 5, 11])
def test_so_they_do_in_eight_percent_at_most_where_one_of_the_two_scatters_three_times_as_much(cells: int) -> None:
    sds = [0.03] + [0.01] * (cells - 1)
    assert share_of(differs(seen) for seen in drawn([1.0] * cells, sds, 3)) <= 0.08


def test_a_difference_of_three_standard_deviations_is_mostly_found_with_three_seeds() -> None:
    assert share_of(differs(seen) for seen in drawn([1.03] + [1.0] * 4, [0.01] * 5, 3)) > 0.55


def test_of_a_family_of_comparisons_any_is_wrong_in_six_percent_at_most() -> None:
    def any_differs(seen: Observations) -> bool:
        means = {cell: seen.contrast({cell: 1.0, "c0": -1.0}) for cell in list(seen.by_cell)[1:]}
        return min(holm({cell: mean.p for cell, mean in means.items() if mean}).values()) < 0.05

    assert share_of(any_differs(seen) for seen in drawn([1.0] * 6, [0.01] * 6, 3)) <= 0.06


@pytest.mark.parametrize(("cells", "seeds"), [(2, 3), (5, 5)])
@pytest.mark.parametrize("side", [1, -1])
def test_losses_that_differ_by_the_margin_are_called_equal_in_five_percent_at_most(
    cells: int, seeds: int, side: int
) -> None:
    margin = 0.05
    means = [math.log(3.0 + side * margin)] + [math.log(3.0)] * (cells - 1)

    def called_equal(seen: Observations) -> bool:
        return _equal(seen, margin)

    assert share_of(called_equal(seen) for seen in drawn(means, [0.004] * cells, seeds)) <= 0.05 + MARGIN_OF_DRAWS


@pytest.mark.parametrize("rates", [(30.0, 20.0), (10.0, 20.0), (1.0, 11.0), (97.0, 85.0)])
def test_rates_that_differ_by_the_margin_are_called_equal_in_five_percent_at_most(rates: tuple[float, float]) -> None:
    means = [transformed(rate, "rate", TRIPLES) for rate in (*rates, 5.0, 15.0, 30.0)]

    def called_equal(seen: Observations) -> bool:
        return _equal(seen, abs(rates[0] - rates[1]))

    said = share_of(called_equal(seen) for seen in drawn(means, [0.15] * 5, 3, "sink_1"))
    assert said <= 0.05 + MARGIN_OF_DRAWS


def _equal(seen: Observations, margin: float) -> bool:
    sides = [beyond_margin(seen, high, low, margin) for high, low in (("c0", "c1"), ("c1", "c0"))]
    return equivalent([side for side in sides if side]) is True


def test_cells_that_are_equal_are_called_so_where_the_margin_is_wide() -> None:
    means = [math.log(3.0)] * 5
    assert share_of(_equal(seen, 0.05) for seen in drawn(means, [0.004] * 5, 3)) > 0.85


@pytest.mark.parametrize("rates", [(40.0, 20.0), (2.0, 1.0), (0.2, 0.1), (90.0, 45.0)])
def test_a_size_is_called_established_in_two_and_a_half_percent_at_most_where_it_is_the_difference(
    rates: tuple[float, float],
) -> None:
    means = [transformed(rate, "rate", TRIPLES) for rate in (*rates, 5.0, 15.0, 30.0)]
    by, times = [], []
    for seen in drawn(means, [0.15] * 5, 3, "sink_1"):
        by.append(_above_0(beyond_margin(seen, "c0", "c1", rates[0] - rates[1])))
        times.append(_above_0(beyond_times(seen, "c0", "c1", 2.0)))
    assert sum(by) / DRAWS <= 0.025 + MARGIN_OF_DRAWS
    assert sum(times) / DRAWS <= 0.025 + MARGIN_OF_DRAWS


def _above_0(mean: MeanOverSeeds | None) -> bool:
    return mean is not None and within(mean, 0.0, math.inf) is True


@pytest.mark.parametrize("cells", [1, 5])
def test_a_mean_on_its_bound_is_said_to_keep_it_or_not_in_two_and_a_half_percent_each(cells: int) -> None:
    for_each = list(drawn([0.0] * cells, [0.01] * cells, 3))
    for bounds in ((0.0, math.inf), (-math.inf, 0.0)):
        found = [within(seen.mean_of("c0"), *bounds) for seen in for_each]
        assert found.count(True) / DRAWS <= 0.025 + MARGIN_OF_DRAWS
        assert found.count(False) / DRAWS <= 0.025 + MARGIN_OF_DRAWS


@pytest.mark.parametrize(("cells", "seeds"), [(1, 3), (6, 3), (1, 5)])
def test_one_more_seed_lies_within_the_prediction_interval_of_the_others_in_about_95_percent(
    cells: int, seeds: int
) -> None:
    """The interval is made of all seeds but the last of the first cell, which has one more than the others."""

    def holds_the_next(seen: Observations) -> bool:
        before = {cell: {s: one for s, one in runs.items() if s < seeds} for cell, runs in seen.by_cell.items()}
        low, high = Observations(seen.quantity, before, seen.recorded).mean_of("c0").prediction()
        return low <= seen.by_cell["c0"][seeds].y <= high

    said = share_of(holds_the_next(seen) for seen in drawn([1.0] * cells, [0.01] * cells, seeds + 1))
    assert 0.95 - MARGIN_OF_DRAWS <= said <= (0.95 + MARGIN_OF_DRAWS if cells == 1 else 0.985)
