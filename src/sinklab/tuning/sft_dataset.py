"""Inputs of a tuning run: model, conversations, settings and tokens for the sink metric.

Conversations are tokenized with a loss mask on the assistant's tokens.

A chat template may mark the assistant's text with `{% generation %}..{% endgeneration %}`. Otherwise the assistant's
text of message m_i is the text that render(m_1 .. m_i) adds to its prefix

    render(m_1 .. m_i-1, with the generation prompt).

render(m_1 .. m_i) must be a prefix of the whole rendered conversation. A template that violates this is rejected.

The text is tokenized up to each boundary of the assistant's text. A token that would cross a boundary is split there,
as in generation. Rejected alternative: character offsets, which are wrong for tokenizers that drop characters.

Conversations are truncated to the maximum length, and excluded if they then have no assistant tokens to predict. The
others are shuffled with the seed, and the first of them are held out.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sinklab.data.textfiles import Message, ReadCounts, expanded, notes_on_folder, read_conversations
from sinklab.device import pick_device
from sinklab.errors import InputError
from sinklab.files import sha256_of
from sinklab.measuring.inputs import default_prefix, natural_text, token_rows
from sinklab.models.huggingface.loading import DEVICE_MAP, Loading
from sinklab.models.huggingface.tokenizer_files import MARK, Rendered, render_chat
from sinklab.opening import Model, open_model
from sinklab.tables import plural
from sinklab.train.recipe import load_recipe
from sinklab.tuning.settings import LONGEST, TuneManifest, TuneOptions, held_out_for, settings_for
from sinklab.tuning.tuned_directory import Tuning

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASSISTANT = "assistant"
REMEDY = "remove it, or pass another template as --chat-template FILE"
DEFAULT = (
    "{% for message in messages %}{{ message['role'] + ':\\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] | trim + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] | trim }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
)
"""Chat template for tokenizers without one: roles are plain text, and every assistant message ends with EOS."""


@dataclass(frozen=True)
class TokenizedChat:
    """Token ids and loss mask of a conversation.

    Attributes:
        is_trained: loss mask, True for the assistant's tokens.
        is_exact: True if the assistant's tokens decode to the assistant's text, up to leading and trailing whitespace;
            not kept by `read_chats`.
    """

    ids: list[int]
    is_trained: list[bool]
    is_exact: bool = True


class ChatTemplate:
    """Chat template of a tokenizer, for rendering and tokenizing conversations.

    Args:
        tokenizer: tokenizer; its `chat_template` is set to the template in use.
        given: Jinja template that replaces the tokenizer's; default: the tokenizer's, or DEFAULT (after BOS, if the
            tokenizer adds it by default) if it has none.

    Attributes:
        notes: notes for the user if the template is not the tokenizer's.

    Raises:
        InputError: without `given`, if the tokenizer has neither template nor EOS, or several templates.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", given: str | None = None) -> None:
        self._tokenizer = tokenizer
        self.notes: list[str] = []
        if given is not None:
            tokenizer.chat_template = given
            self.notes.append("the chat template is read from --chat-template")
        elif not tokenizer.chat_template:
            if tokenizer.eos_token is None:
                raise InputError(
                    "the tokenizer has neither a chat template nor an EOS token: pass --chat-template FILE"
                )
            tokenizer.chat_template = ("{{ bos_token }}" if default_prefix(tokenizer) else "") + DEFAULT
            self.notes.append(
                "the model has no chat template, so sinklab's is used: a line `role:` and the content of each message, "
                "with EOS after the assistant's"
            )
        if isinstance(tokenizer.chat_template, dict):
            raise InputError("the tokenizer has several chat templates: pass one of them as --chat-template FILE")
        self._is_marked = MARK.search(str(tokenizer.chat_template)) is not None

    def tokenize(self, messages: list[Message], where: str) -> TokenizedChat:
        """Tokenize a conversation such that no token crosses a boundary of the assistant's text.

        Raises:
            InputError: if the template fails, or the assistant's text is not rendered, cannot be located, cannot be
                tokenized separately from adjacent text, or has no tokens; the error message begins with `where`.
        """
        whole = self._rendered(messages, where)
        spans = whole.marked if self._is_marked else list(self._spans(messages, whole.text, where))
        if not any(whole.text[start:end].strip() for start, end in spans):
            raise InputError(
                f"{where}: the chat template renders none of the assistant's text, or none between its "
                f"{{% generation %}} marks: pass another template as --chat-template FILE"
            )
        ids: list[int] = []
        is_trained: list[bool] = []
        start, before, is_exact = 0, list[int](), True
        for end, trained in [*((cut, i % 2 == 1) for i, cut in enumerate(chain(*spans))), (len(whole.text), False)]:
            until = self._encode(whole.text[:end])
            added = self._added(before, until, whole.text[start:end], where)
            if trained:
                is_exact &= self._decode(added).strip() == whole.text[start:end].strip()
            ids += added
            is_trained += [trained] * len(added)
            start, before = end, until
        if not any(is_trained):
            raise InputError(
                f"{where}: the model's tokenizer returns no tokens for the assistant's text: remove the conversation"
            )
        return TokenizedChat(ids, is_trained, is_exact)

    def _added(self, before: list[int], until: list[int], piece: str, where: str) -> list[int]:
        """Return the tokens of `piece`, given those of the text before it (`before`) and up to its end (`until`)."""
        if until[: len(before)] == before:
            return until[len(before) :]
        end = str(self._tokenizer.eos_token or "")  # tokenizers add no space after EOS
        for found in (self._encode(piece), self._encode(end + piece)[len(self._encode(end)) :]):
            if self._decode(before + found) == self._decode(until):
                return found
        raise InputError(
            f"{where}: the model's tokenizer merges the assistant's text with adjacent text at {piece[:20]!r}, and "
            "separate tokenization would change characters: pass a template with a special token at the boundary as "
            "--chat-template FILE, or remove the conversation"
        )

    def _encode(self, text: str) -> list[int]:
        read: Any = self._tokenizer(text, add_special_tokens=False, verbose=False)
        return list(read["input_ids"])

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def _spans(self, messages: list[Message], text: str, where: str) -> Iterator[tuple[int, int]]:
        """Yield the character span (start, end) in `text` of each assistant message."""
        for i, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before = self._rendered(messages[:i], where, generation_prompt=True).text
            after = self._rendered(messages[: i + 1], where).text
            if not (after.startswith(before) and text.startswith(after)):
                raise InputError(
                    f"{where}: the model's chat template does not mark the assistant's text, and does not render the "
                    f"messages up to {i + 1} as a prefix of the conversation, so this text cannot be located: pass a "
                    "template with {% generation %}..{% endgeneration %} around it as --chat-template FILE"
                )
            yield len(before), len(after)

    def _rendered(self, messages: list[Message], where: str, generation_prompt: bool = False) -> Rendered:
        return render_chat(self._tokenizer, messages, where, generation_prompt=generation_prompt, remedy=REMEDY)


