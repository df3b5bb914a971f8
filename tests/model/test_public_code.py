"""Layers against reimplementations of public code on our weights, in float64 and with gradients.

Every test names the repository and the file that it was written from; docs/interventions.md lists the interventions
with such a test. Code of transformers is executed and not reimplemented (`test_latent.py`, `test_mixer.py`,
`test_against_transformers.py`); stick-breaking is in `test_attention_stick.py`.
"""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from closeness import assert_close
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from sinklab.model.block import Attention, LayerInputs
from sinklab.model.llama import llama_sizes, llama_weights
from sinklab.model.norm import NormConfig, build_norm
from sinklab.model.transformer import Transformer
from sinklab.train.recipe import build_recipe

E, H, G, T, D = 32, 4, 2, 13, 8
CONTEXT, EPS, THETA = 16, 1e-6, 500.0
SIZES: dict[str, Any] = {
    "layers": 3, "width": E, "heads": H, "kv_heads": G, "ffn_width": 48, "vocab_size": 97, "context": CONTEXT,
}  # fmt: skip
CLOSE = 1e-11


def transformer(**model: Any) -> Transformer:
    """A float64 model with every parameter perturbed."""
    norm = {"eps": EPS, **model.pop("norm", {})}
    recipe = build_recipe({"model": {**SIZES, **model, "norm": norm}, "metric": {"length": CONTEXT}})
    made = Transformer(recipe.model, seed=3).double()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return made


def attention_of(**model: Any) -> Attention:
    """The attention of the second layer, without positions unless they are given."""
    attention = transformer(**{"position": "none", **model}).blocks[1].attention
    assert isinstance(attention, Attention)
    return attention


