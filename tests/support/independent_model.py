"""An independent model, written from docs/interventions.md and the papers: T x T matrices in float64, without sinklab.

If it disagrees with sinklab's model, the page and its sources decide which is right. `run` takes the model part of a
resolved recipe as a plain dict and the weights under our parameters' names.

B sequences, T tokens, N registers (1 is a sink token, 0 without), L = N + T positions, E width, d head width, H query
heads, G key heads, S = L + 1 columns where a bias adds a key or a logit and L where it does not. A row is a query.
"""

import math
from typing import Any, NamedTuple

import torch
from independent_attention import Config, Weights, attention, rms_norm
from independent_mixers import gated_delta, has_attention
from torch import Tensor


class Result(NamedTuple):
    """Outputs of a model; all but the logits are lists over the attention layers."""

    logits: Tensor
    """(B, T, V)."""
    shares: list[Tensor]
    """A, or the proxy scores where rows of A do not sum to one; registers are the first rows and columns, another
    bias or the rest of a row the last column: (B, H, L, S).
    """
    importance: list[Tensor]
    """alpha_k = mean over t = k .. T of the shares of key k: (B, H, T)."""
    bias_share: list[Tensor | None]
    """Mean over all T queries of what the bias gets, or the registers together: (B, H)."""
    row_sums: list[Tensor | None]
    """Mean over all T queries of the raw sum of a row, where rows do not sum to one: (B, H)."""
    dormant: list[Tensor]
    """Share of the queries t > 1 whose largest share is that of token 1, a register or the bias, without and with the
    ties: (2, B, H). Two keys of one token have the same share where there are no positions.
    """