def read_chats(path: Path, template: ChatTemplate, length: int, seed: int) -> tuple[list[TokenizedChat], str]:
    """Read and tokenize all conversations of a file.

    Args:
        length: maximum length in tokens.
        seed: random seed of the shuffle.

    Returns:
        The shuffled, truncated conversations that have assistant tokens after the first token, and a note with the
        numbers of all conversations, truncated ones among those returned, excluded ones, those in which the tokenizer
        changes the assistant's text, excluded ones included, and rows without a conversation.

    Raises:
        InputError: if the file cannot be read or has no conversations, or a conversation has no assistant text or fails
            in the template or tokenizer; the message names the line.
    """
    chats, counts = [], ReadCounts()
    for messages, where in read_conversations(path, counts):
        if not any(message["role"] == ASSISTANT and (message["content"] or "").strip() for message in messages):
            raise InputError(
                f'{where}: no message with role "{ASSISTANT}" has text to train on: remove the conversation'
            )
        chats.append(template.tokenize(messages, where))
    if not chats:
        raise InputError(f"{path} contains no conversation: pass a file whose rows have `messages`")
    taught = [one for one in chats if any(one.is_trained[1:length])]
    note = (
        f"{plural(len(chats), 'conversation')}, {sum(len(one.ids) > length for one in taught):,} of them truncated to "
    )
    note += f"{length:,} tokens"
    if silent := len(chats) - len(taught):
        note += f", {silent:,} excluded because no assistant tokens remain"
    if inexact := sum(not one.is_exact for one in chats):
        note += f"; in {inexact:,} the tokenizer drops or changes characters of the assistant's text"
    note += "".join(f"; {one}" for one in counts.notes())
    order = torch.randperm(len(taught), generator=torch.Generator().manual_seed(seed)).tolist()
    return [TokenizedChat(taught[i].ids[:length], taught[i].is_trained[:length]) for i in order], note


def first_tokens(chats: Sequence[TokenizedChat], sequences: int, length: int) -> Tensor:
    """Return the first `length` tokens of at most `sequences` conversations that are long enough, (N, T).

    Raises:
        InputError: if no conversation is long enough.
    """
    long_enough = [chat.ids[:length] for chat in chats if len(chat.ids) >= length][:sequences]
    if not long_enough:
        raise InputError(
            f"none of the {len(chats)} held-out conversations has the {length} tokens required by the sink metric: "
            "lower --sink-length, raise --held-out, or pass the text for the metric as --text FILE"
        )
    return torch.tensor(long_enough)


