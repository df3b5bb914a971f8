"""A Llama of transformers read token by token from a cache of keys before rotation, one head at a time."""

import math
from typing import Any

import torch
from streaming_reference import HeadCache, Policy, rotated
from torch import Tensor


@torch.no_grad()
def streamed_llama(model: Any, tokens_T: Tensor, policy: Policy) -> Tensor:
    """Hidden states (T, E); positions are those in the cache."""
    config, body = model.config, model.model
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    width, theta = config.head_dim, config.rope_parameters["rope_theta"]
    caches = [[HeadCache() for _ in range(groups)] for _ in body.layers]
    states = []
    for t, token in enumerate(tokens_T):
        x_E = body.embed_tokens(token)
        for block, layer in zip(body.layers, caches, strict=True):
            read_E, part = block.input_layernorm(x_E), block.self_attn
            queries, keys, values = (
                projection(read_E).view(-1, width) for projection in (part.q_proj, part.k_proj, part.v_proj)
            )
            for g, cache in enumerate(layer):
                cache.keep(policy(cache, t))
                cache.keys[t], cache.values[t] = keys[g], values[g]
            outputs = []
            for h in range(heads):
                cache = layer[h * groups // heads]
                held = sorted(cache.keys)
                q = rotated(queries[h], len(held) - 1, theta)
                z = [float(q @ rotated(cache.keys[s], i, theta)) / math.sqrt(width) for i, s in enumerate(held)]
                total = sum(math.exp(x) for x in z)
                outputs.append(sum(math.exp(x) / total * cache.values[s] for x, s in zip(z, held, strict=True)))
            x_E = x_E + part.o_proj(torch.cat([torch.as_tensor(out) for out in outputs]))
            x_E = x_E + block.mlp(block.post_attention_layernorm(x_E))
        states.append(body.norm(x_E))
    return torch.stack(states)
