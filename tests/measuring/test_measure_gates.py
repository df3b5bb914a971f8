"""Gates of runs and models in `--details`, against gates computed by hand from the weights."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from closeness import assert_close
from families import GROUPED, family_tokens, hooks_on, pair_of
from own_models import SIZES, own_tokens
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from sinklab.experiments.definition import MeasuredCell
from sinklab.experiments.summary import measured_numbers
from sinklab.measuring.statistics.details import Details
from sinklab.model.config import ModelConfig
from sinklab.model.transformer import Transformer
from sinklab.survey.api import measure

TINY_EXPERTS: dict[str, Any] = {
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
}
FOUR: dict[str, Any] = GROUPED | {"num_hidden_layers": 4}
LINEAR: dict[str, Any] = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def _details(model: Any, tokens: Tensor, **options: Any) -> Details:
    details = measure(model, tokens, details=True, **options).details
    assert details is not None
    return details


def _own(gate: str, **changes: Any) -> Transformer:
    """A model of ours whose gates are far from a half."""
    config = {**SIZES, "layers": 2, "kv_heads": 2, "gate": {"kind": gate}, **changes}
    model = Transformer(ModelConfig.model_validate(config), seed=3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate" in name:
                parameter.mul_(20)
            if name.endswith("value_gate.bias"):
                parameter.copy_(torch.tensor([-3.0, 0.5]))
    return model


def _inputs(model: Transformer, tokens: Tensor, part: str) -> list[Tensor]:
    """Inputs of the submodule `part` of each attention layer."""
    seen: list[Tensor] = []
    modules = [getattr(block.attention, part) for block in model.blocks]  # type: ignore[union-attr]
    handles = [module.register_forward_hook(lambda _, args, __: seen.append(args[-1])) for module in modules]
    with torch.no_grad():
        model(tokens)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize(("kind", "channels"), [("head", 1), ("element", 8)])
def test_gates_on_the_output_are_those_of_the_layers_input(kind: str, channels: int) -> None:
    model, tokens = _own(kind), own_tokens(3)
    details = _details(model, tokens, batch_size=2)
    assert details.gate is not None
    assert details.gate_closed is not None
    for layer, x_NTE in enumerate(_inputs(model, tokens, "output_gate")):
        weight_OE = model.blocks[layer].attention.output_gate.linear.weight.detach()  # type: ignore[union-attr]
        for head in range(4):
            rows = weight_OE[head * channels : (head + 1) * channels]
            gates_NTX = 1 / (1 + torch.exp(-torch.einsum("nte,xe->ntx", x_NTE, rows)))
            assert_close(details.gate[layer, head], gates_NTX.mean((0, 2)))
            assert_close(details.gate_closed[layer, head], (gates_NTX < 0.1).float().mean((0, 2)))
    assert 0 < details.gate_closed.mean() < 1
    first, rest = details.by_layer["gate_first"], details.by_layer["gate_closed_rest"]
    assert_close(np.array(first), details.gate[:, :, 0].mean(1))
    assert_close(np.array(rest), details.gate_closed[:, :, 1:].mean((1, 2)))


def test_gates_are_among_the_measured_numbers_of_an_experiment() -> None:
    measured = measure(_own("element"), own_tokens(3), details=True)
    assert measured.details is not None
    assert measured.details.gate is not None
    assert measured.details.gate_closed is not None
    found = measured_numbers(MeasuredCell(sequences=3, length=measured.length, details=True), measured, 0)
    assert found.value("gate_first") == pytest.approx(float(measured.details.gate[:, :, 0].mean()))
    assert found.value("gate_rest") == pytest.approx(float(measured.details.gate[:, :, 1:].mean()))
    assert found.value("gate_closed") == pytest.approx(100 * float(measured.details.gate_closed.mean()))


def test_a_gate_on_the_values_counts_for_every_head_that_shares_them() -> None:
    model, tokens = _own("value"), own_tokens(3)
    details = _details(model, tokens)
    assert details.gate is not None
    for layer, v_NGTD in enumerate(_inputs(model, tokens, "value_gate")):
        gating: Any = model.blocks[layer].attention.value_gate  # type: ignore[union-attr]
        for head in range(4):
            logits_NT = v_NGTD[:, head // 2] @ gating.weight[head // 2].detach() + gating.bias[head // 2].detach()
            assert_close(details.gate[layer, head], torch.sigmoid(logits_NT).mean(0))


def test_v_scale_is_a_gate_on_the_values_as_well() -> None:
    model, tokens = _own("v_scale"), own_tokens(3)
    details = _details(model, tokens)
    assert details.gate is not None
    for layer, v_NGTD in enumerate(_inputs(model, tokens, "value_gate")):
        square_NGT = v_NGTD.square().sum(-1)
        gates_GT = (square_NGT / (square_NGT + model.blocks[layer].attention.value_gate.start)).mean(0)  # type: ignore[union-attr]
        assert_close(details.gate[layer], gates_GT.repeat_interleave(2, 0))


def test_gates_of_learned_sink_tokens_are_not_counted() -> None:
    model, tokens = _own("head", attention={"bias": {"kind": "sink_token"}}), own_tokens(3)
    details = _details(model, tokens)
    x_NLE = _inputs(model, tokens, "output_gate")[0]
    weight_HE = model.blocks[0].attention.output_gate.linear.weight.detach()  # type: ignore[union-attr]
    assert details.gate is not None
    assert_close(details.gate[0], torch.sigmoid(x_NLE[:, 1:] @ weight_HE.T).mean(0).T)


def _gate_per_group(attention: Any, channels: int) -> None:
    """Give an attention of Qwen3 the gates of 2505.06708's models: for each key head its queries, then their gates."""
    attention.q_proj = nn.Linear(32, 4 * (8 + channels), bias=False)
    nn.init.normal_(attention.q_proj.weight, std=0.5)

    def forward(hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, **options: Any) -> Any:
        B, T, _ = hidden_states.shape
        queries, logits = attention.q_proj(hidden_states).view(B, T, 2, -1).split([16, 2 * channels], dim=-1)
        q = attention.q_norm(queries.reshape(B, T, 4, 8)).transpose(1, 2)
        k = attention.k_norm(attention.k_proj(hidden_states).view(B, T, -1, 8)).transpose(1, 2)
        v = attention.v_proj(hidden_states).view(B, T, -1, 8).transpose(1, 2)
        q, k = qwen3.apply_rotary_pos_emb(q, k, *position_embeddings)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            attention.config._attn_implementation, qwen3.eager_attention_forward
        )
        out, weights = attend(attention, q, k, v, attention_mask, scaling=attention.scaling)
        out = out * torch.sigmoid(logits.reshape(B, T, 4, channels))
        return attention.o_proj(out.reshape(B, T, -1)), weights

    attention.forward = forward


