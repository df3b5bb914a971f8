"""Roles of the sink in heads of Hugging Face models, against eager attention matrices and values."""

import math
from typing import Any

import pytest
import torch
import transformers as hf
from assessed import run_part, small, some_tokens
from details_reference import captured
from families import GROUPED, family_tokens, pair_of

from sinklab.assessing.parts.heads import Heads, kind_of
from sinklab.models.adapter import adapt
from sinklab.models.huggingface.pretrained_adapter import HuggingFaceAdapter

CHECKED = [
    "llama",
    "llama multi-query",
    "gpt2",
    "gpt-neox",
    "opt",
    "mistral, window 5",
    "qwen3",
    "gemma2, softcap and window 5",
    "olmo2",
    "phi3",
]


def rank(outputs: torch.Tensor) -> float:
    """exp of the entropy of the squared singular values (queries, width) over their sum."""
    squares = [float(s) ** 2 for s in torch.linalg.svdvals(outputs)]
    shares = [square / sum(squares) for square in squares]
    return math.exp(-sum(p * math.log(p) for p in shares if p > 0))


@pytest.mark.parametrize("family", CHECKED)
def test_roles_of_heads_agree_with_eager_attention_matrices_and_values(family: str) -> None:
    (model, eager), tokens = pair_of(family), family_tokens()
    with torch.no_grad():
        matrices = [one.double() for one in eager(tokens, output_attentions=True).attentions]
    values = captured(eager, tokens).values
    found = run_part(Heads, HuggingFaceAdapter(model), tokens)
    assert found.sink == "first position"
    assert [(role.layer, role.head) for role in found.heads] == [(n, h) for n in (1, 2) for h in (1, 2, 3, 4)]
    outputs = {}
    for role in found.heads:
        A, v = matrices[role.layer - 1][:, role.head - 1], values[role.layer - 1][:, role.head - 1]
        norms, out = v.norm(dim=-1), (A @ v)[:, 1:]
        share = float(A[:, 1:, 0].mean())
        value = float(norms[:, 0].mean() / norms[:, 1:].mean())
        given = float((A[:, 1:, 0].mean(-1) * norms[:, 0]).mean() / out.norm(dim=-1).mean())
        effective = rank(out.flatten(0, 1))
        assert (role.share, role.value_norm, role.output_share) == pytest.approx((share, value, given), rel=1e-4)
        assert role.effective_rank == pytest.approx(effective, rel=1e-3)
        assert role.kind == kind_of(share, value, given, effective / v.shape[-1])
        outputs[role.layer, role.head] = float(out.norm(dim=-1).mean())
    for role in found.heads:
        assert role.output_norm is not None
        of_layer = sum(outputs[role.layer, head] for head in (1, 2, 3, 4)) / 4
        assert role.output_norm == pytest.approx(outputs[role.layer, role.head] / of_layer, rel=1e-4)


def test_a_rank_is_low_relative_to_the_heads_width_in_its_own_layer() -> None:
    torch.manual_seed(0)
    wider: dict[str, Any] = {"global_head_dim": 16, "num_global_key_value_heads": 2, "hidden_size_per_layer_input": 0}
    config = hf.Gemma4TextConfig(**GROUPED, **wider, layer_types=["sliding_attention", "full_attention"])
    found = run_part(Heads, adapt(hf.Gemma4ForCausalLM(config).eval()), family_tokens()[:2, :3])
    for role in found.heads:
        share = role.effective_rank / {1: 8, 2: 16}[role.layer]
        assert role.kind == kind_of(role.share, role.value_norm, role.output_share, share)
    broadcast = [role for role in found.heads if role.kind == "broadcast"]
    assert max(role.effective_rank for role in broadcast) > 0.25 * 8


def test_with_biases_in_some_layers_the_sink_is_the_bias_or_the_first_position() -> None:
    mixed = small("sink logit", pattern={"every": 2, "bias": {"kind": "none"}})
    assert run_part(Heads, mixed, some_tokens()).sink == "bias or first position"


def test_a_sink_logit_is_the_sink_and_has_no_value() -> None:
    model, eager = pair_of(family := "gpt-oss, sinks and window 5")
    with torch.no_grad():
        matrices = eager(family_tokens(), output_attentions=True).attentions
    found = run_part(Heads, HuggingFaceAdapter(model), family_tokens())
    assert found.sink == "bias"
    for role in found.heads:
        left = 1 - matrices[role.layer - 1][:, role.head - 1].sum(-1)
        assert role.share == pytest.approx(float(left.mean()), rel=1e-4)
        assert (role.value_norm, role.kind) == (0, "nop" if role.share > 0.3 else "no sink")
    assert "nop" in found.counts
