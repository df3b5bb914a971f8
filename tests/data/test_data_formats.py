"""Texts in common file formats, keys and encodings."""

import bz2
import csv
import gzip
import importlib.util
import io
import json
import lzma
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import polars
import pytest
from tiny_models import tiny_model

from sinklab.data.corpora import documents, total_bytes
from sinklab.data.loader import DataConfig, UniformMix
from sinklab.data.prepare import prepared
from sinklab.data.textfiles import ReadCounts, notes_on_folder, read_conversations
from sinklab.data.texts import streams
from sinklab.errors import InputError, install_command
from sinklab.survey.suites import domain_files

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

TEXTS = ['She said "no, 1; 2", twice.', "Zeilen\n\nund Umlaute: äöü", "x" * 200_000]  # csv's own limit is 131,072
TEXT_ROWS = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]
PACKED: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd.compress,
}


def json_lines(rows: Sequence[Any]) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def table(rows: Sequence[dict[str, Any]], separator: str = ",") -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0].keys(), delimiter=separator)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def parquet(rows: Sequence[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    polars.DataFrame(rows).write_parquet(file)
    return file.getvalue()


FORMS: dict[str, bytes] = {
    ".jsonl": json_lines(TEXT_ROWS),
    ".ndjson": json_lines(TEXT_ROWS),
    ".json": json.dumps(TEXT_ROWS, indent=1).encode(),
    "_lines.json": json_lines(TEXT_ROWS),  # like many .json files on the Hugging Face hub
    "_array.jsonl": json.dumps(TEXT_ROWS).encode(),
    "_strings.json": json.dumps(TEXTS).encode(),
    "_inside.json": json.dumps({"version": 1, "data": TEXT_ROWS}).encode(),
    ".csv": table(TEXT_ROWS),
    "_excel.csv": b"\xef\xbb\xbf" + table(TEXT_ROWS, ";"),
    ".tsv": table(TEXT_ROWS, "\t"),
    ".parquet": parquet(TEXT_ROWS),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("suffix", PACKED)
def test_the_rows_of_every_format_are_the_same_documents(tmp_path: Path, form: str, suffix: str) -> None:
    path = tmp_path / f"text{form}{suffix}"
    path.write_bytes(PACKED[suffix](FORMS[form]))
    assert list(documents(str(path))) == TEXTS


@pytest.mark.parametrize("kind", [".txt", ".md"])
@pytest.mark.parametrize("suffix", PACKED)
def test_plain_text_is_read_compressed_or_not(tmp_path: Path, kind: str, suffix: str) -> None:
    path = tmp_path / f"text{kind}{suffix}"
    path.write_bytes(PACKED[suffix]("# Über\n\none\n<|endoftext|>\ntwo\n".encode()))
    assert list(documents(str(path))) == ["# Über\n\none\n", "two\n"]
    assert total_bytes(str(path)) == (None if suffix else path.stat().st_size)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_file_of_several_compressed_frames_is_read_to_its_end(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"text.jsonl{suffix}"
    path.write_bytes(b"".join(PACKED[suffix](json_lines([row])) for row in TEXT_ROWS))
    assert list(documents(str(path))) == TEXTS


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_a_damaged_or_truncated_compressed_file_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"text.jsonl{suffix}"
    for content in (b"not compressed", PACKED[suffix](FORMS[".jsonl"])[:-9]):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"cannot read .*text\.jsonl"):
            list(documents(str(path)))


USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"content": "a page"}, "a page"),
        ({"text": None, "content": "a page"}, "a page"),
        ({"prompt": "1 + 1 =", "completion": " 2"}, "1 + 1 = 2"),
        ({"prompt": [USER], "completion": [ANSWER]}, "user: Hi\nassistant: Hello"),
        ({"messages": [USER, ANSWER]}, "user: Hi\nassistant: Hello"),
        ({"messages": [USER, CALL]}, "user: Hi\nassistant: "),
        ({"messages": [CALL]}, "assistant: "),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}]},
            "user: Hi",
        ),
        (
            {
                "conversations": [
                    {"from": "system", "value": "Be kind."},
                    {"from": "human", "value": "Hi"},
                    {"from": "gpt", "value": "Hello"},
                    {"from": "Human", "value": "Bye"},
                    {"from": "bing", "value": "So long"},
                ]
            },
            "system: Be kind.\nuser: Hi\nassistant: Hello\nuser: Bye\nassistant: So long",
        ),
        ({"conversations": [USER, ANSWER]}, "user: Hi\nassistant: Hello"),
    ],
)
def test_the_text_of_a_row_is_found_under_the_keys_in_use(tmp_path: Path, row: dict[str, Any], text: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json_lines([row]))
    assert list(documents(str(path))) == [text]


