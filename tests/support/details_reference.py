"""A reference for the details, from whole matrices and one head at a time, independent of sinklab."""

import math
import sys
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask


@dataclass
class Captured:
    """Queries, keys and values of every attention layer, (B, heads, T, width), in the order of the calls."""

    queries: list[Tensor] = field(default_factory=list)
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


@torch.no_grad()
def captured(model: Any, tokens: Tensor) -> Captured:
    """Queries, keys and values that a Hugging Face model passes to its attention function."""
    found = Captured()

    def capture(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Any:
        found.queries.append(q.double())
        found.keys.append(k.double().repeat_interleave(q.shape[1] // k.shape[1], 1))
        found.values.append(v.double().repeat_interleave(q.shape[1] // v.shape[1], 1))
        return sys.modules[type(module).__module__].eager_attention_forward(module, q, k, v, mask, **options)

    AttentionInterface.register("capture", capture)
    AttentionMaskInterface.register("capture", eager_mask)
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation("capture")
        model(tokens, use_cache=False)
    finally:
        model.set_attn_implementation(before)
        AttentionInterface._global_mapping.pop("capture")
        AttentionMaskInterface._global_mapping.pop("capture")
    return found


@torch.no_grad()
def stream_of(model: Any, tokens: Tensor, blocks: Any) -> Tensor:
    """The residual stream before the first block and after each: (N, blocks + 1, T, channels), float64."""
    found: list[Any] = []
    handles = [blocks[0].register_forward_pre_hook(lambda _, args: found.append(args[0]))]
    handles += [
        block.register_forward_hook(lambda _, __, out: found.append(out[0] if isinstance(out, tuple) else out))
        for block in blocks
    ]
    model(tokens)
    for handle in handles:
        handle.remove()
    return torch.stack(found, 1).double()


class Read(NamedTuple):
    """Tensors of a family's own eager forward pass, float64.

    Attributes:
        attention: the matrices (N, L, H, T, T).
        seen: queries, keys and values; None for BLOOM, which does not call the attention interface.
        values: of every layer.
        hidden: the residual stream (N, blocks + 1, T, channels).
    """

    attention: Tensor
    seen: Captured | None
    values: list[Tensor]
    hidden: Tensor


@torch.no_grad()
def read_eagerly(model: Any, eager: Any, tokens: Tensor) -> Read:
    """One forward pass of a model of two blocks, and of the same weights behind eager attention."""
    blocks = next(m for m in eager.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 2)
    hidden = stream_of(eager, tokens, blocks)
    output = eager(tokens, output_attentions=True, use_cache=True)
    attention = torch.stack(output.attentions, 1).double()
    if eager.config.model_type == "bloom":
        return Read(attention, None, [layer.values.double() for layer in output.past_key_values.layers], hidden)
    seen = captured(model, tokens)
    return Read(attention, seen, seen.values, hidden)


def entropy(A: Tensor) -> float:
    """Mean entropy over queries; attention that no key receives counts as that of a sink logit."""
    total = 0.0
    for row in A.tolist():
        rest = max(0.0, 1 - sum(row))
        total -= sum(a * math.log(a) for a in [*row, rest] if a > 1e-9)
    return total / len(A)


def by_distance(A: Tensor) -> list[float]:
    T = len(A)
    buckets: dict[int, float] = {}
    for t in range(T):
        for k in range(t + 1):
            start = 0 if t == k else 2 ** int(math.log2(t - k))
            buckets[start] = buckets.get(start, 0.0) + float(A[t, k])
    return [buckets[start] / T for start in sorted(buckets)]


def by_query(A: Tensor) -> tuple[list[float], list[float]]:
    """Attention to the first key, and mean attention to another key, by range of queries."""
    T = len(A)
    first: dict[int, list[float]] = {}
    rest: dict[int, list[float]] = {}
    for t in range(1, T + 1):
        bucket = 2 ** int(math.log2(t))
        first.setdefault(bucket, []).append(float(A[t - 1, 0]))
        others = [float(A[t - 1, k]) for k in range(1, t)]
        rest.setdefault(bucket, []).append(sum(others) / len(others) if others else 0.0)
    return [sum(x) / len(x) for x in first.values()], [sum(x) / len(x) for x in rest.values()]


def angles(q: Tensor, k: Tensor, seen: Tensor) -> tuple[list[float], list[float]]:
    """Mean cosine and norm product of every key, over the queries that see it."""
    T = len(q)
    cosines, products = [], []
    for key in range(T):
        queries = [t for t in range(key, T) if seen[t, key]]
        norms = [float(q[t].norm() * k[key].norm()) for t in queries]
        cosines.append(sum(float(q[t] @ k[key]) / n for t, n in zip(queries, norms, strict=True)) / len(queries))
        products.append(sum(norms) / len(queries))
    return cosines, products


def kurtosis(h: Tensor) -> float:
    centred = h - h.mean()
    return float((centred**4).mean() / (centred**2).mean() ** 2)


def matrix_entropy(h: Tensor) -> float:
    """From the singular values of one sequence's hidden states (T, channels)."""
    squares = [float(s) ** 2 for s in torch.linalg.svdvals(h)]
    shares = [square / sum(squares) for square in squares]
    return -sum(p * math.log(p) for p in shares if p > 0) / math.log(min(h.shape))


def secondary(A: Tensor, eps: float) -> list[int]:
    """Positions 5 .. T / 2 with an importance above eps, 1-based."""
    T = len(A)
    return [k for k in range(5, T // 2 + 1) if float(A[k - 1 :, k - 1].mean()) > eps]


@dataclass
class Sink:
    """A token other than the first that heads attend to, 1-based."""

    sequence: int
    position: int
    token: int
    heads: float
    importance: float
    block: int
    alignment: float
    layers: list[int]
    alike: list[int]


def sinks(A_NLHTT: Tensor, hidden_NMTC: Tensor, tokens_NT: Tensor, eps: float) -> list[Sink]:
    """All sinks at positions 2 .. T / 2, strongest first, of sequences of at most 31 tokens."""
    N, L, H, T, _ = A_NLHTT.shape
    assert T < 32
    found = []
    for n in range(N):
        norms = hidden_NMTC[n].norm(dim=-1)
        ratios = [float(norm[0] / norm[1:].mean()) for norm in norms]
        block = max(range(len(ratios)), key=lambda m: ratios[m])
        for k in range(1, T // 2):
            alphas = [[float(A_NLHTT[n, layer, h, k:, k].mean()) for h in range(H)] for layer in range(L)]
            above = [sum(alpha > eps for alpha in one) for one in alphas]
            cosines = [float(torch.cosine_similarity(h[k], h[0], dim=0)) for h in hidden_NMTC[n]]
            if not sum(above) and not (cosines[block] > 0.9 and ratios[block] >= 3):
                continue
            found.append(
                Sink(
                    n + 1,
                    k + 1,
                    int(tokens_NT[n, k]),
                    100 * sum(above) / (L * H),
                    sum(map(sum, alphas)) / (L * H),
                    block,
                    cosines[block],
                    [layer + 1 for layer in range(L) if above[layer]],
                    [m for m, cosine in enumerate(cosines) if cosine > 0.9],
                )
            )
    return sorted(found, key=lambda one: (-one.heads, -one.importance))


def reference(
    A_NLHTT: Tensor, seen: Captured | None, values: list[Tensor], hidden_NMTC: Tensor, eps: float
) -> dict[str, Tensor]:
    """All arrays of the details, by name."""
    N, L, H, T, _ = A_NLHTT.shape
    heads = [(n, layer, h) for n in range(N) for layer in range(L) for h in range(H)]

    def over_sequences(function: Any) -> Tensor:
        return torch.tensor([function(*at) for at in heads]).unflatten(0, (N, L, H)).mean(0)

    found = {
        "entropy": over_sequences(lambda n, layer, h: entropy(A_NLHTT[n, layer, h])),
        "by_distance": over_sequences(lambda n, layer, h: by_distance(A_NLHTT[n, layer, h])),
        "first_by_query": over_sequences(lambda n, layer, h: by_query(A_NLHTT[n, layer, h])[0]),
        "rest_by_query": over_sequences(lambda n, layer, h: by_query(A_NLHTT[n, layer, h])[1]),
        "secondary": over_sequences(lambda n, layer, h: 100.0 * bool(secondary(A_NLHTT[n, layer, h], eps))),
        "kurtosis": torch.tensor([[[kurtosis(h) for h in hs] for hs in place] for place in hidden_NMTC]).mean(0),
        "matrix_entropy": torch.tensor([[matrix_entropy(h) for h in hs] for hs in hidden_NMTC]).mean(0),
        "alignment": torch.cosine_similarity(hidden_NMTC, hidden_NMTC[:, :, :1], dim=-1).mean(0),
    }
    norms = torch.stack([v.norm(dim=-1).mean(0) for v in values])
    found["value_ratio"] = norms[..., 0] / norms[..., 1:].mean(-1)
    if seen is not None:
        both = over_sequences(
            lambda n, layer, h: angles(seen.queries[layer][n, h], seen.keys[layer][n, h], A_NLHTT[n, layer, h] > 0)
        )
        found["cosine"], found["norm_product"] = both.unbind(2)
    return found
