"""Texts, conversations and tokenizer files in their usual forms give the token ids of the model's own library.

The models are TinyStories-656K with one file changed.
"""

import html
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from sinklab.measuring.measurement import Measurement
from sinklab.measuring.options import Request
from sinklab.models.huggingface.loading import Loading
from sinklab.opening import open_model
from sinklab.survey.api import measure
from sinklab.survey.measure import measure_loaded, measure_model, read_tokens

BODY = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
ASKED = Request(sequences=4)


@pytest.fixture(scope="module")
def base(data_dir: Path) -> Path:
    return data_dir / "models" / "TinyStories-656K"


@pytest.fixture(scope="module")
def docs(data_dir: Path) -> list[str]:
    lines = (data_dir / "domains" / "c4_web.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"].encode("ascii", "ignore").decode() for line in lines]
    return [text for text in texts if len(text) > 600][:8]


def copied(base: Path, folder: Path, **tokenizer_config: Any) -> Path:
    shutil.copytree(base, folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | tokenizer_config))
    return folder


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def ids_of(model: Path, text: Path, request: Request = ASKED) -> list[list[int]]:
    return read_tokens(open_model(str(model)), text, request).tokens_NT.tolist()


def test_a_row_that_begins_with_the_bos_string_has_one_bos_and_a_note(
    base: Path, docs: list[str], tmp_path: Path
) -> None:
    text = written(tmp_path / "rendered.jsonl", [{"text": f"<|start_story|>{doc}"} for doc in docs])
    theirs = Tokenizer.from_file(str(base / "tokenizer.json"))
    rows = ids_of(base, text)
    assert rows == [theirs.encode(f"<|start_story|>{doc}", add_special_tokens=False).ids[:64] for doc in docs[:4]]
    assert all(row.count(1) == 1 and row[0] == 1 for row in rows)
    measured = measure_model(str(base), text, ASKED)
    assert measured.bos
    assert any("4 of 4 sequences begin with <|start_story|> in the text itself" in note for note in measured.notes)
    assert all(row.count(1) == 0 for row in ids_of(base, text, ASKED.model_copy(update={"no_bos": True})))


@pytest.mark.parametrize("bos", ["", "{{ bos_token }}"])
def test_a_chat_has_the_ids_of_its_template_with_and_without_bos(
    base: Path, docs: list[str], tmp_path: Path, bos: str
) -> None:
    model = copied(base, tmp_path / "model", chat_template=bos + BODY)
    talks = [[{"role": "user", "content": doc[:300]}, {"role": "assistant", "content": doc[300:900]}] for doc in docs]
    text = written(tmp_path / "chat.jsonl", [{"messages": talk} for talk in talks])
    theirs: Any = PreTrainedTokenizerFast.from_pretrained(model)
    expected = [theirs.apply_chat_template(talk, tokenize=True, return_dict=False)[:64] for talk in talks[:4]]
    assert ids_of(model, text) == expected
    assert [row[0] == 1 for row in expected] == 4 * [bool(bos)]
    assert measure_model(str(model), text, ASKED).bos is bool(bos)


def test_a_model_gives_one_loss_with_and_without_its_tokenizer_config(
    base: Path, data_dir: Path, tmp_path: Path
) -> None:
    alone, text = copied(base, tmp_path / "model"), data_dir / "domains" / "c4_web.jsonl"
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        (alone / name).unlink()
    both, one = measure_model(str(base), text, ASKED), measure_model(str(alone), text, ASKED)
    assert both.loss == one.loss
    assert ids_of(base, text) == ids_of(alone, text)
    assert any("the tokenizer is that of tokenizer.json" in note for note in both.notes)
    assert not any("tokenizer.json" in note for note in one.notes)
    rebuilt = measure_loaded(open_model(str(base), Loading(tokenizer="transformers")), text, ASKED)
    assert rebuilt.loss != both.loss
    assert not any("tokenizer.json" in note for note in rebuilt.notes)


def test_the_result_has_the_first_tokens_with_their_texts(base: Path, tmp_path: Path) -> None:
    text = written(tmp_path / "a.jsonl", [{"text": "Once upon a time, there was a little girl.\n" * 9}] * 4)
    measured = measure_model(str(base), text, Request(sequences=2, length=32))
    assert measured.fed is not None
    assert measured.fed.ids == ids_of(base, text, Request(sequences=2, length=32))[0][:8]
    assert measured.fed.line() == "fed: <|start_story|> | ▁ | On | ce | upon a tim | e, | there was a | little girl .."
    measured.save(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "measurement.json").read_text())["fed"]["tokens"][2] == "On"
    assert Measurement.load(tmp_path / "out").fed == measured.fed
    assert measured.fed.line() in html.unescape(measured._repr_html_())
    in_memory = measure(AutoModelForCausalLM.from_pretrained(base), [[1, 5, 6, 7], [1, 2, 3, 4]])
    assert in_memory.fed is not None
    assert in_memory.fed.line() == "fed: 1 | 5 | 6 | 7 .."
