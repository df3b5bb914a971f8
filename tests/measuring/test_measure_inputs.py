"""The token matrix: which tokens of which documents it has, and the messages if there is too little text."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sinklab.data.corpora import default_text
from sinklab.errors import InputError
from sinklab.measuring.inputs import (
    DocumentEncoder,
    Encode,
    drawn_text,
    natural_text,
    random_tokens,
    repeated_tokens,
    token_rows,
)


def _letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def _jsonl(path: Path, *documents: str) -> Path:
    path.write_text("\n".join(json.dumps({"text": document}) for document in documents))
    return path


def natural_tokens(text: Path, encode: Encode, *, sequences: int, length: int, prefix: Sequence[int] = ()) -> Tensor:
    return token_rows(natural_text(text, DocumentEncoder(encode, tuple(prefix)), sequences=sequences, length=length))


def test_each_sequence_is_the_start_of_a_document_that_is_long_enough(tmp_path: Path) -> None:
    text = _jsonl(tmp_path / "a.jsonl", "abcdef", "no", "ghijk", "lmnop")
    tokens = natural_tokens(text, _letters, sequences=2, length=4)
    assert ["".join(map(chr, row)) for row in tokens.tolist()] == ["abcd", "ghij"]


def test_bos_counts_within_the_length(tmp_path: Path) -> None:
    text = _jsonl(tmp_path / "a.jsonl", "abc", "ab")
    assert natural_tokens(text, _letters, sequences=1, length=4, prefix=[7]).tolist() == [[7, *_letters("abc")]]


def test_plain_text_is_cut_into_consecutive_pieces(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefgh")
    tokens = natural_tokens(tmp_path / "a.txt", _letters, sequences=2, length=4, prefix=[7])
    assert tokens.tolist() == [[7, *_letters("abc")], [7, *_letters("def")]]


def test_too_little_text_says_how_much_is_usable_and_what_to_do(tmp_path: Path) -> None:
    text = _jsonl(tmp_path / "a.jsonl", "abcdef", "no", "ghijk")
    with pytest.raises(InputError, match=r"2 of its 3 documents have 4 tokens.*lower --sequences to 2"):
        natural_tokens(text, _letters, sequences=9, length=4)
    with pytest.raises(InputError, match=r"sinklab's text gives 0 usable sequences.*, or pass yours with --text"):
        natural_tokens(default_text(), _letters, sequences=2, length=1000)


def test_a_folder_of_documents_and_plain_text_does_not_count_pieces_as_documents(tmp_path: Path) -> None:
    _jsonl(tmp_path / "a.jsonl", "abcdef")
    (tmp_path / "b.txt").write_text("ghijklmnopqr")
    with pytest.raises(InputError, match=r"are needed: 4 pieces have 4 tokens of text; lower --sequences to 4"):
        natural_tokens(tmp_path, _letters, sequences=9, length=4)
    with pytest.raises(InputError, match=r"gives no sequence: it does not have 70 tokens of text"):
        drawn_text(tmp_path, DocumentEncoder(_letters), sequences=9, length=70, draw=0)


def test_draws_of_text_are_disjoint_and_from_all_pieces_of_every_document(tmp_path: Path) -> None:
    pieces = [f"{number:03}" for number in range(65)]
    text = _jsonl(tmp_path / "a.jsonl", "".join(pieces[:30]), "no", "".join(pieces[30:]) + "xx")

    def draw_of(draw: int) -> list[str]:
        rows = drawn_text(text, DocumentEncoder(_letters, (7,)), sequences=13, length=4, draw=draw)
        assert {row.prefix for row in rows} == {(7,)}
        return ["".join(map(chr, row.ids)) for row in rows]

    draws = [draw_of(draw) for draw in range(5)]
    assert [len(draw) for draw in draws] == [13] * 5
    assert sorted(piece for draw in draws for piece in draw) == pieces
    assert draw_of(2) == draws[2]
    assert draws[0] != pieces[:13]  # not the beginning of the text


def test_a_text_with_few_pieces_is_shared_out_over_five_draws(tmp_path: Path) -> None:
    text = _jsonl(tmp_path / "a.jsonl", "abcdefghijklmnopqrstuvwxyz", "no", "0123456789")  # 8 + 3 pieces
    draws = [drawn_text(text, DocumentEncoder(_letters), sequences=9, length=3, draw=draw) for draw in range(5)]
    assert [len(draw) for draw in draws] == [2] * 5
    assert len({"".join(map(chr, row.ids)) for draw in draws for row in draw}) == 10
    with pytest.raises(
        InputError, match=r"11 sequences of .*, enough for 5 draws of 2: use a longer text or at most 5"
    ):
        drawn_text(text, DocumentEncoder(_letters), sequences=9, length=3, draw=5)
    two = _jsonl(tmp_path / "two.jsonl", "abc", "def")
    pairs = [drawn_text(two, DocumentEncoder(_letters), sequences=9, length=3, draw=draw) for draw in (0, 1)]
    assert sorted(rows[0].ids[0] for rows in pairs) == [97, 100]
    with pytest.raises(InputError, match=r"gives no sequence: none of its 3 documents has 70 tokens of text"):
        drawn_text(text, DocumentEncoder(_letters), sequences=9, length=70, draw=0)


@pytest.mark.parametrize("content", [None, "", "\n\n"])
def test_missing_or_empty_text_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "a.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=r"a\.jsonl"):
        natural_tokens(path, _letters, sequences=1, length=4)


def test_random_tokens_are_seeded_and_cover_the_vocabulary() -> None:
    tokens = random_tokens(11, sequences=40, length=50, seed=3)
    assert tokens.shape == (40, 50)
    assert torch.equal(tokens.unique(), torch.arange(11))
    assert torch.equal(tokens, random_tokens(11, sequences=40, length=50, seed=3))
    assert not torch.equal(tokens, random_tokens(11, sequences=40, length=50, seed=4))


def test_a_repeated_sequence_is_one_token() -> None:
    tokens = repeated_tokens(1000, sequences=20, length=9, seed=0)
    assert tokens.shape == (20, 9)
    assert all(len(row.unique()) == 1 for row in tokens)
    assert len(tokens[:, 0].unique()) > 10


def test_sequences_alternate_between_the_files_of_a_folder(tmp_path: Path) -> None:
    _jsonl(tmp_path / "a.jsonl", "aaaa", "bbbb", "cccc", "dddd")
    _jsonl(tmp_path / "b.jsonl", "xx", "eeee")
    (tmp_path / "c.txt").write_text("ffffgggg")
    tokens = natural_tokens(tmp_path, _letters, sequences=7, length=4)
    assert [chr(row[0]) for row in tokens.tolist()] == ["a", "e", "f", "b", "g", "c", "d"]


def test_plain_text_without_blank_lines_or_with_many_gives_sequences_of_any_length(tmp_path: Path) -> None:
    words = [f"word{number} " for number in range(60_000)]
    for text in ("".join(words), "".join(f"{word}\n\n" if i % 300 == 0 else word for i, word in enumerate(words))):
        (tmp_path / "a.txt").write_text(text)
        tokens = natural_tokens(tmp_path / "a.txt", _letters, sequences=3, length=100_000)
        assert tokens.shape == (3, 100_000)
        assert all("".join(map(chr, row)) in text for row in tokens.tolist())


def test_documents_of_plain_text_are_not_joined(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc\n<|endoftext|>\ndef\n<|endoftext|>\nghijkl\n")
    tokens = natural_tokens(tmp_path / "a.txt", _letters, sequences=1, length=6)
    assert tokens.tolist() == [_letters("ghijkl")]


def test_only_the_needed_part_of_a_huge_document_is_tokenised(tmp_path: Path) -> None:
    text = _jsonl(tmp_path / "a.jsonl", "ab " * 1_000_000)
    read: list[int] = []

    def encode(part: str) -> list[int]:
        read.append(len(part))
        return _letters(part)

    tokens = natural_tokens(text, encode, sequences=1, length=64)
    assert tokens.tolist() == [_letters("ab " * 22)[:64]]
    assert sum(read) < 100_000
    few = natural_tokens(text, lambda part: _letters(part)[: len(part) // 50_000], sequences=1, length=50)
    assert few.shape == (1, 50)  # where a token has fifty thousand characters, more is read
