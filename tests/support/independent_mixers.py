"""Linear attention of the independent model: the gated delta rule of docs/interventions.md, one position at a time."""

import torch
from independent_attention import Config, Weights, rms_norm
from torch import Tensor


def has_attention(model: Config, layer: int) -> bool:
    mixer = model["mixer"]
    return mixer["kind"] == "attention" or (model["layers"] - layer) % mixer["every"] == 0


def gated_delta(model: Config, own: Weights, x: Tensor) -> Tensor:
    """Output of a linear layer for the input x (B, L, E)."""
    mixer, L = model["mixer"], x.shape[1]
    H = mixer["heads"] or model["heads"]
    G = mixer["key_heads"] or H
    D = mixer["key_width"] or model["width"] // model["heads"]
    V = mixer["value_width"] or D
    w = {name.removeprefix("attention."): weight for name, weight in own.items()}
    channels = x @ w["qkv.weight"].T
    kimi = mixer["kind"] == "kimi_delta"
    if kimi:  # both through V numbers; a decay for every channel
        z = (x @ w["gate.0.weight"].T @ w["gate.1.weight"].T).unflatten(-1, (H, V))
        rates = x @ w["rates.weight"].T
        steps = (x @ w["decay.0.weight"].T @ w["decay.1.weight"].T + w["step"]).unflatten(-1, (H, D))
    else:
        z = (x @ w["gate.weight"].T).unflatten(-1, (H, V))
        rates, steps = (x @ w["rates.weight"].T).split([H, H], dim=-1)
        steps = (steps + w["step"]).unsqueeze(-1)
    heads = []
    for h in range(H):
        g = h * G // H
        S = x.new_zeros(len(x), D, V)
        outs = []
        for t in range(L):
            now = silu(convolved(channels, w["conv.weight"], t))
            q, k, v = now.split([G * D, G * D, H * V], dim=-1)
            q, k, v = q[:, g * D : (g + 1) * D], k[:, g * D : (g + 1) * D], v[:, h * V : (h + 1) * V]
            q, k = (y / torch.sqrt((y * y).sum(-1, keepdim=True) + 1e-6) for y in (q, k))
            softplus = torch.log1p(torch.exp(steps[:, t, h]))
            S = torch.exp(-torch.exp(w["log_rate"][h]) * softplus)[:, :, None] * S
            held = (S * k[:, :, None]).sum(1)
            S = S + torch.sigmoid(rates[:, t, h])[:, None, None] * k[:, :, None] * (v - held)[:, None, :]
            outs.append((S * q[:, :, None]).sum(1) / D**0.5)
        out = rms_norm(torch.stack(outs, dim=1), w["norm.weight"], model["norm"]["eps"])
        heads.append(out * (torch.sigmoid(z[:, :, h]) if kimi else silu(z[:, :, h])))
    return torch.cat(heads, dim=-1) @ w["out.weight"].T


def convolved(channels: Tensor, weight: Tensor, t: int) -> Tensor:
    """Every channel at t: its own weights times its last W positions."""
    W = weight.shape[-1]
    total = torch.zeros_like(channels[:, t])
    for j in range(W):
        s = t - W + 1 + j
        if s >= 0:
            total = total + weight[:, 0, j] * channels[:, s]
    return total


def silu(y: Tensor) -> Tensor:
    return y * torch.sigmoid(y)
