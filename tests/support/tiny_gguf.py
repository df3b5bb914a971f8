"""The same tiny random Llama twice: as a directory of transformers, and as a .gguf file, written tensor by tensor."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from tiny_models import tiny_model

WIDTH, HEADS, KEY_HEADS = 64, 4, 2
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GPT_OSS_PARTS = {"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"}


def needed() -> Any:
    """The package gguf; the test is skipped where it, or accelerate, is not installed."""
    pytest.importorskip("accelerate", reason="needs accelerate (extra gguf)")
    return pytest.importorskip("gguf", reason="needs gguf (extra gguf)")


def llama(folder: Path, *, bos: bool = False, template: str = "") -> Path:
    """A directory with a Llama of 2 layers, whose tokenizer may put <s> first and have a chat template."""
    tokenizer: Any = hf.AutoTokenizer.from_pretrained(tiny_model(folder, bos=bos, template=template))
    config = hf.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    hf.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def as_gguf(
    model: Path,
    path: Path,
    kind: str = "F32",
    *,
    architecture: str = "llama",
    tensors_in_a_file: int = 0,
    scaled: bool = False,
) -> Path:
    """Write the Llama of a directory as llama.cpp does: matrices of that kind, everything else in float32.

    Args:
        architecture: name of the architecture in the file.
        tensors_in_a_file: if not 0, the model is split into files of this many tensors, named PATH-00001-of-00003.gguf.
        scaled: with factors for its rotary frequencies, as Llama 3.1 has.
    """
    gguf = needed()
    config = hf.AutoConfig.from_pretrained(model)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_in_a_file)
    writer.add_name("Tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, model)
    for name, tensor in hf.AutoModelForCausalLM.from_pretrained(model).state_dict().items():
        array, called = tensor.numpy(), _name(name)
        if "attn_q." in called or "attn_k." in called:
            array = _interleaved(array, HEADS if "attn_q." in called else KEY_HEADS)
        as_it_is = kind == "F32" or array.ndim < 2
        packed = array if as_it_is else gguf.quants.quantize(array, gguf.GGMLQuantizationType[kind])
        writer.add_tensor(called, packed, raw_dtype=None if as_it_is else gguf.GGMLQuantizationType[kind])
    if scaled:
        writer.add_tensor("rope_freqs.weight", np.ones(WIDTH // HEADS // 2, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def windowed_as_gguf(model: Path, path: Path, sinks: bool = True, **altered: Any) -> Path:
    """Write a Gemma 2 or gpt-oss of a directory as llama.cpp does, in float32.

    Args:
        sinks: whether gpt-oss has its sink logits; else they are so low that no query attends to them.
        altered: values of its config.
    """
    gguf = needed()
    config: Any = hf.AutoConfig.from_pretrained(model)
    config.update(altered)
    is_gemma = config.model_type == "gemma2"
    writer = gguf.GGUFWriter(path, "gemma2" if is_gemma else "gpt-oss")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_sliding_window(config.sliding_window)
    if is_gemma:
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    else:
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.intermediate_size)
    _add_tokenizer(writer, model)
    for name, tensor in hf.AutoModelForCausalLM.from_pretrained(model).state_dict().items():
        layer = ".".join(name.split(".")[2:3])
        if name == "lm_head.weight" and is_gemma:
            continue
        if name.endswith("sinks"):
            value = tensor if sinks else torch.full_like(tensor, -1e4)
            writer.add_tensor(f"blk.{layer}.attn_sinks.weight", value.numpy())
        elif "experts" in name:
            kind = "bias" if name.endswith("bias") else "weight"
            value = tensor if kind == "bias" else tensor.mT
            parts = {"down": value} if "down" in name else {"gate": value[:, ::2], "up": value[:, 1::2]}
            for part, one in parts.items():
                writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.{kind}", one.contiguous().numpy())
        else:
            value = tensor + 1 if is_gemma and "norm" in name else tensor
            writer.add_tensor(_name(name, GEMMA_NORMS if is_gemma else GPT_OSS_PARTS), value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _name(name: str, other: Mapping[str, str] = {}) -> str:
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in whole or name == "lm_head.weight":
        return whole.get(name, "output.weight")
    layer, _, inside = name.removeprefix("model.layers.").partition(".")
    part, _, kind = inside.rpartition(".")
    return f"blk.{layer}.{(NAMES | dict(other))[part]}.{kind}"


def _interleaved(array: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows, as llama.cpp rotates neighbouring channels and transformers those half a head apart."""
    return array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)


def _add_tokenizer(writer: Any, model: Path) -> None:
    tokenizer: Any = hf.AutoTokenizer.from_pretrained(model)
    words = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    merges = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([3 if i < 3 else 1 for i in range(len(words))])  # control, normal
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(tokenizer("a").input_ids[0] == 1)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)
