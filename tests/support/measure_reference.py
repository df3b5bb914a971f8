"""A reference for the metric, from attention matrices and with explicit loops, independent of sinklab."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Reference:
    """alpha (sequences, layers, heads, T), percent per position, and the mean loss in nats."""

    importance: Tensor
    sink_rate: list[float]
    loss: float
    logits: Tensor


def importance_by_loops(attention_LHTT: Tensor) -> Tensor:
    """alpha[l, h, k] = mean over t = k..T of A[l, h, t, k]."""
    layers, heads, length, _ = attention_LHTT.shape
    alpha = torch.zeros(layers, heads, length)
    for layer in range(layers):
        for head in range(heads):
            for k in range(length):
                seen = [attention_LHTT[layer, head, t, k] for t in range(k, length)]
                alpha[layer, head, k] = sum(seen) / len(seen)
    return alpha


def uniform_ratio_by_loops(importance_NLHT: Tensor) -> list[float]:
    """Importance over that of a matrix whose rows are uniform over the tokens so far, mean over all but positions."""
    length = importance_NLHT.shape[-1]
    rows = [[1 / (t + 1) if k <= t else 0.0 for k in range(length)] for t in range(length)]
    uniform = [sum(rows[t][k] for t in range(k, length)) / (length - k) for k in range(length)]
    return [importance_NLHT[..., k].double().mean().item() / uniform[k] for k in range(length)]


def sink_rate_by_loops(importance_NLHT: Tensor, eps: float) -> list[float]:
    """The share of (sequence, layer, head) triples above eps, per position, in percent."""
    sequences, layers, heads, length = importance_NLHT.shape
    rates = []
    for k in range(length):
        above = 0
        for n in range(sequences):
            for layer in range(layers):
                for head in range(heads):
                    above += bool(importance_NLHT[n, layer, head, k] > eps)
        rates.append(100 * above / (sequences * layers * heads))
    return rates


@torch.no_grad()
def eager_reference(eager_model: Any, tokens_NT: Tensor, eps: float = 0.3) -> Reference:
    """Measure a model that was built with attn_implementation="eager", one sequence at a time."""
    importance, logits, losses = [], [], []
    for tokens_T in tokens_NT:
        output = eager_model(tokens_T[None], output_attentions=True, use_cache=False)
        importance.append(importance_by_loops(torch.cat(output.attentions)))
        logits.append(output.logits)
        log_p = output.logits[0].log_softmax(-1)
        losses += [-log_p[t, tokens_T[t + 1]].item() for t in range(len(tokens_T) - 1)]
    stacked = torch.stack(importance)
    return Reference(stacked, sink_rate_by_loops(stacked, eps), sum(losses) / len(losses), torch.cat(logits))
