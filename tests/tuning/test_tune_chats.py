"""Conversations as tokens, labels and held-out sets, and refused ones; without trl."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers as hf
from chats import MARKED, exported, sheep_chats, tuned_run, write_chats

from sinklab.errors import InputError
from sinklab.models.huggingface.loading import AS_IT_IS
from sinklab.tuning import sft_dataset
from sinklab.tuning.settings import LONGEST, TuneOptions, held_out_for, settings_for
from sinklab.tuning.sft_dataset import (
    ChatTemplate,
    TokenizedChat,
    TuneSources,
    first_tokens,
    prepare_dataset,
    read_chats,
)

TALK = [
    {"role": "system", "content": "count"},
    {"role": "user", "content": "1 and 2"},
    {"role": "assistant", "content": "sheep jumps 4"},
    {"role": "user", "content": "and 9"},
    {"role": "assistant", "content": "fence 16"},
]
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("tokenizer")
    run, _ = tuned_run(where)
    return exported(where, run)


@pytest.fixture
def tokenizer(folder: Path) -> Any:
    return hf.AutoTokenizer.from_pretrained(folder)


def trained_text(spoken: TokenizedChat, tokenizer: hf.PreTrainedTokenizerBase) -> list[str]:
    """Text of each run of consecutive training tokens."""
    stretches: list[list[int]] = []
    for i, (token, is_trained) in enumerate(zip(spoken.ids, spoken.is_trained, strict=True)):
        if is_trained and (i == 0 or not spoken.is_trained[i - 1]):
            stretches.append([])
        if is_trained:
            stretches[-1].append(token)
    return [str(tokenizer.decode(stretch)) for stretch in stretches]


def test_the_default_template_trains_on_the_assistants_text_and_the_end_of_sequence(tokenizer) -> None:
    template = ChatTemplate(tokenizer)
    spoken = template.tokenize(TALK, "here")
    assert trained_text(spoken, tokenizer) == ["sheep jumps 4<|endoftext|>", "fence 16<|endoftext|>"]
    said = "<|bos|>system:\ncount\nuser:\n1 and 2\nassistant:\nsheep jumps 4<|endoftext|>\nuser:\nand 9\nassistant:\n"
    assert tokenizer.decode(spoken.ids) == said + "fence 16<|endoftext|>\n"
    assert "sinklab's is used" in template.notes[0]


def test_the_default_template_has_no_bos_for_a_run_without_bos(tmp_path: Path) -> None:
    run, _ = tuned_run(tmp_path, bos=False)
    tokenizer: Any = hf.AutoTokenizer.from_pretrained(exported(tmp_path, run))
    assert str(tokenizer.decode(ChatTemplate(tokenizer).tokenize(TALK, "here").ids)).startswith("system:\n")


def test_the_prompt_for_an_answer_is_the_beginning_of_the_answered_conversation(tokenizer) -> None:
    spoken = ChatTemplate(tokenizer).tokenize(TALK, "here")
    asked = tokenizer.apply_chat_template(TALK[:-1], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert spoken.ids[: len(asked)] == asked
    assert spoken.is_trained[len(asked)]
    assert not spoken.is_trained[len(asked) - 1]


def test_a_template_without_generation_marks_trains_on_the_text_that_each_answer_adds(tokenizer) -> None:
    marked = ChatTemplate(tokenizer, MARKED).tokenize(TALK, "here")
    unmarked = ChatTemplate(tokenizer, UNMARKED).tokenize(TALK, "here")
    assert unmarked.ids == marked.ids
    assert trained_text(marked, tokenizer) == ["sheep jumps 4</s>", "fence 16</s>"]
    assert trained_text(unmarked, tokenizer) == ["sheep jumps 4</s>\n", "fence 16</s>\n"]


def test_an_unmarked_template_that_changes_earlier_text_is_refused_with_a_remedy(tokenizer) -> None:
    counting = "{{ messages | length }} " + UNMARKED
    with pytest.raises(InputError, match=r"line 3: .*does not mark the assistant's text.*--chat-template FILE"):
        ChatTemplate(tokenizer, counting).tokenize(TALK, "chats.jsonl, line 3")


def test_a_conversation_that_the_template_cannot_render_is_refused_with_its_line(tokenizer) -> None:
    with pytest.raises(InputError, match=r"line 7: .*cannot render this conversation \(no system role\)"):
        ChatTemplate(tokenizer, "{{ raise_exception('no system role') }}").tokenize(TALK, "chats.jsonl, line 7")


def test_conversations_are_truncated_and_those_left_without_an_answer_are_excluded(tokenizer, tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "1 " * n}, {"role": "assistant", "content": "2"}]} for n in (1, 99)
    ]
    chats, note = read_chats(write_chats(tmp_path / "chats.jsonl", rows), ChatTemplate(tokenizer), length=48, seed=0)
    assert len(chats) == 1
    assert note.startswith("2 conversations, 0 of them truncated to 48 tokens, 1 excluded")
    longer = [{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2 " * 99}]}]
    chats, note = read_chats(write_chats(tmp_path / "long.jsonl", longer), ChatTemplate(tokenizer), length=48, seed=0)
    assert (len(chats[0].ids), note) == (48, "1 conversation, 1 of them truncated to 48 tokens")


def test_the_seed_decides_the_order(tokenizer, tmp_path: Path) -> None:
    file, template = sheep_chats(tmp_path / "chats.jsonl"), ChatTemplate(tokenizer)
    first, again, other = (read_chats(file, template, 48, seed)[0] for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert sorted(one.ids for one in first) == sorted(one.ids for one in other)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"messages": [{"role": "user", "content": "hello"}]}, 'line 1: no message with role "assistant" has text'),
        ({"messages": [{"role": "assistant", "content": "  "}]}, 'line 1: no message with role "assistant" has text'),
        ({"messages": []}, "no row has a conversation"),
        ({"messages": ["hello"]}, 'line 1: each message needs "role" and "content"'),
        ({"text": "hello"}, "no row has a conversation"),
    ],
)
def test_a_row_without_a_trainable_conversation_is_refused(
    tokenizer, tmp_path: Path, row: dict[str, object], says: str
) -> None:
    with pytest.raises(InputError) as refused:
        read_chats(write_chats(tmp_path / "chats.jsonl", [row]), ChatTemplate(tokenizer), 48, 0)
    assert says in str(refused.value)


def test_a_file_without_conversations_is_refused(tokenizer, tmp_path: Path) -> None:
    empty = write_chats(tmp_path / "chats.jsonl", [])
    with pytest.raises(InputError, match="contains no conversation"):
        read_chats(empty, ChatTemplate(tokenizer), 48, 0)
    with pytest.raises(InputError, match="does not exist or has no rows"):
        read_chats(tmp_path / "chats.txt", ChatTemplate(tokenizer), 48, 0)


def test_the_sink_is_measured_on_the_first_tokens_of_conversations_that_are_long_enough() -> None:
    chats = [TokenizedChat(list(range(n)), [True] * n) for n in (3, 9, 5, 9)]
    assert first_tokens(chats, 2, 5).tolist() == [[0, 1, 2, 3, 4]] * 2
    with pytest.raises(InputError, match="none of the 4 held-out conversations has the 10 tokens"):
        first_tokens(chats, 2, 10)


def test_the_defaults_are_those_of_the_paper() -> None:
    settings = settings_for(TuneOptions(), LONGEST, held_out_for(TuneOptions(), 200_100), trained=200_000)
    assert (settings.lr, settings.batch_size, settings.length, settings.steps) == (2e-5, 64, 2048, 3125)
    assert (settings.held_out, settings.micro_batch, settings.eval_every) == (100, 2, 312)


def test_conversations_may_be_as_long_as_the_context_that_yarn_extends(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sft_dataset, "LIBRARIES", ())
    extended = Path(shutil.copytree(folder, tmp_path / "extended"))
    config = json.loads((extended / "config.json").read_text())
    config["rope_parameters"] |= {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 48}
    (extended / "config.json").write_text(json.dumps(config))
    sources, options = TuneSources(sheep_chats(tmp_path / "chats.jsonl")), TuneOptions(length=96, sink_length=12)
    assert prepare_dataset(str(extended), sources, options, AS_IT_IS).tuning.asked.length == 96
    with pytest.raises(InputError, match="use --length 48 or less"):
        prepare_dataset(str(folder), sources, options, AS_IT_IS)


def test_inconsistent_options_are_refused() -> None:
    with pytest.raises(InputError, match="not a multiple of --micro-batch 5"):
        settings_for(TuneOptions(micro_batch=5), 64, 1, 10)
    with pytest.raises(InputError, match="--sink-length 65 exceeds the 64 tokens"):
        settings_for(TuneOptions(sink_length=65), 64, 1, 10)
    with pytest.raises(InputError, match="at least 2 are needed"):
        held_out_for(TuneOptions(), 1)
    with pytest.raises(InputError, match="--held-out 5 leaves none of 5"):
        held_out_for(TuneOptions(held_out=5), 5)
