"""Tokenizers: trained here, read from a folder, fetched by name."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest

from sinklab.data import tokenizers
from sinklab.data.corpora import cut, documents
from sinklab.data.tokenizers import load_tokenizer, train_bpe
from sinklab.errors import InputError


def stdlib_text() -> list[str]:
    return [text for _, text in cut((("", text) for text in documents("stdlib")), 200_000)]


def test_training_twice_gives_the_same_tokenizer(tmp_path: Path):
    texts = stdlib_text()
    for name in ("a", "b"):
        train_bpe(iter(texts), 600, tmp_path / name)
    first, second = ((tmp_path / name / "tokenizer.json").read_bytes() for name in ("a", "b"))
    assert first == second


def test_a_trained_tokenizer_has_eos_0_bos_1_and_its_size(tmp_path: Path):
    tokenizer = train_bpe(stdlib_text(), 600, tmp_path)
    assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.vocab_size) == (0, 1, 600)


def test_a_trained_tokenizer_encodes_and_decodes_any_text(tmp_path: Path):
    tokenizer = train_bpe(["ascii only"], 258, tmp_path)
    text = "Grüße, 世界 🙂\n\tdef f(): pass  <|endoftext|>"
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.backend.decode(ids) == text
    assert not {tokenizer.eos_id, tokenizer.bos_id} & set(ids)


def test_a_saved_tokenizer_is_the_same_when_loaded_by_sinklab_and_by_transformers(tmp_path: Path):
    from transformers import AutoTokenizer

    text = stdlib_text()[0]
    tokenizer = train_bpe(stdlib_text(), 600, tmp_path)
    again = load_tokenizer(str(tmp_path))
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path)
    assert (again.eos_id, again.bos_id) == (theirs.eos_token_id, theirs.bos_token_id) == (0, 1)
    assert tokenizer.encode_batch([text]) == again.encode_batch([text]) == [theirs(text)["input_ids"]]


def test_gpt_neox_uses_its_end_of_text_as_bos_and_agrees_with_transformers(data_dir: Path):
    from transformers import AutoTokenizer

    folder = data_dir / "tokenizers" / "gptneox"
    tokenizer = load_tokenizer(str(folder))
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    texts = list(documents(str(data_dir / "domains" / "github_code.jsonl")))[:3]
    assert tokenizer.vocab_size == 50277
    assert tokenizer.bos_id == tokenizer.eos_id == theirs.eos_token_id == 0
    assert tokenizer.encode_batch(texts) == [theirs(text, add_special_tokens=False)["input_ids"] for text in texts]


def test_a_llama_tokenizer_keeps_its_own_bos_but_does_not_add_it(data_dir: Path):
    tokenizer = load_tokenizer(str(data_dir / "models" / "TinyStories-656K"))
    (ids,) = tokenizer.encode_batch(["Once upon a time"])
    assert tokenizer.bos_id != tokenizer.eos_id
    assert tokenizer.bos_id not in ids


def test_a_tokenizer_without_an_end_of_text_is_refused(tmp_path: Path):
    train_bpe(["text"], 258, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<nowhere>"}), encoding="utf-8")
    with pytest.raises(InputError, match=r"eos_token in tokenizer_config\.json"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))


def test_a_config_that_is_no_object_or_cannot_be_read_is_refused(tmp_path: Path):
    train_bpe(["text"], 258, tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text("[]", encoding="utf-8")
    with pytest.raises(InputError, match=r"tokenizer_config\.json is not a readable JSON object"):
        load_tokenizer(str(tmp_path))
    config.unlink()
    config.symlink_to("/proc/self/mem")  # a file that even root cannot read
    with pytest.raises(InputError, match=r"tokenizer_config\.json is not a readable JSON object: .*Input/output"):
        load_tokenizer(str(tmp_path))


def test_an_unusable_tokenizer_is_refused_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(InputError, match="no tokenizer at"):
        load_tokenizer(str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match="no tokenizer at ~nosuchuser"):
        load_tokenizer("~nosuchuser/tokenizer")
    with pytest.raises(InputError, match="no usable tokenizer"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(InputError, match=r"not a readable tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match=r"Check the name and the connection.*train:SIZE"):
        load_tokenizer("nobody/no-such-model-anywhere")


def test_a_folder_of_vocabulary_and_merges_is_converted(tmp_path: Path):
    tokenizer = train_bpe(stdlib_text(), 400, tmp_path / "whole")
    old = tmp_path / "old"
    old.mkdir()
    model = json.loads((tmp_path / "whole" / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    (old / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (old / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", encoding="utf-8")
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>", "bos_token": "<|bos|>"}
    (old / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    converted = load_tokenizer(str(old))
    text = "def f(x): return x + 1\n"
    assert converted.encode_batch([text]) == tokenizer.encode_batch([text])
    assert (converted.eos_id, converted.bos_id) == (0, 1)
    shutil.rmtree(old)


def _long_text(seed: int) -> str:
    """Words, numbers, runs of spaces, line ends, other scripts and emoji in random order."""
    draw = random.Random(seed)
    odd = ["sink,", "3.14159", "  ", "\n\n", "\t", "été", "日本語", "😀", "x_1", "don't", " "]
    parts = ["the", "Attention's", "a", "I", *odd]
    return " ".join(draw.choice(parts) for _ in range(6000))


@pytest.mark.parametrize("name", ["TinyStories-656K", "train:300"])
def test_a_long_document_is_encoded_in_pieces_to_the_same_tokens(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    texts = [_long_text(0), "short", _long_text(1), "x" * 9000]
    trained = name.startswith("train:")
    made = train_bpe(texts, 300, tmp_path) if trained else load_tokenizer(str(data_dir / "models" / name))
    expected = [made.backend.encode(text, add_special_tokens=False).ids for text in texts]
    monkeypatch.setattr(tokenizers, "PIECE", 1000)
    monkeypatch.setattr(tokenizers, "AROUND", 100)
    ids, lengths = tokenizers.encoder(made.backend)(texts)
    assert [row.tolist() for row in np.split(ids, lengths.cumsum()[:-1])] == expected


def test_pieces_have_the_requested_size_or_are_whole() -> None:
    text = _long_text(0)
    parts = list(tokenizers.pieces(text, 1000))
    assert "".join(parts) == text
    assert max(map(len, parts)) <= 1000
    assert list(tokenizers.pieces(text, 1000, lambda left, right: False)) == [text]
    assert list(tokenizers.pieces("x" * 9000, 1000)) == ["x" * 9000]


def test_a_tokenizer_is_trained_on_the_pieces_of_a_long_document_as_on_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train_bpe([_long_text(2)], 400, tmp_path).backend.to_str()
    monkeypatch.setattr(tokenizers, "PIECE", 1000)
    assert train_bpe([_long_text(2)], 400, tmp_path).backend.to_str() == whole