LIBRARIES = ("torch", "transformers", "trl", "accelerate")


@dataclass(frozen=True)
class TuneSources:
    """Input files of a tuning run.

    Attributes:
        chats: file of conversations.
        text: text file for the sink metric; None for the held-out conversations.
        template: file with a chat template that replaces the model's; None for the model's.
    """

    chats: Path
    text: Path | None = None
    template: Path | None = None


@dataclass(frozen=True)
class SftDataset:
    """Loaded model and its tuning data.

    Attributes:
        trained, held_out: tokenized training and held-out conversations.
        tokens_NT: tokens for the sink metric, (N, T).
        tuning: content of sft.json before the first update; all settings are in `tuning.asked`.
    """

    model: Model
    trained: list[TokenizedChat]
    held_out: list[TokenizedChat]
    tokens_NT: Tensor
    tuning: Tuning


def prepare_dataset(model: str, sources: TuneSources, options: TuneOptions, loading: Loading) -> SftDataset:
    """Load the model, tokenize the conversations and the text of the sink metric, and return them with all settings.

    Settings that `options` leaves unset are derived from the model and the conversations.

    Raises:
        InputError: if the model, a file or an option is unusable.
        SinklabError: if no checkpoint of a run is valid.
    """
    try:
        given = None if sources.template is None else sources.template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--chat-template {sources.template} cannot be read: {error}") from error
    opened = open_trainable(model, loading, options.length or 0)
    template = ChatTemplate(opened.tokenizer, given)
    length = options.length or min(LONGEST, opened.adapter.limit or LONGEST)
    usable, counts = read_chats(sources.chats, template, length, options.seed)
    count = held_out_for(options, len(usable))
    held_out, trained = usable[:count], usable[count:]
    settings = settings_for(options, length, count, len(trained))
    read = ReadCounts()
    if sources.text is None:
        tokens_NT = first_tokens(held_out, settings.sequences, settings.sink_length)
    else:
        rows = natural_text(
            sources.text,
            opened.encoder(),
            sequences=settings.sequences,
            length=settings.sink_length,
            fewer=True,
            render=opened.conversations().render,
            counts=read,
        )
        tokens_NT = opened.arrange(token_rows(rows), len(rows[0].prefix), None)
    notes = [*opened.notes, *template.notes, counts, *read.notes()]
    if opened.step is not None:
        data = load_recipe(str(Path(opened.name) / "recipe.yaml")).data
        notes.insert(0, f"the checkpoint of the run is from step {opened.step:,}")
        if data.fixed_token is not None or data.random_tokens is not None:
            notes.append(
                "the run was trained with data.fixed_token or data.random_tokens, which are not applied to the "
                "conversations"
            )
    if sources.text is not None:
        notes += notes_on_folder(expanded(str(sources.text)))
    if len(tokens_NT) < settings.sequences:
        notes.append(
            f"the sink metric uses {len(tokens_NT)} of the requested {settings.sequences} sequences: the text or the "
            "held-out conversations do not contain more of this length"
        )
    tuning = Tuning(
        model=opened.name,
        architecture=type(opened.module).__name__,
        parameters=sum(parameter.numel() for parameter in opened.module.parameters()),
        asked=TuneManifest(
            **dict(settings),
            files=opened.files,
            data=sha256_of(sources.chats),
            sink_tokens=hashlib.sha256(tokens_NT.to(torch.int64).numpy().tobytes()).hexdigest(),
            chat_template=given,
        ),
        conversations=len(trained),
        trained_tokens=sum(sum(chat.is_trained[1:]) for chat in trained),
        sequences=len(tokens_NT),
        notes=notes,
        versions={name: version(name) for name in LIBRARIES},
    )
    return SftDataset(opened, trained, held_out, tokens_NT, tuning)


def open_trainable(name: str, loading: Loading, length: int) -> Model:
    """Load a Hugging Face model, or the exported model of a run, with float32 weights for training.

    Raises:
        InputError: if the model cannot be loaded, its weights are quantised, or several GPUs are visible or requested.
        SinklabError: as `open_model`.
    """
    if loading.device == DEVICE_MAP:
        raise InputError("--device map is not supported, because tuning uses one device: use auto, cpu or cuda")
    if pick_device(loading.device).type == "cuda" and torch.cuda.device_count() > 1:
        raise InputError("tuning uses one GPU, but several are visible: select one, as in CUDA_VISIBLE_DEVICES=0")
    model = open_model(name, replace(loading, dtype="float32"), as_transformers=True, length=length)
    if method := model.adapter.quantised:
        raise InputError(
            f"the weights of {name} are quantised ({method}) and cannot be trained: use the unquantised model"
        )
    return model
