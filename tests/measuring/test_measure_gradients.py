"""Gradient sinks, against gradients of tensors put in by hand in the place of each norm's output."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from closeness import assert_close
from families import GROUPED, SMALL, hooks_on, pair_of
from own_models import SIZES, own_model, own_tokens
from torch import Tensor

from sinklab.errors import InputError
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.options import Options, Request
from sinklab.model.config import ModelConfig
from sinklab.model.transformer import Transformer
from sinklab.report.result_tables import layers_table
from sinklab.survey.api import measure

LONG = 40  # tokens: the ratio is over the first 32


def _tokens(sequences: int = 3, length: int = LONG) -> Tensor:
    return torch.randint(3, 32, (sequences, length), generator=torch.Generator().manual_seed(1))


def _own(**changes: Any) -> Transformer:
    config = {**SIZES, "context": 64, "layers": 2, **changes}
    model = Transformer(ModelConfig.model_validate(config), seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.6)
    return model


def _by_hand(model: Any, norms: list[Any], loss: Any, tokens: Tensor) -> np.ndarray:
    """|sum over sequences of the gradient| (L, T) of the mean loss, one layer and one sequence at a time.

    The output of the layer's norm is replaced by a copy of itself, whose gradient is taken.
    """
    norms_LT = []
    for norm in norms:
        total = torch.zeros(tokens.shape[1], SIZES["width"])
        for sequence in tokens:
            copy: list[Tensor] = []

            def replaced(_: Any, __: Any, output: Tensor, copy: list[Tensor] = copy) -> Tensor:
                copy.append(output.detach().clone().requires_grad_())
                return copy[0]

            handle = norm.register_forward_hook(replaced)
            model.zero_grad()
            loss(sequence[None]).backward()
            handle.remove()
            assert copy[0].grad is not None
            total += copy[0].grad[0, -tokens.shape[1] :] / len(tokens)
        norms_LT.append(total.norm(dim=-1))
    model.zero_grad()
    return torch.stack(norms_LT).numpy()


def _ratio(norm_LT: np.ndarray, last: int) -> list[float]:
    return [float(norm_T[0] / norm_T[1:last].mean()) for norm_T in norm_LT]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_heads": 2, "gate": {"kind": "head"}},
        {"attention": {"bias": {"kind": "sink_token"}}},
        {"norm": {"placement": "sandwich"}},
        {"mixer": {"kind": "gated_delta", "every": 2}},
    ],
    ids=["plain", "gated", "sink token", "sandwich", "hybrid"],
)
def test_gradients_of_a_run_are_those_of_its_norms(changes: dict[str, Any]) -> None:
    model, tokens = _own(**changes), _tokens()
    found = measure(model, tokens, gradients=True, batch_size=2)
    norms: Any = [model.blocks[layer - 1].attention_norm for layer in model.config.attention_layers]

    def mean_loss(tokens_1T: Tensor) -> Tensor:
        logits = model(tokens_1T)[0, :-1]
        return -logits.log_softmax(-1)[torch.arange(tokens_1T.shape[1] - 1), tokens_1T[0, 1:]].mean()

    expected = _by_hand(model, norms, mean_loss, tokens)
    assert found.gradient_norm is not None
    assert found.gradient_norm_ratio is not None
    assert_close(found.gradient_norm, expected)
    assert_close(np.array(found.gradient_norm_ratio), np.array(_ratio(expected, 32)))
    assert (found.gradient_norm[:, -1] == 0).all()


PRETRAINED: dict[str, Any] = {
    "llama": (lambda: hf.LlamaConfig(**GROUPED), "input_layernorm"),
    "gpt2": (
        lambda: hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3),
        "ln_1",
    ),
    "gpt-neox, parallel blocks": (lambda: hf.GPTNeoXConfig(**SMALL), "input_layernorm"),
    "qwen3": (lambda: hf.Qwen3Config(**GROUPED), "input_layernorm"),
}


@pytest.mark.parametrize("family", PRETRAINED)
def test_gradients_of_a_pretrained_model_are_those_of_its_norms(family: str) -> None:
    config, name = PRETRAINED[family]
    torch.manual_seed(0)
    model, tokens = hf.AutoModelForCausalLM.from_config(config()).eval(), _tokens(length=12)
    model.requires_grad_(True)
    hooks = hooks_on(model)
    found = measure(model, tokens, gradients=True, batch_size=2)
    assert hooks_on(model) == hooks
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    norms = [getattr(module, name) for module in model.modules() if hasattr(module, name)]
    expected = _by_hand(model, norms, lambda tokens_1T: model(tokens_1T, labels=tokens_1T).loss, tokens)
    assert found.gradient_norm is not None
    assert found.gradient_norm_ratio is not None
    assert_close(found.gradient_norm, expected)
    assert_close(np.array(found.gradient_norm_ratio), np.array(_ratio(expected, 11)))


def test_where_the_mlp_reads_the_same_norm_the_gradient_is_that_of_attention_alone() -> None:
    torch.manual_seed(0)
    model: Any = hf.AutoModelForCausalLM.from_config(hf.CohereConfig(**SMALL, num_key_value_heads=2)).eval()
    tokens = _tokens(1, 12)
    whole, norm = model.model.layers[0].self_attn.forward, []

    def reading(hidden_states: Tensor, **options: Any) -> Any:
        norm.append(hidden_states.detach().clone().requires_grad_())
        return whole(hidden_states=norm[0], **options)

    model.model.layers[0].self_attn.forward = reading
    model(tokens, labels=tokens).loss.backward()
    model.model.layers[0].self_attn.forward = whole
    found = measure(model, tokens, gradients=True).gradient_norm
    assert found is not None
    assert_close(found[0], norm[0].grad[0].norm(dim=-1))


def test_gradients_are_measured_only_on_request_and_do_not_change_the_other_results(tmp_path: Path) -> None:
    model, tokens = _own(), _tokens()
    for name, gradients in (("plain", False), ("with", True)):
        measure(model, tokens, gradients=gradients, details=True).save(tmp_path / name)
    plain, other = (json.loads((tmp_path / name / "measurement.json").read_text()) for name in ("plain", "with"))
    assert len(other.pop("gradient_norm_ratio")) == 2
    for document in (plain, other):
        del document["seconds"], document["peak_memory_mb"]
    assert other == plain
    with np.load(tmp_path / "plain" / "measurement.npz") as a, np.load(tmp_path / "with" / "measurement.npz") as b:
        assert set(b) - set(a) == {"gradient_norm"}
        assert all((a[name] == b[name]).all() for name in a)
    loaded = Measurement.load(tmp_path / "with")
    assert loaded.gradient_norm is not None
    assert loaded.columns("layers")["gradient_norm_ratio"].shape == (2,)
    assert "gradients" not in Request().document()
    assert Request(options=Options(gradients=True)).document()["gradients"]


def test_the_table_by_layer_has_a_column_of_gradients_if_they_were_measured() -> None:
    with_them, without = (measure(_own(), _tokens(), gradients=gradients) for gradients in (True, False))
    assert with_them.gradient_norm_ratio is not None
    shown, plain = (layers_table([("", one)]) for one in (with_them, without))
    assert "gradient" in [column.title for column in shown.columns]
    assert "gradient" not in [column.title for column in plain.columns]
    place = [column.title for column in shown.columns].index("gradient")
    assert [row[place] for row in shown.rows[1:]] == with_them.gradient_norm_ratio
    assert "gradient" in " ".join(shown.notes)


def test_gradients_can_be_measured_together_with_ablations() -> None:
    found = measure(_own(), _tokens(), gradients=True, ablate=["mask_first:1"])
    assert found.gradient_norm_ratio is not None
    assert found.ablations is not None


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: _own(norm={"placement": "post"}), "a post-norm model has no norm there"),
        (lambda: pair_of("olmo2")[0], "input of attention layer 1 of this 'olmo2' model is not a norm's output"),
        (lambda: pair_of("bloom")[0], "attention modules of a 'bloom' model cannot be found"),
    ],
)
def test_models_without_a_norm_before_attention_are_refused(make: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        measure(make(), _tokens(), gradients=True)


def test_quantised_weights_padding_and_short_sequences_are_refused() -> None:
    model, tokens = pair_of("llama")[0], own_tokens()
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    with pytest.raises(InputError, match="without padding"):
        measure(model, tokens, attention_mask=mask, gradients=True)
    with pytest.raises(InputError, match="at least 3 tokens"):
        measure(model, tokens[:, :2], gradients=True)
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    with pytest.raises(InputError, match=r"quantised \(bitsandbytes\)"):
        measure(model, tokens, gradients=True)


def test_sequences_without_a_target_after_the_prefix_are_refused() -> None:
    model, tokens = own_model("prefix"), own_tokens()  # a prefix of three tokens
    with pytest.raises(InputError, match="gradients need sequences of at least 4 tokens"):
        measure(model, tokens[:, :3], gradients=True)
    assert measure(model, tokens[:, :4], gradients=True).gradient_norm is not None
