"""Render conversations with chat templates, in a separate process with limits on time and memory.

A chat template is a program shipped with a model. Jinja's sandbox blocks files and network, but not infinite loops or
unlimited memory, and a thread cannot be stopped. Templates are therefore rendered in one separate process, with
transformers' sandbox and without torch or the model. The operating system kills the process after SECONDS of processor
time for one conversation, and limits its memory to MEMORY (not on macOS).
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from sinklab.data.sources.textfiles import ChatText, Message, plain_conversation
from sinklab.errors import InputError, SinklabError, cause

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


SECONDS = 10
MEMORY = 2 * 2**30  # bytes
CHARACTERS = 2**24  # maximum length of the output, plus REPEATED times that of the JSON request (with the template)
REPEATED = 4
MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # numpy's threads would count as memory


@dataclass(frozen=True)
class Rendered:
    """A conversation rendered by a chat template.

    Attributes:
        text: the text of the whole conversation.
        marked: ranges [start, end) of the characters of `text` inside `{% generation %}` blocks, in order; empty if the
            template has no such block.
    """

    text: str
    marked: list[tuple[int, int]]


def render_chat(
    tokenizer: "PreTrainedTokenizerBase",
    messages: list[Message],
    where: str,
    *,
    generation_prompt: bool = False,
    remedy: str = "remove it from the text",
) -> Rendered:
    """Render a conversation with the chat template of a tokenizer.

    Args:
        where: name of the conversation in error messages.
        generation_prompt: append the beginning of the assistant's next message.
        remedy: advice at the end of error messages.

    Raises:
        InputError: if the template is missing, fails, or exceeds the limits on time, memory or output, or the tokenizer
            has several templates and none is the default.
        SinklabError: if the rendering process cannot be started, or exits by itself.
    """
    conversation = [{key: value for key, value in message.items() if value is not None} for message in messages]
    try:
        template = tokenizer.get_chat_template()
        asked = {
            "template": template,
            "messages": conversation,
            "generation_prompt": generation_prompt,
            "special": tokenizer.special_tokens_map,
            "seconds": SECONDS,
            "characters": CHARACTERS,
        }
        answer = _PROCESS.ask(json.dumps(asked, default=str))
        why = answer.get("error")
    except ValueError as error:
        answer, why = {}, cause(error)
    if why is not None:
        raise InputError(f"{where}: the chat template cannot render this conversation ({why}): {remedy}")
    return Rendered(answer["text"], [(start, end) for start, end in answer["marked"]])


class _Process:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._complaints: IO[bytes] | None = None

    def ask(self, line: str) -> dict[str, Any]:
        """Send a JSON line to the process and return its response, a dict with the key `error` if rendering failed."""
        with self._lock:
            process = self._process or self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            answer = ""
            try:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(line + "\n")
                    process.stdin.flush()
                    answer = process.stdout.readline()
            except BaseException:  # Ctrl-C: the pending response would be read as the response to the next line
                process.kill()
                self._forget(process)
                raise
            if answer.endswith("\n"):
                return json.loads(answer)
            status, said = self._forget(process)
            if status >= 0:
                raise SinklabError(f"the process that renders chat templates ended with status {status}: {said[-400:]}")
            if status == -signal.SIGPROF:
                return {"error": f"it did not end within {SECONDS} seconds of processor time"}
            return {"error": f"the rendering process was ended by {signal.Signals(-status).name}"}

    def _start(self) -> "subprocess.Popen[str]":
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        code = f"from {__name__} import serve; serve()"
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._complaints,
                env={**os.environ, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
                start_new_session=True,  # keeps Ctrl-C from the child process
                encoding="ascii",
            )
        except OSError as error:
            raise SinklabError(f"no process could be started to render chat templates: {error}") from error
        return self._process

    def _forget(self, process: "subprocess.Popen[str]") -> tuple[int, str]:
        assert self._complaints is not None
        self._process, status = None, process.wait()
        with contextlib.suppress(BrokenPipeError), process:
            pass  # closes its pipes
        with self._complaints as file:
            file.seek(0)
            return status, file.read().decode(errors="replace").strip()


_PROCESS = _Process()


def serve() -> None:
    """Render conversations from standard input, one JSON object per line, and print each result as a JSON line."""
    import resource

    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    with contextlib.suppress(ValueError, OSError):  # macOS
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY if hard < 0 else min(MEMORY, hard), hard))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process
    for line in sys.stdin:
        asked = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, asked["seconds"])
        try:
            (text,), marked = render_jinja_template(
                conversations=[asked["messages"]],
                chat_template=asked["template"],
                add_generation_prompt=asked["generation_prompt"],
                return_assistant_tokens_mask=MARK.search(asked["template"]) is not None,
                **asked["special"],
            )
            if len(text) > (most := asked["characters"] + REPEATED * len(line)):
                answer = json.dumps({"error": f"it writes {len(text):,} characters, more than {most:,}"})
            else:
                answer = json.dumps({"text": text, "marked": marked[0] if marked else []})
        except MemoryError:
            answer = json.dumps({"error": f"it needs more than {MEMORY / 2**30:.0f} GiB of memory"})
        except Exception as error:  # a template may raise any exception
            kind = "" if type(error) is TemplateError else f"{type(error).__name__}: "
            answer = json.dumps({"error": f"{kind}{cause(error)[:400]}"})
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, flush=True)


class Conversations:
    """Renders conversations as text, and keeps how they were rendered for `notes`.

    Args:
        tokenizer: tokenizer whose chat template is applied. If it is None or has no template, conversations are
            rendered as lines `role: content`.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase | None" = None) -> None:
        self._tokenizer = tokenizer
        self._seen = False

    def render(self, messages: list[Message], where: str) -> str:
        """Render one conversation as text: a `ChatText` if the tokenizer has a chat template.

        Args:
            where: name of the conversation in error messages.

        Raises:
            InputError, SinklabError: see `render_chat`.
        """
        self._seen = True
        if not self._templated:
            return plain_conversation(messages, where)
        assert self._tokenizer is not None
        return ChatText(render_chat(self._tokenizer, messages, where).text)

    def notes(self) -> list[str]:
        """Return a list with a note on how conversations were rendered; empty if none was rendered."""
        if not self._seen:
            return []
        if self._templated:
            return ["conversations were rendered with the model's chat template"]
        return ["conversations were rendered as plain lines `role: content`: the model has no chat template"]

    @property
    def _templated(self) -> bool:
        return bool(getattr(self._tokenizer, "chat_template", None))