def test_a_message_in_parquet_has_null_where_it_lacks_a_field(tmp_path: Path) -> None:
    path = tmp_path / "chats.parquet"
    path.write_bytes(parquet([{"messages": [USER, CALL]}, {"messages": [USER, ANSWER]}]))
    found = [messages for messages, _ in read_conversations(path)]
    assert [[one["content"] for one in messages] for messages in found] == [["Hi", None], ["Hi", "Hello"]]
    assert found[1][1]["tool_calls"] is None  # `render_chat` leaves it out


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"from": "narrator", "value": "It rains."}, "line 2: a message is from 'narrator'; known are human"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "line 2: a part of a message is of type 'image_url'"),
        ({"role": "user", "content": 5}, "line 2: each message needs"),
        ({"content": "Hi"}, "line 2: each message needs"),
    ],
)
def test_a_malformed_message_is_refused_with_its_line(tmp_path: Path, message: dict[str, Any], says: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json_lines([{"messages": [USER]}, {"messages": [message]}]))
    with pytest.raises(InputError, match=re.escape(says)):
        list(documents(str(path)))


EMPTY_ROWS = [
    {"text": None},
    {"text": "one"},
    {"text": " "},
    {"messages": [{"role": "assistant", "content": None}]},
    {"id": 4},
    {"text": "two"},
]


def test_rows_without_text_are_skipped_and_counted(tmp_path: Path) -> None:
    path, counts = tmp_path / "rows.jsonl", ReadCounts()
    path.write_bytes(json_lines(EMPTY_ROWS))
    assert list(documents(str(path), counts=counts)) == ["one", "two"]
    assert counts.notes() == ["4 of the 6 rows that were read have no text and were skipped"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.csv", b"\n", "contains no text"),
        ("a.csv", b"title,year\nA,1\n", "its first row has the keys title, year"),
        ("a.csv", b"id,text\n1,one, two\n", "line 2: a row of 3 fields under a header of 2: put a text that"),
        ("a.csv", b"id,text\n1\n", "line 2: a row of 1 fields under a header of 2"),
        ("a.csv", b'id,text\n1,"open\n2,b\n', "not valid CSV"),
        ("a.json", b'{"a": {"text": "one"}}', "its first row has the keys a"),
        ("a.json", b'[{"text": "one"},]', "not valid JSON"),
        ("a.parquet", b"PAR1", "as Parquet"),
        ("b.parquet", parquet([{"title": "A", "year": 1}]), "its first row has the keys title, year"),
    ],
)
def test_a_file_without_a_usable_row_is_refused_by_name(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=re.escape(says)) as refused:
        list(documents(str(tmp_path / name)))
    assert str(tmp_path / name) in str(refused.value)


