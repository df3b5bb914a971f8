"""Bits per byte: by hand, at cut characters, with and without BOS, across tokenizers, and where they are undefined."""

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from chat_templates import template_tokenizer, trained_backend
from rich.console import Console
from tiny_models import WORDS, chat_file, text_file, tiny_model
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from trained_run import trained_run
from transformers.convert_slow_tokenizer import bytes_to_unicode

import sinklab
from sinklab.commands.results import print_measurement
from sinklab.measuring.inputs import UNKNOWN, spelling
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.options import Options, Request
from sinklab.report.page import write_report
from sinklab.report.result_tables import difference_sentence
from sinklab.survey.measure import measure_model
from sinklab.survey.suites import compare_models, compared_rows

SMALL = Request(sequences=4, length=16)
MANY_BYTES = "Ünïcödé 日本語 😀👩‍👧 naïve ﬁn. "


def jsonl(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def bits_by_hand(folder: Path, texts: list[str], *, bos: bool) -> float:
    """-log2 p of every predicted token over the bytes that it stands for; token by token, from its own string."""
    model = hf.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer: Any = hf.AutoTokenizer.from_pretrained(folder)
    alphabet = {v: k for k, v in bytes_to_unicode().items()}
    bits, size = 0.0, 0
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][: SMALL.length - bos]
        row = torch.tensor([[tokenizer.bos_token_id] * bos + ids])
        with torch.no_grad():
            nats = -model(row).logits[0, :-1].log_softmax(-1).gather(-1, row[0, 1:, None])
        bits += float(nats.double().sum()) / math.log(2)
        predicted = row[0, 1:].tolist()
        size += sum(len(bytes(alphabet[c] for c in token)) for token in tokenizer.convert_ids_to_tokens(predicted))
    return bits / size


@pytest.mark.parametrize("bos", [False, True])
def test_bits_per_byte_are_the_negative_log2_likelihood_over_bytes_of_predicted_tokens(
    tmp_path: Path, bos: bool
) -> None:
    folder = tiny_model(tmp_path / "model", bos=bos)
    texts = [f"{number} {MANY_BYTES}" * 3 for number in range(4)]  # sequences end in the middle of a character
    measured = measure_model(str(folder), jsonl(tmp_path / "a.jsonl", *texts), SMALL)
    assert measured.bos == bos
    assert measured.bits_per_byte == pytest.approx(bits_by_hand(folder, texts, bos=bos), rel=1e-5)
    if bos:
        bare = measure_model(str(folder), tmp_path / "a.jsonl", Request(sequences=4, length=16, no_bos=True))
        assert bare.bits_per_byte == pytest.approx(bits_by_hand(folder, texts, bos=False), rel=1e-5)


def test_the_bytes_of_all_tokens_are_those_of_the_text_wherever_it_is_cut(tmp_path: Path, data_dir: Path) -> None:
    plain: Any = hf.AutoTokenizer.from_pretrained(tiny_model(tmp_path / "model"))
    pieces: Any = hf.AutoTokenizer.from_pretrained(data_dir / "models" / "TinyStories-656K")  # writes a space in front
    for tokenizer, text in ((plain, MANY_BYTES * 2), (plain, " a  b\n"), (pieces, "One day, Lily"), (pieces, " a\nb ")):
        found = spelled(tokenizer)(text)
        assert list(found.ids) == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert sum(found.sizes) == len(text.encode())
        assert min(found.sizes) >= 0
        assert [*found[:3].sizes, *found[3:].sizes] == list(found.sizes)


def test_spaces_that_a_tokenizer_adds_after_special_tokens_are_not_counted() -> None:
    tokenizer = template_tokenizer(trained_backend("metaspace"), "<s>", "")
    text = "<s>The cat </s>sat on<|end|> the mat."
    found = spelled(tokenizer)(text)
    tokens = tokenizer.convert_ids_to_tokens(list(found.ids))
    assert [token for token in tokens if token in ("<s>", "</s>", "<|end|>")] == ["<s>", "</s>", "<|end|>"]
    assert all(tokens[at].startswith("▁") for at in (1, tokens.index("</s>") + 1))
    assert min(found.sizes) >= 0
    assert sum(found.sizes) == len(text)


def test_sizes_are_unknown_from_the_first_character_that_a_tokenizer_omits(data_dir: Path) -> None:
    pieces: Any = hf.AutoTokenizer.from_pretrained(data_dir / "models" / "TinyStories-656K")  # has no asterisk
    sizes = list(spelled(pieces)("Lily 3*i and more").sizes)
    first = sizes.index(UNKNOWN)
    assert sum(sizes[:first]) == len("Lily 3")
    assert set(sizes[first:]) == {UNKNOWN}


def spelled(tokenizer: hf.PreTrainedTokenizerFast):
    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[return-value]

    return spelling(encode, tokenizer.convert_ids_to_tokens, set(tokenizer.added_tokens_decoder))  # type: ignore[arg-type]


def test_a_tokenizer_that_normalises_gives_no_bits_per_byte_and_a_note_says_why(tmp_path: Path) -> None:
    folder, text = tiny_model(tmp_path / "model"), jsonl(tmp_path / "a.jsonl", "Red Cat " * 20, "old dog " * 20)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.normalizer = normalizers.Lowercase()  # type: ignore[assignment]
    backend.save(str(folder / "tokenizer.json"))
    measured = measure_model(str(folder), text, Request(sequences=2, length=16))
    assert measured.loss is not None
    assert measured.bits_per_byte is None
    assert measured.notes == [
        "no bits per byte: tokens and text differ in 1 of 2 sequences: the tokenizer changes or leaves out characters"
    ]


