"""Scores of downstream tasks: log-likelihoods from the definition, accuracies by hand, runs as they were trained."""

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hellaswag_files import hellaswag_file, read_records, sheep_items
from loglikelihood_reference import hellaswag_answers, reference_model
from trained_run import trained_run

from sinklab.data.tokenizers import load_tokenizer
from sinklab.evaluating.evaluate_model import evaluate_model
from sinklab.evaluating.evaluation import ItemRecord, TaskRequest, TaskScores
from sinklab.measuring.options import Request
from sinklab.survey.measure import measure_model
from sinklab.train.run import load_run

pytest.importorskip("lm_eval", reason="needs lm-eval (extra eval)")
LONG = {"context": 64}


def scored(model: Path, request: TaskRequest, out: Path) -> tuple[TaskScores, list[ItemRecord]]:
    scores = evaluate_model(str(model), request, out=out).tasks["hellaswag"]
    assert scores.records is not None
    return scores, read_records(out / scores.records)


def close(found: Any, expected: tuple[float, bool]) -> bool:
    return math.isclose(found[0], expected[0], rel_tol=1e-4, abs_tol=1e-4) and found[1] == expected[1]


def test_every_item_of_a_real_model_has_the_log_likelihoods_of_the_definition(data_dir: Path, tmp_path: Path) -> None:
    folder, file = data_dir / "models" / "TinyStories-656K", data_dir / "eval" / "hellaswag_val.jsonl.gz"
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        items = [json.loads(line) for line in lines]
    _, records = scored(folder, TaskRequest(tasks=("hellaswag",), limit=25, data=file), tmp_path)
    assert len(records) == 25
    model, tokenizer = reference_model(folder)
    for record in records:
        expected = hellaswag_answers(model, tokenizer, items[record.item])
        assert all(map(close, record.responses, expected)), record.item


def test_accuracies_are_those_of_the_answers(data_dir: Path, tmp_path: Path) -> None:
    folder, file = data_dir / "models" / "TinyStories-656K", data_dir / "eval" / "hellaswag_val.jsonl.gz"
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        items = [json.loads(line) for line in lines]
    scores, records = scored(folder, TaskRequest(tasks=("hellaswag",), limit=25, seed=1, data=file), tmp_path)
    right: dict[str, list[bool]] = {"acc": [], "acc_norm": []}
    for record in records:
        item, answers = items[record.item], torch.tensor([answer[0] for answer in record.responses])  # type: ignore[index]
        lengths = torch.tensor([len(ending) for ending in item["endings"]])
        right["acc"].append(int(answers.argmax()) == item["label"])
        right["acc_norm"].append(int((answers / lengths).argmax()) == item["label"])
        assert record.target == item["label"]
        assert record.metrics == {name: float(found[-1]) for name, found in right.items()}
    for name, found in right.items():
        share = sum(found) / 25
        assert scores.metrics[name].value == pytest.approx(share)
        assert scores.metrics[name].stderr == pytest.approx(math.sqrt(share * (1 - share) / 24))


def own_answer(run: Path, context: str, continuation: str, cut_to: int | None = None) -> tuple[float, bool]:
    """Answer from the logits of our own model, with BOS if the run has it; a long context is cut on the left."""
    found = load_run(run)
    tokenizer = load_tokenizer(str(found.tokenizer_path))
    front = [tokenizer.bos_id] if found.recipe.data.bos else []
    whole, before = tokenizer.encode_batch([context + continuation, context])
    answer = list(whole[len(before) :])
    shown = list(before)
    if cut_to is not None and len(front) + len(shown) + len(answer) > cut_to + 1:
        shown = shown[len(shown) - (cut_to + 1 - len(front) - len(answer)) :]
    ids = [*front, *shown, *answer]
    with torch.no_grad():
        logits = found.model.head(found.model.hidden(torch.tensor([ids[:-1]])))[0].double()
    log_p = logits.log_softmax(-1)[-len(answer) :]
    chosen = torch.tensor(answer)
    return float(log_p.gather(-1, chosen[:, None]).sum()), bool((log_p.argmax(-1) == chosen).all())