def read() -> Tensor:
    """Random input of a layer: (2, T, E)."""
    return torch.randn(2, T, E, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()


def attended(attention: Attention, x: Tensor) -> Tensor:
    q, k, v = attention.inputs(x, LayerInputs())
    return attention.output(attention.core(q, k, v, *attention.core_arguments(x, LayerInputs(), None)), x, v)


def heads(attention: Attention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of every query head, (2, H, T, D), those of key heads repeated as in Llama."""
    assert attention.qkv is not None
    parts = (x @ attention.qkv.weight.T).split([H * D, G * D, G * D], dim=-1)
    q, k, v = (part.unflatten(-1, (-1, D)).transpose(1, 2) for part in parts)
    return q, k.repeat_interleave(H // G, 1), v.repeat_interleave(H // G, 1)


def joined(attention: Attention, out: Tensor) -> Tensor:
    return out.transpose(1, 2).reshape(*out.shape[:1], T, H * D) @ attention.out.weight.T


def seen() -> Tensor:
    return torch.ones(T, T, dtype=torch.bool).tril()


def assert_same(module: nn.Module, x: Tensor, ours: Tensor, theirs: Tensor) -> None:
    """Outputs, and gradients to the input and to all parameters that the code of others has."""
    assert_close(ours, theirs, CLOSE)
    weight = torch.randn(ours.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    wanted = [x, *module.parameters()]
    found, expected = (
        torch.autograd.grad((out * weight).sum(), wanted, materialize_grads=True, allow_unused=True)
        for out in (ours, theirs)
    )
    assert all(gradient.any() for gradient in expected)
    for mine, other in zip(found, expected, strict=True):
        assert_close(mine, other, CLOSE)


@pytest.mark.parametrize("weights", [None, True, "per_head"], ids=["plain", "pro, shared weights", "pro"])
def test_forgetting_equals_its_authors_code(weights: bool | str | None) -> None:
    """github.com/zhixuan-lin/forgetting-transformer, ops/forgetting_attention.py (the reference of its own test).

    The layer around it is `ForgettingAttentionLayer` of modeling_forgetting_transformer.py with the gate `full`, and
    for the "pro" block `qk_norm`, `use_output_norm` and `use_output_gate`, whose norms are `GroupNorm` with a group for
    each head and a weight for each channel; its shifted keys and values are not built here. Shared weights of queries
    and keys are its `qk_norm_share_param_across_head`; it has no such option for outputs. Its key heads are as many as
    its query heads: with fewer, each has a vector of its own here.
    """
    parts: dict[str, Any] = {"norm": {"qk_norm": weights, "head_norm": weights}, "gate": "element"} if weights else {}
    attention, x = attention_of(attention={"operation": "forgetting"}, **parts), read()
    q, k, v = heads(attention, x)
    gate = attention.forget_gate
    assert gate is not None
    weight, bias = attention.get_parameter("forget_gate.weight"), attention.get_parameter("forget_gate.bias")
    if weights:
        q = group_norm(q, attention.get_parameter("q_norm.weight"))
        k = group_norm(k, attention.get_parameter("k_norm.weight"))
    log_gate = F.logsigmoid(x @ weight.T + bias).transpose(1, 2)
    summed = log_gate.cumsum(-1)
    scores = q @ k.mT / math.sqrt(D) + (summed[..., :, None] - summed[..., None, :])
    out = torch.softmax(scores.masked_fill(~seen(), -torch.inf), -1) @ v
    if weights:
        out = group_norm(out, attention.get_parameter("head_norm.weight"))
        output_gate = x @ attention.get_parameter("output_gate.linear.weight").T
        out = out * torch.sigmoid(output_gate.unflatten(-1, (H, D)).transpose(1, 2))
    assert_same(attention, x, attended(attention, x), joined(attention, out))


def group_norm(x_BHTD: Tensor, weight: Tensor) -> Tensor:
    """RMS norm of each head's channels; `weight` has an entry per channel, or those of one head, shared by all."""
    per_head = weight.view(-1, D).repeat_interleave(H * D // len(weight), 0)
    return rms_norm(x_BHTD.transpose(1, 2), per_head).transpose(1, 2)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


@pytest.mark.parametrize("G", [1, 2, 4])
def test_differential_attention_v2_equals_its_authors_code(G: int) -> None:
    """github.com/microsoft/unilm, Diff-Transformer/Diff-Transformer-V2/multihead_flashdiffv2.py, its flash attention as
    explicit matrices over 2 H query heads, neighbours of which share a key head; positions are left out.
    """
    attention, x = attention_of(kv_heads=G, attention={"operation": "differential_v2"}), read()
    assert attention.qkv is not None
    parts = (x @ attention.qkv.weight.T).split([2 * H * D, G * D, G * D], dim=-1)
    q, k, v = (part.view(2, T, -1, D).transpose(1, 2) for part in parts)
    k, v = (y.repeat_interleave(2 * H // G, 1) for y in (k, v))
    heads = torch.softmax((q @ k.mT / math.sqrt(D)).masked_fill(~seen(), -torch.inf), -1) @ v
    weight = torch.sigmoid(x @ attention.get_parameter("weight_gate.weight").T).transpose(1, 2).unsqueeze(-1)
    out = heads[:, 0::2] - weight * heads[:, 1::2]
    assert_same(attention, x, attended(attention, x), joined(attention, out))


def test_threshold_attention_equals_its_authors_code() -> None:
    """github.com/snap-research/TDA, commit cd8ddc9, triton_threshold_attention.py, its kernel as explicit matrices.

    The code begins with queries and keys and ends before the norm; the halves of a head are not part of it.
    """
    rectified = attention_of(attention={"operation": "threshold_rectified"})
    differential = attention_of(attention={"operation": "threshold_differential"})
    x = read()

    def kernel(q: Tensor, k: Tensor, v: Tensor, beta: float = 1.0) -> Tensor:
        q, k = (torch.nn.functional.normalize(y, p=2, dim=-1) for y in (q, k))
        rows = torch.arange(T, dtype=torch.float64) + 1.0
        tau = beta * torch.sqrt((2.0 * torch.log(rows)) / q.shape[-1])
        scores = torch.where(seen(), q @ k.mT, 0.0)
        exceeding = torch.relu(scores - tau[:, None])
        return (exceeding * exceeding) @ v

    q, k, v = heads(rectified, x)
    assert_same(rectified, x, attended(rectified, x), joined(rectified, kernel(q, k, v)))

    q, k, v = heads(differential, x)
    first, second = (kernel(q[..., part], k[..., part], v) for part in (slice(0, D // 2), slice(D // 2, D)))
    out = first - torch.clamp(differential.get_parameter("core.learned.weight"), min=0.0, max=1.0) * second
    weight = differential.get_parameter("core.learned.norm.weight")
    normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + 1e-5) * weight
    assert_same(differential, x, attended(differential, x), joined(differential, normed))


def test_sigmoid_with_a_bias_of_minus_log_context_equals_its_authors_code() -> None:
    """github.com/apple/ml-sigmoid-attention, attention_simulator/src/attention_simulator/layers/attention.py.

    `Attention` there, with the bias `attn_bias` before the sigmoid and scores masked by the smallest number.
    `SigmoidAttention` in github.com/apple/axlearn, axlearn/common/attention.py, sets the bias to -log of the training
    length.
    """
    attention, x = attention_of(attention={"operation": {"kind": "sigmoid", "shift": "context"}}), read()
    q, k, v = heads(attention, x)
    scores = (q * D**-0.5) @ k.mT
    scores = scores.masked_fill(~seen(), -torch.finfo(scores.dtype).max) - math.log(CONTEXT)
    assert_same(attention, x, attended(attention, x), joined(attention, torch.sigmoid(scores) @ v))


@pytest.mark.parametrize("offset", [None, 0.7])
def test_scalable_softmax_equals_public_code(offset: float | None) -> None:
    """github.com/gdevos010/Scalable-Softmax, src/scalable_softmax.py, not by the paper's authors.

    It takes the rows of one length n at a time: row t of a causal matrix is given to it with its t keys alone.
    """
    attention, x = attention_of(attention={"operation": {"kind": "scalable_softmax", "offset": offset}}), read()
    q, k, v = heads(attention, x)
    scale = attention.get_parameter("core.learned.scale")[:, None]
    shift = 0.0 if offset is None else attention.get_parameter("core.learned.offset")[:, None]
    rows = []
    for n in range(1, T + 1):
        scores = (q[:, :, n - 1, None] @ k[:, :, :n].mT).squeeze(2) / math.sqrt(D)
        rows.append(torch.softmax((scale * math.log(n) + shift) * scores, -1)[:, :, None] @ v[:, :, :n])
    assert_same(attention, x, attended(attention, x), joined(attention, torch.cat(rows, 2)))


def test_exclusive_attention_equals_public_code() -> None:
    """github.com/openai/parameter-golf, commit 3a36c41bc690, `_xsa_efficient` of a submission's train_gpt.py.

    It is in records/track_10min_16mb/2026-03-20_11L_EMA_XSA_TTT_Int6, not by the paper's authors. The same, but for
    1e-6 added to |v|^2, is in github.com/marin-community/marin, experiments/grug/moe/model.py.
    """
    attention, x = attention_of(exclusive=True), read()
    q, k, v = heads(attention, x)
    out = torch.softmax((q @ k.mT / math.sqrt(D)).masked_fill(~seen(), -torch.inf), -1) @ v
    unit = F.normalize(v, dim=-1)
    out = out - (out * unit).sum(-1, keepdim=True) * unit
    assert_same(attention, x, attended(attention, x), joined(attention, out))


def test_a_norm_of_heads_equals_public_code() -> None:
    """github.com/facebookresearch/RAM, projects/mta/mta_transformer.py: `subln` where `group_norm` is true.

    Of another paper (2504.00927): RMSNorm of every head's output, one weight for all heads, before the last matrix.
    """
    attention, x = attention_of(norm={"head_norm": True}), read()
    q, k, v = heads(attention, x)
    out = torch.softmax((q @ k.mT / math.sqrt(D)).masked_fill(~seen(), -torch.inf), -1) @ v
    out = rms_norm(out, attention.get_parameter("head_norm.weight"))
    assert_same(attention, x, attended(attention, x), joined(attention, out))


def test_a_gated_norm_equals_public_code() -> None:
    """github.com/marin-community/marin, experiments/grug/moe/model.py: `RMSNorm`, then `GatedNorm`, of rank 128 there.

    Not by the paper's authors.
    """
    norm, x = build_norm(NormConfig(eps=EPS, gate_rank=5), E).double(), read()
    for number, parameter in enumerate(norm.parameters()):
        nn.init.normal_(parameter, 0.5, 0.5, generator=torch.Generator().manual_seed(number))
    y = rms_norm(x, norm.get_parameter("weight"))
    inner = torch.einsum("btd,dr->btr", y, norm.get_parameter("gate.down.weight").T)
    gate = torch.einsum("btr,rd->btd", F.silu(inner), norm.get_parameter("gate.up.weight").T)
    assert_same(norm, x, norm(x), y * torch.sigmoid(gate))


def test_single_gains_and_projected_embeddings_equal_their_authors_code() -> None:
    """github.com/dmis-lab/Outlier-Safe-Pre-Training, example_modeling_flax.py: `rmsnorm_scale` single, `rotated_embed`.

    The whole model, up to its logits. The offsets of its Dense layers, zero before training, are left out.
    """
    ours = transformer(
        position={"kind": "rotary", "theta": THETA}, embedding="projected", norm={"kind": "rmsnorm_single"}
    )
    angle = torch.arange(T)[:, None] * THETA ** -(torch.arange(0, D, 2, dtype=torch.float64) / D)
    turn = torch.polar(torch.ones_like(angle), angle)

    def turned(x: Tensor) -> Tensor:
        y = torch.complex(*x.chunk(2, -1)) * turn
        return torch.cat((y.real, y.imag), -1)

    def single(name: str, x: Tensor) -> Tensor:
        (gain,) = ours.get_parameter(f"{name}.weight")
        return gain * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()

    tokens = torch.randint(97, (2, T), generator=torch.Generator().manual_seed(0))
    x = F.one_hot(tokens, 97).double() @ ours.embedding.weight @ ours.get_parameter("embedding_map.weight").T
    for number, block in enumerate(ours.blocks):
        attention = block.attention
        assert isinstance(attention, Attention)
        q, k, v = heads(attention, single(f"blocks.{number}.attention_norm", x))
        scores = turned(q) @ turned(k).mT / math.sqrt(D)
        x = x + joined(attention, torch.softmax(scores.masked_fill(~seen(), -torch.inf), -1) @ v)
        read = single(f"blocks.{number}.ffn_norm", x) @ ours.get_parameter(f"blocks.{number}.ffn.up.weight").T
        gate, up = read.chunk(2, -1)
        x = x + (up * F.silu(gate)) @ ours.get_parameter(f"blocks.{number}.ffn.down.weight").T
    logits = single("final_norm", x) @ ours.get_parameter("head_map.weight").T @ ours.head.weight.T
    assert_same(ours, ours.head.weight, ours(tokens), logits)


class Table(nn.Module):
    """Llama's rotary table in float64, where transformers rounds it to float32."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        frequency = THETA ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
        angle = (position_ids[..., None].double() * frequency).repeat(1, 1, 2)
        return angle.cos(), angle.sin()


def llama(ours: Transformer) -> LlamaForCausalLM:
    """transformers' Llama with our weights, nothing in it rounded to float32."""
    plain = transformer(position={"kind": "rotary", "theta": THETA})
    plain.load_state_dict(ours.state_dict())
    theirs = (
        LlamaForCausalLM(LlamaConfig(**(llama_sizes(plain.config) | {"attn_implementation": "sdpa"}))).double().eval()
    )
    theirs.load_state_dict(llama_weights(plain))
    for name, module in list(theirs.named_modules()):
        if type(module).__name__ == "LlamaRMSNorm":
            exact = nn.RMSNorm(E, eps=EPS, dtype=torch.float64)
            exact.load_state_dict(module.state_dict())
            theirs.set_submodule(name, exact)
    theirs.set_submodule("model.rotary_emb", Table())
    return theirs


@pytest.mark.parametrize(("first", "own"), [(0.5, 0.5), (1.0, 0.0)], ids=["ResFormer", "SVFormer"])
@torch.no_grad()
def test_value_residuals_equal_their_authors_code(first: float, own: float) -> None:
    """github.com/Zcchill/Value-Residual-Learning, src/modeling/modeling_llama_resformer.py and .._svformer.py.

    They change only the values of transformers' Llama, so Llama is executed here with hooks on its values.
    """
    ours = transformer(
        position={"kind": "rotary", "theta": THETA}, value_residual={"kind": "fixed", "first": first, "own": own}
    )
    theirs, values = llama(ours), []

    def mixed(_: nn.Module, __: Any, value: Tensor) -> Tensor:
        values.append(value)
        return value if len(values) == 1 else first * values[0] + own * value

    for layer in theirs.model.layers:
        layer.self_attn.v_proj.register_forward_hook(mixed)  # type: ignore[union-attr]
    tokens = torch.randint(97, (2, T), generator=torch.Generator().manual_seed(0))
    assert_close(ours(tokens), theirs(tokens).logits, CLOSE)
    assert len(values) == 3
    plain = transformer(position={"kind": "rotary", "theta": THETA})
    plain.load_state_dict(ours.state_dict())
    assert not torch.allclose(plain(tokens), ours(tokens), rtol=1e-3)