def test_tokens_without_a_text_have_no_bits_per_byte(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model")
    for inputs in ("random", "repeat"):
        measured = measure_model(str(folder), None, Request(options=Options(inputs=inputs), sequences=2, length=8))
        assert measured.bits_per_byte is None
        assert measured.notes == []
    given = sinklab.measure(hf.AutoModelForCausalLM.from_pretrained(folder), torch.arange(16).view(2, 8))
    assert (given.bits_per_byte, given.vocabulary) == (None, None)
    assert given.document()["bits_per_byte"] is None


def test_a_run_has_bits_per_byte_unless_its_recipe_replaces_tokens(tmp_path: Path) -> None:
    for name in ("bos", "random"):
        (tmp_path / name).mkdir()
    run, text = trained_run(tmp_path / "bos", {"bos": True})
    request = Request(sequences=4, length=12)
    measured = measure_model(str(run), text, request)
    bare = measure_model(str(run), text, Request(sequences=4, length=11, no_bos=True))
    backend = Tokenizer.from_file(str(next(run.rglob("tokenizer.json"))))
    texts = [json.loads(line)["text"] for line in text.read_text(encoding="utf-8").splitlines()[:4]]
    tokens = [backend.decode([one]) for written in texts for one in backend.encode(written).ids[:11]]  # all ASCII
    for found, predicted in ((measured, tokens), (bare, [one for at, one in enumerate(tokens) if at % 11])):
        assert found.loss is not None
        bits = found.loss / math.log(2) * len(predicted)
        assert found.bits_per_byte == pytest.approx(bits / len("".join(predicted)), rel=1e-6)
    assert measured.vocabulary == bare.vocabulary is not None
    run, text = trained_run(tmp_path / "random", {"random_tokens": {"start": 2, "end": 5}})
    replaced = measure_model(str(run), text, request)
    assert replaced.bits_per_byte is None
    assert any(
        note.startswith("no bits per byte: tokens and text differ in 4 of 4 sequences") for note in replaced.notes
    )


def test_losses_of_different_tokenizers_have_no_difference_and_bits_per_byte_have(tmp_path: Path) -> None:
    text = text_file(tmp_path / "text.jsonl")
    base, more = tiny_model(tmp_path / "base"), tiny_model(tmp_path / "more", seed=1)
    tokenizer: Any = hf.AutoTokenizer.from_pretrained(more)
    tokenizer.add_tokens(["<|tool|>"], special_tokens=True)  # as chat models have
    tokenizer.save_pretrained(more)
    model = hf.AutoModelForCausalLM.from_pretrained(more)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(more)
    other = _with_another_tokenizer(tmp_path / "other")
    found = compare_models([str(base), str(more), str(other)], text, SMALL, out=tmp_path / "out")
    rows = {row.quantity: row for row in compared_rows(found.outcome.measured)}
    loss, bits = rows["loss"], rows["bits per byte"]
    assert loss.differences["more"] == pytest.approx(loss.values["more"] - loss.values["base"])  # type: ignore[operator]
    assert loss.differences["other"] is None
    assert bits.differences["other"] == pytest.approx(bits.values["other"] - bits.values["base"])  # type: ignore[operator]
    for name, measured in found.outcome.measured.items():
        assert Measurement.load(tmp_path / "out" / name).bits_per_byte == measured.bits_per_byte is not None
    shown = io.StringIO()
    print_measurement(found.outcome.measured["base"], Console(file=shown, width=120), full=True)
    assert f"{found.outcome.measured['base'].bits_per_byte:.4f} bits/byte" in shown.getvalue()
    assert "Bits per byte" in write_report([tmp_path / "out"]).read_text(encoding="utf-8")


def test_losses_on_differently_written_conversations_have_no_difference(tmp_path: Path) -> None:
    text = chat_file(tmp_path / "chats.jsonl")
    template = "{% for m in messages %}<s>{{ m['content'] }}{% endfor %}"
    base, chat = tiny_model(tmp_path / "base"), tiny_model(tmp_path / "chat", template=template)
    found = compare_models([str(base), str(chat)], text, SMALL, out=tmp_path / "out")
    loss = next(row for row in compared_rows(found.outcome.measured) if row.quantity == "loss")
    assert (loss.values["base"] is not None, loss.differences["chat"]) == (True, None)
    assert "on other tokens" in difference_sentence(compared_rows(found.outcome.measured))
    plain = compare_models([str(base), str(chat)], text_file(tmp_path / "text.jsonl"), SMALL, out=tmp_path / "plain")
    (same,) = (row for row in compared_rows(plain.outcome.measured) if row.quantity == "loss")
    assert same.differences["chat"] == 0


def _with_another_tokenizer(folder: Path) -> Path:
    """A model whose tokens are single bytes."""
    tiny_model(folder, seed=2)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=260, special_tokens=special, initial_alphabet=alphabet)
    backend.train_from_iterator(WORDS, trainer)
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.save_pretrained(folder)
    return folder
