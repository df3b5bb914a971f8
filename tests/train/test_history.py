"""metrics.jsonl as resumed runs and reports read it, and the seconds of training computed from it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from report_fixtures import make_run

from sinklab.errors import InputError, SinklabError
from sinklab.report.collect import collect
from sinklab.train.run import Evaluation, read_history, read_metrics, seconds_spent


def metrics(folder: Path, text: str) -> Path:
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    return folder / "metrics.jsonl"


def speeds(*known: float | None) -> list[Evaluation]:
    """Evaluations every hundred steps of ten tokens each, with the speed of the updates before each."""
    return [Evaluation(step=100 * i, tokens=1000 * i, tokens_per_second=speed) for i, speed in enumerate(known)]


def test_unknown_keys_are_ignored_and_missing_ones_are_none(tmp_path: Path) -> None:
    (one,) = read_history(metrics(tmp_path, '{"step": 3, "sink_rate": [8.5], "perplexity": {"of": "everything"}}\n'))
    assert (one.step, one.sink_rate, one.valid_loss, one.hidden_norm_ratio) == (3, [8.5], None, [])


def test_reports_read_evaluations_by_step_and_resumed_runs_read_them_as_written(tmp_path: Path) -> None:
    rows = [{"step": 0, "lr": 1}, {"step": 9, "lr": 2.0}, {"step": 4, "other": None}, {"step": 9, "lr": 3e-3}]
    path = metrics(tmp_path, "".join(json.dumps(row) + "\n" for row in rows))
    assert [(one.step, one.lr) for one in read_history(path)] == [(0, 1.0), (4, None), (9, 0.003)]
    assert read_metrics(path) == rows


@pytest.mark.parametrize(
    "line",
    ['{"step": -1}', '{"step": 1.5}', '{"step": 1, "lr": "low"}', '{"step": 1, "sink_rate": null}', '{"a": 1}', "[1]"],
)
def test_a_line_with_invalid_values_is_refused(line: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"metrics\.jsonl, line 2, is invalid"):
        read_history(metrics(tmp_path, f'{{"step": 0}}\n{line}\n'))


@pytest.mark.parametrize("read", [read_metrics, read_history])
@pytest.mark.parametrize(
    "torn",
    ['{"step": 1, "lr": 0.', "\0" * 9, '{"step": 1,\n'],
    ids=["half a line", "a block of zeros", "half a line with a line break"],
)
def test_a_torn_last_line_is_left_out(torn: str, read: Callable[[Path], list], tmp_path: Path) -> None:
    assert len(read(metrics(tmp_path, '{"step": 0}\n' + torn))) == 1


@pytest.mark.parametrize("read", [read_metrics, read_history])
@pytest.mark.parametrize("text", ['{"step": 0}\nx', '{"step": 0}\n{"step": 1,\n{"step": 2}\n'])
def test_other_damaged_lines_are_refused(text: str, read: Callable[[Path], list], tmp_path: Path) -> None:
    with pytest.raises(SinklabError, match="line 2, is invalid"):
        read(metrics(tmp_path, text))


def test_seconds_are_tokens_over_their_speed() -> None:
    assert seconds_spent([]) == 0
    assert seconds_spent(speeds(None, 500.0, 250.0)) == 2 + 4


def test_updates_of_unknown_speed_are_left_out() -> None:
    assert seconds_spent(speeds(None, 500.0, None, 250.0)) == 2 + 4


def test_the_report_counts_updates_of_unknown_speed_at_the_speed_of_the_next(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", reached=0)
    rows = [one.model_dump(include={"step", "tokens", "tokens_per_second"}) for one in speeds(None, 500.0, None, 250.0)]
    metrics(run, "".join(json.dumps(row) + "\n" for row in rows))
    assert collect([run]).runs[0].seconds == 2 + 8
