"""Tiny random Hugging Face models with tokenizers of their own, saved as real ones are, and a small text for them."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TEMPLATE = "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
REFUSING = "{{ raise_exception('no system role') }}"
WORDS = [f"{a}{b}" for a in ("red", "old", "big", "wet") for b in ("cat", "dog", "hat", "sea", "sky")]


def tiny_model(folder: Path, kind: str = "gpt2", *, seed: int = 0, bos: bool = False, template: str = "") -> Path:
    """A random model of 2 layers and 2 heads; `bos`: the tokenizer puts <s> first; `template`: its chat template."""
    tokenizer = _tokenizer(bos, template)
    sizes: dict[str, Any] = {"vocab_size": len(tokenizer), "bos_token_id": 1, "eos_token_id": 2}
    if kind == "gpt2":
        config: Any = hf.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=64, **sizes)
    else:
        config = hf.GPTNeoXConfig(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, **sizes
        )
    torch.manual_seed(seed)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def text_file(path: Path, documents: int = 12, seed: int = 0, words: int = 40) -> Path:
    """A .jsonl file of this number of documents, each of this number of words."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"text": " ".join(_words(words, seed + i))} for i in range(documents)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def chat_file(path: Path, conversations: int = 6) -> Path:
    """A .jsonl file of conversations."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": " ".join(_words(12, i))},
                {"role": "assistant", "content": " ".join(_words(12, i + 50))},
            ]
        }
        for i in range(conversations)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _words(count: int, seed: int) -> list[str]:
    return [WORDS[(seed * 7 + i * i * (seed + 3)) % len(WORDS)] for i in range(count)]


def _tokenizer(bos: bool, template: str) -> hf.PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([" ".join(_words(40, i)) for i in range(20)], trainer)
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    if template:
        tokenizer.chat_template = template
    return tokenizer
