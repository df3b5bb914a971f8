"""Text sources: installed Python sources, .txt and .jsonl files, datasets."""

import importlib.util
import json
import re
from itertools import islice
from pathlib import Path

import pytest

from sinklab.data.corpora import Fingerprint, cut, documents, entries, identity, total_bytes
from sinklab.errors import InputError, install_command


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def first_bytes(source: str, limit: int) -> list[str]:
    return [text for _, text in cut((("", text) for text in documents(source)), limit)]


def test_the_standard_library_is_always_in_the_same_order():
    first, second = (first_bytes("stdlib", 300_000) for _ in range(2))
    assert first == second
    assert identity("stdlib") == identity("stdlib")


def test_the_standard_library_has_sources_and_the_language_reference():
    names = [entry.name for entry in entries(["stdlib"])]
    assert "stdlib/argparse.py" in names
    assert "stdlib/pydoc_data/topics.py/lambda" in names
    assert not any("site-packages" in name or "__pycache__" in name for name in names)


def test_installed_packages_are_a_corpus_and_can_be_joined_with_the_standard_library():
    names = {entry.name for entry in entries(["stdlib", "site-packages"])}
    assert {"stdlib/argparse.py", "site-packages/pytest/__init__.py"} <= names
    assert len(list(islice(documents("stdlib+site-packages"), 3))) == 3


def test_a_limit_is_exact_and_splits_no_character(tmp_path: Path):
    source = str(write_rows(tmp_path / "a.jsonl", [{"text": "abc"}, {"text": "äöü"}, {"text": "never"}]))
    assert first_bytes(source, 6) == ["abc", "ä"]
    assert first_bytes(source, 3) == ["abc"]
    assert sum(len(text.encode()) for text in first_bytes("stdlib", 12_345)) in range(12_342, 12_346)


def test_rows_are_documents_and_messages_are_joined(tmp_path: Path):
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    rows = [{"text": "one\ntwo"}, {"text": "  "}, {"messages": chat}]
    source = write_rows(tmp_path / "a.jsonl", rows)
    assert list(documents(str(source))) == ["one\ntwo", "user: Hi\nassistant: Hello"]


def test_a_folder_is_its_text_files_in_sorted_order(tmp_path: Path):
    (tmp_path / "b.txt").write_text("second", encoding="utf-8")
    write_rows(tmp_path / "a.jsonl", [{"text": "first"}])
    (tmp_path / "c.bin").write_bytes(b"\xff")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "d.txt").write_text("third", encoding="utf-8")
    assert list(documents(str(tmp_path))) == ["first", "second", "third"]


def test_a_book_is_split_at_blank_lines_without_loss(tmp_path: Path):
    book = "".join(f"Chapter {i}. {'word ' * 300}\n\n" for i in range(40))
    path = tmp_path / "book.txt"
    path.write_text(book, encoding="utf-8")
    pieces = list(documents(str(path)))
    assert len(pieces) > 2
    assert "".join(pieces) == book
    assert all(piece.endswith("\n\n") for piece in pieces)


def test_text_without_line_breaks_is_split(tmp_path: Path):
    path = tmp_path / "line.txt"
    path.write_text("x" * 300_000, encoding="utf-8")
    pieces = list(documents(str(path)))
    assert len(pieces) > 1
    assert sum(map(len, pieces)) == 300_000


def test_separator_lines_divide_a_text_file(tmp_path: Path):
    path = tmp_path / "stories.txt"
    path.write_text("one\n<|endoftext|>\ntwo\n<|endoftext|>\n", encoding="utf-8")
    assert list(documents(str(path))) == ["one\n", "two\n"]


@pytest.mark.parametrize("begins", ["", "\ufeff"])
def test_a_long_document_before_the_first_separator_is_not_split(tmp_path: Path, begins: str):
    path, long = tmp_path / "long.txt", "A line of a long document.\n\n" * 3000
    path.write_text(f"{begins}{long}<|endoftext|>\nsecond\n", encoding="utf-8")
    assert list(documents(str(path))) == [long, "second\n"]


def test_real_domains_are_read_whole(data_dir: Path):
    source = data_dir / "domains" / "tinystories.jsonl"
    assert len(list(documents(str(source)))) == 500
    assert total_bytes(str(source)) == source.stat().st_size


def _fingerprint(texts: list[str]) -> str:
    found = Fingerprint()
    for text in texts:
        found.add(text)
    return found.hexdigest()


def test_the_fingerprint_depends_on_the_text_and_its_boundaries():
    assert len({_fingerprint(texts) for texts in (["ab", "c"], ["a", "bc"], ["abc"], ["c", "ab"])}) == 4


def test_the_identity_of_a_file_changes_with_it(tmp_path: Path):
    source = write_rows(tmp_path / "a.jsonl", [{"text": "one"}])
    before = identity(str(source))
    assert identity(str(source)) == before
    write_rows(source, [{"text": "longer"}])
    assert identity(str(source)) != before


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b'{"text": "fine"}\n{"text": \n', "line 2: not valid JSON"),
        (b'{"txt": "?", "id": 1}\n\n', 'no row has "text", "content"'),
        (b'{"txt": "?", "id": 1}\n\n', "its first row has the keys txt, id"),
        (b'{"text": 5}\n', "its first row has the keys text"),
        (b"[5]\n", "its first row has no keys"),
        (b'{"messages": [{"role": "user"}]}\n', 'line 1: each message needs "role" and "content"'),
        (b'{"text": "\xff"}\n', "not UTF-8"),
        (b"", "contains no text: all its documents are empty"),
        (b'{"text": ""}\n', "contains no text"),
    ],
)
def test_a_malformed_file_is_refused_by_line(tmp_path: Path, content: bytes, told: str):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"bad\.jsonl") as caught:
        list(documents(str(path)))
    assert told in str(caught.value)


def test_a_lone_surrogate_in_json_becomes_a_question_mark(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\\ud800b"}\n', encoding="utf-8")
    assert list(documents(str(path))) == ["a?b"]


def test_missing_and_unreadable_sources_are_refused_with_the_accepted_forms(tmp_path: Path):
    with pytest.raises(InputError, match=r"no text at .*nowhere.*pass a .txt, .md, .jsonl"):
        next(documents(str(tmp_path / "nowhere")))
    with pytest.raises(InputError, match=r"contains no text file \(\.txt, "):
        next(documents(str(tmp_path)))
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match=r"a\.parquet as Parquet"):
        next(documents(str(tmp_path / "a.parquet")))
    with pytest.raises(InputError, match="no text at ~nosuchuser"):
        next(documents("~nosuchuser/text.txt"))
    with pytest.raises(InputError, match="hf:NAME:CONFIG:SPLIT"):
        next(documents("hf:"))


@pytest.mark.skipif(importlib.util.find_spec("datasets") is not None, reason="the data extra is installed")
def test_a_dataset_without_the_extra_names_the_installing_command():
    with pytest.raises(InputError, match=re.escape(install_command("data"))):
        next(documents("hf:some/dataset"))


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="needs the data extra")
def test_a_dataset_is_streamed_row_by_row(tmp_path: Path):
    write_rows(tmp_path / "train.jsonl", [{"text": f"row {i}"} for i in range(20)])
    assert list(documents(f"hf:{tmp_path}")) == [f"row {i}" for i in range(20)]
    with pytest.raises(InputError, match="split nosuch"):
        next(documents(f"hf:{tmp_path}::nosuch"))
