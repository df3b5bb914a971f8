"""The token ids of a conversation are those of `apply_chat_template(tokenize=True)`, and nothing is put before them."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from chat_templates import (
    SENTENCES,
    TEMPLATES,
    WITHOUT_SYSTEM,
    chats_of,
    conversations,
    llama,
    template_tokenizer,
    trained_backend,
)
from tokenizers import Tokenizer, normalizers
from transformers import PreTrainedTokenizerFast

from sinklab.assessing.part import AssessText
from sinklab.errors import InputError
from sinklab.measuring.options import Request, Study
from sinklab.opening import Model, open_model
from sinklab.survey.measure import measure_model, read_tokens

LENGTH = 24
backend = cache(trained_backend)


def fed(model: Model, text: Path, **asked: Any) -> list[list[int]]:
    request = Request(sequences=3, length=LENGTH, **asked)
    return read_tokens(model, text, request).tokens_NT.tolist()


@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_ids_of_a_conversation_are_those_of_apply_chat_template(tmp_path: Path, name: str, kind: str) -> None:
    bos, template = TEMPLATES[name]
    talks = conversations(system=name not in WITHOUT_SYSTEM)
    folder = llama(tmp_path / "model", template_tokenizer(backend(kind), bos, template, prepends=True))
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    whole = [theirs.apply_chat_template(talk, tokenize=True, return_dict=False) for talk in talks]
    model, text = open_model(str(folder)), chats_of(tmp_path / "chats.jsonl", talks)
    assert fed(model, text) == [ids[:LENGTH] for ids in whole]
    written = bos is not None and whole[0][0] == theirs.bos_token_id
    assert fed(model, text, no_bos=True) == [ids[written : LENGTH + written] for ids in whole]
    if bos is not None:
        first = [] if written else [theirs.bos_token_id]
        assert fed(model, text, bos=True) == [[*first, *ids][:LENGTH] for ids in whole]


@pytest.mark.parametrize("name", ["llama-3", "qwen-2"])
def test_every_sequence_cut_from_a_conversation_begins_with_the_bos_of_its_template(tmp_path: Path, name: str) -> None:
    bos, template = TEMPLATES[name]
    model = open_model(str(llama(tmp_path / "model", template_tokenizer(backend("byte-level"), bos, template))))
    text, talks = tmp_path / "chats.jsonl", conversations()
    ids = model.tokenizer.apply_chat_template(talks[0], tokenize=True, return_dict=False)
    own = [] if bos is None else [ids[0]]
    body, rest = LENGTH - len(own), ids[len(own) :]
    pieces = [[*own, *rest[at : at + body]] for at in range(0, len(rest) - body + 1, body)]
    assert len(pieces) > 2
    chats_of(text, talks[:1])
    drawn = [row for seed in range(len(pieces)) for row in fed(model, text, drawn_text=True, seed=seed)]
    assert sorted(drawn) == sorted(pieces)


def test_spaces_after_special_tokens_are_those_of_a_tokenizer_json_of_llama_2(tmp_path: Path) -> None:
    legacy = Tokenizer.from_str(backend("metaspace").to_str())  # llama.cpp 7094: a space after every special token
    legacy.pre_tokenizer = None
    legacy.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bos, template = TEMPLATES["llama-2"]
    folder = llama(tmp_path / "model", template_tokenizer(legacy, bos, template))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": "LlamaTokenizer", "legacy": True}))
    model, talks = open_model(str(folder)), conversations()
    render = model.conversations().render
    expected = [legacy.encode(render(talk, ""), add_special_tokens=False) for talk in talks]
    assert all(one.tokens[0] == "<s>" and one.tokens[1].startswith("▁") for one in expected)
    assert fed(model, chats_of(tmp_path / "chats.jsonl", talks)) == [one.ids[:LENGTH] for one in expected]


def test_rendered_conversations_saved_as_text_have_the_ids_of_the_conversations(tmp_path: Path) -> None:
    bos, template = TEMPLATES["llama-3"]  # llama-cpp-python 1501, vllm 27517: two BOS
    folder = llama(tmp_path / "model", template_tokenizer(backend("byte-level"), bos, template, prepends=True))
    model, talks, text = open_model(str(folder)), conversations(), tmp_path / "rendered.jsonl"
    saved = [model.tokenizer.apply_chat_template(talk, tokenize=False) for talk in talks]
    text.write_text("".join(json.dumps({"text": one}) + "\n" for one in saved), encoding="utf-8")
    assert fed(model, text) == fed(model, chats_of(tmp_path / "chats.jsonl", talks))
    (note,) = read_tokens(model, text, Request(sequences=3, length=LENGTH)).notes
    assert note.startswith("3 of 3 sequences begin with <|begin_of_text|> in the text itself")


def test_conversations_to_assess_are_joined_in_order_and_cut_into_rows_that_begin_with_bos(tmp_path: Path) -> None:
    bos, template = TEMPLATES["llama-3"]
    model = open_model(str(llama(tmp_path / "model", template_tokenizer(backend("metaspace"), bos, template))))
    talks = conversations()
    whole = [model.tokenizer.apply_chat_template(talk, tokenize=True, return_dict=False) for talk in talks]
    stream = [*whole[0][1:], *whole[1], *whole[2]]
    tokens = AssessText(model, chats_of(tmp_path / "chats.jsonl", talks)).sequences(99, LENGTH).tolist()
    body = LENGTH - 1
    assert len(tokens) == len(stream) // body
    assert [row[1:] for row in tokens] == [stream[at : at + body] for at in range(0, len(tokens) * body, body)]
    assert {row[0] for row in tokens} == {whole[0][0]}


def test_sequences_of_which_some_begin_with_bos_are_counted_in_a_note(tmp_path: Path) -> None:
    tokenizer = template_tokenizer(backend("byte-level"), "<s>", TEMPLATES["chatml"][1], prepends=True)
    folder, text = llama(tmp_path / "model", tokenizer), chats_of(tmp_path / "mixed.jsonl", conversations()[:1])
    text.write_text(text.read_text() + json.dumps({"text": " ".join(SENTENCES)}) + "\n", encoding="utf-8")
    measured = measure_model(str(folder), text, Request(sequences=2, length=LENGTH))
    assert not measured.bos
    assert "1 of 2 sequences begin with BOS, the others do not" in measured.notes
    with pytest.raises(InputError, match="so there is no BOS to remove"):
        measure_model(str(folder), text, Request(sequences=2, length=LENGTH, study=Study(ablate=("no_bos",))))
