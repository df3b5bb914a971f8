"""`sinklab eval`: its output and files, continuing after an interruption, and refusals."""

import json
import math
import shutil
import sys
from pathlib import Path

import pytest
from conftest import Run, on_one_line
from hellaswag_files import hellaswag_file, read_records, sheep_items
from tiny_models import text_file
from trained_run import trained_run

from sinklab.errors import install_command
from sinklab.evaluating.evaluate_model import evaluate_model
from sinklab.evaluating.evaluation import DownstreamScores, TaskRequest, load_scores
from sinklab.jobs import JobEvent
from sinklab.survey.measure import text_hash
from sinklab.train.lock import HeldError, lock_run, one_writer

Made = tuple[Path, Path]


@pytest.fixture(scope="module")
def needs_lm_eval() -> None:
    pytest.importorskip("lm_eval", reason="needs lm-eval (extra eval)")


@pytest.fixture
def made(needs_lm_eval: None, tmp_path: Path) -> Made:
    """A run, and a file of items."""
    run, _ = trained_run(tmp_path, {"bos": True}, {"context": 64})
    return run, hellaswag_file(tmp_path / "items.jsonl", sheep_items(30))


class StopsMidway:
    """Raises KeyboardInterrupt after a number of answered requests; records the number answered at each event."""

    def __init__(self, after: float = math.inf) -> None:
        self._after, self.answered = after, list[float]()

    def __call__(self, event: JobEvent) -> None:
        if event.kind == "advanced":
            self.answered.append(event.done)
            if event.done >= self._after:
                raise KeyboardInterrupt


def without_cost(scores: DownstreamScores) -> dict[str, object]:
    tasks = {name: task.model_copy(update={"seconds": 0.0}) for name, task in scores.tasks.items()}
    return scores.model_copy(update={"tasks": tasks}).document()


def test_scores_of_a_run_are_kept_in_its_directory(made: Made, run: Run) -> None:
    directory, file = made
    status, out, err = run("eval", directory, "--tasks", "hellaswag", "--data", file, "--limit", 8, "--json")
    assert status == 0, err
    document = json.loads(out)
    assert document == json.loads((directory / "evaluation.json").read_text())
    assert document["schema"] == 1
    task = document["tasks"]["hellaswag"]
    assert (task["items"], task["available"], task["limit"]) == (8, 30, 8)
    assert set(task["metrics"]) == {"acc", "acc_norm"}
    assert all({"value", "stderr"} == set(metric) for metric in task["metrics"].values())
    assert len(read_records(directory / task["records"])) == 8
    assert not list(directory.glob("answers_*"))
    assert run("runs", directory)[0] == 0  # the directory is still a valid run


def test_without_a_directory_for_scores_a_table_is_printed_and_nothing_written(
    made: Made, run: Run, tmp_path: Path
) -> None:
    directory, file = made
    assert run("export", directory, tmp_path / "exported")[0] == 0
    before = sorted((tmp_path / "exported").iterdir())
    status, out, err = run("eval", tmp_path / "exported", "--tasks", "hellaswag", "--data", file, "--limit", 4)
    assert status == 0, err
    assert "acc_norm" in out
    assert "standard error" in out
    assert "hellaswag: 16 requests" in err
    assert sorted((tmp_path / "exported").iterdir()) == before


def test_an_interrupted_call_continues_to_the_result_of_an_uninterrupted_one(made: Made, tmp_path: Path) -> None:
    directory, file = made
    request = TaskRequest(tasks=("hellaswag",), data=file, batch_size=2)
    stops = StopsMidway(after=60)
    with pytest.raises(KeyboardInterrupt):
        evaluate_model(str(directory), request, out=tmp_path / "cut", observe=stops)
    assert not (tmp_path / "cut" / "evaluation.json").exists()
    after = StopsMidway()
    went_on = evaluate_model(str(directory), request, out=tmp_path / "cut", observe=after)
    assert 0 < len(after.answered) == 120 - len(stops.answered)  # an answered request is not asked for again
    assert list((tmp_path / "cut").glob("answers_*")) == []
    whole = evaluate_model(str(directory), request, out=tmp_path / "whole")
    assert without_cost(went_on) == without_cost(whole)
    records = [(tmp_path / name / "items_hellaswag.jsonl.gz").read_bytes() for name in ("cut", "whole")]
    assert records[0] == records[1]


def test_of_two_calls_at_a_time_one_is_refused(made: Made, tmp_path: Path) -> None:
    directory, file = made
    request, out = TaskRequest(tasks=("hellaswag",), limit=4, data=file), tmp_path / "e"

    def meanwhile(event: JobEvent) -> None:
        if event.kind == "started":
            with pytest.raises(
                HeldError, match=r"/e is being written to by process \d+ on .*: wait until it has ended"
            ):
                evaluate_model(str(directory), request, out=out)

    evaluate_model(str(directory), request, out=out, observe=meanwhile)
    assert sorted(path.name for path in out.iterdir()) == ["evaluation.json", "items_hellaswag.jsonl.gz"]


def test_a_run_can_be_evaluated_while_it_is_trained_and_trained_while_it_is_evaluated(made: Made, run: Run) -> None:
    directory, file = made
    with lock_run(directory):
        status, _, err = run("eval", directory, "--tasks", "hellaswag", "--data", file, "--limit", 4)
        assert status == 0, err
    with one_writer(directory / "evaluation.json"):
        lock_run(directory).close()