def _qwen3_next() -> Any:
    config = hf.Qwen3NextConfig(**FOUR, **LINEAR, **TINY_EXPERTS, shared_expert_intermediate_size=16)
    return hf.AutoModelForCausalLM.from_config(config)


def _qwen3_5() -> Any:
    return hf.AutoModelForCausalLM.from_config(hf.Qwen3_5TextConfig(**FOUR, **LINEAR))


def _qwen3(channels: int) -> Any:
    model = hf.AutoModelForCausalLM.from_config(hf.Qwen3Config(**GROUPED))
    for block in model.model.layers:
        _gate_per_group(block.self_attn, channels)
    return model


def _afmoe() -> Any:
    return hf.AutoModelForCausalLM.from_config(
        hf.AfmoeConfig(**GROUPED, **TINY_EXPERTS, num_dense_layers=2, layer_types=["full_attention"] * 2)
    )


def _by_head(logits_NTC: Tensor) -> Tensor:
    """(N, T, H, X) of rows [query, gate] of each head."""
    return logits_NTC.unflatten(-1, (4, 16))[..., 8:]


def _by_group(logits_NTC: Tensor) -> Tensor:
    """(N, T, H, X) of rows [two queries, two gates] of each key head."""
    return torch.stack([part for group in logits_NTC.chunk(2, -1) for part in group[..., 16:].chunk(2, -1)], 2)