def loss_of(model: Config, logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean cross-entropy in nats of tokens 2 .. T, under a prefix mask of length p of tokens p + 1 .. T.

    `logits` are those of tokens 1 .. T - 1.
    """
    seen = first_counted(model)
    log_p = torch.log_softmax(logits, dim=-1)
    of_target = [log_p[:, t - 1].gather(1, tokens[:, t : t + 1]) for t in range(seen, tokens.shape[1])]
    return -torch.cat(of_target, dim=1).mean()


def first_counted(model: Config) -> int:
    """The longest prefix of any layer that has attention, 1 without."""
    layers = [layer for layer in range(1, model["layers"] + 1) if has_attention(model, layer)]
    masks = [of_layer(model, layer)["attention"]["mask"] for layer in layers]
    return max(mask["length"] if mask["kind"] == "prefix" else 1 for mask in masks)


def of_layer(model: Config, layer: int) -> Config:
    """The model with the mask, bias and position that a pattern gives a layer, from 1."""
    pattern = model["pattern"]
    if pattern is None or layer not in range(
        pattern["first"] or pattern["every"], model["layers"] + 1, pattern["every"]
    ):
        return model
    given = {part: pattern[part] for part in ("mask", "bias") if pattern[part] is not None}
    return model | {"attention": model["attention"] | given, "position": pattern["position"] or model["position"]}


def run(model: Config, weights: Weights, tokens: Tensor) -> Result:
    """Run the model on tokens (B, T)."""
    stream = weights["embedding.weight"][tokens]
    if model["embedding"] == "projected":
        stream = stream @ weights["embedding_map.weight"].T
    B, T, E = stream.shape
    position = model["position"]
    if position["kind"] == "absolute":
        stream = stream + sinusoids(T, E, position["theta"])
    if position["kind"] == "learnable":
        stream = stream + weights["position_table"][:T]
    N = registers(model["attention"]["bias"])
    if N:
        stream = torch.cat([weights["sink_token"].reshape(1, N, E).expand(B, N, E), stream], dim=1)
    times = torch.arange(-N, T)
    of_layers, biases, first_values = [], [], []
    for layer in range(1, model["layers"] + 1):
        one = of_layer(model, layer)
        visible = who_sees_whom(one["attention"]["mask"], tokens, N)
        own = {k.split(".", 2)[2]: w for k, w in weights.items() if k.startswith(f"blocks.{layer - 1}.")}
        outer = {k: w for k, w in weights.items() if k.startswith("distance.")}
        seen: list[Tensor] = []

        def attend(
            x: Tensor,
            own: Weights = own | outer,
            layer: int = layer,
            seen: list[Tensor] = seen,
            one: Config = one,
            visible: Tensor = visible,
        ) -> Tensor:
            if not has_attention(model, layer):
                return gated_delta(model, own, x)
            out, scores = attention(one, own, layer, x, times, visible, first_values)
            seen.append(scores)
            return out

        stream = residual(model, own, "attention", stream, attend)
        stream = residual(model, own, "ffn", stream, lambda x, own=own: feed_forward(model["ffn"], own, x))
        of_layers += seen
        biases += [one["attention"]["bias"]] * len(seen)
    stream = stream[:, N:]
    if model["norm"]["placement"] != "post":
        stream = norm(model["norm"], weights, "final_norm", stream)
    if model["embedding"] == "projected":
        stream = stream @ weights["head_map.weight"].T
    logits, operation = stream @ weights["head.weight"].T, model["attention"]["operation"]
    by_layer = [measured(A, operation, bias, T) for A, bias in zip(of_layers, biases, strict=True)]
    return Result(logits, *(list(part) for part in zip(*by_layer, strict=True)))


def registers(bias: Config) -> int:
    return bias["count"] if bias["kind"] == "sink_token" else 0


def measured(
    A: Tensor, operation: Config, bias: Config, T: int
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
    """The last five of `Result`, from A (B, H, L, S)."""
    shares, row_sums = A, None
    if not rows_sum_to_one(operation):
        row_sums = A[..., -T:, :].sum(-1).mean(-1)
        sums = A.abs().sum(-1, keepdim=True)
        shares = torch.where(sums > 0, A.abs() / torch.where(sums > 0, sums, 1.0), 0.0)
    of_tokens, first = shares[..., -T:, :], registers(bias)
    alpha = torch.stack([of_tokens[..., k:, first + k].mean(-1) for k in range(T)], dim=-1)
    stars = [-1] if bias["kind"] in ("k", "kv", "sink_logit", "off_by_one") else list(range(first))
    if operation["kind"] == "stick_breaking":
        stars.append(-1)  # the rest
    later = of_tokens[..., 1:, :]
    sinks = sorted({one % A.shape[-1] for one in (*range(first + 1), *stars)})
    top, rest = later[..., sinks].max(-1)[0], [one for one in range(A.shape[-1]) if one not in sinks]
    most = later[..., rest].max(-1)[0] if rest else torch.zeros_like(top)
    dormant = torch.stack([(top > most * (1 + 1e-9)) & (top > 0), (top >= most * (1 - 1e-9)) & (top > 0)])
    dormant = dormant.double().mean(-1)
    return shares, alpha, of_tokens[..., stars].sum(-1).mean(-1) if stars else None, row_sums, dormant


def rows_sum_to_one(operation: Config) -> bool:
    kind = operation["kind"]
    if kind == "softmax":
        return operation["alpha"] == 1 and operation["p"] == 1
    if kind in ("sigmoid", "elu1"):
        return operation["normalised"] and operation["p"] == 1
    if kind == "elu_kernel":
        return operation["normalised"]
    if kind in ("scalable_softmax", "forgetting", "stick_breaking", "entmax15"):
        return True
    return kind == "clipped_softmax" and operation["zeta"] == 1 and operation["gamma"] == 0


# Around attention ------------------------------------------------------------------------------------------------


def sinusoids(T: int, E: int, theta: float) -> Tensor:
    table = torch.zeros(T, E, dtype=torch.float64)
    for t in range(T):
        for column in range(E):
            angle = t * theta ** (-2 * (column // 2) / E)
            table[t, column] = math.cos(angle) if column % 2 else math.sin(angle)
    return table


def residual(model: Config, own: Weights, part: str, x: Tensor, f: Any) -> Tensor:
    how = model["norm"]
    if how["placement"] == "post":
        return norm(how, own, f"{part}_norm", x + f(x))
    change = f(norm(how, own, f"{part}_norm", x))
    return x + (norm(how, own, f"{part}_post_norm", change) if how["placement"] == "sandwich" else change)


def norm(how: Config, weights: Weights, name: str, x: Tensor) -> Tensor:
    y = ungated(how, weights, name, x)
    if how["gate_rank"] is None:
        return y
    inner = y @ weights[f"{name}.gate.down.weight"].T
    return y * torch.sigmoid((inner * torch.sigmoid(inner)) @ weights[f"{name}.gate.up.weight"].T)


def ungated(how: Config, weights: Weights, name: str, x: Tensor) -> Tensor:
    w = weights[f"{name}.weight"]
    if how["kind"] in ("rmsnorm", "rmsnorm_single"):  # w of either every channel or all of them
        return rms_norm(x, w, how["eps"])
    b = weights[f"{name}.bias"]
    if how["kind"] == "layernorm":
        centred = x - x.mean(-1, keepdim=True)
        return w * centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + how["eps"]) + b
    return w * torch.tanh(weights[f"{name}.alpha"] * x) + b


def feed_forward(kind: str, own: Weights, x: Tensor) -> Tensor:
    act = {
        "relu": lambda y: y.clamp(min=0),
        "gelu": lambda y: y * (1 + torch.erf(y / math.sqrt(2))) / 2,
        "swish": lambda y: y / (1 + torch.exp(-y)),
    }
    inner, gated = {"reglu": ("relu", 1), "geglu": ("gelu", 1), "swiglu": ("swish", 1)}.get(kind, (kind, 0))
    up = x @ own["ffn.up.weight"].T
    if gated:
        left, right = up.chunk(2, dim=-1)
        return (act[inner](left) * right) @ own["ffn.down.weight"].T
    return act[inner](up) @ own["ffn.down.weight"].T


def who_sees_whom(mask: Config, tokens: Tensor, N: int) -> Tensor:
    """(B, L, L), query by key: registers see each other causally and no token, and every token sees them all."""
    B, T = tokens.shape
    real = torch.zeros(B, T, T, dtype=torch.bool)
    for b in range(B):
        document = [0] * T
        if mask["kind"] == "document":
            document = [sum(int(token == mask["eos_id"]) for token in tokens[b, :t]) for t in range(T)]
        for t in range(T):
            for s in range(T):
                sees = s <= t
                if mask["kind"] == "window":
                    sees = sees and s > t - mask["width"]
                if mask["kind"] == "prefix":
                    sees = sees or s < mask["length"]
                if mask["kind"] == "document":
                    sees = sees and document[s] == document[t]
                real[b, t, s] = sees
    visible = torch.zeros(B, N + T, N + T, dtype=torch.bool)
    visible[:, N:, :N] = True
    visible[:, :N, :N] = torch.tensor([[s <= t for s in range(N)] for t in range(N)]).reshape(N, N)
    visible[:, N:, N:] = real
    return visible
