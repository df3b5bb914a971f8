"""A reference for KV caches, one token and one head at a time, without code of sinklab's attention.

A layer keeps the key before rotation, the value and the position in the text of each token. A policy returns the
positions that stay in the cache before each step.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sinklab.model.transformer import Transformer

Policy = Callable[["HeadCache", int], list[int]]  # (cache, the query that comes next) -> positions that stay


@dataclass
class HeadCache:
    """KV cache of one KV head, by position in the text."""

    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    attention: dict[int, float] = field(default_factory=dict)  # summed over queries and over heads that share the cache
    latest: dict[int, float] = field(default_factory=dict)  # of the latest query, summed over all heads of the layer

    def keep(self, positions: Sequence[int]) -> None:
        for store in (self.keys, self.values, self.attention, self.latest):
            for gone in set(store) - set(positions):
                del store[gone]


def first_and_recent(size: int, first: int) -> Policy:
    """Keep so many keys that the cache has `size` together with the next query's own key."""

    def stay(cache: HeadCache, t: int) -> list[int]:
        return [s for s in sorted(cache.keys) if s < first or s > t - (size - first)]

    return stay


def heavy_hitters(size: int, barred: int = 0) -> Policy:
    def stay(cache: HeadCache, t: int) -> list[int]:
        held = sorted(cache.keys)
        if len(held) < size:
            return held
        recent = max(1, size // 2)
        late = [s for s in held if s > t - recent]
        early = [s for s in held if s <= t - recent and s >= barred]
        early.sort(key=lambda s: -cache.attention[s])
        return late + early[: size - recent]

    return stay


def latest_attention(size: int) -> Policy:
    def stay(cache: HeadCache, t: int) -> list[int]:
        held = sorted(cache.keys, key=lambda s: -cache.latest[s])
        return held if len(held) < size else held[: size - 1]

    return stay


def distinct_keys(size: int, turned: int) -> Policy:
    """Keys with the smallest cosine to the mean of all unit keys, after rotation of their last `turned` numbers."""

    def stay(cache: HeadCache, t: int) -> list[int]:
        keys = {s: last_rotated(key, s, turned) if turned else key for s, key in cache.keys.items()}
        units = {s: key / key.norm() for s, key in keys.items()}
        mean = sum(units.values()) / len(units) if units else 0
        held = sorted(units, key=lambda s: float(torch.cosine_similarity(units[s], mean, dim=0)))  # type: ignore[arg-type]
        return held if len(held) < size else held[: size - 1]

    return stay


def last_rotated(x_D: Tensor, position: int, width: int) -> Tensor:
    """Rotate the last `width` numbers and leave the others unchanged."""
    return torch.cat([x_D[: len(x_D) - width], rotated(x_D[len(x_D) - width :], position)])


def rotated(x_D: Tensor, position: int, theta: float = 10000.0) -> Tensor:
    half = len(x_D) // 2
    out = torch.empty_like(x_D)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x_D))
        out[i] = x_D[i] * math.cos(angle) - x_D[i + half] * math.sin(angle)
        out[i + half] = x_D[i] * math.sin(angle) + x_D[i + half] * math.cos(angle)
    return out


def weights(kind: str, logits: list[float], bias: float | None) -> list[float]:
    """Attention weights of the keys and of the bias, if any, as the last, by the formula of each operation."""
    z = [*logits, bias] if bias is not None else logits
    if kind == "sigmoid":
        return [1 / (1 + math.exp(-x)) for x in z]
    if kind == "softpick":
        total = sum(abs(math.exp(x) - 1) for x in z) + 1e-6
        return [max(math.exp(x) - 1, 0) / total for x in z]
    total = sum(math.exp(x) for x in z)
    return [math.exp(x) / total for x in z]


@torch.no_grad()
def streamed(model: Transformer, tokens_T: Tensor, policy: Policy, in_cache: bool) -> Tensor:
    """The hidden states (T, E) of one of our models in float64, computed one token at a time.

    Args:
        in_cache: positions are those in the cache, not those in the text.
    """
    config: Any = model.config
    heads, groups, width, turned = config.heads, config.key_heads, config.query_width, config.rotary_width
    kind, rotary = config.attention.operation.kind, config.position.kind == "rotary"
    caches = [[HeadCache() for _ in range(groups)] for _ in model.blocks]
    stream = list(model.embedding(tokens_T))
    if model.sink_token is not None:
        stream = [*model.sink_token[0], *stream]
    states = []
    for t, x_E in enumerate(stream):
        for block, layer in zip(model.blocks, caches, strict=True):
            attention: Any = block.attention
            read_E = block.attention_norm(x_E)  # type: ignore[operator]
            if attention.latent is None:
                parts = attention.qkv(read_E).view(-1, width)
                queries, keys, values = parts[: -2 * groups], parts[-2 * groups : -groups], parts[-groups:]
            else:
                queries, keys, values = (x[0, :, 0] for x in attention.latent(read_E[None, None], None))
            for g, cache in enumerate(layer):
                cache.keep(policy(cache, t))
                cache.keys[t], cache.values[t], cache.attention[t] = keys[g], values[g], 0.0
            outputs = []
            latest: dict[int, float] = {}
            for h in range(heads):
                cache = layer[h * groups // heads]
                held = sorted(cache.keys)
                place = {s: i for i, s in enumerate(held)} if in_cache else {s: s for s in held}
                rows = []
                for query in queries.reshape(heads, -1, width)[h]:
                    q = last_rotated(query, place[t], turned) if rotary else query
                    logits = []
                    for s in held:
                        k = last_rotated(cache.keys[s], place[s], turned) if rotary else cache.keys[s]
                        term = -(2 ** (-8 * (h + 1) / heads)) * (place[t] - place[s])
                        logits.append(
                            float(q @ k) / math.sqrt(width) + (term if config.position.kind == "alibi" else 0)
                        )
                    bias = None
                    if attention.core.bias.key is not None:
                        bias = float(q @ attention.core.bias.key[h * groups // heads]) / math.sqrt(width)
                    if attention.core.bias.logit is not None:
                        bias = float(attention.core.bias.logit[h])
                    if attention.core.bias.off_by_one:
                        bias = 0.0
                    rows.append(weights(kind, logits, bias))
                row = rows[0]
                if kind == "differential_v2":
                    second = float(torch.sigmoid(read_E @ attention.weight_gate.weight[h]))
                    row = [one - second * other for one, other in zip(*rows, strict=True)]
                total = sum(map(abs, row)) or 1.0  # softpick may give a row of zeros
                for s, weight in zip(held, row, strict=False):
                    cache.attention[s] += abs(weight) / total
                    latest[s] = latest.get(s, 0.0) + abs(weight) / total
                outputs.append(sum(weight * cache.values[s] for s, weight in zip(held, row, strict=False)))
            for cache in layer:
                cache.latest = {s: latest[s] for s in cache.keys}
            joined = torch.cat([torch.as_tensor(out) for out in outputs])
            if attention.output_gate is not None:
                gate = torch.sigmoid(attention.output_gate.linear(read_E)).view(heads, -1)
                joined = (joined.view(heads, -1) * gate).flatten()
            x_E = x_E + attention.out(joined)
            x_E = x_E + block.ffn(block.ffn_norm(x_E))  # type: ignore[operator]
        states.append(model.final_norm(x_E))
    return torch.stack(states[model.leading :])
