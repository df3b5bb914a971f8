"""The jump of a curve, on curves that have one of a known size and on curves that have none."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from made_runs import reading, run_of

from sinklab.experiments.quantities import JUMP_POINTS, discontinuity_at

STEPS = range(50, 1501, 50)


def power_law(step: float) -> float:
    return 3.2 + 12 * step**-0.45


def exponential(step: float) -> float:
    return 3.6 + 2.5 * math.exp(-step / 400)


@pytest.mark.parametrize("at", [800, 950, 1100])
@pytest.mark.parametrize("jump", [0.3, -0.05])
def test_a_jump_is_found_on_a_curve_that_is_a_cubic_in_log_steps(at: int, jump: float) -> None:
    def curve(step: int) -> float:
        x = math.log(step)
        return 9 - 1.1 * x + 0.06 * x * x + 0.002 * x**3 + (jump if step >= at else 0.0)

    assert discontinuity_at(STEPS, [curve(step) for step in STEPS], at) == pytest.approx(jump, abs=1e-9)


@pytest.mark.parametrize("curve", [power_law, exponential])
@pytest.mark.parametrize("at", [800, 900, 1150])
@pytest.mark.parametrize("jump", [0.0, 0.1])
def test_the_bend_of_a_learning_curve_is_not_taken_for_a_jump(
    curve: Callable[[float], float], at: int, jump: float
) -> None:
    found = discontinuity_at(STEPS, [curve(step) + jump * (step >= at) for step in STEPS], at)
    assert found == pytest.approx(jump, abs=0.005)


def test_noise_of_0_01_in_the_loss_changes_the_jump_by_less_than_0_03() -> None:
    generator = np.random.default_rng(0)
    curves = [[power_law(step) + generator.normal(0, 0.01) for step in STEPS] for _ in range(200)]
    noisy = np.array([discontinuity_at(STEPS, curve, 850) for curve in curves], dtype=float)
    assert np.mean(noisy) == pytest.approx(0.0, abs=0.005)
    assert np.std(noisy) < 0.03


def test_a_gradual_change_over_several_evaluations_is_not_a_jump() -> None:
    def curve(step: int) -> float:
        return power_law(step) - 0.2 * min(max((step - 800) / 300, 0), 1)

    found = discontinuity_at(STEPS, [curve(step) for step in STEPS], 850)
    assert found == pytest.approx(0.0, abs=0.06)


def test_too_few_points_on_a_side_give_no_jump() -> None:
    near_the_end = STEPS[-JUMP_POINTS + 1]
    assert discontinuity_at(STEPS, [power_law(step) for step in STEPS], near_the_end) is None
    assert discontinuity_at(STEPS, [power_law(step) for step in STEPS], STEPS[-JUMP_POINTS]) is not None
    assert discontinuity_at(STEPS, [power_law(step) for step in STEPS], 700) is None


def test_the_loss_change_is_measured_at_the_emergence_of_the_sink_and_none_without_a_sink() -> None:
    def loss(step: int) -> float:
        return 4 - 0.2 * math.log(step) + (0.25 if step >= 900 else 0.0)

    sinks = [(step, 30.0 if step >= 900 else 1.0) for step in STEPS]
    rows = [reading(step, sink_1=sink, valid_loss=loss(step)) for step, sink in sinks]
    untrained = reading(0, sink_1=0.0, valid_loss=7.1)
    assert run_of(0, untrained, *rows).value("loss_change") == pytest.approx(0.25)
    assert (
        run_of(0, untrained, *(row.model_copy(update={"sink_rate": [1.0]}) for row in rows)).value("loss_change")
        is None
    )
    holes = [row.model_copy(update={"valid_loss": None}) if row.step == 500 else row for row in rows]
    assert run_of(0, untrained, *holes).value("loss_change") == pytest.approx(0.25)
