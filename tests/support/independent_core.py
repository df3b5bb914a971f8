"""The formula of an attention core by itself, from the pieces of the independent model, head by head.

It uses the core's config and parameters, `Mask.allowed` and the `Score` of a position, and no other code of sinklab.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from independent_attention import above_threshold, kernel, of_scores, rms_norm, softmax
from torch import Tensor


def formula(
    core: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None, gates: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The output (B, H, T, V) and A (B, H, T, S), of whole sequences; a bias or the rest of a row is column 0 of A."""
    (B, H, T, _), G = q.shape, k.shape[1]
    b, h, t, s = torch.meshgrid(*(torch.arange(n) for n in (B, 1, T, T)), indexing="ij")
    visible = core.mask_of_batch(documents).allowed(b, h, t, s)[:, 0]
    of_heads = [
        _of_head(
            core, i, H, q[:, i], k[:, i * G // H], v[:, i * G // H], visible, gates if gates is None else gates[..., i]
        )
        for i in range(H)
    ]
    out, A = (torch.stack(part, dim=1) for part in zip(*of_heads, strict=True))
    return out, torch.cat([A[..., T:], A[..., :T]], dim=-1)


def _of_head(
    core: Any, h: int, heads: int, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, gates: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Output (B, T, V) and A of one query head; a bias or the rest of a row is the last column of A."""
    operation, T = core.operation.model_dump(), q.shape[1]
    learned: Any = core.learned
    kind, half = operation["kind"], q.shape[-1] // 2
    parameters = {} if core.learned is None else dict(core.learned.named_parameters())
    own = {f"attention.core.learned.{name}": parameter for name, parameter in parameters.items()}
    if operation.get("shift") in ("context", "learned"):
        operation["context"] = math.exp(-learned.start)
    key, value, logit = _added(core.bias, h, heads, k, v)
    seen = visible if key is None and logit is None else F.pad(visible, (0, 1), value=True)

    def scores(q: Tensor, part: slice = slice(None)) -> Tensor:
        """z of every key, or of a part of its width, and of the bias."""
        z = _capped(core.softcap, _scaled(q, k[..., part], kind))
        if core.position is not None:
            b, t, s = torch.meshgrid(*(torch.arange(n) for n in z.shape), indexing="ij")
            z = core.position()(z, b, torch.full_like(b, h), t, s)
        if kind == "forgetting":
            z = z + _faded(gates)
        if logit is not None:
            return torch.cat([z, logit.expand(*z.shape[:2], 1)], dim=-1)
        if key is None:
            return z
        of_key = _capped(core.softcap, _scaled(q, key[part].expand(len(q), 1, -1), kind))
        return torch.cat([z, of_key if core.bias.offset is None else of_key + core.bias.offset[h]], dim=-1)

    if kind == "differential":
        weight = torch.exp(learned.q1 @ learned.k1) - torch.exp(learned.q2 @ learned.k2) + learned.lambda_init
        first, second = scores(q[..., :half], slice(0, half)), scores(q[..., half:], slice(half, None))
        A = softmax(first, seen) - weight * softmax(second, seen)
    elif kind == "threshold_differential":
        parts = [
            above_threshold(operation, scores(q[..., part], part), seen, half)
            for part in (slice(0, half), slice(half, None))
        ]
        A = parts[0] - learned.weight.clamp(0, 1) * parts[1]
    elif kind == "threshold_rectified":
        A = above_threshold(operation, scores(q), seen, q.shape[-1])
    elif kind == "differential_v2":
        assert gates is not None
        first, second = scores(q[..., :half]), scores(q[..., half:])
        A = softmax(first, seen) - torch.sigmoid(gates)[..., None] * softmax(second, seen)
    elif kind in ("elu_kernel", "identity", "mlp"):
        keys = k if key is None else torch.cat([k, key.expand(len(k), 1, -1)], dim=1)
        A = kernel(operation, own, q, keys, seen)
    else:
        A = of_scores(operation, own, h, scores(q), seen)
    out = A[..., :T] @ v
    if kind == "stick_breaking":
        carried = parameters["value"][h] if operation["rest"] == "learned" else v
        out = out + A[..., T:] * (0.0 if operation["rest"] == "dropped" else carried)
    if key is not None and value is not None:
        out = out + A[..., T:] * value
    if kind == "differential":
        out = rms_norm(out, learned.norm.weight, 1e-5) * (1 - learned.lambda_init)
    if kind == "threshold_differential":
        out = rms_norm(out, learned.norm.weight, 1e-5)
    if key is None and value is not None:
        out = out + value
    return out, A


def _added(bias: Any, h: int, heads: int, k: Tensor, v: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The key, value and logit that a bias has for a query head; a value without a key is that of a V bias."""
    key, value = (None if x is None else x[h * len(x) // heads] for x in (bias.key, bias.value))
    if key is not None:
        key = torch.cat([key, key.new_zeros(k.shape[-1] - len(key))])
    if bias.fixed is not None:
        first = [1.0] + [0.0] * (v.shape[-1] - 1)
        direction = first if bias.fixed.direction == "first" else [1 / math.sqrt(v.shape[-1])] * v.shape[-1]
        value = bias.fixed.norm * v.new_tensor(direction)
    return key, value, v.new_zeros(()) if bias.off_by_one else None if bias.logit is None else bias.logit[h]


def _scaled(q: Tensor, k: Tensor, kind: str) -> Tensor:
    """q.k / sqrt(d), or the cosine under attention with a threshold."""
    lengths = q.norm(dim=-1)[..., None] * k.norm(dim=-1)[..., None, :]  # 0 for half of a bias key with few dimensions
    lengths = torch.where(lengths > 0, lengths, 1.0)
    return q @ k.mT / (lengths if kind.startswith("threshold") else math.sqrt(q.shape[-1]))


def _capped(softcap: float | None, z: Tensor) -> Tensor:
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def _faded(log_kept: Tensor | None) -> Tensor:
    """The sum of log f_l over the positions l after key s up to query t, 0 where there are none: (B, T, T)."""
    assert log_kept is not None
    log_f, t = log_kept.diff(dim=1, prepend=torch.zeros_like(log_kept[:, :1])), torch.arange(log_kept.shape[1])
    after = (t[None, :, None] < t) & (t <= t[:, None, None])  # [t, s, l]
    return torch.einsum("bl,tsl->bts", log_f, after.to(log_f.dtype))
