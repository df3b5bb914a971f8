"""metrics.jsonl as a run that goes on takes it up, as others read it, and the seconds that follow from it."""

import json
from pathlib import Path

import pytest
from report_fixtures import make_run

from sinklab.errors import InputError, SinklabError
from sinklab.report.cells import cell_rows
from sinklab.report.collect import collect
from sinklab.train.directory.history import Evaluation, read_history, read_metrics, seconds_spent


def metrics(folder: Path, text: str) -> Path:
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    return folder / "metrics.jsonl"


def speeds(*known: float | None) -> list[Evaluation]:
    """Evaluations every hundred steps of ten tokens each, with the speed of the updates before each."""
    return [Evaluation(step=100 * i, tokens=1000 * i, tokens_per_second=speed) for i, speed in enumerate(known)]


def test_keys_of_another_version_are_left_alone_and_what_it_has_not_written_is_none(tmp_path: Path) -> None:
    (one,) = read_history(metrics(tmp_path, '{"step": 3, "sink_rate": [8.5], "perplexity": {"of": "everything"}}\n'))
    assert (one.step, one.sink_rate, one.valid_loss, one.hidden_norm_ratio) == (3, [8.5], None, [])


def test_evaluations_are_read_by_step_and_a_run_that_goes_on_has_them_as_they_were_written(tmp_path: Path) -> None:
    rows = [{"step": 0, "lr": 1}, {"step": 9, "lr": 2.0}, {"step": 4, "other": None}, {"step": 9, "lr": 3e-3}]
    path = metrics(tmp_path, "".join(json.dumps(row) + "\n" for row in rows))
    assert [(one.step, one.lr) for one in read_history(path)] == [(0, 1.0), (4, None), (9, 0.003)]
    assert read_metrics(path) == rows


@pytest.mark.parametrize(
    "line",
    ['{"step": -1}', '{"step": 1.5}', '{"step": 1, "lr": "low"}', '{"step": 1, "sink_rate": null}', '{"a": 1}', "[1]"],
)
def test_a_line_whose_numbers_are_none_is_damaged(line: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"metrics\.jsonl, line 2, is damaged"):
        read_history(metrics(tmp_path, f'{{"step": 0}}\n{line}\n'))


@pytest.mark.parametrize(
    ("torn", "goes_on", "looks_on"),
    [
        ('{"step": 1, "lr": 0.', True, True),
        ("\0" * 9, True, False),
        ('{"step": 1,\n', True, False),
        ("x", False, False),
    ],
    ids=["half a line", "a block of zeros", "half a line with an end", "not a line of ours"],
)
def test_half_a_line_at_the_end_is_left_out_and_what_else_a_crash_leaves_only_by_the_run_that_writes_it_anew(
    torn: str, goes_on: bool, looks_on: bool, tmp_path: Path
) -> None:
    path = metrics(tmp_path, '{"step": 0}\n' + torn)
    for read, accepted in ((read_metrics, goes_on), (read_history, looks_on)):
        if accepted:
            assert len(read(path)) == 1
        else:
            with pytest.raises(SinklabError, match="line 2"):
                read(path)


def test_seconds_are_tokens_over_their_speed() -> None:
    assert seconds_spent([]) == 0
    assert seconds_spent(speeds(None, 500.0, 250.0)) == 2 + 4


def test_updates_whose_speed_another_process_took_along_are_left_out() -> None:
    assert seconds_spent(speeds(None, 500.0, None, 250.0)) == 2 + 4


def test_the_report_counts_such_updates_at_the_speed_of_the_next(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", reached=0)
    rows = [one.model_dump(include={"step", "tokens", "tokens_per_second"}) for one in speeds(None, 500.0, None, 250.0)]
    metrics(run, "".join(json.dumps(row) + "\n" for row in rows))
    (row,) = cell_rows(collect([run]))
    assert row.seconds is not None
    assert row.seconds.values == (2 + 8,)
