"""Token ids are those of tokenizer.json, also if transformers rebuilds the tokenizer with other ids."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Run, on_one_line
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen2Config

from sinklab.errors import InputError
from sinklab.measuring.options import Request
from sinklab.models.huggingface.loading import Loading, load_pretrained
from sinklab.opening import open_model
from sinklab.survey.measure import read_tokens

SPECIAL = ["<|bos|>", "<|eos|>"]
TEXT = "We need to add 9 and 650841823, in 2023: café **bold** naïve.\n\n" * 3
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def byte_level(pattern: str | None) -> Tokenizer:
    """A byte-level BPE tokenizer, which splits text at the matches of `pattern` first."""
    tokenizer = Tokenizer(models.BPE())
    split = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern != QWEN)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, last])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return tokenizer


def model_with(folder: Path, tokenizer: Tokenizer, kind: type, tokenizer_class: str, rows: int = 0) -> Path:
    """A random model with this tokenizer.json; `rows`: size of its embedding, if it is not that of the tokenizer."""
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 1}
    torch.manual_seed(0)
    config = kind(vocab_size=rows or tokenizer.get_vocab_size(), **sizes, **heads)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": tokenizer_class, "bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


REPORTED = {
    "digits in threes (Granite 4, transformers #45812)": (r"\p{N}{1,3}", LlamaConfig, "GPT2Tokenizer"),
    "byte-level in a Llama (deepseek-math, #48206)": (None, LlamaConfig, "LlamaTokenizer"),
    "a qwen2 with its own (#45488)": (r"\p{N}{1,3}", Qwen2Config, "Qwen2Tokenizer"),
    "a qwen2 without a class": (r"\p{N}{1,3}", Qwen2Config, "PreTrainedTokenizerFast"),
    "a Llama of Cohere's class": (r"\p{N}{1,3}", LlamaConfig, "CohereTokenizer"),
    "a Llama of Gemma's class": (r"\p{N}{1,3}", LlamaConfig, "GemmaTokenizer"),
}


@pytest.mark.parametrize("case", REPORTED)
def test_the_ids_are_those_of_tokenizer_json_with_a_note_if_transformers_has_others(tmp_path: Path, case: str) -> None:
    pattern, kind, tokenizer_class = REPORTED[case]
    filed = byte_level(pattern)
    folder = model_with(tmp_path / "model", filed, kind, tokenizer_class)
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    expected = filed.encode(TEXT, add_special_tokens=False).ids[:24]
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    try:
        differs = theirs(TEXT, add_special_tokens=False)["input_ids"][:24] != expected
    except Exception:  # such as of Gemma's tokenizer, which needs <unk>
        differs = True
    for tokenizer in ("auto", "file"):
        model = open_model(str(folder), Loading(tokenizer=tokenizer))
        assert read_tokens(model, tmp_path / "a.txt", Request(sequences=1, length=24)).tokens_NT.tolist() == [expected]
        notes = [note for note in model.notes if f"rebuilds it as {type(theirs).__name__} with another" in note]
        assert len(notes) <= (tokenizer == "auto")
        assert notes or not differs or tokenizer == "file"
        assert all(" in the file, and " in note for note in notes)


@pytest.mark.parametrize("kind", ["auto", "file"])
def test_the_tokenizer_of_the_file_keeps_its_ids_when_saved_and_loaded_again(kind: Any, tmp_path: Path) -> None:
    folder = model_with(tmp_path / "model", byte_level(None), LlamaConfig, "LlamaTokenizer")
    ids = (tokenizer := load_pretrained(str(folder), Loading(tokenizer=kind)).tokenizer)(TEXT)["input_ids"]
    tokenizer.save_pretrained(folder)
    assert load_pretrained(str(folder)).tokenizer(TEXT)["input_ids"] == ids


def test_a_tokenizer_that_transformers_rebuilds_with_the_same_ids_has_no_note(tmp_path: Path) -> None:
    tokenizer = byte_level(QWEN)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    folder = model_with(tmp_path / "model", tokenizer, Qwen2Config, "Qwen2Tokenizer")
    rebuilt: Any = AutoTokenizer.from_pretrained(folder)
    rebuilt.save_pretrained(folder)  # with its normalizer
    assert open_model(str(folder)).notes == ()


def test_the_tokenizer_of_transformers_is_used_if_requested(tmp_path: Path) -> None:
    folder = model_with(tmp_path / "model", byte_level(r"\p{N}{1,3}"), Qwen2Config, "Qwen2Tokenizer", rows=500)
    loaded = load_pretrained(str(folder), Loading(tokenizer="transformers"))
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    assert type(loaded.tokenizer) is type(theirs)
    assert loaded.tokenizer(TEXT)["input_ids"] == theirs(TEXT)["input_ids"]
    assert loaded.notes == []


def test_the_option_tokenizer_file_is_refused_for_a_model_without_tokenizer_json(run: Run, tmp_path: Path) -> None:
    folder = model_with(tmp_path / "model", byte_level(None), LlamaConfig, "GPT2Tokenizer")
    theirs = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(theirs["vocab"]))
    (folder / "merges.txt").write_text("\n".join(" ".join(merge) for merge in theirs["merges"]))
    (folder / "tokenizer.json").unlink()
    assert load_pretrained(str(folder)).notes == []
    status, out, err = on_one_line(run)("measure", folder, "--inputs", "random", "--tokenizer", "file")
    assert (status, out) == (2, "")
    assert "has no tokenizer.json; leave --tokenizer out" in err


def test_added_tokens_beyond_the_embedding_are_refused_only_if_the_text_contains_them(tmp_path: Path) -> None:
    tokenizer = byte_level(None)
    rows = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(["<|tool|>"])
    folder = model_with(tmp_path / "model", tokenizer, LlamaConfig, "PreTrainedTokenizerFast", rows)
    model, text = open_model(str(folder)), tmp_path / "a.txt"
    text.write_text(TEXT, encoding="utf-8")
    assert read_tokens(model, text, Request(sequences=1, length=24)).tokens_NT.shape == (1, 24)
    text.write_text(f"a<|tool|>{TEXT}", encoding="utf-8")
    with pytest.raises(InputError, match=rf"contains '<\|tool\|>', token {rows} .* has only {rows} tokens"):
        read_tokens(model, text, Request(sequences=1, length=24))
