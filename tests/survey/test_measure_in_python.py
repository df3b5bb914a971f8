"""`sinklab.measure` on a text: a model by its name or in memory, with its own tokenizer or another."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from tiny_models import TEMPLATE, text_file, tiny_model
from trained_run import trained_run

import sinklab
from sinklab.errors import InputError
from sinklab.measuring.options import Request
from sinklab.survey.measure import measure_model
from sinklab.train.run import load_run


def numbers(result: sinklab.Measurement, *left_out: str) -> dict[str, Any]:
    """Everything of a measurement but its time and memory; arrays as lists."""
    values = {name: getattr(result, name) for name in type(result).model_fields}
    kept = {name: value for name, value in values.items() if name not in {"seconds", "peak_memory_mb", *left_out}}
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in kept.items()}


def test_a_name_a_model_in_memory_and_the_command_give_the_same_result(tmp_path: Path) -> None:
    folder, text = tiny_model(tmp_path / "model", bos=True), text_file(tmp_path / "text.jsonl")
    expected = measure_model(str(folder), text, Request(sequences=6, length=16))
    named = sinklab.measure(str(folder), text=text, sequences=6, length=16)
    assert numbers(named) == numbers(expected)
    model = hf.AutoModelForCausalLM.from_pretrained(folder)
    held = sinklab.measure(model, text=str(text), sequences=6, length=16)
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    given = sinklab.measure(model, text=text, tokenizer=tokenizer, sequences=6, length=16, model_name="mine")
    assert numbers(held) == numbers(expected)
    assert given.model == "mine"
    assert numbers(given, "model") == numbers(expected, "model")


def test_a_text_and_its_token_ids_give_the_same_results_bit_for_bit(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model", bos=True)
    model = hf.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer: Any = hf.AutoTokenizer.from_pretrained(folder)
    documents = ["red cat old dog big hat wet sea " * 3, "big sky wet cat red sea old hat " * 3]
    by_text = sinklab.measure(model, text=documents, sequences=2, length=12)
    tokens = torch.tensor([tokenizer(document)["input_ids"][:12] for document in documents])
    for by_tokens in (sinklab.measure(model, tokens), sinklab.measure(str(folder), tokens)):
        assert by_tokens.bos
        assert by_text.bos
        assert by_tokens.loss == by_text.loss
        assert by_tokens.sink_rate == by_text.sink_rate
        assert np.array_equal(by_tokens.importance, by_text.importance)


def test_a_list_of_messages_is_one_conversation_of_the_chat_template(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model", template=TEMPLATE)
    chat = [{"role": role, "content": "red cat old dog big hat wet sea " * 4} for role in ("user", "assistant")]
    found = sinklab.measure(str(folder), text=chat, length=16)
    assert numbers(found) == numbers(sinklab.measure(str(folder), text=[chat], length=16))
    assert "conversations were rendered with the model's chat template" in found.notes


def test_the_column_of_rows_can_be_chosen_in_python_and_on_the_command_line(
    tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    folder, text = tiny_model(tmp_path / "model"), text_file(tmp_path / "text.jsonl")
    expected = sinklab.measure(str(folder), text=text, sequences=6, length=16)
    renamed = tmp_path / "renamed.jsonl"
    renamed.write_text(text.read_text().replace('{"text"', '{"instruction": "Add.", "output"'))
    found = sinklab.measure(str(folder), text=renamed, column="output", sequences=6, length=16)
    assert numbers(found) == numbers(expected)
    options = ("--text", renamed, "--column", "output", "--sequences", "6", "--length", "16", "--json")
    assert json.loads(run("measure", folder, *options)[1])["loss"] == expected.loss
    options = ("--text", renamed, "--parts", "streaming", "--length", "16", "--sequences", "1", "--cache", "4")
    assert run("assess", folder, *options)[0] == 2
    status, _, err = run("assess", folder, *options, "--column", "output", "--keep", "1")
    assert status == 0, err


def test_a_short_list_of_documents_gives_fewer_sequences(tmp_path: Path) -> None:
    documents = ["red cat old dog big hat wet sea " * 12] * 3
    found = sinklab.measure(str(tiny_model(tmp_path / "model")), text=documents)
    assert found.sequences == 3
    assert any("100" in note for note in found.notes)
    found = sinklab.measure(str(tmp_path / "model"), text=["red cat", *documents, "old dog"])
    assert any("3 of 100 sequences:" in note and "that are shorter: 2)" in note for note in found.notes)


def test_errors_of_a_list_of_documents_name_the_argument_and_what_to_change(tmp_path: Path) -> None:
    folder = str(tiny_model(tmp_path / "model"))
    says = (
        r"^`text` gives 0 usable sequences: 0 of its 2 documents have 64 tokens of text, and the longest has \d+; lower"
    )
    with pytest.raises(InputError, match=rf"{says} `length`, or use more text"):
        sinklab.measure(folder, text=["red cat old", "big"])
    with pytest.raises(InputError, match=r"^`text`, document 2: each message needs"):
        sinklab.measure(folder, text=["red cat old " * 50, ["big"]])
    for texts in (["red cat old", "big"], [{"role": "user", "content": "red"}]):
        with pytest.raises(InputError, match=r"documents are passed as text=\[..\]"):
            sinklab.measure(folder, texts)  # type: ignore[arg-type]


@pytest.mark.parametrize("left", [True, False])
def test_padding_without_a_mask_is_noted(left: bool) -> None:
    config = hf.LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=32,
        eos_token_id=[2, 3],
    )
    model = hf.LlamaForCausalLM(config)
    tokens = torch.randint(4, 32, (3, 8), generator=torch.Generator().manual_seed(0))
    tokens[0, 0] = tokens[2, -1] = 3  # a single one is part of a text
    assert not [note for note in sinklab.measure(model, tokens).notes if "attention_mask" in note]
    padded = slice(None, 2) if left else slice(-2, None)
    tokens[1, padded] = 3
    (note,) = [note for note in sinklab.measure(model, tokens).notes if "attention_mask" in note]
    assert note.startswith("1 of 3 sequences begin or end")
    mask = torch.ones_like(tokens)
    mask[1, padded] = 0
    assert not [note for note in sinklab.measure(model, tokens, attention_mask=mask).notes if "attention_mask" in note]


def test_conversations_and_rows_are_documents_as_in_a_file(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model")
    messages = [{"role": "user", "content": "red cat old dog big hat wet sea " * 3}]
    given = ([messages], [{"messages": messages}], [{"text": f"user: {messages[0]['content']}"}])
    losses = {sinklab.measure(str(folder), text=text, sequences=1, length=12).loss for text in given}
    assert len(losses) == 1


def test_bos_of_a_text_can_be_added_or_left_out(tmp_path: Path) -> None:
    folder, text = tiny_model(tmp_path / "model", bos=True), text_file(tmp_path / "text.jsonl")
    bare = sinklab.measure(str(folder), text=text, sequences=4, length=16, bos=False)
    assert not bare.bos
    plain = tiny_model(tmp_path / "plain")
    assert not sinklab.measure(str(plain), text=text, sequences=4, length=16).bos
    assert sinklab.measure(str(plain), text=text, sequences=4, length=16, bos=True).bos


def test_random_tokens_need_no_text(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model")
    request = Request.model_validate({"options": {"inputs": "random"}, "sequences": 3, "length": 8, "seed": 5})
    drawn = sinklab.measure(str(folder), inputs="random", sequences=3, length=8, seed=5)
    assert numbers(drawn) == numbers(measure_model(str(folder), None, request))


def test_the_default_text_is_read(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model")
    measured = sinklab.measure(hf.AutoModelForCausalLM.from_pretrained(folder), sequences=2, length=8)
    assert any("--text" in note for note in measured.notes)


def test_a_run_is_measured_by_its_directory_and_not_in_memory(tmp_path: Path) -> None:
    run, _ = trained_run(tmp_path, {"bos": True}, {})
    text = text_file(tmp_path / "text.jsonl")
    assert sinklab.measure(run, text=text, sequences=2, length=8).bos
    with pytest.raises(InputError, match="run directory"):
        sinklab.measure(load_run(run).model, text=text)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"tokens": [[1, 2]], "text": "stdlib"}, "not both"),
        ({"attention_mask": [[1, 1]]}, "attention_mask"),
        ({"text": "there/is/none.txt"}, "none.txt"),
        ({"text": "红猫" * 200}, "documents as a list"),
        ({"text": "red cat " * 50}, r"no text at 'red cat .*documents as a list, such as text=\[..\]"),
        ({"tokenizer": 5}, "tokenizer of transformers"),
        ({"tokenizer": "./none"}, "no tokenizer at ./none"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(
    arguments: dict[str, object], said: str, tmp_path: Path
) -> None:
    model = hf.AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path / "model"))
    with pytest.raises(InputError, match=said):
        sinklab.measure(model, **arguments)  # type: ignore[arg-type]


def test_a_model_without_a_directory_needs_a_tokenizer(tmp_path: Path) -> None:
    model = hf.AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path / "model"))
    model.config.name_or_path = ""
    with pytest.raises(InputError, match="tokenizer"):
        sinklab.measure(model, text=["red cat"])