def test_utf_16_without_bom_is_refused_with_the_command_that_converts_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("It was a dark night. ".encode("utf-16-le"))
    with pytest.raises(InputError, match=r"contains NUL characters: .* \(iconv -f UTF-16LE -t UTF-8\)"):
        list(documents(str(tmp_path / "a.txt")))


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_a_byte_order_mark_gives_the_encoding(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(FORMS[".jsonl"].decode().encode(encoding))
    assert list(documents(str(tmp_path / "a.jsonl"))) == TEXTS


def test_a_text_with_a_single_nul_character_is_refused_as_damaged_or_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a log that was damaged\0 in one place")
    with pytest.raises(InputError, match="it is damaged, not text, or UTF-16"):
        list(documents(str(tmp_path / "a.txt")))


def test_a_folder_is_read_without_readme_and_metadata_files_which_a_note_names(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.jsonl.gz", "b.csv", "README.md", "dataset_info.json", "logo.png", ".git/config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(PACKED[".gz"](FORMS[".jsonl"]) if name.endswith("gz") else FORMS[".jsonl"])
    (tmp_path / "b.csv").write_bytes(FORMS[".csv"])
    assert list(documents(str(tmp_path))) == TEXTS * 2
    assert notes_on_folder(tmp_path) == [f"not read in {tmp_path}: README.md, a.jsonl.gz, dataset_info.json, logo.png"]
    assert list(domain_files(tmp_path)) == ["a", "b"]
    for name in ("a.jsonl", "a.jsonl.gz", "b.csv"):
        (tmp_path / name).unlink()
    (tmp_path / "README.md").write_text("# Notes\n")
    assert list(documents(str(tmp_path))) == ["# Notes\n", *TEXTS]


def test_domains_of_a_mix_are_found_under_every_suffix(tmp_path: Path) -> None:
    for name in ("arxiv.parquet", "books-00.csv", "web.jsonl.zst"):
        kind, _, packed = name.partition(".")[2].partition(".")
        (tmp_path / name).write_bytes(PACKED[f".{packed}" if packed else ""](FORMS[f".{kind}"]))
    found = streams(str(tmp_path), UniformMix())
    assert {one.name: list(one.documents()) for one in found} == dict.fromkeys(
        ("arxiv.parquet", "books-00.csv", "web.jsonl.zst"), TEXTS
    )


def test_data_json_has_the_number_of_skipped_rows_and_the_unread_files(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    rows = [{"text": None}, *({"text": f"document {number} of twenty"} for number in range(20))]
    (folder / "a.jsonl").write_bytes(json_lines(rows))
    config = DataConfig(source=str(folder), tokenizer="train:300")
    assert prepared(config, tmp_path / "cache").manifest.notes is not None
    (folder / "README").write_text("about")
    (folder / "a.jsonl").write_bytes(json_lines([*rows, {"text": "another"}]))
    assert prepared(config, tmp_path / "cache").manifest.notes == [
        "1 of the 22 rows that were read has no text and was skipped",
        f"not read in {folder}: README",
    ]
    (folder / "README").unlink()
    (folder / "a.jsonl").write_bytes(json_lines(rows[1:]))
    assert "notes" not in prepared(config, tmp_path / "cache").manifest.model_dump(mode="json")


def test_a_measurement_says_how_many_rows_were_skipped(run: Any, tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.jsonl").write_bytes(json_lines([{"text": None}, *({"text": "a b c " * 9},) * 3]))
    (tmp_path / "texts" / "plan.docx").write_bytes(b"PK")
    status, out, err = run("measure", model, "--text", "texts", "--sequences", 2, "--length", 8, "--json")
    assert status == 0, err
    notes = json.loads(out)["notes"]
    assert "1 of the 3 rows that were read has no text and was skipped" in notes
    assert "not read in texts: plan.docx" in notes


@pytest.mark.skipif(importlib.util.find_spec("datasets") is not None, reason="the data extra is installed")
def test_an_unknown_format_is_refused_with_the_extra_that_may_read_it(tmp_path: Path) -> None:
    (tmp_path / "a.arrow").write_bytes(b"ARROW1")
    for source in (tmp_path, tmp_path / "a.arrow"):
        with pytest.raises(InputError, match=re.escape(install_command("data"))):
            list(documents(str(source)))


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="needs the data extra")
def test_a_dataset_that_was_saved_to_disk_is_read(tmp_path: Path) -> None:
    """`save_to_disk` writes the rows as a stream in the Arrow format, beside two .json files."""
    polars.DataFrame(TEXT_ROWS).write_ipc_stream(tmp_path / "data-00000-of-00001.arrow")
    for name in ("state.json", "dataset_info.json"):
        (tmp_path / name).write_text("{}")
    assert list(documents(str(tmp_path))) == TEXTS
    assert notes_on_folder(tmp_path) == [f"not read in {tmp_path}: dataset_info.json, state.json"]


ALPACA = [{"instruction": "Add.", "input": "", "output": text} for text in TEXTS]
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.jsonl", json_lines(ALPACA)), ("a.csv", table(ALPACA)), ("a.parquet", parquet(ALPACA))],
)
def test_a_named_column_is_the_text_and_without_it_the_columns_are_listed(
    tmp_path: Path, name: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(content)
    assert list(documents(str(tmp_path / name), column="output")) == TEXTS
    for column, needed in ((None, '"text"'), ("answer", "'answer'")):
        says = rf"no row has {needed}.* the keys instruction, input, output: name the one to read with --column NAME"
        with pytest.raises(InputError, match=says):
            list(documents(str(tmp_path / name), column=column))


def test_a_named_column_may_contain_messages_and_is_refused_for_plain_text(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(parquet([{"text": "x", "dialog": CHAT}]))
    assert list(documents(str(tmp_path / "a.parquet"), column="dialog")) == ["user: Hi\nassistant: Hello"]
    (tmp_path / "a.txt").write_text("one\n")
    with pytest.raises(InputError, match=r"a.txt is plain text without columns"):
        list(documents(str(tmp_path / "a.txt"), column="dialog"))


def test_the_refusal_of_a_parquet_file_lists_all_its_columns(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(parquet([{"prompt": "a", "response": "b"}]))
    with pytest.raises(InputError, match="the keys prompt, response"):
        list(documents(str(tmp_path / "a.parquet")))


@pytest.mark.parametrize("text", ["", None, " \n"])
def test_messages_are_read_if_the_text_beside_them_is_empty(tmp_path: Path, text: str | None) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines([{"text": text, "messages": CHAT}]))
    assert list(documents(str(tmp_path / "a.jsonl"))) == ["user: Hi\nassistant: Hello"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet"])
def test_a_file_of_one_message_a_row_is_one_conversation(tmp_path: Path, name: str) -> None:
    forms = {"a.jsonl": json_lines(CHAT), "a.json": json.dumps(CHAT).encode(), "a.csv": table(CHAT)}
    (tmp_path / name).write_bytes(forms.get(name, parquet(CHAT)))
    assert list(documents(str(tmp_path / name))) == ["user: Hi\nassistant: Hello"]
    assert [messages for messages, _ in read_conversations(tmp_path / name)] == [CHAT]
    assert list(documents(str(tmp_path / name), column="content")) == ["Hi", "Hello"]


@pytest.mark.parametrize("form", [json_lines([CHAT, CHAT[:1]]), json.dumps([CHAT, CHAT[:1]]).encode()])
def test_rows_that_are_lists_of_messages_are_conversations(tmp_path: Path, form: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(form)
    assert list(documents(str(tmp_path / "a.jsonl"))) == ["user: Hi\nassistant: Hello", "user: Hi"]


@pytest.mark.parametrize("other", [{"text": "one"}, {"role": "engineer", "content": "one"}, {**CHAT[0], "id": 1}])
def test_rows_that_are_not_all_messages_stay_documents(tmp_path: Path, other: dict[str, Any]) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines([CHAT[0], other]))
    assert list(documents(str(tmp_path / "a.jsonl"))) == ["Hi", other.get("text") or other["content"]]
