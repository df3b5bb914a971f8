"""Quantities computed from the evaluations of a run."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from trained_run import trained_run

from sinklab.experiments.quantities import RunNumbers, quantity
from sinklab.experiments.summary import read_numbers
from sinklab.train.run import Evaluation

FIRST = Evaluation(
    step=0, sink_rate=[1.0, 2.0, 3.0, 4.0, 5.0], valid_loss=7.0, hidden_norm_ratio=[3.0], norm_ratio_sink_token=[2.0]
)


def run_of(*readings: Evaluation) -> RunNumbers:
    return RunNumbers(seed=0, readings=readings)


def test_sink_rates_of_a_range_of_positions_are_summed() -> None:
    assert run_of(FIRST).value("sink_2_to_5") == 14.0
    assert run_of(FIRST).value("sink_1_or_bias") == 1.0
    assert run_of(FIRST.model_copy(update={"sink_rate_bias": 60.0})).value("sink_1_or_bias") == 61.0
    assert quantity("sink_2_to_5").unit == "%"
    with pytest.raises(ValueError, match="unknown quantity 'sink_5_to_2'"):
        quantity("sink_5_to_2")


@pytest.mark.parametrize("name", ["sink_6", "sink_first_6", "sink_2_to_6", "sink_6_to_7"])
def test_rates_of_positions_beyond_the_measured_ones_are_unknown(name: str) -> None:
    assert run_of(FIRST).value("sink_first_5") == 15.0
    assert run_of(FIRST).value(name) is None


def test_sink_growth_is_the_change_since_half_of_the_steps() -> None:
    rates = {0: 0.0, 100: 4.0, 200: 10.0, 300: 20.0, 400: 30.0}
    run = run_of(*(FIRST.model_copy(update={"step": step, "sink_rate": [rate]}) for step, rate in rates.items()))
    assert run.value("sink_growth") == pytest.approx(20.0 - 10.0)


def test_the_untrained_model_is_not_among_the_last_evaluations() -> None:
    run = run_of(
        FIRST, *(FIRST.model_copy(update={"step": step, "valid_loss": loss}) for step, loss in ((5, 6.0), (10, 5.0)))
    )
    assert run.value("valid_loss") == 5.5
    assert run_of(FIRST).value("valid_loss") == 7.0


def test_the_norm_growth_of_a_sink_token_is_relative_to_the_untrained_model() -> None:
    later = [FIRST.model_copy(update={"step": step, "norm_ratio_sink_token": [8.0]}) for step in (1, 2, 3)]
    assert run_of(FIRST, *later).value("norm_growth_sink_token") == 4.0
    assert run_of(*later).value("norm_growth_sink_token") is None


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ({"norm": {"placement": "post"}}, "norm_ratio_before_norm"),
        ({"attention": {"bias": "sink_token"}}, "norm_ratio_sink_token"),
        ({"attention": {"mask": {"kind": "window", "width": 4}}}, "sink_window_start"),
    ],
)
def test_quantities_of_only_some_models_are_read_from_their_runs(
    model: dict[str, Any], name: str, tmp_path: Path
) -> None:
    run, _ = trained_run(tmp_path, {}, model)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    recorded = [row["sink_rate_window_start" if name == "sink_window_start" else name] for row in rows]
    numbers = [max(one) if isinstance(one, list) else one for one in recorded]
    assert read_numbers(run).value(name) == pytest.approx(fmean(numbers[1:][-3:]))  # without step 0
    others = {"norm_ratio_before_norm", "norm_ratio_sink_token", "sink_window_start"} - {name}
    assert all(read_numbers(run).value(other) is None for other in others)
