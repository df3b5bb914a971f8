"""Kernels of flash-linear-attention (extra `fla`, github.com/fla-org/flash-linear-attention) for CUDA.

They replace blocks of PyTorch operations where both compute the same formula: causal linear attention, forgetting
attention, stick-breaking attention, the gated delta rule and Kimi delta attention. A kernel is used if the package is
installed and the call has bfloat16 values on CUDA. Queries and keys are rounded to bfloat16; sums are float32.
Results differ from those of our own code by this rounding (tests/attention/test_fla.py). float32 and float64 always
use our own code, because the kernels would multiply float32 in TF32 whatever `train.float32_matmul` says.

fla's normalised linear attention is not used: it adds 1e-10 to the row sum and has no max(|row sum|, 1).

B batch, H query heads, G KV heads, T queries, D key dimension, V value dimension.
"""

import functools
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sinklab.attention.operations.base import Call
from sinklab.attention.query_blocks import default_scale

WIDTHS = range(16, 257, 8)  # widths of queries, keys and values that all kernels support


@functools.cache
def installed() -> bool:
    """Return whether flash-linear-attention is installed, and Triton, which it needs."""
    return all(map(find_spec, ("fla", "triton")))


def serves(q_BHTD: Tensor, v_BHTV: Tensor) -> bool:
    """Return whether the kernels support these tensors. Subclasses, such as fake tensors, are not supported."""
    fits = all(x.shape[-1] in WIDTHS for x in (q_BHTD, v_BHTV))
    on_card = v_BHTV.is_cuda and v_BHTV.dtype == torch.bfloat16 and type(v_BHTV) is Tensor
    return on_card and fits and q_BHTD.shape[2] > 0 and installed()


def serves_call(call: Call, v_BGTV: Tensor) -> bool:
    """Return whether the kernels support this call: backend auto, plain causal mask, T = S, scores q.k * scale only."""
    added = (call.cap, call.position, call.key_HD, call.logit_BHT)
    plain = call.backend == "auto" and call.mask.plain and not call.first and all(x is None for x in added)
    return plain and serves(call.q_BHTD, v_BGTV)


def linear(call: Call, v_BGTV: Tensor) -> Tensor:
    """Compute the sum of (q_t.k_s) / sqrt(D) v_s over s <= t, float32: (B, H, T, V).

    Args:
        call: queries and keys after the feature map.
        v_BGTV: values of any width, for example with a column of ones.
    """
    V, repeats = v_BGTV.shape[-1], call.q_BHTD.shape[1] // v_BGTV.shape[1]
    v_BGTV = F.pad(v_BGTV, (0, -V % WIDTHS.step))
    # The kernel requires as many KV heads as query heads.
    k, v = (x.to(v_BGTV.dtype).repeat_interleave(repeats, 1) for x in (call.k_BGTD, v_BGTV))
    sums = _kernel("simple_gla", "chunk_simple_gla")
    out_BTHV, _ = sums(*_rows(call.q_BHTD.to(v.dtype), k, v), scale=default_scale(call.q_BHTD))
    return out_BTHV.transpose(1, 2)[..., :V].float()


def forgetting(call: Call, v_BGTV: Tensor) -> Tensor:
    """Compute softmax attention with forget gates (`scores.forget_gates`): (B, H, T, V)."""
    assert call.forget_gates is not None
    (log_kept_BTH,) = call.forget_gates.tensors
    log_gate_BTH = log_kept_BTH.diff(dim=1, prepend=torch.zeros_like(log_kept_BTH[:, :1]))
    parts = _rows(call.q_BHTD.to(v_BGTV.dtype), call.k_BGTD.to(v_BGTV.dtype), v_BGTV)
    attend = _kernel("forgetting_attn", "parallel_forgetting_attn")
    return attend(*parts, log_gate_BTH, scale=call.matrix().factor).transpose(1, 2)


def stick_breaking(call: Call, v_BGTV: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the output of stick-breaking attention, (B, H, T, V), and the rest, (B, H, T)."""
    parts = _rows(call.q_BHTD.to(v_BGTV.dtype), call.k_BGTD.to(v_BGTV.dtype), v_BGTV)
    out_BTHV, rest_BTH = _kernel("stickbreaking_attn", "parallel_stickbreaking_attn")(*parts)
    return out_BTHV.transpose(1, 2), rest_BTH.transpose(1, 2)


def gated_delta_by_fla(
    q_BHTD: Tensor, k_BHTD: Tensor, v_BHTV: Tensor, log_decay: Tensor, rate_BHT: Tensor, state_BHDV: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute `sinklab.model.mixer.gated_delta`, with its arguments and results."""
    rule = _kernel("kda", "chunk_kda") if log_decay.ndim == 4 else _kernel("gated_delta_rule", "chunk_gated_delta_rule")
    parts = _rows(q_BHTD.to(v_BHTV.dtype), k_BHTD.to(v_BHTV.dtype), v_BHTV, log_decay, rate_BHT)
    out_BTHV, state_BHDV = rule(*parts, scale=1.0, initial_state=state_BHDV, output_final_state=True)
    return out_BTHV.transpose(1, 2), state_BHDV


def _kernel(module: str, name: str) -> Callable[..., Any]:
    """Return a kernel. An import statement would make transformers require fla for every exported model."""
    return getattr(import_module(f"fla.ops.{module}"), name)


def _rows(*parts: Tensor) -> list[Tensor]:
    """Return tensors with the position before the head, as the kernels require."""
    return [part.transpose(1, 2) for part in parts]
