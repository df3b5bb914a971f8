"""Chat templates with the structure of common ones, rewritten, and tiny tokenizers and models for them.

Each has the features that affect the first tokens: whether BOS is written, how roles are marked, whether content is
stripped, the text after a special token, and generation blocks. `TEMPLATES` maps a name to (BOS, template).
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

LOOP, END = "{% for m in messages %}", "{% endfor %}"
CHATML = LOOP + "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}" + END
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
LEADING_SYSTEM = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}"
    "{% else %}{% set system = '' %}{% endif %}"
)
INST = (
    LOOP + "{% if m.role == 'user' %}{{ '[INST] ' + (system + '\n\n' if loop.first and system else '') + m.content + "
    "' [/INST]' }}{% else %}{{ ' ' + m.content + eos_token }}{% endif %}" + END
)
GEMMA = (
    LOOP + "{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}" + END
)
HEADERS = (
    LOOP
    + "{% set content = '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' %}"
    "{% if loop.first %}{% set content = bos_token + content %}{% endif %}{{ content }}" + END
)
TURNS = LOOP + "{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}" + END

TEMPLATES: dict[str, tuple[str | None, str]] = {
    "llama-2": (
        "<s>",
        LEADING_SYSTEM + LOOP + "{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + m.content "
        "if loop.first and system else m.content %}{% if m.role == 'user' %}"
        "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
        "{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}" + END,
    ),
    "llama-3": ("<|begin_of_text|>", HEADERS),
    "llama-3.1": (
        "<|begin_of_text|>",
        "{{- bos_token }}" + LEADING_SYSTEM + "{{- '<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge: "
        "2023\n\n' + system | trim + '<|eot_id|>' }}" + HEADERS.replace("{% set content = bos_token + content %}", ""),
    ),
    "mistral": ("<s>", "{{ bos_token }}" + LEADING_SYSTEM + INST),
    "mixtral": ("<s>", NO_SYSTEM + "{{ bos_token }}{% set system = '' %}" + INST.replace("' [/INST]'", "'[/INST]'")),
    "gemma-2": ("<bos>", "{{ bos_token }}" + NO_SYSTEM + GEMMA),
    "gemma-3": (
        "<bos>",
        "{{ bos_token }}"
        + LEADING_SYSTEM
        + LOOP
        + "{{ '<start_of_turn>' + m.role + '\n' + (system + '\n\n' if loop.first "
        "else '') + m.content | trim + '<end_of_turn>\n' }}" + END,
    ),
    "qwen-2": (
        None,
        LOOP + "{% if loop.first and m.role != 'system' %}{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}"
        "{% endif %}"
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}" + END,
    ),
    "qwen-2.5": (
        None,
        "{%- if messages[0].role == 'system' %}\n    {{- '<|im_start|>system\n' + messages[0].content "
        "+ '<|im_end|>\n' }}\n{%- endif %}\n{%- for m in messages %}\n    {%- if m.role != 'system' %}\n"
        "        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}\n"
        "    {%- endif %}\n{%- endfor %}",
    ),
    "qwen-3": (
        None,
        LOOP + "{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.last %}"
        "{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m.content.strip('\n') + '<|im_end|>\n' }}" + END,
    ),
    "phi-3": ("<s>", LOOP + "{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}" + END + "{{ eos_token }}"),
    "phi-4": ("<|endoftext|>", LOOP + "{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}" + END),
    "chatml": ("<s>", CHATML),
    "zephyr": ("<s>", TURNS),
    "tinyllama": ("<s>", TURNS.replace("m.content", "m.content | trim")),
    "vicuna": (
        "<s>",
        "{{ bos_token }}" + LEADING_SYSTEM + "{{ system + ' ' }}" + LOOP + "{% if m.role == 'user' %}"
        "{{ 'USER: ' + m.content.strip() + ' ' }}{% else %}{{ 'ASSISTANT: ' + m.content.strip() + eos_token }}"
        "{% endif %}" + END,
    ),
    "alpaca": (
        "<s>",
        LEADING_SYSTEM + "{{ system + '\n\n' }}" + LOOP + "{% if m.role == 'user' %}"
        "{{ '### Instruction:\n' + m.content + '\n\n' }}{% else %}{{ '### Response:\n' + m.content + '\n\n' }}"
        "{% endif %}" + END,
    ),
    "deepseek": (
        "<｜begin▁of▁sentence｜>",
        "{{ bos_token }}" + LEADING_SYSTEM + "{{ system }}" + LOOP + "{% if m.role == 'user' %}"
        "{{ '<｜User｜>' + m.content }}{% else %}{{ '<｜Assistant｜>' + m.content + '<｜end▁of▁sentence｜>' }}"
        "{% endif %}" + END,
    ),
    "command-r": (
        "<BOS_TOKEN>",
        "{{ bos_token }}" + LOOP + "{{ '<|START_OF_TURN_TOKEN|><|' + m.role | upper + '_TOKEN|>' + m.content.strip() + "
        "'<|END_OF_TURN_TOKEN|>' }}" + END,
    ),
    "falcon-instruct": (
        None,
        LOOP + "{% if not loop.first %}{{ '\n' }}{% endif %}{{ m.role | capitalize + ': ' + m.content.strip() }}" + END,
    ),
    "olmo": (
        "<|endoftext|>",
        "{{ bos_token }}" + TURNS.replace("eos_token", "(eos_token if m.role == 'assistant' else '')"),
    ),
    "smollm-2": ("<|im_start|>", CHATML),
    "openchat": (
        "<s>",
        "{{ bos_token }}"
        + LOOP
        + "{{ 'GPT4 Correct ' + m.role.title() + ': ' + m.content + '<|end_of_turn|>' }}"
        + END,
    ),
    "granite": (
        "<|endoftext|>",
        LOOP + "{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' }}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content + '<|end_of_text|>' }}{% endgeneration %}{% else %}{{ m.content + '<|end_of_text|>' }}"
        "{% endif %}\n" + END,
    ),
    "gpt-oss": (
        "<|startoftext|>",
        "{{ '<|start|>system<|message|>You are ChatGPT.<|end|>' }}" + LOOP + "{% if m.role == 'assistant' %}"
        "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') }}"
        "{% else %}{{ '<|start|>' + ('developer' if m.role == 'system' else m.role) + '<|message|>' + m.content + "
        "'<|end|>' }}{% endif %}" + END,
    ),
    "glm-4": (None, "{{ '[gMASK]<sop>' }}" + LOOP + "{{ '<|' + m.role + '|>\n' + m.content }}" + END),
}
WITHOUT_SYSTEM = ("mixtral", "gemma-2")
SPECIAL = [
    "<unk>", "<s>", "</s>", "<|endoftext|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<|im_start|>", "<|im_end|>", "<|im_sep|>", "<|end|>",
    "<|user|>", "<|assistant|>", "<|system|>", "<think>", "</think>", "<｜begin▁of▁sentence｜>", "<｜User｜>",
    "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>",
    "<|USER_TOKEN|>", "<|end_of_turn|>", "<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|startoftext|>",
    "<|start|>", "<|message|>", "<|channel|>", "<|return|>", "[gMASK]", "<sop>",
]  # fmt: skip
SENTENCES = [
    "The cat sat on the mat in 2023, and didn't move.",
    "  What is 12 * 34?\nThink  about it. ",
    "user system assistant model: [INST] ### Instruction: café, naïve «words»\n\nHuman",
]


def conversations(system: bool = True) -> list[list[dict[str, str]]]:
    """Conversations of two turns, with spaces and line breaks around the content."""
    turns = [
        [
            {"role": "user", "content": f" {SENTENCES[i % 3]}"},
            {"role": "assistant", "content": f"{SENTENCES[(i + 1) % 3]}\n"},
            {"role": "user", "content": f"{SENTENCES[(i + 2) % 3]} {i}"},
            {"role": "assistant", "content": f"{i} {SENTENCES[i % 3]}"},
        ]
        for i in range(3)
    ]
    return [[{"role": "system", "content": " Be brief. "}, *one] if system else one for one in turns]


def chats_of(path: Path, talks: list[list[dict[str, str]]]) -> Path:
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks), encoding="utf-8")
    return path


def trained_backend(kind: str) -> Tokenizer:
    """A BPE tokenizer trained on a few sentences, byte-level or with `▁` for spaces (metaspace, as sentencepiece's)."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=kind == "metaspace"))
    if kind == "byte-level":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        backend.decoder = decoders.Metaspace(prepend_scheme="always")
        alphabet = [chr(code) for code in range(32, 127)] + ["\n"]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(SENTENCES * 3, trainer)
    return backend


def template_tokenizer(
    backend: Tokenizer, bos: str | None, template: str, prepends: bool = False
) -> hf.PreTrainedTokenizerFast:
    """A tokenizer with this chat template; `prepends`: it puts BOS before plain text."""
    own = Tokenizer.from_str(backend.to_str())
    if prepends and bos is not None:
        special: Any = [(bos, own.token_to_id(bos))]
        own.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=special)
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=own, bos_token=bos, eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = template
    return tokenizer


def llama(folder: Path, tokenizer: hf.PreTrainedTokenizerFast) -> Path:
    """A folder with this tokenizer and a random Llama of 1 layer."""
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    special: dict[str, Any] = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = hf.LlamaConfig(vocab_size=len(tokenizer), **sizes, **special)
    torch.manual_seed(0)
    hf.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
