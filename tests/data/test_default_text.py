"""The default text of measurements."""

import json

from conftest import Run

from sinklab.data.corpora import default_text, documents


def test_the_default_text_has_128_short_documents_of_many_kinds() -> None:
    rows = [json.loads(line) for line in default_text().read_text("utf-8").splitlines()]
    assert len(rows) == len({row["text"] for row in rows}) == 128
    assert all(400 <= len(row["text"].encode()) <= 640 for row in rows)
    assert len({row["domain"] for row in rows}) >= 15
    assert [*documents(str(default_text()))] == [row["text"] for row in rows]


def test_the_python_documents_of_the_default_text_compile() -> None:
    rows = [json.loads(line) for line in default_text().read_text("utf-8").splitlines()]
    code = [row["text"] for row in rows if row["domain"] == "python"]
    assert len(code) == 12
    for text in code:
        compile(text, "default text", "exec")


def test_a_model_is_measured_on_the_default_text_if_none_is_given(run: Run) -> None:
    sets = ["data.source=synthetic:bigram_backcopy:length=65,documents=2000", "data.tokenizer=words", "train.steps=2"]
    sets += ["metric.sequences=8"]
    made = run("train", "tiny", *[arg for one in sets for arg in ("--set", one)], "--out", "run")
    assert made[0] == 0, made[2]
    status, out, err = run("measure", "run", "--sequences", 4, "--length", 8, "--json")
    assert status == 0, err
    assert any("the text is that of sinklab" in note for note in json.loads(out)["notes"])
