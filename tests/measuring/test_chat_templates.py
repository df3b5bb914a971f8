"""Chat templates are third-party programs: one that fails, hangs or uses too much memory ends with a message."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import transformers as hf
from chats import MARKED
from conftest import Run, on_one_line
from tiny_models import TEMPLATE, chat_file, tiny_model

from sinklab.data.textfiles import Message
from sinklab.errors import InputError
from sinklab.models.huggingface import tokenizer_files as rendering
from sinklab.models.huggingface.tokenizer_files import render_chat
from sinklab.tuning.sft_dataset import DEFAULT, ChatTemplate

TALK = [{"role": "user", "content": "héllo \ud800\n"}, {"role": "assistant", "content": "so"}]
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
FAILING = {
    "{{ 1 // 0 }}": "ZeroDivisionError: integer division",
    "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}": "RecursionError: maximum recursion depth",
    "{{ range(10 ** 9) | list }}": "OverflowError: Range too big",
    "{{ messages[9].content.text }}": "UndefinedError: list object has no element 9",
    "{{ messages[0] + 1 }}": "TypeError: unsupported operand",
    "{% if %}": "TemplateSyntaxError: Expected an expression",
    "{{ raise_exception('no system role') }}": "(no system role)",
    "{{ 'a' * 10 ** 8 }}": "it writes 100,000,000 characters, more than ",
}
MODEST = "{{ 'a' * 100 }}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("templates") / "m", template=TEMPLATE)


@pytest.fixture
def tokenizer(folder: Path) -> Any:
    return hf.AutoTokenizer.from_pretrained(folder)


def rendered(tokenizer: hf.PreTrainedTokenizerBase, template: str, talk: list[Message] = TALK) -> str:
    tokenizer.chat_template = template
    return render_chat(tokenizer, talk, "chats.jsonl, line 7").text


@pytest.mark.parametrize("template", [TEMPLATE, DEFAULT, MARKED, "{{ messages | tojson }}"])
@pytest.mark.parametrize("prompt", [False, True])
def test_a_conversation_is_written_as_transformers_writes_it(tokenizer, template: str, prompt: bool) -> None:
    tokenizer.chat_template = template
    found = render_chat(tokenizer, TALK, "here", generation_prompt=prompt)
    assert found.text == tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=prompt)
    marked = [found.text[start:end] for start, end in found.marked]
    assert marked == {DEFAULT: ["so</s>"], MARKED: ["so</s>"]}.get(template, [])


@pytest.mark.parametrize("template", FAILING)
def test_a_template_that_fails_is_refused_with_the_line_and_its_exception(tokenizer, template: str) -> None:
    with pytest.raises(InputError) as refused:
        rendered(tokenizer, template)
    assert f"line 7: the chat template cannot render this conversation ({FAILING[template].lstrip('(')}" in str(
        refused.value
    )
    assert rendered(tokenizer, MODEST) == "a" * 100


def test_an_endless_template_is_stopped_at_the_time_limit(tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "SECONDS", 0.5)
    with pytest.raises(InputError, match=r"line 7: .*did not end within 0.5 seconds of processor time"):
        rendered(tokenizer, ENDLESS)
    assert rendered(tokenizer, MODEST) == "a" * 100


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not hold a process to a limit of memory")
def test_a_template_that_exceeds_the_memory_limit_is_refused(tokenizer) -> None:
    with pytest.raises(InputError, match=r"line 7: .*needs more than 2 GiB of memory"):
        rendered(tokenizer, "{{ 'a' * 10 ** 11 }}")
    assert rendered(tokenizer, MODEST) == "a" * 100


def test_threads_may_render_at_the_same_time(folder: Path) -> None:
    found: dict[int, list[str]] = {}

    def render(number: int) -> None:
        own: Any = hf.AutoTokenizer.from_pretrained(folder)
        talk = [{"role": "user", "content": f"{number}"}]
        found[number] = [rendered(own, "{{ messages[0].content }}", talk) for _ in range(20)]

    threads = [threading.Thread(target=render, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [f"{number}"] * 20 for number in range(4)}


def test_a_conversation_after_an_interruption_gets_its_own_rendering(tokenizer, monkeypatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    rendered(tokenizer, MODEST)
    process = rendering._PROCESS._process
    assert process is not None
    assert process.stdout is not None
    monkeypatch.setattr(process.stdout, "readline", interrupt, raising=False)
    with pytest.raises(KeyboardInterrupt):
        rendered(tokenizer, "{{ 'interrupted' }}")
    assert rendered(tokenizer, MODEST) == "a" * 100
    assert process.returncode is not None


def test_the_process_that_renders_needs_no_torch() -> None:
    code = f"import sys; import {rendering.__name__}; "
    code += "from transformers.utils.chat_template_utils import render_jinja_template; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_fine_tuning_refuses_a_template_that_fails_with_the_line(tokenizer) -> None:
    with pytest.raises(InputError, match=r"line 7: .*ZeroDivisionError.*--chat-template FILE"):
        ChatTemplate(tokenizer, "{{ 1 // 0 }}").tokenize(TALK, "chats.jsonl, line 7")


@pytest.mark.parametrize("template", ["{{ 1 // 0 }}", "{{ raise_exception('no system role') }}"])
def test_commands_end_with_status_2_for_a_failing_template_and_compare_names_the_model(
    run: Run, tmp_path: Path, template: str
) -> None:
    good = tiny_model(tmp_path / "good", template=TEMPLATE)
    bad, chats = tiny_model(tmp_path / "bad", seed=1, template=template), chat_file(tmp_path / "chats.jsonl")
    small = ("--sequences", 2, "--length", 12)
    status, _, err = on_one_line(run)("measure", bad, "--text", chats, "--out", "m", *small)
    assert status == 2
    assert "chats.jsonl, line 1: the chat template cannot render this conversation" in err
    status, _, err = on_one_line(run)("compare", good, bad, "--text", chats, "--out", "c", *small)
    assert status == 2
    assert f"{bad}: {chats}, line 1: the chat template cannot render this conversation" in err
    assert (tmp_path / "c" / "good" / "measurement.json").is_file()  # kept, and not measured again