@pytest.mark.parametrize(
    ("model", "bos"),
    [
        ({}, True),
        ({}, False),
        ({"attention": {"operation": {"kind": "sigmoid", "normalised": False}}}, True),
        ({"attention": {"bias": {"kind": "sink_token"}}}, True),
        ({"position": {"kind": "learnable"}}, False),
    ],
    ids=["bos", "no bos", "sigmoid", "sink token", "learned positions"],
)
def test_a_run_scores_items_with_or_without_bos_as_in_training(
    model: dict[str, Any], bos: bool, tmp_path: Path
) -> None:
    run, _ = trained_run(tmp_path, {"bos": bos}, {**model, **LONG})
    items = sheep_items(6)
    file = hellaswag_file(tmp_path / "items.jsonl", items)
    scores, records = scored(run, TaskRequest(tasks=("hellaswag",), data=file), run)
    assert (scores.items, scores.available, scores.left_out, scores.cut) == (6, 6, 0, 0)
    for item, record in zip(items, records, strict=True):
        expected = [own_answer(run, item["query"], f" {ending}") for ending in item["endings"]]
        assert all(map(close, record.responses, expected))


def test_a_context_that_is_too_long_loses_its_first_words_and_keeps_bos(tmp_path: Path) -> None:
    run, _ = trained_run(tmp_path, {"bos": True}, LONG)
    items = sheep_items(4, words=40)
    file = hellaswag_file(tmp_path / "items.jsonl", items)
    scores, records = scored(run, TaskRequest(tasks=("hellaswag",), data=file), run)
    assert scores.cut == 4
    for item, record in zip(items, records, strict=True):
        expected = [own_answer(run, item["query"], f" {ending}", cut_to=64) for ending in item["endings"]]
        assert all(map(close, record.responses, expected))


def test_items_with_an_answer_beyond_the_context_are_left_out_and_counted(tmp_path: Path) -> None:
    run, _ = trained_run(tmp_path, {"bos": True}, LONG)
    items = sheep_items(5)
    items[2]["endings"][1] = "jumps " * 90
    file = hellaswag_file(tmp_path / "items.jsonl", items)
    scores, records = scored(run, TaskRequest(tasks=("hellaswag",), data=file), run)
    assert (scores.items, scores.left_out) == (4, 1)
    assert [record.item for record in records] == [0, 1, 3, 4]


def test_items_are_drawn_by_the_seed(tmp_path: Path) -> None:
    run, _ = trained_run(tmp_path, {"bos": True}, LONG)
    file = hellaswag_file(tmp_path / "items.jsonl", sheep_items(30))
    drawn = {
        (seed, place): [
            one.item
            for one in scored(run, TaskRequest(tasks=("hellaswag",), limit=5, seed=seed, data=file), tmp_path / place)[
                1
            ]
        ]
        for seed, place in ((0, "a"), (0, "b"), (1, "c"))
    }
    assert drawn[0, "a"] == drawn[0, "b"] != drawn[1, "c"]
    assert drawn[0, "a"] == sorted(set(drawn[0, "a"]))


def test_the_sink_beside_the_scores_is_that_of_measure(data_dir: Path, tmp_path: Path) -> None:
    folder, text = data_dir / "models" / "TinyStories-656K", data_dir / "domains" / "tinystories.jsonl"
    file = hellaswag_file(tmp_path / "items.jsonl", sheep_items(4))
    scores, _ = scored(folder, TaskRequest(tasks=("hellaswag",), data=file, text=text), tmp_path / "out")
    measured = measure_model(str(folder), text, Request())
    assert scores.sink is not None
    assert scores.sink.sink_1 == pytest.approx(measured.sink_rate[0])
    assert (scores.sink.sequences, scores.sink.length, scores.sink.bos) == (100, 64, measured.bos)


def test_unless_a_text_is_given_the_sink_is_that_of_the_items(tmp_path: Path) -> None:
    run, _ = trained_run(tmp_path, {"bos": True}, LONG)
    items = sheep_items(8, words=60)
    file = hellaswag_file(tmp_path / "items.jsonl", items)
    scores, _ = scored(run, TaskRequest(tasks=("hellaswag",), data=file), run)
    rows = [{"text": f"{item['query']} {item['endings'][item['label']]}"} for item in items]
    text = tmp_path / "texts.jsonl"
    text.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    measured = measure_model(str(run), text, Request(length=64, fewer=True))
    assert scores.sink is not None
    assert scores.sink.text == "task"
    assert scores.sink.sequences == measured.sequences
    assert scores.sink.sink_1 == pytest.approx(measured.sink_rate[0])
