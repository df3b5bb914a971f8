"""Training tokens are those of the assistant's text, also if the tokenizer drops or merges characters at its ends."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import transformers as hf
from chats import exported, tuned_run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from sinklab.data.textfiles import read_conversations
from sinklab.errors import InputError
from sinklab.tuning.sft_dataset import DEFAULT, ChatTemplate, TokenizedChat, read_chats

UNMARKED = DEFAULT.replace("{% generation %}", "").replace("{% endgeneration %}", "")
CHARACTERS = "\nTaehinorstu:"


def dropping_tokenizer() -> hf.PreTrainedTokenizerFast:
    """A tokenizer of CHARACTERS and the space that drops all others and merges a line feed with a T after it."""
    vocabulary = {token: i for i, token in enumerate(["</s>", "▁", *CHARACTERS, "\nT", "th"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("\n", "T"), ("t", "h")]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    backend.add_special_tokens(["</s>"])
    return hf.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


def decoded(tokenizer: hf.PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def trained(tokenizer: hf.PreTrainedTokenizerBase, spoken: TokenizedChat) -> str:
    return decoded(
        tokenizer, [one for one, is_trained in zip(spoken.ids, spoken.is_trained, strict=True) if is_trained]
    )


def writable(tokenizer: hf.PreTrainedTokenizerBase) -> Callable[[str], str]:
    """A text without the characters that the tokenizer has no token for."""

    @cache
    def kept(character: str) -> str:
        ids = tokenizer(f"a{character}a", add_special_tokens=False)["input_ids"]
        return character if decoded(tokenizer, list(ids)) == f"a{character}a" else ""  # type: ignore[arg-type]

    return lambda text: "".join(map(kept, text))


@pytest.mark.parametrize("template", [DEFAULT, UNMARKED])
@pytest.mark.parametrize("asked", ["no", "7 -- *#* 7", "T"])
@pytest.mark.parametrize(("said", "written"), [("The sun", "The sun"), ("7T7h8e9 (s)un", "The sun"), ("**", "")])
def test_a_tokenizer_that_drops_characters_trains_on_the_rest_of_the_assistants_text(
    template: str, asked: str, said: str, written: str
) -> None:
    tokenizer = dropping_tokenizer()
    talk = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}] * 2
    spoken = ChatTemplate(tokenizer, template).tokenize(talk, "here")
    end = "</s>" if template == DEFAULT else "</s>\n"
    assert trained(tokenizer, spoken) == (written + end) * 2
    assert spoken.is_exact is (said == written)


def test_a_word_that_the_tokenizer_joins_with_the_line_feed_before_it_is_trained_on_alone() -> None:
    tokenizer = dropping_tokenizer()
    talk = [{"role": "user", "content": "so"}, {"role": "assistant", "content": "The"}]
    spoken = ChatTemplate(tokenizer).tokenize(talk, "here")
    tokens = tokenizer.convert_ids_to_tokens(spoken.ids)
    assert next(token for token, is_trained in zip(tokens, spoken.is_trained, strict=True) if is_trained) == "T"
    prompt: Any = tokenizer.apply_chat_template(talk[:1], add_generation_prompt=True, return_dict=False)
    assert spoken.ids[: len(prompt)] == prompt


def test_an_answer_without_any_tokens_is_refused_as_a_limit_of_the_tokenizer() -> None:
    silent = "{% for m in messages %}:{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}"
    template = ChatTemplate(dropping_tokenizer(), silent)
    with pytest.raises(
        InputError, match="line 3: the model's tokenizer returns no tokens for the assistant's text: remove"
    ):
        template.tokenize([{"role": "assistant", "content": "42"}], "chats.jsonl, line 3")


def test_the_number_of_conversations_that_lose_characters_is_noted(tmp_path: Path) -> None:
    rows = ["The", "42 suns"]
    lines = [
        f'{{"messages": [{{"role": "user", "content": "so"}}, {{"role": "assistant", "content": "{said}"}}]}}\n'
        for said in rows
    ]
    (tmp_path / "chats.jsonl").write_text("".join(lines), encoding="utf-8")
    _, note = read_chats(tmp_path / "chats.jsonl", ChatTemplate(dropping_tokenizer()), 48, 0)
    assert "in 1 the tokenizer drops or changes characters" in note


@pytest.fixture(params=["TinyStories-656K", "SmolLM2-135M-Instruct", "gptneox", "prepared"])
def tokenizer(request: pytest.FixtureRequest, data_dir: Path, tmp_path: Path) -> Any:
    if request.param == "prepared":
        run, _ = tuned_run(tmp_path)
        return hf.AutoTokenizer.from_pretrained(exported(tmp_path, run))
    if request.param == "SmolLM2-135M-Instruct":
        pytest.importorskip("gguf", reason="needs the extra gguf")
        folder = data_dir / "models" / request.param
        return hf.AutoTokenizer.from_pretrained(folder, gguf_file=f"{request.param}.Q4_1.gguf")
    return hf.AutoTokenizer.from_pretrained(
        data_dir / ("tokenizers" if request.param == "gptneox" else "models") / request.param
    )


def check_real_conversations(tokenizer: hf.PreTrainedTokenizerBase, data_dir: Path, every: int) -> None:
    """The decoded training tokens equal the text in the file; a decoder may strip its leading space."""
    kept = writable(tokenizer)
    template = ChatTemplate(tokenizer, None if tokenizer.chat_template else UNMARKED)
    ends = "<|im_end|>\n" if "im_end" in str(tokenizer.chat_template) else f"{tokenizer.eos_token}\n"
    conversations = list(read_conversations(data_dir / "chat" / "messages.jsonl"))
    for messages, where in conversations[41 % every :: every]:
        said = [message["content"] for message in messages if message["role"] == "assistant"]
        said = said if "im_end" in ends else [text.strip() for text in said]
        found = trained(tokenizer, template.tokenize(messages, where))
        assert found.strip() == "".join(kept(text) + ends for text in said).strip(), where


def test_training_tokens_of_real_conversations_decode_to_the_assistants_text(tokenizer, data_dir: Path) -> None:
    check_real_conversations(tokenizer, data_dir, every=13)


@pytest.mark.slow
def test_training_tokens_of_all_real_conversations_decode_to_the_assistants_text(tokenizer, data_dir: Path) -> None:
    check_real_conversations(tokenizer, data_dir, every=1)
