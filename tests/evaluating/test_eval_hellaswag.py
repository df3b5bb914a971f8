"""HellaSwag from a file: both formats, malformed lines with their numbers, and the committed results."""

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hellaswag_files import hellaswag_file, read_records, sheep_items
from loglikelihood_reference import hellaswag_answers, reference_model
from tiny_gguf import needed

from sinklab.errors import InputError
from sinklab.evaluating.evaluate_model import read_items
from sinklab.evaluating.evaluation import load_scores

RESULTS = Path(__file__).parents[2] / "results" / "models"
ORIGINAL = {
    "activity_label": "Removing ice from car",
    "ctx_a": "Then, the man writes [substeps] over the snow.",
    "ctx_b": "then",
    "endings": [" [title] the man adds  wax.", "a person [step] pushes.", "he runs.", "they go."],
    "label": "3",
}


def test_the_published_form_is_cleaned_as_lm_eval_does(tmp_path: Path) -> None:
    (item,) = read_items(hellaswag_file(tmp_path / "one.jsonl", [ORIGINAL]))
    assert item.query == "Removing ice from car: Then, the man writes over the snow. Then"
    assert item.endings[1:] == ["a person pushes.", "he runs.", "they go."]
    assert item.label == 3
    pytest.importorskip("lm_eval", reason="needs lm-eval (extra eval)")
    from datasets import Dataset  # comes with lm-eval
    from lm_eval.tasks.hellaswag.utils import process_docs

    theirs: Any = process_docs(Dataset.from_list([ORIGINAL]))[0]
    assert (item.query, item.endings, item.label) == (theirs["query"], theirs["choices"], theirs["gold"])


def test_compressed_and_plain_files_have_the_same_items(tmp_path: Path) -> None:
    plain = hellaswag_file(tmp_path / "items.jsonl", sheep_items(3))
    packed = tmp_path / "items.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_items(plain) == read_items(packed)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: "),
        ("[1]", "the row is [1], not an object"),
        ('{"query": "a", "endings": ["b", "c"]}', "label"),
        ('{"ctx_a": "a", "ctx_b": "b", "endings": ["b"], "label": 0}', "'activity_label' is missing"),
        ('{"query": "a", "endings": ["b", "c"], "label": 2}', "label 2, counted from 0, is not one of 2 endings"),
        ('{"query": "a", "endings": ["b", ""], "label": 0}', "or a text is empty"),
        ('{"query": "", "endings": ["b", "c"], "label": 0}', "or a text is empty"),
        ('{"activity_label": 1, "ctx_a": "a", "ctx_b": 3, "endings": ["b"], "label": 0}', "line 2: "),
    ],
)
def test_a_malformed_line_is_named(line: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text(f"{json.dumps(sheep_items(1)[0])}\n{line}\n")
    with pytest.raises(InputError) as refused:
        read_items(path)
    assert said in str(refused.value)
    assert "line 2" in str(refused.value)


def test_a_file_without_items_or_that_is_no_gzip_is_refused(tmp_path: Path) -> None:
    damaged = bytearray(gzip.compress(b"text"))
    damaged[10] = 255  # a block of a type that does not exist
    for name, content, said in (
        ("a.jsonl", b"\n", "has no items"),
        ("b.jsonl.gz", b"text", "cannot read"),
        ("c.jsonl.gz", damaged, "cannot read"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=said):
            read_items(tmp_path / name)


def items_of(data_dir: Path) -> list[dict[str, Any]]:
    with gzip.open(data_dir / "eval" / "hellaswag_val.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def agree_with_the_definition(name: str, every: int, model: Any, tokenizer: Any, items: list[dict[str, Any]]) -> None:
    """Compare every n-th committed record of a model with the definition."""
    records = read_records(RESULTS / name / "hellaswag" / "items_hellaswag.jsonl.gz")
    for record in records[::every]:
        expected = hellaswag_answers(model, tokenizer, items[record.item])
        for found, (log_p, greedy) in zip(record.responses, expected, strict=True):
            assert isinstance(found, list)
            assert math.isclose(found[0], log_p, rel_tol=1e-3), (record.item, found, log_p)
            assert found[1] == greedy


@pytest.mark.parametrize(("name", "count"), [("TinyStories-656K", 500), ("SmolLM2-135M-Instruct", 200)])
def test_committed_scores_are_those_of_their_items(name: str, count: int) -> None:
    folder = RESULTS / name / "hellaswag"
    scores = load_scores(folder / "evaluation.json").tasks["hellaswag"]
    records = read_records(folder / "items_hellaswag.jsonl.gz")
    assert scores.items == len(records) == count
    for metric, score in scores.metrics.items():
        share = sum(float(str(record.metrics[metric])) for record in records) / count
        assert score.value == pytest.approx(share)
        assert score.stderr == pytest.approx(math.sqrt(share * (1 - share) / (count - 1)))


def test_committed_items_of_tinystories_agree_with_the_definition(data_dir: Path) -> None:
    model, tokenizer = reference_model(data_dir / "models" / "TinyStories-656K", rebuilt=True)  # of before 2026-11-28
    agree_with_the_definition("TinyStories-656K", 5, model, tokenizer, items_of(data_dir))


@pytest.mark.real
def test_committed_items_of_a_real_model_agree_with_the_definition(data_dir: Path) -> None:
    needed()
    (file,) = (data_dir / "models" / "SmolLM2-135M-Instruct").glob("*.gguf")
    model, tokenizer = reference_model(file.parent, file.name)
    agree_with_the_definition("SmolLM2-135M-Instruct", 5, model, tokenizer, items_of(data_dir))
