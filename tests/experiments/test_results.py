"""Numbers of a finished run, read from its directory as trained, and as committed in compressed form."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from trained_run import trained_run

from sinklab.errors import InputError, SinklabError
from sinklab.experiments.documents import RECORD, RunRecord
from sinklab.experiments.summary import read_numbers
from sinklab.measuring.measurement import Measurement

METRICS = "metrics.jsonl"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory of two layers with two heads, measured on four sequences."""
    return trained_run(tmp_path_factory.mktemp("trained"), {})[0]


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the trained run directory."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def test_numbers_of_a_run_are_means_of_its_last_three_evaluations(run: Path) -> None:
    untrained, last = map(json.loads, (run / METRICS).read_text().splitlines())
    rows = [untrained]
    for step, rate, loss, ratio in ((1, 90, 9, 8), (2, 10, 3, 2), (3, 20, 4, 3), (4, 60, 2, 7)):
        changed = {"sink_rate": [rate, *last["sink_rate"][1:]], "valid_loss": loss, "hidden_norm_ratio": [1, ratio, 1]}
        rows.append({**last, **changed, "step": step})
    (run / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    numbers = read_numbers(run)
    assert numbers.seed == 0
    assert numbers.last.sink_rate == rows[-1]["sink_rate"]
    assert numbers.value("sink_1") == pytest.approx(30)
    assert numbers.value("valid_loss") == pytest.approx(3)
    assert numbers.value("norm_ratio") == pytest.approx(4)
    assert [one.step for one in numbers.readings] == [0, 1, 2, 3, 4]


def test_sink_rates_of_heads_equal_those_of_the_measurement(run: Path) -> None:
    last = json.loads((run / METRICS).read_text().splitlines()[-1])
    measured = Measurement.load(run)
    expected = 100 * (measured.importance_first > measured.eps).mean(0)
    assert np.array(last["sink_rate_heads"]) == pytest.approx(expected)
    assert np.mean(last["sink_rate_heads"]) == pytest.approx(last["sink_rate"][0])
    numbers = read_numbers(run)
    layers = [numbers.evaluations(f"sink_layer_{layer}", count=1) for layer in (1, 2, 3)]
    assert layers == [*([max(heads)] for heads in last["sink_rate_heads"]), []]


def test_an_evaluation_has_other_thresholds_and_the_importance_of_the_first_position(run: Path) -> None:
    last = json.loads((run / METRICS).read_text().splitlines()[-1])
    first_NLH = Measurement.load(run).importance_first
    rates = {eps: 100 * (first_NLH > float(eps)).mean() for eps in ("0.3", "0.2", "0.4")}
    assert last["sink_rate_eps"] == pytest.approx(rates)
    assert len(set(rates.values())) > 1, "thresholds that make no difference show nothing"
    assert np.array(last["importance_first_heads"]) == pytest.approx(first_NLH.mean(0), rel=1e-5)
    assert last["sink_rate_visible_eps"] is last["sink_rate_bias_eps"] is None


def test_the_sink_step_of_a_layer_is_when_one_head_has_a_sink_in_half_of_the_sequences(run: Path) -> None:
    rows = [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
    assert len(rows) == 2
    rates = [[[0.0, 49.0], [0.0, 0.0]], *([[[0.0, 50.0], [49.0, 49.0]]] * (len(rows) - 1))]
    lines = [json.dumps(row | {"sink_rate_heads": heads}) for row, heads in zip(rows, rates, strict=True)]
    (run / METRICS).write_text("\n".join(lines) + "\n")
    numbers = read_numbers(run)
    assert numbers.value("layer_step_1") == rows[1]["step"]
    assert numbers.value("layer_step_2") == math.inf, "two heads of 49 percent are not one of half"
    assert numbers.value("layer_step_3") is None


def test_rates_of_heads_are_none_for_older_runs_without_them(run: Path) -> None:
    rows = [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
    for row in rows:
        del row["sink_rate_heads"]
    (run / METRICS).write_text("\n".join(map(json.dumps, rows)) + "\n")
    numbers = read_numbers(run)
    assert numbers.value("layer_step_1") is numbers.value("sink_layer_1") is None
    assert numbers.evaluations("sink_1", count=1) == [rows[-1]["sink_rate"][0]]


def test_importance_and_the_rates_at_other_thresholds_are_read_where_rows_have_them(run: Path) -> None:
    rows = [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
    heads = {"importance_first_heads": [[0.1, 0.5], [None, 0.3]]}
    rates = {"sink_rate_eps": {"0.2": 60.0, "0.4": 20.0}, "sink_rate_bias_eps": None}
    (run / METRICS).write_text("\n".join(json.dumps(row | heads | rates) for row in rows) + "\n")
    numbers = read_numbers(run)
    assert numbers.value("importance_first") == pytest.approx(30.0)
    assert (numbers.value("sink_1", eps="0.2"), numbers.value("sink_1", eps="0.4")) == (60.0, 20.0)
    assert numbers.value("sink_1_visible", eps="0.4") == 20.0
    assert numbers.value("sink_bias", eps="0.2") is numbers.value("sink_2", eps="0.2") is None
    assert numbers.value("sink_1") == pytest.approx(np.mean([row["sink_rate"][0] for row in rows[-3:]]))


def test_kurtosis_is_read_from_the_record_of_a_run(run: Path) -> None:
    assert read_numbers(run).value("kurtosis") is None
    RunRecord(hash="0" * 16, name="run", seed=0, status="done", kurtosis=7.5, peak_memory_mb=400.0).save(run)
    numbers = read_numbers(run)
    assert numbers.value("kurtosis") == 7.5


def test_a_finished_run_needs_no_weights(run: Path) -> None:
    RunRecord(hash="0" * 16, name="run", seed=0, status="done", seconds=3.0).save(run)
    before = read_numbers(run)
    (run / "measurement.json").unlink()
    shutil.rmtree(run / "checkpoints")
    assert read_numbers(run) == before


def test_a_run_that_has_not_finished_or_failed_has_no_numbers(run: Path) -> None:
    (run / "measurement.json").unlink()
    with pytest.raises(SinklabError, match="has not finished"):
        read_numbers(run)
    RunRecord(hash="0" * 16, name="run", seed=0, status="failed", message="the loss is not finite").save(run)
    with pytest.raises(SinklabError, match="has not finished"):
        read_numbers(run)


def test_a_damaged_record_is_refused_by_its_path(run: Path) -> None:
    (run / RECORD).write_text("{")
    with pytest.raises(InputError, match=RECORD):
        read_numbers(run)
