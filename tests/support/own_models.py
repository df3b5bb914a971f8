"""Small transformers of ours with one intervention each, tokens for them, and their attention written out."""

import math
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sinklab.model.config import ModelConfig
from sinklab.model.llama import llama_sizes, llama_weights
from sinklab.model.transformer import Transformer

LENGTH, VOCABULARY = 10, 32
SIZES = {"width": 32, "heads": 4, "ffn_width": 48, "vocab_size": VOCABULARY, "context": 16}

VARIANTS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "grouped keys": {"kv_heads": 2},
    "key bias": {"bias": {"kind": "k"}},
    "key and value bias": {"bias": {"kind": "kv"}},
    "sink token": {"bias": {"kind": "sink_token"}},
    "sigmoid": {"operation": {"kind": "sigmoid", "normalised": False}},
    "window": {"mask": {"kind": "window", "width": 4}},
    "prefix": {"mask": {"kind": "prefix", "length": 3}},
}


def own_model(variant: str) -> Transformer:
    changes = dict(VARIANTS[variant])
    heads = {"kv_heads": changes.pop("kv_heads")} if "kv_heads" in changes else {}
    config = ModelConfig.model_validate(
        {
            **SIZES,
            "layers": 2,
            "attention": changes,
            **heads,
        }
    )
    model = Transformer(config, seed=3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.mul_(40 if ".bias." in name or name == "sink_token" else 1.6)  # sharper than at the start
    return model


def llama_of(model: Transformer) -> LlamaForCausalLM:
    """A Llama of transformers with the weights of a plain model of ours."""
    llama = LlamaForCausalLM(LlamaConfig(**llama_sizes(model.config)))
    llama.load_state_dict(llama_weights(model))
    return llama.eval()


def own_tokens(sequences: int = 5) -> torch.Tensor:
    return torch.randint(VOCABULARY, (sequences, LENGTH), generator=torch.Generator().manual_seed(0))


def core_inputs(model: Any, tokens: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Queries, keys (repeated over groups) and values of every layer, as the cores see them."""
    seen: list[tuple[torch.Tensor, ...]] = []
    handles = [
        block.attention.core.register_forward_hook(lambda _, args, __: seen.append(args[:3])) for block in model.blocks
    ]
    with torch.no_grad():
        model(tokens)
    for handle in handles:
        handle.remove()
    queries, keys, values = zip(*seen, strict=True)
    return list(queries), [k.repeat_interleave(4 // k.shape[1], 1) for k in keys], list(values)


def attention_matrices(model: Any, variant: str, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Normalised scores of the real tokens (N, L, H, T, T), and the share of a bias in each row (N, L, H, T)."""
    queries, keys, _ = core_inputs(model, tokens)
    matrices, biases = [], []
    for layer, (q, k) in enumerate(zip(queries, keys, strict=True)):
        z = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        S = z.shape[-1]
        t, s = torch.arange(S)[:, None], torch.arange(S)
        seen = s <= t
        if variant == "window":
            seen &= s > t - 4
        if variant == "prefix":
            seen |= s < 3
        weights = z.sigmoid() if variant == "sigmoid" else z.exp()
        weights = weights * seen
        core = model.blocks[layer].attention.core
        if core.bias.key is not None:
            z_bias = (q * core.bias.key_per_head()[:, None]).sum(-1, keepdim=True) / math.sqrt(q.shape[-1])
            weights = torch.cat((z_bias.exp(), weights), -1)
        matrix = weights / weights.sum(-1, keepdim=True)
        if variant == "sink token":
            matrix = matrix[..., 1:, :]
        if core.bias.key is not None or variant == "sink token":
            biases.append(matrix[..., 0])
            matrix = matrix[..., 1:]
        matrices.append(matrix)
    return torch.stack(matrices, 1), torch.stack(biases, 1) if biases else None