GATED: dict[str, tuple[Any, str, Any]] = {
    "qwen3-next": (_qwen3_next, "q_proj", _by_head),
    "qwen3.5": (_qwen3_5, "q_proj", _by_head),
    "2505.06708, headwise": (lambda: _qwen3(1), "q_proj", _by_group),
    "2505.06708, elementwise": (lambda: _qwen3(8), "q_proj", _by_group),
    "afmoe": (_afmoe, "gate_proj", lambda logits_NTC: logits_NTC.unflatten(-1, (4, 8))),
}


@pytest.mark.parametrize("name", GATED)
def test_gates_of_a_pretrained_model_are_those_that_its_code_applies(name: str) -> None:
    make, linear, split = GATED[name]
    torch.manual_seed(0)
    model, tokens = make().eval(), family_tokens()
    seen: list[Tensor] = []
    linears = [
        getattr(module, linear) for module in model.modules() if hasattr(module, "o_proj") and hasattr(module, linear)
    ]
    handles = [one.register_forward_hook(lambda _, __, out: seen.append(out)) for one in linears]
    with torch.no_grad():
        model(tokens)
    for handle in handles:
        handle.remove()
    gates_LNTHX = torch.stack([torch.sigmoid(split(logits).double()) for logits in seen])
    before = hooks_on(model)
    details = _details(model, tokens, batch_size=2)
    assert hooks_on(model) == before
    assert details.gate is not None
    assert details.gate_closed is not None
    assert_close(details.gate, gates_LNTHX.mean((1, 4)).transpose(1, 2))
    assert_close(details.gate_closed, (gates_LNTHX < 0.1).double().mean((1, 4)).transpose(1, 2))


def test_padding_changes_no_gate() -> None:
    torch.manual_seed(0)
    model, tokens = _qwen3(8).eval(), family_tokens()
    plain, pad = _details(model, tokens).gate, torch.nn.functional.pad
    mask = pad(torch.ones_like(tokens), (6, 0))
    padded = _details(model, pad(tokens, (6, 0), value=9), attention_mask=mask).gate
    assert plain is not None
    assert padded is not None
    assert_close(padded, plain)


def test_a_layer_without_gates_has_ones_beside_layers_with_them() -> None:
    torch.manual_seed(0)
    model = _qwen3(8)
    model.model.layers[0].self_attn = hf.AutoModelForCausalLM.from_config(model.config).model.layers[0].self_attn
    details = _details(model.eval(), family_tokens())
    assert details.gate is not None
    assert details.gate_closed is not None
    assert (details.gate[0] == 1).all()
    assert (details.gate_closed[0] == 0).all()
    assert (details.gate[1] < 1).all()


def test_models_without_gates_have_none() -> None:
    plain = Transformer(ModelConfig.model_validate({**SIZES, "layers": 1}))
    for details in (_details(plain, own_tokens()), _details(pair_of("llama")[0], family_tokens())):
        assert details.gate is None
        assert details.gate_closed is None
        assert details.by_layer.get("gate_first") is None
    deepseek = _details(pair_of("deepseek-v3, other value width")[0], family_tokens())
    assert deepseek.gate is None


def test_gates_of_an_unknown_kind_are_not_reported_and_the_notes_say_so() -> None:
    torch.manual_seed(0)
    model, logits = pair_of("qwen3")[0], []
    for block in model.model.layers:
        attention = block.self_attn
        attention.g_proj = nn.Linear(32, attention.o_proj.in_features)
        attention.register_forward_pre_hook(
            lambda module, _, named: logits.append(module.g_proj(named["hidden_states"])), with_kwargs=True
        )
        attention.o_proj.register_forward_pre_hook(lambda _, args: args[0] * torch.tanh(logits.pop()))
    measured = measure(model, family_tokens(), details=True)
    assert measured.details is not None
    assert measured.details.gate is None
    assert [note for note in measured.notes if "not multiplied by the sigmoid of g_proj" in note]
    assert not [note for note in measure(model, family_tokens()).notes if "gates" in note]
    for known in (_qwen3(8).eval(), pair_of("llama")[0]):
        assert not [note for note in measure(known, family_tokens(), details=True).notes if "gates" in note]