def test_finished_tasks_are_kept_and_other_settings_are_refused(made: Made, run: Run) -> None:
    directory, file = made
    call = ("eval", directory, "--tasks", "hellaswag", "--data", file)
    assert run(*call, "--limit", 4)[0] == 0
    before = (directory / "evaluation.json").read_bytes()
    status, _, err = run(*call, "--limit", 4)
    assert (status, "hellaswag: 4 items (kept)" in err) == (0, True)
    status, _, err = on_one_line(run)(*call, "--limit", 5)
    assert status == 2
    assert "with other settings (limit of hellaswag is 4, requested 5)" in err
    assert (directory / "evaluation.json").read_bytes() == before
    assert load_scores(directory / "evaluation.json").tasks["hellaswag"].items == 4


def test_no_task_is_added_with_another_version_of_lm_eval(made: Made, run: Run) -> None:
    directory, file = made
    call = ("eval", directory, "--data", file, "--limit", 4, "--tasks")
    assert run(*call, "hellaswag")[0] == 0
    document = json.loads((directory / "evaluation.json").read_text())
    (directory / "evaluation.json").write_text(json.dumps(document | {"lm_eval": "0.4.0"}))
    assert run(*call, "hellaswag")[0] == 0  # nothing is scored
    scores = document["tasks"].pop("hellaswag")
    other = document | {"lm_eval": "0.4.0", "tasks": {"other": scores}}
    (directory / "evaluation.json").write_text(json.dumps(other))
    status, _, err = on_one_line(run)(*call, "hellaswag")
    assert status == 2
    assert "with other settings (version of lm-eval is 0.4.0, requested" in err


def test_a_sink_on_one_text_is_not_returned_for_another(made: Made, run: Run, tmp_path: Path) -> None:
    directory, file = made
    first, other = text_file(tmp_path / "first.jsonl"), text_file(tmp_path / "other.jsonl", seed=3)
    call = ("eval", directory, "--tasks", "hellaswag", "--data", file, "--limit", 4)
    assert run(*call, "--text", first)[0] == 0
    copy = shutil.copyfile(first, tmp_path / "copy.jsonl")
    status, _, err = run(*call, "--text", copy)
    assert (status, "hellaswag: 4 items (kept)" in err) == (0, True)
    for options, now in ((("--text", other), text_hash(other)), ((), None)):
        status, _, err = on_one_line(run)(*call, *options)
        assert status == 2
        assert f"with other settings (text of hellaswag is {text_hash(first)}, requested {now})" in err


@pytest.mark.parametrize(
    ("tasks", "options", "said"),
    [
        ("helaswag", (), "no task 'helaswag'; similar names: hellaswag"),
        ("", (), "an argument is empty"),
        (
            "arc_easy",
            ("--data", "items.jsonl"),
            "can only supply the items of hellaswag, which is not in --tasks arc_easy: add it, or remove --data",
        ),
        ("hellaswag", ("--data", "absent.jsonl"), "cannot read absent.jsonl: No such file"),
        ("hellaswag", ("--text", "absent.jsonl"), "no text at absent.jsonl"),
    ],
)
def test_impossible_requests_are_refused_and_nothing_is_written(
    tasks: str, options: tuple[object, ...], said: str, made: Made, run: Run, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    status, _, err = on_one_line(run)("eval", made[0], "--tasks", tasks, *options, "--out", out)
    assert status == 2
    assert said in err
    assert not out.exists()


def test_a_task_is_refused_if_every_item_has_an_answer_beyond_the_context(made: Made, run: Run, tmp_path: Path) -> None:
    items = sheep_items(3)
    for item in items:
        item["endings"][0] = "jumps " * 90
    file = hellaswag_file(tmp_path / "long.jsonl", items)
    status, _, err = on_one_line(run)("eval", made[0], "--tasks", "hellaswag", "--data", file)
    assert status == 2
    assert "every item has an answer that is longer than the context" in err
    assert "64 tokens" in err


def test_an_unreachable_hub_is_reported_with_a_remedy(made: Made, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets  # comes with lm-eval

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    monkeypatch.delenv("SINKLAB_DATA", raising=False)
    status, _, err = on_one_line(run)("eval", made[0], "--tasks", "hellaswag")
    assert status == 2
    assert "could not be loaded from the Hugging Face hub (ConnectionError: Couldn't reach the Hub)" in err
    assert "--data hellaswag_val.jsonl" in err


def test_hellaswag_is_found_in_the_folder_of_sinklab_data(
    made: Made, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, file = made
    (tmp_path / "data" / "eval").mkdir(parents=True)
    file.rename(tmp_path / "data" / "eval" / "hellaswag_val.jsonl")
    monkeypatch.setenv("SINKLAB_DATA", str(tmp_path / "data"))
    status, out, err = run("eval", directory, "--tasks", "hellaswag", "--limit", 2, "--json")
    assert status == 0, err
    assert json.loads(out)["tasks"]["hellaswag"]["data"] == "hellaswag_val.jsonl"


def test_an_absent_extra_is_named_with_the_command_that_installs_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    status, _, err = on_one_line(run)("eval", tmp_path, "--tasks", "hellaswag")
    assert status == 2
    assert f"a downstream task needs the package lm-eval, which is not installed: {install_command('eval')}" in err
